"""Each key of a model's config that changes what it computes: to-mcore writes it as an argument, or refuses it by name.

Models of random numbers, one key of whose config is another one, go to Megatron-Core's form and come back without their
config.json. "defaults" and "names" of each family's file are what the installed transformers says.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import expert_families
import proofs
import pytest
import torch

import zckpt
from zckpt.base.errors import UnsupportedError, ZckptError
from zckpt.naming import config_keys
from zckpt.naming.families import OFF, OFF_WITH_EXPERTS, mapped_arguments
from zckpt.naming.megatron_arguments import _unsaid_routing, known_keys
from zckpt.naming.rotary import rotary_of
from zckpt.naming.schemes import families, scheme

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

KEYS = known_keys()
CLASSES = [kind for kind in KEYS if kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING]
"""Those that transformers has a class for; Kimi K2 brings its own."""
DENSE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
SMALL_EXPERTS = {**DENSE, **expert_families.SMALL, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon": ("falcon", "FalconForCausalLM", {
        **{key: DENSE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 64,
    }),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {**DENSE, "head_dim": 8}),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM", {**DENSE, "head_dim": 8, "num_hidden_layers": 7, "sliding_window": 4}),
    "glm4": ("glm4", "Glm4ForCausalLM", {**DENSE, "head_dim": 8}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {
        "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None,
    }),
    "gpt_neox": ("gpt-neox", "GPTNeoXForCausalLM", {k: v for k, v in DENSE.items() if k != "num_key_value_heads"}),
    "llama": ("llama", "LlamaForCausalLM", DENSE),
    "mistral": ("mistral", "MistralForCausalLM", {**DENSE, "sliding_window": 4}),
    "phi3": ("phi3", "Phi3ForCausalLM", DENSE),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", DENSE),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**DENSE, "head_dim": 8}),
    **{
        kind.replace("-", "_"): (kind, f"{name}ForCausalLM", {**SMALL_EXPERTS, **own})
        for kind, (name, own) in expert_families.MODELS.items()
        if " " not in kind
    },
}  # fmt: skip
"""`model_type` -> family, class and config of a small model; bloom is none of Megatron-Core's."""

ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "llama3, other constants": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
                                "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0,
                     "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn, one mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7},
    "yarn, untruncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    "yarn, attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 2.0},
    "other base": {"rope_type": "default", "rope_theta": 77.5},
    "half": {"rope_type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip


def others(key: str, value: object, kind: str) -> list[object]:
    """Values for a key that are not the class's own."""
    if key in ("hidden_act", "activation", "activation_function", "hidden_activation"):
        return [one for one in ("gelu", "relu", "gelu_new", "silu", "gelu_pytorch_tanh") if one != value]
    if key == "topk_method":
        return ["group_limited_greedy"]
    if key == "layer_types":
        return [["full_attention"] * 7, ["sliding_attention"] * 7, (["full_attention", "sliding_attention"] * 4)[:7]]
    if key == "sliding_window":
        return [3, None]
    if key == "query_pre_attn_scalar":
        return [7]
    if key in ("n_group", "topk_group"):
        return [4, 2, 1]
    if key == "max_window_layers":
        return [1]
    if isinstance(value, bool) or (value is None and key.startswith("use_")):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 1]
    return [value * 1.5 + 0.125] if isinstance(value, float) else [] if value is None else [value]


def variants(kind: str) -> dict[str, dict[str, Any]]:
    """A word -> what a config has otherwise, for each key of the class that may change what the model computes."""
    fields = config_keys.fields_of(kind)
    found: dict[str, dict[str, Any]] = {"nothing": {}}
    for key, value in fields.items():
        if key in config_keys.FREE or key in config_keys.SHOWN or key == "rope_parameters":
            continue
        for number, other in enumerate(others(key, value, kind)):
            layers = {"num_hidden_layers": 7} if key == "layer_types" else {}
            window = (
                {"use_sliding_window": True} if "use_sliding_window" in fields and key in config_keys.WINDOW else {}
            )
            found[f"{key} {number}"] = (
                {**layers, "sliding_window": 4, **window, key: other} if window else {**layers, key: other}
            )
    if "rope_parameters" in fields:
        found |= {f"rotary {name}": {"rope_parameters": rope} for name, rope in ROTARY.items()}
    if kind == "gemma3_text":
        found |= {f"rotary {name}": {"rope_parameters": {"full_attention": rope}} for name, rope in ROTARY.items()}
        found["rotary near"] = {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
    if kind == "deepseek_v2":
        groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        found |= {"groups": groups, "groups, one expert": {**groups, "num_experts_per_tok": 1}}
        found["groups, all"] = {**groups, "topk_group": 2}
    if kind == "deepseek_v3":
        found["one expert"] = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "norm_topk_prob": False}
        found["one group"] = {"n_group": 1, "topk_group": 1}
    for key, value in (("attention_bias", True), ("mlp_bias", True), ("tie_word_embeddings", not fields["tie_word_embeddings"]),
                       ("num_experts_per_tok", 1), ("new_decoder_architecture", True), ("parallel_attn", False)):  # fmt: skip
        if key in fields:
            found[f"{key} {value}"] = {key: value}
    return found


