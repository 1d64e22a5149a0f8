"""From the metadata of a GGUF file to transformers' config of the model.

For `transform`, when a GGUF file is a source. What a file does not record is as llama.cpp has it for such a model: Gemma's scale
of queries, and whether the weights of experts are made to add up to one. Llama, Mistral and (with experts) Mixtral are one
architecture in llama.cpp; without experts the model is taken for a Llama. The parameters of Llama 3's rotary embeddings are not
recorded either: they are found if the factors in the file are those of a Llama 3.1 or 3.2.
Source: llama.cpp, src/llama-arch.cpp (keys), src/llama-model.cpp (what is not recorded; of 2026).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from zckpt.base.errors import CorruptError, UsageError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.engine.elements import ElementReader, elements
from zckpt.naming.families import architecture_of
from zckpt.naming.gguf_keys import BLOCKS_OF_27B, SUMS_OF_EXPERTS
from zckpt.naming.gguf_metadata import ARCHITECTURES
from zckpt.naming.gguf_tensors import FACTORS, llama3_factors
from zckpt.naming.schemes import family_of

_TYPES = {architecture: kind for kind, architecture in reversed(ARCHITECTURES.items())}
"""llama.cpp's architecture -> the first `model_type` that is written so."""

_KNOWN_SCALINGS = tuple(
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
)
"""The scalings of Llama 3.1 and 3.3, and of 3.2."""


def is_known(metadata: Mapping[str, object]) -> bool:
    """Whether a file's architecture is one with tensors and a config that zckpt knows."""
    return metadata.get("general.architecture") in _TYPES


def config_of_gguf(catalog: Catalog, metadata: Mapping[str, object], family: str = "") -> dict[str, object]:
    """The config of the model in a GGUF file. `family`: "mistral" or "mixtral" where the user says so.

    Raises:
        CorruptError: the metadata lacks what every such model has, or contradicts itself.
        UsageError: the parameters of its rotary embeddings are not known.
    """
    read = _Metadata(metadata, catalog.source.path)
    kind = _TYPES[str(metadata["general.architecture"])]
    experts = read.number("expert_count", 0)
    if kind == "llama":
        kind = "mixtral" if experts else family if family == "mistral" else kind
    heads, hidden = read.number("attention.head_count", least=1), read.number("embedding_length")
    size = read.number("attention.key_length", hidden // heads)
    known = family_of(kind)
    config: dict[str, object] = {
        "model_type": kind,
        "architectures": [] if known is None else [architecture_of(known)],
        "vocab_size": _rows(catalog),
        "hidden_size": hidden,
        "intermediate_size": read.number("feed_forward_length"),
        "num_hidden_layers": read.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.number("attention.head_count_kv", heads),
        "max_position_embeddings": read.number("context_length"),
        "rms_norm_eps": read.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in catalog.tensors,
    }
    if kind != "qwen2" or size != hidden // heads:
        config["head_dim"] = size
    for token in ("bos", "eos", "pad"):
        config[f"{token}_token_id"] = metadata.get(f"tokenizer.ggml.{'padding' if token == 'pad' else token}_token_id")
    config |= _of_kind(kind, config, catalog, read)
    if scaling := _scaling(config, catalog, read):
        config["rope_scaling"] = scaling
    return config


class _Metadata:
    """The values of an architecture's keys."""

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self._values = values
        self._architecture = values["general.architecture"]
        self.path = path

    def get(self, key: str) -> object:
        return self._values.get(f"{self._architecture}.{key}")

    def number(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number from `least`."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self._wrong(key, value, f"a whole number from {least}" if least else "a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number of fp32, with the fewest digits that tell it from its neighbours."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        for digits in range(6, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        return float(value)

    def _wrong(self, key: str, value: object, expected: str) -> CorruptError:
        return CorruptError(
            "the metadata does not describe such a model", file=self.path, expected=f"{expected} as {self._architecture}.{key}",
            found="no such entry" if value is None else f"{value!r:.80}",
            remedy="Pass the model's config.json with --config, with --to hf.",
        )  # fmt: skip


def _rows(catalog: Catalog) -> int | None:
    embedding = catalog.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None and embedding.shape else None


def _of_kind(kind: str, config: Mapping[str, object], catalog: Catalog, read: _Metadata) -> dict[str, object]:
    """The keys that only some kinds of models have."""
    found: dict[str, object] = {"hidden_act": "silu"}
    if kind == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in catalog.tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in catalog.tensors
    elif kind == "mistral":
        found["sliding_window"] = None
    elif kind == "mixtral":
        found |= {"num_local_experts": read.number("expert_count"), "sliding_window": None}
        found["num_experts_per_tok"] = read.number("expert_used_count")
    elif kind in ("qwen2_moe", "qwen3_moe"):
        found["num_experts"], found["num_experts_per_tok"] = (
            read.number("expert_count"),
            read.number("expert_used_count"),
        )
        found["moe_intermediate_size"] = read.number("expert_feed_forward_length")
        found["norm_topk_prob"] = SUMS_OF_EXPERTS[kind]
        found["decoder_sparse_step"] = 1
        blocks = range(read.number("block_count"))
        found["mlp_only_layers"] = [b for b in blocks if f"blk.{b}.ffn_gate_inp.weight" not in catalog.tensors]
        if kind == "qwen2_moe":
            found["shared_expert_intermediate_size"] = read.number("expert_shared_feed_forward_length")
    elif kind.startswith("gemma"):
        found = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": read.number("attention.sliding_window")}
        found["query_pre_attn_scalar"] = config["head_dim"]
        if config["num_hidden_layers"] == BLOCKS_OF_27B[kind]:
            found["query_pre_attn_scalar"] = int(str(config["hidden_size"])) // int(str(config["num_attention_heads"]))
        final = read.get("final_logit_softcapping")
        found["final_logit_softcapping"] = None if final is None else read.real("final_logit_softcapping")
        if kind == "gemma2":
            found["attn_logit_softcapping"] = read.real("attn_logit_softcapping")
        else:
            found["rope_local_base_freq"] = read.real("rope.freq_base_swa", 10000.0)
    return found


def _scaling(config: Mapping[str, object], catalog: Catalog, read: _Metadata) -> dict[str, object]:
    """The scaling of rotary embeddings; empty if they are not scaled."""
    if (factors := catalog.tensors.get(FACTORS)) is not None:
        return _llama3(config, factors, read.path)
    kind = read.get("rope.scaling.type")
    if kind not in ("linear", "yarn"):
        return {}
    scaling: dict[str, object] = {"rope_type": kind, "factor": read.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = read.number("rope.scaling.original_context_length")
        for key, name in (
            ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if read.get(f"rope.scaling.{key}") is not None:
                scaling[name] = read.real(f"rope.scaling.{key}")
    return scaling


def _llama3(config: Mapping[str, Any], factors: TensorEntry, path: str) -> dict[str, object]:
    """The parameters of the known scaling with the factors in the file."""
    found = ElementReader().read(elements(factors, 0, factors.numel))
    for known in _KNOWN_SCALINGS:
        own = llama3_factors({**known, "rope_theta": config["rope_theta"]}, config["head_dim"])
        if len(own) == factors.numel and _near(struct.unpack(f"<{len(own)}f", found), own):
            return {"rope_type": "llama3", **known}
    raise UsageError(
        "does not record how its rotary embeddings are scaled", file=path, found=f"factors in {FACTORS!r} of no known model",
        remedy="Pass the model's config.json: --to hf --config config.json.",
    )  # fmt: skip


def _near(found: tuple[float, ...], own: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 * b for a, b in zip(found, own, strict=True))
