"""Every family of transformers: a model of random numbers goes through parts, and through other writers' names, and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import CorruptError, UnsupportedError, UsageError
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.dtypes import BY_TORCH_NAME
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.jobs.groups import Form
from zckpt.jobs.open import read_tensor
from zckpt.naming.compose import compose
from zckpt.naming.decompose import decompose_with_origins
from zckpt.naming.facts import Facts, facts_of, with_parts
from zckpt.naming.families import by_parts, make_config
from zckpt.naming.schemes import families, scheme, schemes
from zckpt.naming.vocabulary import words_of
from zckpt.storage.location import locate

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
OLD = {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLD_NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
FALCON = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {**SMALL, "tie_word_embeddings": False}),
    "llama-biased": ("llama", "Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama-tied": ("llama", "Llama", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("mistral", "Mistral", SMALL),
    "qwen2": ("qwen2", "Qwen2", SMALL),
    "qwen3": ("qwen3", "Qwen3", {**SMALL, "head_dim": 8}),
    "gemma2": ("gemma2", "Gemma2", {**SMALL, "head_dim": 8}),
    "gemma3": ("gemma3", "Gemma3Text", {**SMALL, "head_dim": 8}),
    "phi3": ("phi3", "Phi3", SMALL),
    "glm4": ("glm4", "Glm4", {**SMALL, "attention_bias": True, "head_dim": 4}),
    "bloom": ("bloom", "Bloom", OLD),
    "falcon-7b": ("falcon", "Falcon", {**FALCON, "multi_query": True, "parallel_attn": True, "bias": False}),
    "falcon-rw": ("falcon", "Falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-40b": ("falcon", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt2": (
        "gpt2",
        "GPT2",
        {key: value for key, value in {**OLD, "n_embd": 16, "n_positions": 16}.items() if key != "hidden_size"},
    ),
    "gpt-neox": ("gpt-neox", "GPTNeoX", OLD_NEOX),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family's name, and the directory of a model of it as transformers writes it; and the model."""
    family, name, given = MODELS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**given)
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    home = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(home)
    return family, home, model