def model_of(kind: str, more: dict[str, Any]) -> Any:
    """A model with random numbers; None if transformers has no such model."""
    _, name, own = MODELS[kind]
    said = copy.deepcopy({**own, **more})
    cls = getattr(transformers, name)
    with contextlib.suppress(Exception):
        model = expert_families.filled(cls(cls.config_class(**said)))
        model(input_ids=torch.arange(24)[None])
        return model
    return None


TOKENS = torch.arange(32)[None]


def come_back(kind: str, model: Any, home: Path) -> float | ZckptError:
    """How far the logits of the model are that comes back without its config; the error, where it is refused."""
    model.save_pretrained(home / "hf")
    try:
        zckpt.to_mcore(home / "hf", home / "mcore", progress=False)
        (home / "mcore" / "config.json").unlink()
        form = zckpt.Form(to=f"hf:{MODELS[kind][0]}", vocab_size=model.config.vocab_size)
        zckpt.convert(home / "mcore", home / "back", options=zckpt.Options(form=form), progress=False)
    except ZckptError as error:
        return error
    again = type(model).from_pretrained(home / "back").eval()
    with torch.no_grad():
        return float((again(input_ids=TOKENS).logits - model(input_ids=TOKENS).logits).abs().max())


def is_named(error: ZckptError, key: str) -> bool:
    """Whether an error says a key of a config, or the argument of a run that it became."""
    window = ("sliding_window", "layer_types", "max_window_layers", "use_sliding_window")
    spelled = {
        **dict.fromkeys(window, "window_"),
        "hidden_act": "activation",
        "partial_rotary_factor": "rotary_percent",
    }
    return key in str(error.found) or spelled.get(key, key) in str(error.found) or "no place" in str(error)


FEW = [
    ("llama", "nothing"), ("llama", "rotary linear"), ("llama", "rotary dynamic"), ("llama", "rotary llama3, other constants"),
    ("llama", "hidden_act 0"), ("qwen2", "rotary yarn"), ("qwen2", "layer_types 2"), ("deepseek_v3", "norm_topk_prob 0"),
    ("deepseek_v2", "n_group 1"), ("deepseek_v2", "groups"), ("deepseek_v2", "groups, one expert"), ("gpt2", "nothing"),
    ("gemma2", "query_pre_attn_scalar 0"), ("gemma3_text", "rotary linear"), ("glm4", "nothing"),
    ("gpt_oss", "rotary other base"), ("qwen3_moe", "norm_topk_prob 0"), ("mistral", "sliding_window 1"),
]  # fmt: skip
ALL = [(kind, word) for kind in MODELS for word in variants(kind)]


@pytest.mark.parametrize(("kind", "word"), [*FEW, *proofs.cases([case for case in ALL if case not in FEW])])
def test_a_model_comes_back_the_same_or_is_refused(kind: str, word: str, tmp_path: Path) -> None:
    """Without its config.json: from the arguments alone."""
    more = variants(kind)[word]
    if (model := model_of(kind, more)) is None:
        pytest.skip("transformers has no such model")
    found = come_back(kind, model, tmp_path)
    if isinstance(found, ZckptError):
        assert word != "nothing" and isinstance(found, UnsupportedError), found
        last = list(more)[-1]
        inner = {**more, **more.get("rope_parameters", {})}.keys() if last == "rope_parameters" else {last}
        inner = {
            *inner,
            *(key for rope in more.get("rope_parameters", {}).values() if isinstance(rope, dict) for key in rope),
        }
        assert any(is_named(found, key) for key in inner), found
    else:
        assert found == 0, found


