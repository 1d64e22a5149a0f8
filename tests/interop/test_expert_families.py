"""Families of transformers with experts, by their schemes: hub and memory, DeepSpeed's forms, configs from a run's arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from expert_families import MODELS, family, logits, made
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import UnsupportedError
from zckpt.core.dtypes import F32
from zckpt.jobs.convert import prepare
from zckpt.jobs.declarations import CONVERT
from zckpt.jobs.groups import Form
from zckpt.jobs.open import read_tensor
from zckpt.naming.compose import compose
from zckpt.naming.decompose import decompose_with_origins
from zckpt.naming.facts import facts_of, with_parts
from zckpt.naming.families import by_parts, make_config
from zckpt.naming.schemes import scheme, scheme_of

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

FIXTURES = Path(__file__).parents[2] / "fixtures"


def all_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_memory(model: Any, path: Path) -> Path:
    """As the model lies in memory, with its config."""
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return path


def to_hf(source: Path, out: Path, to: str = "hf", dtype: str = "fp32", **more: Any) -> Any:
    form = Form(to, **more)
    return zckpt.convert(source, out, dtype=dtype, options=zckpt.Options(form=form))


def loaded(path: Path) -> Any:
    """The model that `from_pretrained` makes of it; it finds nothing missing and nothing unexpected."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def assert_same_files(found: Path, wanted: Path) -> None:
    """The same names and bytes."""
    ours, theirs = all_of(found), all_of(wanted)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", MODELS)
def test_hub_and_memory(kind: str, tmp_path: Path) -> None:
    """What lies in memory becomes what `save_pretrained` writes, and that stays as it is."""
    model = made(kind)
    model.save_pretrained(tmp_path / "theirs")
    report = to_hf(in_memory(model, tmp_path / "memory"), tmp_path / "from memory")
    assert f"hf:{family(kind)}" in " ".join(report.notes) and "transformers' own" not in " ".join(report.notes)
    assert_same_files(tmp_path / "from memory", tmp_path / "theirs")
    to_hf(tmp_path / "theirs", tmp_path / "from hub", f"hf:{family(kind)}")
    assert_same_files(tmp_path / "from hub", tmp_path / "theirs")
    again = loaded(tmp_path / "from memory")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe"])
def test_layers_that_predict_further_tokens_stay(kind: str, tmp_path: Path) -> None:
    """The hub has them behind the last layer, with experts of their own; transformers does not load them. Megatron-Core's
    form has no place for them here.
    """
    model = made(kind)
    model.save_pretrained(tmp_path / "theirs")
    deeper = made(kind, num_hidden_layers=4)
    deeper.save_pretrained(tmp_path / "deeper")
    behind = {name: tensor for name, tensor in all_of(tmp_path / "deeper").items() if ".layers.3." in name}
    more = {"eh_proj.weight": (16, 32), "enorm.weight": (16,), "hnorm.weight": (16,), "shared_head.norm.weight": (16,)}
    behind |= {f"model.layers.3.{name}": torch.rand(shape) for name, shape in more.items()}
    save_file({**all_of(tmp_path / "theirs"), **behind}, tmp_path / "theirs" / "model.safetensors")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    report = to_hf(tmp_path / "theirs", tmp_path / "out")
    assert not any("MTP" in note or "A loader of" in note for note in report.notes)
    assert_same_files(tmp_path / "out", tmp_path / "theirs")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])
    assert torch.equal(logits(again.eval()), logits(model))
    report = zckpt.to_mcore(tmp_path / "out", tmp_path / "megatron", progress=False)
    assert f"({len(behind)} tensors)" in next(note for note in report.notes if "MTP" in note)
    assert zckpt.verify(tmp_path / "out", tmp_path / "megatron", progress=False).ok


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj_blocks"),
        ("deepseek-v3", "model.layers.0.self_attn.o_proj.weight_scale_inv"),
    ],
)
def test_a_part_of_a_quantized_weight_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path / "in")
    more = {name: torch.ones(4, 24, 1, 8, dtype=torch.uint8)}
    save_file({**all_of(tmp_path / "in"), **more}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UnsupportedError, match="codes without scales") as caught:
        to_hf(tmp_path / "in", tmp_path / "out")
    assert name in str(caught.value.found)