def as_catalog(tensors: dict[str, torch.Tensor]) -> Catalog:
    entries = {}
    for name, tensor in tensors.items():
        store = MemoryStore(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
        dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = TensorEntry(
            name, tuple(tensor.shape), dtype, "parameter", (Fragment(store, 0, 0, tensor.numel()),)
        )
    return Catalog(entries, Source("test", "memory"), LIVE)


def assert_same_tensors(catalog: Catalog, wanted: dict[str, torch.Tensor]) -> None:
    assert catalog.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = read_tensor(catalog[name], "pt")
        assert found.shape == tensor.shape and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_model_stays_itself(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """`--to hf` finds the family by the config; every byte and the logits are the same, and `verify` agrees."""
    family, home, model = saved
    report = zckpt.convert(home, tmp_path / "out", options=zckpt.Options(form=Form("hf")))
    assert any(f"hf:{family}" in note for note in report.notes)
    assert_same_tensors(
        as_catalog(load_file(tmp_path / "out" / "model.safetensors")), load_file(home / "model.safetensors")
    )
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(found.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert zckpt.verify(home, tmp_path / "out").ok


WRITERS = [name for name in schemes() if not name.startswith("hf-")]


def test_there_and_back(saved: tuple[str, Path, Any]) -> None:
    """Through the names and rows of every writer that has a place for all parts, each tensor comes back to the last bit."""
    family, home, _ = saved
    tensors = load_file(home / "model.safetensors")
    config = json.loads((home / "config.json").read_text())
    own = scheme(f"hf-{family}")
    start = decompose_with_origins(as_catalog(tensors), own, facts_of(as_catalog(tensors), config))
    assert_same_tensors(compose(start.parts, own, start.facts), tensors)
    crossed = set()
    for name in WRITERS:
        writer = scheme(name)
        if any(rule.plus and start.facts.meet(rule.when) for rule in writer.rules):
            continue  # adding one rounds: see test_gguf
        try:
            theirs = compose(start.parts, writer, start.facts)
        except UnsupportedError:
            continue
        again = decompose_with_origins(theirs, writer, start.facts.having(version=3.0 if name == "megatron" else None))
        assert_same_tensors(compose(again.parts, own, again.facts), tensors)
        crossed.add(name)
    assert crossed or family in ("gemma2", "gemma3", "glm4", "qwen3"), family


ARGS = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True,
    "max_position_embeddings": 16, "norm_epsilon": 0.003, "rotary_base": 500, "rotary_percent": 1.0, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
    "apply_layernorm_1p": False, "rotary_interleaved": False, "add_bias_linear": False, "use_rope_scaling": False,
}  # fmt: skip
CLASSIC = {**ARGS, "normalization": "LayerNorm", "swiglu": False, "group_query_attention": False, "num_query_groups": 1}
ZERO_CENTERED = {**ARGS, "apply_layernorm_1p": True, "swiglu": False, "untie_embeddings_and_output_weights": False}
EQUAL = {"rms_norm_eps": 0.003, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
FALCON_EQUAL = {"layer_norm_epsilon": 0.003, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llama": (ARGS, EQUAL, "llama"),
    "llama-tied": (
        {**ARGS, "untie_embeddings_and_output_weights": False, "use_rope_scaling": True, "rope_scaling_factor": 8.0},
        {**EQUAL, "rope_parameters": SCALED}, "llama",
    ),
    "mistral": ({**ARGS, "_target_": "bridge.MistralModelProvider"}, EQUAL, "mistral"),
    "mistral-window": ({**ARGS, "window_size": (3, 0)}, {**EQUAL, "sliding_window": 4}, "mistral"),
    "qwen2": (ARGS, EQUAL, "qwen2"),
    "qwen3": (ARGS, EQUAL, "qwen3"),
    "gemma2": (ZERO_CENTERED, EQUAL, "gemma2"),
    "phi3": ({**ARGS, "_target_": "bridge.Phi3ModelProvider"}, EQUAL, "phi3"),
    "glm4": ({**ARGS, "rotary_interleaved": True, "rotary_percent": 0.5}, {**EQUAL, "rope_parameters": HALF}, "glm4"),
    "gpt2": (
        {**CLASSIC, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False},
        {"layer_norm_epsilon": 0.003, "activation_function": "gelu"}, "gpt2",
    ),
    "gpt-neox": (
        {**CLASSIC, "rotary_percent": 0.5}, {"layer_norm_eps": 0.003, "use_parallel_residual": False, "rope_parameters": HALF},
        "gpt-neox",
    ),
    "falcon-7b": (
        {**CLASSIC, "group_query_attention": True, "parallel_attn": True, "untie_embeddings_and_output_weights": False},
        FALCON_EQUAL, "falcon",
    ),
    "falcon-40b": (
        {**CLASSIC, "group_query_attention": True, "num_query_groups": 2, "parallel_attn": True,
         "untie_embeddings_and_output_weights": False},
        FALCON_EQUAL, "falcon",
    ),
    "falcon-11b": (
        {**CLASSIC, "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": False},
        FALCON_EQUAL, "falcon",
    ),
}  # fmt: skip
"""Model -> the arguments of a run of Megatron, what of them is in the config, and the family."""


@pytest.mark.parametrize("kind", RUNS)
def test_the_config_is_made_from_the_arguments_of_a_run(kind: str) -> None:
    """As Megatron-Core names it, without any config: the family is found, and the model computes the same logits."""
    arguments, more, family = RUNS[kind]
    _, name, given = MODELS[kind.removesuffix("-window")]
    model_class = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))
    torch.manual_seed(7)
    model = model_class(getattr(transformers, f"{name}Config")(**{**given, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    own = scheme(f"hf-{family}")
    tensors = {
        n: t.detach()
        for n, t in model.state_dict().items()
        if n != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    catalog = as_catalog(tensors)
    start = decompose_with_origins(catalog, own, facts_of(catalog, model.config.to_dict()))
    core = scheme("megatron-core")
    theirs = replace(compose(start.parts, core, start.facts), extras={"args": arguments, "checkpoint_version": 3.0})
    found = decompose_with_origins(theirs, core, facts_of(theirs))
    facts = with_parts(found.facts, found.parts)
    assert by_parts(found.parts, facts)[0] == family
    made = make_config(own, found.parts, facts)
    again = model_class(model_class.config_class.from_dict(made)).eval()
    composed = compose(found.parts, own, found.facts)
    weights = {n.replace("embed_out", "lm_head"): read_tensor(composed[n], "pt") for n in composed}
    left = again.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and left.missing_keys in ([], ["lm_head.weight"])
    again.tie_weights()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


LLM = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "position_embedding_type": 1, "glu_activation": None,
    "layernorm_epsilon": 0.003, "max_position_embeddings": 16, "rope_scaling_factor": 1.0, "use_post_ln": False,
    "rope_theta": 500.0,
}  # fmt: skip
"""What Megatron-LLM keeps of a run; 1 is its number of rotary positions."""


def by_megatron_llm(state: dict[str, torch.Tensor], heads: int, keys: int) -> dict[str, torch.Tensor]:
    """A Falcon or Llama as Megatron-LLM's own converter writes it: rotary rows as pairs, the rows of `up` first."""

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, len(x) // 2, -1).transpose(0, 1).reshape(x.shape)

    def fused(x: torch.Tensor) -> torch.Tensor:
        groups = [group.split(4) for group in x.chunk(keys)]
        return torch.cat([torch.cat([*map(pairs, qs), pairs(k), v]) for *qs, k, v in groups])

    own = "language_model.encoder.layers.{}."
    out = {}
    for name, x in state.items():
        *_, block, module, last = ("", "", *name.removesuffix(".weight").removesuffix(".bias").split("."))
        kind = name.rpartition(".")[2]
        if name in ("transformer.word_embeddings.weight", "model.embed_tokens.weight"):
            out["language_model.embedding.word_embeddings.weight"] = x
        elif name == "lm_head.weight":
            out["language_model.lm_head"] = x
        elif ".ln_f." in name or name == "model.norm.weight":
            out[f"language_model.encoder.final_layernorm.{kind}"] = x
        elif last in ("ln_attn", "ln_mlp", "input_layernorm", "post_attention_layernorm"):
            layer = own.format(module)
            new = {"ln_attn": "input_layernorm", "ln_mlp": "mlp_layernorm"}.get(last, last)
            out[f"{layer}{new}.{kind}"] = x
        elif last == "query_key_value":
            out[f"{own.format(block)}self_attention.query_key_value.weight"] = fused(x)
        elif last in ("dense", "dense_h_to_4h", "dense_4h_to_h"):
            out[f"{own.format(block)}{'self_attention' if last == 'dense' else 'mlp'}.{last}.weight"] = x
        elif last == "q_proj":
            k, v = (state[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            rows = [torch.cat(group) for group in zip(x.chunk(keys), k.chunk(keys), v.chunk(keys))]
            out[f"{own.format(block)}self_attention.query_key_value.weight"] = fused(torch.cat(rows))
        elif last == "o_proj":
            out[f"{own.format(block)}self_attention.dense.weight"] = x
        elif last == "up_proj":
            both = torch.cat([x, state[name.replace("up_proj", "gate_proj")]])
            out[f"{own.format(block)}mlp.dense_h_to_4h.weight"] = both
        elif last == "down_proj":
            out[f"{own.format(block)}mlp.dense_4h_to_h.weight"] = x
    return out


@pytest.mark.parametrize("kind", ["falcon-7b", "falcon-40b", "llama"])
def test_models_of_megatron_llm(kind: str) -> None:
    """Its orders of rows are others than Megatron's; its arguments say so, and whether attention and MLP are side by side."""
    family, name, given = MODELS[kind]
    more = EQUAL if family == "llama" else FALCON_EQUAL
    torch.manual_seed(8)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class(
        getattr(transformers, f"{name}Config")(**{**given, **more, "tie_word_embeddings": False})
    ).eval()
    state = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    keys = {"falcon-7b": 1, "falcon-40b": 2, "llama": 2}[kind]
    arguments = {**LLM, "num_attention_heads_kv": keys, "tie_embed_logits": False, "parallel_attn": family == "falcon",
                 "glu_activation": "swiglu" if family == "llama" else None}  # fmt: skip
    catalog = as_catalog(by_megatron_llm(state, 4, keys))
    catalog = replace(catalog, extras={"args": arguments, "checkpoint_version": 3.0})
    found = decompose_with_origins(catalog, scheme("megatron"), facts_of(catalog))
    facts = with_parts(found.facts, found.parts)
    assert by_parts(found.parts, facts)[0] == family
    composed = compose(found.parts, scheme(f"hf-{family}"), found.facts)
    assert_same_tensors(composed, state)
    made = make_config(scheme(f"hf-{family}"), found.parts, facts)
    again = model_class(model_class.config_class.from_dict(made)).eval()
    again.load_state_dict(state)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_what_a_config_of_falcon_needs_is_named() -> None:
    """Without arguments nothing says whether attention and MLP are side by side; ALiBi is another one in Falcon."""
    torch.manual_seed(9)
    config = transformers.FalconConfig(**{**FALCON, "multi_query": False, "parallel_attn": False, "bias": True})
    state = {
        n: t.detach() for n, t in transformers.FalconForCausalLM(config).state_dict().items() if "lm_head" not in n
    }
    own, core = scheme("hf-falcon"), scheme("megatron-core")
    start = decompose_with_origins(as_catalog(state), own, facts_of(as_catalog(state), config.to_dict()))
    theirs = compose(start.parts, core, start.facts)
    parts = decompose_with_origins(theirs, core, start.facts).parts
    facts = with_parts(Facts({"query_heads": 4}), parts)
    with pytest.raises(UsageError, match="whether attention and MLP of a block are side by side"):
        make_config(own, start.parts, facts)
    alibi = with_parts(facts.having(parallel=False), parts)
    assert make_config(own, start.parts, alibi)["parallel_attn"] is False
    with pytest.raises(UnsupportedError, match="of ALiBi's slopes Falcon has others"):
        make_config(own, start.parts, replace(alibi, arguments={"position_embedding_type": "alibi"}))
    with pytest.raises(UnsupportedError, match="groups of queries"):
        make_config(own, start.parts, alibi.having(groups_in_sequence=True))


MCORE = Path(__file__).parents[2] / "fixtures" / "mcore"
SAVES = {"stages_tp2_pp2": "llama", "moe_ep2": "mixtral"}


def by_hand(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of Llama or Mixtral from those of Megatron-Core, with torch's own functions: 4 heads, 2 of keys."""
    out = {"model.embed_tokens.weight": truth["embedding.word_embeddings.weight"], "lm_head.weight": truth["output_layer.weight"],
           "model.norm.weight": truth["decoder.final_layernorm.weight"]}  # fmt: skip
    layers = {name.removeprefix("decoder.layers."): tensor for name, tensor in truth.items() if ".layers." in name}
    for b in range(len(layers["self_attention.linear_proj.weight"])):
        own = {name: tensor[b] for name, tensor in layers.items()}
        q, k, v = own["self_attention.linear_qkv.weight"].view(2, 4, 4, 16).split([2, 1, 1], dim=1)
        new = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        new = {name: tensor.reshape(-1, 16) for name, tensor in new.items()}
        new["self_attn.o_proj"] = own["self_attention.linear_proj.weight"]
        new["input_layernorm"] = own["self_attention.linear_qkv.layer_norm_weight"]
        new["post_attention_layernorm"] = own["mlp.linear_fc1.layer_norm_weight"]
        if "mlp.router.weight" in own:
            new["block_sparse_moe.gate"] = own["mlp.router.weight"]
            for e in range(2):
                expert = f"block_sparse_moe.experts.{e}."
                new[expert + "w1"], new[expert + "w3"] = own["mlp.experts.experts.linear_fc1.weight"][e].chunk(2)
                new[expert + "w2"] = own["mlp.experts.experts.linear_fc2.weight"][e]
        else:
            new["mlp.gate_proj"], new["mlp.up_proj"] = own["mlp.linear_fc1.weight"].chunk(2)
            new["mlp.down_proj"] = own["mlp.linear_fc2.weight"]
        out |= {f"model.layers.{b}.{name}.weight": tensor for name, tensor in new.items()}
    return out


@pytest.mark.parametrize("save", SAVES)
def test_saves_of_megatron_core(save: str, tmp_path: Path) -> None:
    """Of the real one: its arguments say the family, and every weight is the live model's."""
    options = zckpt.Options(form=Form("hf"))
    zckpt.convert(MCORE / save / "checkpoint", tmp_path / "out", dtype="bf16", options=options)
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert found.config.model_type == SAVES[save]
    truth = load_file(MCORE / save / "truth.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    cut = {n: t[:13] if n in ("model.embed_tokens.weight", "lm_head.weight") else t for n, t in by_hand(truth).items()}
    assert_same_tensors(as_catalog(written), {name: tensor.contiguous() for name, tensor in cut.items()})
    assert zckpt.verify(MCORE / save / "checkpoint", tmp_path / "out").ok


def test_a_directory_of_megatron_bridge(tmp_path: Path) -> None:
    """Of the real one, after two steps: `export_hf_weights` of Bridge gives the same; nothing of its vocabulary is padding."""
    run = MCORE.parent / "bridge" / "llama_tp2"
    options = zckpt.Options(form=Form("hf"))
    report = zckpt.convert(run / "checkpoint", tmp_path / "out", dtype="bf16", options=options)
    assert not [note for note in report.notes if "padding" in note]
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    config = found.config
    assert (config.model_type, config.vocab_size, config.rms_norm_eps) == ("llama", 32, 1e-6)
    assert (config.rope_parameters["rope_theta"], config.num_key_value_heads) == (50_000.0, 2)
    assert_same_tensors(
        as_catalog(load_file(tmp_path / "out" / "model.safetensors")), load_file(run / "truth.safetensors")
    )
    assert zckpt.verify(run / "checkpoint", tmp_path / "out").ok
    zckpt.convert(run / "checkpoint", tmp_path / "fp32", dtype="fp32", options=options)
    masters = load_file(tmp_path / "fp32" / "model.safetensors")
    assert_same_tensors(
        as_catalog({name: tensor.bfloat16() for name, tensor in masters.items()}), load_file(run / "truth.safetensors")
    )
    assert any((tensor != tensor.bfloat16()).any() for tensor in masters.values())


@pytest.mark.parametrize("where", ["config.json", "huggingface/config.json", "run_config.yaml"])
def test_what_is_beside_a_save_says_the_family(where: str, tmp_path: Path) -> None:
    """Llama and Mistral have the same tensors. The config's vocabulary, or the run's, cuts the padding off; a note says whose."""
    shutil.copytree(MCORE / "stages_tp2_pp2" / "checkpoint", tmp_path / "run")
    path = tmp_path / "run" / where
    path.parent.mkdir(exist_ok=True)
    if where == "run_config.yaml":
        path.write_text("model:\n  _target_: megatron.bridge.models.mistral.MistralModelProvider\n  num_layers: 2\n")
    else:
        path.write_text(
            json.dumps({"model_type": "mistral", "vocab_size": 13, "num_attention_heads": 4, "head_dim": 4})
        )
    report = zckpt.convert(tmp_path / "run", tmp_path / "out", dtype="bf16", options=zckpt.Options(form=Form("hf")))
    (said,) = (note for note in report.notes if "hf:mistral" in note)
    assert ("MistralModelProvider" if where == "run_config.yaml" else where) in said
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert len(written["lm_head.weight"]) == len(written["model.embed_tokens.weight"]) == 13
    by = "the run's vocab_size" if where == "run_config.yaml" else "the config"
    assert any("3 rows of padding" in note and f"since {by} says 13" in note for note in report.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    assert zckpt.verify(tmp_path / "run", tmp_path / "out").ok


TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 12, "content": "</s>"}]}
PADDED = {"make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("arguments", "tokenizer", "option", "kept", "said"),
    [
        ({"vocab_size": 13, **PADDED}, False, None, 13, "since the run's vocab_size says 13"),
        ({"vocab_size": 12, "tokenizer_type": "NullTokenizer", **PADDED}, False, None, 13, "at the end of a document says 13"),
        ({"vocab_size": 13, "padded_vocab_size": 16}, False, None, 13, "since the run's vocab_size says 13"),
        ({"vocab_size": 9, "make_vocab_size_divisible_by": 4}, False, None, 16, "nothing says how many words there are"),
        (PADDED, True, None, 13, "since tokenizer.json"),
        ({"make_vocab_size_divisible_by": 2}, True, None, 16, "a multiple of 2"),
        (PADDED, False, None, 16, "Pass --vocab-size N"),
        (PADDED, True, 11, 11, "since --vocab-size says 11"),
        ({}, True, None, 16, "The model is written as hf:llama"),
    ],
)  # fmt: skip
def test_padding_is_cut_by_what_the_run_says(
    arguments: dict[str, Any], tokenizer: bool, option: int | None, kept: int, said: str, tmp_path: Path
) -> None:
    """By its `vocab_size` or the tokenizer beside it, where padding makes of these the rows that are there; else a note asks."""
    run = tmp_path / "run"
    shutil.copytree(MCORE / "stages_tp2_pp2" / "checkpoint", run)
    common = torch.load(run / "iter_0000002" / "common.pt", weights_only=False)
    for name in ("vocab_size", "padded_vocab_size", "tensor_model_parallel_size"):
        delattr(common["args"], name)
    vars(common["args"]).update(arguments)
    torch.save(common, run / "iter_0000002" / "common.pt")
    if tokenizer:
        (run / "iter_0000002" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    options = zckpt.Options(form=Form("hf", vocab_size=option))
    report = zckpt.convert(run, tmp_path / "out", dtype="bf16", options=options)
    assert any(said in note for note in report.notes), report.notes
    assert len(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]) == kept
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == kept
    (run / "iter_0000002" / "tokenizer.json").unlink(missing_ok=True)
    assert zckpt.verify(run, tmp_path / "out").ok
    if option:
        zckpt.to_mcore(run, tmp_path / "again", vocab_size=option)
        assert zckpt.verify(run, tmp_path / "again").ok


@pytest.mark.parametrize("words", [0, -1, 17])
def test_an_impossible_vocabulary(words: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--vocab-size"):
        options = zckpt.Options(form=Form("hf", vocab_size=words))
        zckpt.convert(MCORE / "stages_tp2_pp2" / "checkpoint", tmp_path / "out", options=options)
    with pytest.raises(UsageError, match="--vocab-size"):
        zckpt.to_mcore(MCORE / "stages_tp2_pp2" / "checkpoint", tmp_path / "out", vocab_size=words)
    with pytest.raises(UsageError, match="--vocab-size is of use only"):
        options = zckpt.Options(form=Form(vocab_size=3))
        zckpt.convert(MCORE / "stages_tp2_pp2" / "checkpoint", tmp_path / "out", options=options)
    with pytest.raises(CorruptError, match="is not a tokenizer"):
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": -1}}}')
        words_of(locate(str(tmp_path / "tokenizer.json")))


def test_every_family_is_tried_here() -> None:
    """Or in the page of another part: a family without a model is not proved."""
    assert {family for family, *_ in MODELS.values()} <= set(families())