GROUPS = [(6, 8, 3), (4, 4, 2), (2, 4, 2), (3, 4, 2), (1, 4, 1), (4, 4, 1)]
"""Experts of a token, groups, and groups of a token; DeepSeek-V2's own first."""


@pytest.mark.parametrize(("chosen", "groups", "some"), GROUPS)
def test_groups_of_experts_are_written_where_megatron_core_routes_alike(chosen: int, groups: int, some: int) -> None:
    """DeepSeek-V2 judges a group by its best expert; Megatron-Core by as many as a token takes from a group."""
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    own = {"n_group": groups, "topk_group": some, "num_experts_per_tok": chosen, "topk_method": "group_limited_greedy"}
    config = transformers.DeepseekV2Config(n_routed_experts=32, hidden_size=32, routed_scaling_factor=1.0, **own)
    router = transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    hidden = torch.randn(500, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        router.weight.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
        logits, _, theirs = router(hidden)
    _, found = utils.group_limited_topk(logits.softmax(-1), chosen, 500, 32, groups, some)
    is_alike = torch.equal(found.sort(-1).values, theirs.sort(-1).values)
    assert is_alike == (not _unsaid_routing(scheme("hf-deepseek-v2").megatron or {}, own))


@pytest.mark.parametrize("family", families())
def test_the_defaults_are_those_of_the_installed_class(family: str) -> None:
    """What is to stand in the family's file is in the message."""
    own = scheme(f"hf-{family}")
    if own.megatron is None or "cannot" in own.megatron:
        assert not own.defaults  # nothing reads them
        return
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[own.config["fixed"]["model_type"]]
    cls = cls.sub_configs.get("text_config", cls)
    fields = {field.name: field.default for field in dataclasses.fields(cls) if field.name not in base}
    wanted = json.loads(json.dumps({"defaults": fields, "names": dict(cls.attribute_map)}))
    assert {"defaults": own.defaults, "names": own.spellings} == wanted, json.dumps(wanted)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_key_of_the_class_is_in_the_table_or_refused_when_it_is_another_one(kind: str) -> None:
    """So is each key of the class's own making, and one that nobody knows; a class's own config is taken."""
    config = {**config_keys.fields_of(kind), "model_type": kind}
    if kind == "exaone4":  # the class's own is a model with a window, whose other layers have no rotary positions
        config["sliding_window"] = None
    config_keys.check_keys(config_keys.whole_config(config), KEYS, "x", "", "")
    whole = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]().to_dict()
    keys, refused = KEYS[kind], set()
    for key, value in {**whole, **config, "nobody_knows": None}.items():
        if key in config_keys.FREE or key in config_keys.SHOWN or key in keys.said:
            continue
        with pytest.raises(UnsupportedError) as caught:
            config_keys.check_keys({**config, key: "another" if value != "another" else 7}, KEYS, "x", "", "")
        assert str(caught.value.found).startswith(key)
        refused.add(key)
    assert "nobody_knows" in refused


def test_a_model_of_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Arcee has the names of a Llama, and computes its MLP otherwise."""
    model = transformers.ArceeForCausalLM(transformers.ArceeConfig(**DENSE))
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="model_type 'arcee'"):
        zckpt.to_mcore(tmp_path / "hf", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_key_that_is_left_out_means_the_default_of_the_class(tmp_path: Path) -> None:
    """Qwen3-MoE does not make the weights of experts add up to one, if its config says nothing; Mistral has a window."""
    for kind, key, argument, value in (
        ("qwen3_moe", "norm_topk_prob", "moe_router_pre_softmax", True),
        ("mistral", "sliding_window", "window_size", [4095, 0]),
        ("gpt_oss", "rope_parameters", "position_embedding_type", "yarn"),
    ):
        home = tmp_path / kind
        model_of(kind, {}).save_pretrained(home)
        config = json.loads((home / "config.json").read_text())
        del config[key]
        (home / "config.json").write_text(json.dumps(config))
        zckpt.to_mcore(home, tmp_path / f"{kind}-out", progress=False)
        common = torch.load(tmp_path / f"{kind}-out" / "release" / "common.pt", weights_only=False)
        assert getattr(common["args"], argument) == value, kind


SPELLINGS: list[dict[str, Any]] = [
    {}, {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0}, "rope_theta": 500.0},
    {"partial_rotary_factor": 0.25}, {"rotary_pct": 0.75, "rotary_emb_base": 99.0},
]  # fmt: skip


TURNED = {
    kind for kind in CLASSES
    if hasattr(transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](), "rope_parameters")
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(TURNED - {"gemma3_text", "phi3"}))
def test_rotary_positions_of_a_config_are_those_of_the_class(kind: str) -> None:
    cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    for said in SPELLINGS:
        with contextlib.suppress(KeyError):  # the class does not take it
            theirs = dict(cls(**copy.deepcopy(said), max_position_embeddings=64).rope_parameters)
            ours = rotary_of(config_keys.whole_config({"model_type": kind, "max_position_embeddings": 64, **said}))
            del ours["type" if "type" in ours else "rope_type"], theirs["type" if "type" in theirs else "rope_type"]
            assert ours == {"partial_rotary_factor": 1.0, **theirs}, said


EVERY_MODEL = frozenset({
    "activation_func", "add_qkv_bias", "beta_fast", "beta_slow", "ffn_hidden_size", "gated_linear_unit", "hidden_size",
    "kv_channels", "kv_lora_rank", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size", "mscale", "mscale_all_dim", "num_attention_heads", "num_layers",
    "num_moe_experts", "num_query_groups", "q_lora_rank", "qk_head_dim", "qk_layernorm", "qk_pos_emb_head_dim",
    "rope_type", "rotary_scaling_factor", "softmax_scale", "v_head_dim",
})  # fmt: skip
"""Fields of Megatron-Core's config that the tensors show, or that are read for every family."""