def test_experts_that_stay_as_they_are_keep_their_fragments(tmp_path: Path) -> None:
    """Rows that alternate and are turned would be a fragment each: millions, of a model of 120 B parameters."""
    source = in_memory(made("gpt-oss"), tmp_path / "memory")
    asked = CONVERT.ask(dtype=F32, form=Form("hf"))
    pairs = prepare(str(source), str(tmp_path / "out"), asked).plan.pairs
    fragments = {to.name: len(entry.fragments) for entry, to in pairs}
    assert fragments["model.layers.0.mlp.experts.gate_up_proj"] == 1
    assert set(fragments.values()) == {1}


def test_a_tensor_that_no_rule_takes_is_named(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path / "in")
    more = {"model.layers.1.block_sparse_moe.extra.weight": torch.ones(2)}
    save_file({**all_of(tmp_path / "in"), **more}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UnsupportedError) as caught:
        to_hf(tmp_path / "in", tmp_path / "out", "hf:mixtral")
    assert "block_sparse_moe.extra" in str(caught.value.found)


MEGATRON = {
    "num_attention_heads": 4, "max_position_embeddings": 64, "norm_epsilon": 1e-6, "init_method_std": 0.02, "swiglu": True,
    "normalization": "RMSNorm", "rotary_base": 10000, "rotary_percent": 1.0, "moe_router_topk": 2, "ffn_hidden_size": 20,
    "moe_router_score_function": "softmax", "position_embedding_type": "rope", "multi_latent_attention": False,
}  # fmt: skip
"""Arguments of a run of Megatron-LM, as it keeps them in a save."""

V3 = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
LATENT = {"multi_latent_attention": True, "rope_type": "rope", "moe_router_pre_softmax": True}

RUNS: dict[str, dict[str, object]] = {
    "mixtral": {"norm_epsilon": 1e-5, "rotary_base": 1000000, "moe_router_pre_softmax": False},
    "qwen2-moe": {"moe_router_pre_softmax": True, "add_qkv_bias": True},
    "qwen3-moe": {"moe_router_pre_softmax": True, "qk_layernorm": True},
    "deepseek-v2": {**LATENT},
    "deepseek-v2 lite": {**LATENT},
    "deepseek-v3": {**V3, **LATENT, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "glm4-moe": {**V3, "rotary_percent": 0.5, "norm_epsilon": 1e-5, "moe_router_topk_scaling_factor": 1.0},
    "gpt-oss": {
        "swiglu": False, "quick_geglu": True, "norm_epsilon": 1e-5, "rotary_base": 150000, "position_embedding_type": "yarn",
        "softmax_type": "learnable", "glu_linear_offset": 1.0, "window_size": (127, 0), "window_attn_skip_freq": 2,
        "rotary_scaling_factor": 32.0, "yarn_correction_range_round_to_int": False, "activation_func_clamp_value": 7.0,
        "add_bias_linear": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_a_config_from_the_arguments_of_a_run(kind: str, tmp_path: Path) -> None:
    """A model with the config that is made is the same function, and its family is found."""
    model = made(kind)
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "config.json").unlink()
    catalog = zckpt.open_checkpoint(tmp_path / "in").catalog
    facts = replace(facts_of(catalog), arguments={**MEGATRON, **RUNS[kind]})
    facts = facts.having(query_heads=4)
    parts = decompose_with_origins(catalog, scheme(f"hf-{family(kind)}"), facts).parts
    facts = with_parts(facts, parts)
    assert by_parts(parts, facts)[0] == family(kind)
    made_of_it = make_config(scheme(f"hf-{family(kind)}"), parts, facts)
    (tmp_path / "in" / "config.json").write_text(json.dumps(made_of_it))
    again = loaded(tmp_path / "in")
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))
    wanted, found = model.config.to_dict(), again.config.to_dict()
    odd = {"_name_or_path", "architectures", "dtype", "num_nextn_predict_layers", "num_mtp_layers"}
    said = [key for key, value in wanted.items() if key not in odd and value is not None]
    assert {key: found[key] for key in said} == {key: wanted[key] for key in said}


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_in_megatron_cores_names(kind: str, tmp_path: Path) -> None:
    """Layers are numbered where some have no experts, as Megatron-Core does for a `moe_layer_freq` that is a list."""
    model = made(kind)
    model.save_pretrained(tmp_path)
    catalog = zckpt.open_checkpoint(tmp_path).catalog
    own, core = scheme(f"hf-{family(kind)}"), scheme("megatron-core")
    facts = facts_of(catalog, model.config.to_dict())
    parts = decompose_with_origins(catalog, own, facts).parts
    layers = "stacked" if kind in ("mixtral", "gpt-oss") else "numbered"
    theirs = compose(parts, core, facts.having(layers=layers))
    assert scheme_of(theirs.tensors, "").name == "megatron-core"
    again = decompose_with_origins(theirs, core, facts)
    found = compose(again.parts, own, again.facts)
    assert found.tensors.keys() == catalog.tensors.keys()
    truth = all_of(tmp_path)
    assert all(same_bits(read_tensor(entry, "pt"), truth[name]) for name, entry in found.tensors.items())


