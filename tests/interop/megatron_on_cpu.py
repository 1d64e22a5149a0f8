"""Real Megatron-Core on a CPU, over gloo: its GPT model for a model of transformers, and how that is computed.

PYTHONPATH may name a directory with another version of megatron-core than the one that is installed.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import inspect
import queue
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
_ones = torch.ones
torch.ones = lambda *args, device=None, **kwargs: _ones(*args, device=None if device == "cuda" else device, **kwargs)  # type: ignore[assignment]
torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, dot_product_attention
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.moe import moe_utils

WIDTH = 128
"""Multiple of the vocabulary."""


class Tracker:
    """Stands for the random states of a GPU; nothing here is random."""

    @contextlib.contextmanager
    def fork(self, *args: object) -> Iterator[None]:
        yield


def on_cpu() -> None:
    """Takes away what Megatron-Core asks of a GPU and of Transformer Engine; no arithmetic depends on it.

    And what takes it seconds: compiling, and a process that imports all again to hold the results of a save's writers, which this
    process reads itself.
    """
    torch.compiler.set_stance("force_eager")
    filesystem_async._results_queue = queue.Queue()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *args, **kwargs: Tracker()  # type: ignore[attr-defined]
    moe_utils.te_general_gemm = None
    mla.TELinear = type("Absent", (), {})
    made: Callable[..., None] = dot_product_attention.DotProductAttention.__init__

    def latent(self: Any, *args: Any, k_channels: object = None, v_channels: object = None, **kwargs: Any) -> None:
        made(self, *args, **kwargs)

    dot_product_attention.DotProductAttention.__init__ = latent


on_cpu()


def built(hf: Any, tp: int, pp: int, ep: int) -> GPTModel:
    """This rank's part of Megatron-Core's model for a config of transformers."""
    kind = hf.model_type
    latent = kind in ("deepseek_v2", "deepseek_v3")
    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads, "ffn_hidden_size": hf.intermediate_size,
        "kv_channels": hf.v_head_dim if latent else getattr(hf, "head_dim", None), "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe") or getattr(hf, "attention_bias", False),
        "use_cpu_initialization": True,
        "qk_layernorm": latent or kind in ("qwen3", "qwen3_moe") or getattr(hf, "use_qk_norm", False),
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "persist_layer_norm": False, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep, "sequence_parallel": False,
    }  # fmt: skip
    settings |= _experts(hf)
    if kind == "gpt_oss":
        settings |= _gpt_oss(hf)
    theta = hf.rope_parameters["rope_theta"]
    if latent:
        settings |= {
            "multi_latent_attention": True, "q_lora_rank": hf.q_lora_rank, "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim, "qk_pos_emb_head_dim": hf.qk_rope_head_dim, "v_head_dim": hf.v_head_dim,
            "rope_type": "rope", "rotary_base": theta,
        }  # fmt: skip
    make = MLATransformerConfig if latent else TransformerConfig
    known = inspect.signature(make).parameters
    config = make(**{name: value for name, value in settings.items() if name in known})
    yarn = {} if latent else {f"yarn_{name}": value for name, value in _yarn(hf.rope_parameters).items()}
    for name, value in yarn.items():  # Megatron-Core reads them, and does not declare them
        setattr(config, name, value)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    words = -(-hf.vocab_size // (WIDTH * tp)) * WIDTH * tp
    return GPTModel(
        config, spec, vocab_size=words, max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="yarn" if yarn else "rope", rotary_base=theta,
        rotary_percent=hf.rope_parameters.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
    ).eval()  # fmt: skip


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """What scales rotary positions."""
    if rope["rope_type"] != "yarn":
        return {}
    same = {name: rope[name] for name in ("beta_fast", "beta_slow", "original_max_position_embeddings")}
    rounded = {"correction_range_round_to_int": rope["truncate"]}
    return {**same, **rounded, "rotary_scaling_factor": rope["factor"], "mscale": None, "mscale_all_dim": None}


def _gpt_oss(hf: Any) -> dict[str, Any]:
    return {
        "activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": hf.swiglu_limit,
        "softmax_type": "learnable", "add_bias_linear": True, "window_size": (hf.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }  # fmt: skip


def _experts(hf: Any) -> dict[str, Any]:
    experts = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(hf, key, 0))), 0
    )
    if not experts:
        return {}
    found = {
        "num_moe_experts": experts, "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        "moe_router_topk": hf.num_experts_per_tok, "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather", "moe_router_pre_softmax": getattr(hf, "norm_topk_prob", True) is False,
    }  # fmt: skip
    if hf.model_type == "qwen2_moe":
        found |= {
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size, "moe_shared_expert_gate": True
        }  # fmt: skip
    if hf.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        dense = hf.first_k_dense_replace
        found |= {
            "moe_layer_freq": [0] * dense + [1] * (hf.num_hidden_layers - dense), "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }  # fmt: skip
        if hf.model_type != "deepseek_v2":
            found |= {
                "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
                "moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group,
            }  # fmt: skip
    return found


def logits(model: GPTModel, words: torch.Tensor) -> torch.Tensor | None:
    """What the whole model says of some words; None on ranks of stages before the last."""
    length = words.shape[1]
    places = torch.arange(length)[None].expand(words.shape)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    if not model.pre_process:
        hidden = torch.empty(length, len(words), model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad():
        found = model(words, places, mask)
    if not model.post_process:
        dist.send(found.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return found