TRAINING = (
    "_cpu_", "account_for_", "activation_func_fp8_", "apply_query_key_layer_scaling", "apply_rope_fusion", "async_",
    "attention_backend", "attention_dropout", "attention_softmax_in_fp32", "autocast_dtype", "barrier_", "batch_",
    "batch_invariant_mode", "bf16", "bias_", "cache_mla_latents", "calculate_", "clone_", "config_logger_dir",
    "context_parallel_size", "cp_comm_type", "cpu_", "cross_entropy_", "cuda_graph_", "deallocate_", "defer_", "delay_",
    "deterministic_", "disable_", "distribute_", "dsa_indexer_", "embedding_init_method", "enable_", "ep_overlap_",
    "expert_", "external_", "finalize_", "fine_grained_", "first_last_", "flash_decode", "fp16", "fp32_", "fp4", "fp8",
    "fused_", "grad", "hetereogenous_", "hidden_dropout", "hierarchical_", "hybrid_context_parallel", "inference_",
    "init_m", "kitchen_", "linear_", "log_", "mamba_", "masked_", "max_seqlen_", "memory_", "microbatch_",
    "min_offloaded_", "mlp_chunks_", "moe_aux_", "moe_deepep_", "moe_enable_", "moe_expert_capacity_", "moe_extended_",
    "moe_flex_", "moe_grouped_", "moe_hybridep_", "moe_input_jitter_eps", "moe_layer_recompute", "moe_pad_", "moe_per_",
    "moe_permute_", "moe_router_bias_update_rate", "moe_router_dtype", "moe_router_fusion", "moe_router_padding_",
    "moe_router_topk_limited", "moe_shared_expert_overlap", "moe_token_", "moe_use_", "moe_z_", "mtp_", "no_sync_",
    "num_layers_", "num_microbatches_", "offload_", "output_layer_init_", "overlap_", "param", "perform_", "persist_",
    "pipeline_", "qk_clip", "quant_recipe", "recompute_", "sequence_parallel", "symmetric_", "tensor_model_", "test_mode",
    "timers", "tp_", "transformer_impl", "use_", "variable_", "virtual_", "wgrad_",
)  # fmt: skip
"""Beginnings of its fields that say how a model is trained, spread, and rounded, or that count only beside one of `OFF`."""


def test_each_field_of_megatron_core_is_mapped_or_must_be_off() -> None:
    transformer = pytest.importorskip("megatron.core.transformer")
    mapped = {name for family in families() for name in mapped_arguments(scheme(f"hf-{family}"))}
    known = {*OFF, *OFF_WITH_EXPERTS, *mapped, *EVERY_MODEL}
    fields = {field.name: field.default for field in dataclasses.fields(transformer.MLATransformerConfig)}
    unknown = [name for name in fields if name not in known and not name.startswith(TRAINING)]
    assert not unknown
    plain = {field.name: field.default for field in dataclasses.fields(transformer.TransformerConfig)}
    for name, values in {**OFF, **OFF_WITH_EXPERTS}.items():
        assert plain.get(name) in (None, *values), name