AUTO = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "num_key_value_heads": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "autoep/zero1_w2": {
        **AUTO, "model_type": "qwen2_moe", "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 4,
        "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6, "num_experts_per_tok": 2,
    },
    "autoep/zero3_w4": {
        **AUTO, "model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "autotp/zero1_tp2_dp2": {**AUTO, "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4},
    "autotp/zero2_tp2_dp2": {
        **AUTO, "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Runs of DeepSpeed that split a model of transformers, and the config of that model."""


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_deepspeed_split(name: str, tmp_path: Path) -> None:
    """Experts over ranks (AutoEP) have names of DeepSpeed's own; slices (AutoTP) keep those of the model."""
    to_hf(FIXTURES / name / "checkpoint", tmp_path / "out", config=CONFIGS[name])
    found = loaded(tmp_path / "out").state_dict()
    truth = load_file(FIXTURES / name / "truth.safetensors")
    for block in {key.split(".")[2] for key in truth if key.endswith("experts.w1")}:
        experts = f"model.layers.{block}.mlp.experts"
        gate, up = truth.pop(f"{experts}.w1"), truth.pop(f"{experts}.w3")
        truth |= {
            f"{experts}.gate_up_proj": torch.cat([gate, up], 1),
            f"{experts}.down_proj": truth.pop(f"{experts}.w2"),
        }
    new = {
        ".router.gate.": ".gate.",
        ".shared_experts.": ".shared_expert.",
        ".shared_experts_gate.": ".shared_expert_gate.",
    }
    for old, own in new.items():
        truth = {key.replace(old, own): tensor for key, tensor in truth.items()}
    if CONFIGS[name].get("tie_word_embeddings"):
        truth["lm_head.weight"] = truth["model.embed_tokens.weight"]
    assert found.keys() == truth.keys()
    assert all(same_bits(found[key], truth[key]) for key in truth)


@pytest.mark.parametrize("name", ["mixtral_zero3", "qwen3_moe_zero2"])
def test_the_same_as_transformers_own_mapping(name: str, tmp_path: Path) -> None:
    """Of a ZeRO save, which holds what was in memory; `verify` expects the same names."""
    source = FIXTURES / "fused" / name / "checkpoint"
    to_hf(source, tmp_path / "out")
    assert "transformers' own mapping" in zckpt.convert(source, tmp_path / "theirs").notes[-1]
    assert_same_files(tmp_path / "out", tmp_path / "theirs")
    assert zckpt.verify(source, tmp_path / "out").ok


def test_a_run_of_megatron_core(tmp_path: Path) -> None:
    """Its arguments and tensors say that it is a Mixtral; its rows are taken apart here by torch."""
    home = FIXTURES / "mcore" / "moe_ep2"
    report = to_hf(home / "checkpoint", tmp_path / "out", dtype="bf16")
    assert "hf:mixtral" in " ".join(report.notes)
    model = loaded(tmp_path / "out")
    truth, found = load_file(home / "truth.safetensors"), all_of(tmp_path / "out")
    heads = truth["decoder.layers.self_attention.linear_qkv.weight"][0].view(2, 4, 4, 16)
    gate, up = truth["decoder.layers.mlp.experts.experts.linear_fc1.weight"][0].chunk(2, 1)
    wanted = {
        "self_attn.q_proj": heads[:, :2].reshape(16, 16), "self_attn.k_proj": heads[:, 2].reshape(8, 16),
        "self_attn.v_proj": heads[:, 3].reshape(8, 16), "block_sparse_moe.experts.1.w1": gate[1],
        "block_sparse_moe.experts.1.w3": up[1], "block_sparse_moe.gate": truth["decoder.layers.mlp.router.weight"][0],
        "post_attention_layernorm": truth["decoder.layers.mlp.linear_fc1.layer_norm_weight"][0],
    }  # fmt: skip
    assert all(same_bits(found[f"model.layers.0.{name}.weight"], tensor) for name, tensor in wanted.items())
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (2, 2)
