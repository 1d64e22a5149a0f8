"""What a model's `config.json` says of quantised weights, and what it says of those that zckpt writes.

For `plain` (reading) and `jobs.quantize` (writing).
Source: transformers 5.23, utils/quantization_config.py (FineGrainedFP8Config, CompressedTensorsConfig); vLLM 0.11,
model_executor/layers/quantization/fp8.py (`modules_to_not_convert`, `weight_block_size`) and compressed_tensors.py (per-tensor
weights of experts need activations per tensor, per-channel weights activations per token); compressed-tensors 0.20,
quantization/quant_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from zckpt.base.dataclass import dataclass
from zckpt.core.dtypes import U8
from zckpt.quantized.targets import TARGETS, Target

Scheme = Literal["block128", "channel", "tensor", "nvfp4", "mxfp4", "mxfp8", "int4", "int8"]
SCHEMES: tuple[Scheme, ...] = ("block128", "channel", "tensor")

RECORDED = "fp8"
"""The key of a manifest's options that says how an output was quantised."""

BLOCK = (128, 128)
_KEYS = ("quantization_config", "compression_config", "quantization")
_FLOATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of quantised weights.

    Attributes:
        method: `quant_method`, such as "fp8" or "gptq".
        about: the same with what distinguishes it, for a person.
        is_read: whether zckpt reads such weights.
        block: rows and columns of a block that has a scale.
        facts: all that the config says.
        otherwise: how another file beside it contradicts it; empty if none does.
    """

    method: str
    about: str
    is_read: bool
    block: tuple[int, int] = BLOCK
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    otherwise: str = ""

    @property
    def version_of_gptq(self) -> str:
        """How GPTQ's zero points are stored; "gptq" where a config of GPTQ does not say it, empty where there is no such config.

        Source: auto-gptq 0.7 and GPTQModel 7.7, quantization/config.py; transformers 5.23, GPTQConfig (`format`, before it
        `checkpoint_format`); vLLM 0.11, gptq.py; auto-round 0.8 (`packing_format`): none of them says a zero point otherwise.
        """
        said = self.facts.get("checkpoint_format") or self.facts.get("format") or "gptq"
        if self.method == "gptq":
            return "marlin" if self.facts.get("is_marlin_format") else str(said).lower()
        return "gptq" if self.facts.get("packing_format") == "auto_round:auto_gptq" else ""

    @property
    def version_of_awq(self) -> str:
        """How AWQ's words are ordered; "gemm" where no config says it, since shapes tell that form from others.

        Source: AutoAWQ 0.2.9, awq/models/_config.py; transformers 5.23, AwqConfig (`format`, before it `version`).
        """
        if self.method != "awq":
            return "gemm"
        said = self.facts.get("version") or self.facts.get("format") or "gemm"
        return str("llm-awq" if self.facts.get("backend") == "llm-awq" else said).lower()

    @property
    def is_symmetric(self) -> bool:
        """Whether the config says that zero points are in the middle."""
        return self.facts.get("sym") is True

    @property
    def bits(self) -> int:
        """The bits of a code by the config; 0 if it does not record them."""
        said = self.facts.get("bits", self.facts.get("w_bit"))
        return said if isinstance(said, int) else 0

    @property
    def is_explicit(self) -> bool:
        """Whether it says how zero points of GPTQ are stored."""
        return bool(self.facts.get("checkpoint_format") or self.facts.get("format"))

    @property
    def groups_of_nvfp4(self) -> set[int]:
        """The columns that a scale of ModelOpt's NVFP4 can be for.

        Source: nvidia-modelopt 0.47, quantization/config.py (W4A8_NVFP4_FP8_CFG, NVFP4_MLP_WEIGHT_ONLY_CFG).
        """
        said: set[Any] = {self.facts.get("group_size"), *(weights.get("group_size") for weights in self.weights)}
        usual = 32 if self.facts.get("quant_algo") == "W4A8_NVFP4_FP8" else 16
        return {size for size in (16, 32) if size in said} or {usual}

    @property
    def weights(self) -> list[Mapping[str, Any]]:
        """The settings of weights by compressed-tensors, for each group of modules."""
        groups = self.facts.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        found = (group.get("weights") for group in groups if isinstance(group, dict))
        return [weights for weights in found if isinstance(weights, dict)]


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """The quantisation in a model's config; None if it has none."""
    if config is None:
        return None
    places = (config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)))
    said = next((place[key] for place in places for key in _keys_of(place) if isinstance(place.get(key), dict)), None)
    if not said:
        return None
    method = str(said.get("quant_method") or "of an unnamed method")
    if method == "fp8":
        block = _pair(said.get("weight_block_size")) or BLOCK
        is_read = said.get("scale_fmt") in (None, "float", "ue8m0") and said.get("expert_dtype") in (None, "fp8")
        return Quantization(method, method, is_read, block, said)
    if method == "compressed-tensors":
        form, weights = str(said.get("format")), Quantization(method, method, is_read=False, facts=said).weights
        floats = [w for w in weights if w.get("type") == "float" and w.get("num_bits") == 8]
        block = next((pair for w in floats if (pair := _pair(w.get("block_structure")))), BLOCK)
        is_read = bool(weights) and len(floats) == len(weights) and form in _FLOATS
        return Quantization(method, f"{method} ({form})", is_read, block, said)
    return Quantization(method, method, is_read=method == "modelopt" and _is_fp8_of_modelopt(said), facts=said)


def _keys_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Keys of a quantisation, the one that holds first: MLX's own is before one that was kept from another form.

    Source: mlx-lm 0.32, utils.py (`load_model`).
    """
    own = config.get("quantization")
    return _KEYS[::-1] if isinstance(own, dict) and {"bits", "group_size"} <= own.keys() else _KEYS


def quantization_of_modelopt(said: object) -> Quantization | None:
    """The quantisation in ModelOpt's `hf_quant_config.json`; None for plain weights.

    Source: nvidia-modelopt 0.47, torch/export/convert_hf_config.py; older versions wrote this file alone.
    """
    part = said.get("quantization") if isinstance(said, dict) else None
    algorithm = part.get("quant_algo") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(algorithm, str):
        return None
    return Quantization("modelopt", f"ModelOpt ({algorithm})", _is_fp8_of_modelopt(part), facts=part)


def _is_fp8_of_modelopt(said: Mapping[str, Any]) -> bool:
    return str(said.get("quant_algo")).startswith("FP8")


def quantization_of_gptq(said: object) -> Quantization | None:
    """The quantisation in auto-gptq's `quantize_config.json` or AutoAWQ's `quant_config.json`; older releases have it
    alone.

    Source: auto-gptq 0.7, quantization/config.py (`from_quant_config`: no method is GPTQ, and a version is AWQ's).
    """
    if not isinstance(said, dict) or not {"bits", "w_bit", "quant_method"} & said.keys():
        return None
    method = str(said.get("quant_method") or ("awq" if said.get("version") else "gptq")).lower()
    return Quantization(method, method, is_read=False, facts=said)


OWN_FILES: Mapping[str, Callable[[object], Quantization | None]] = {
    "hf_quant_config.json": quantization_of_modelopt,
    "quantize_config.json": quantization_of_gptq,
    "quant_config.json": quantization_of_gptq,
}
"""Files that record a quantisation that config.json lacks -> the function that reads their JSON."""


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, str):  # compressed-tensors before 0.11
        value = [int(part) for part in value.split("x") if part.isdecimal()]
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def without(config: Mapping[str, object]) -> dict[str, object]:
    """A config without its quantisation, also in nested configs."""
    kept: dict[str, object] = {key: value for key, value in config.items() if key not in _KEYS}
    for key, value in kept.items():
        if key.endswith("_config") and isinstance(value, dict):
            kept[key] = without(value)
    return kept


def quantization_config(
    scheme: Scheme | Literal["stacks"], kept: Sequence[str], group_size: int | None = None
) -> dict[str, object]:
    """The `quantization_config` of an output; "stacks" is NVFP4 of experts as ModelOpt has it, and `kept` are modules with
    matrices that are not quantised.
    """
    if scheme == "stacks":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": list(kept),
            "producer": {"name": "zckpt"},
        }
    if scheme in TARGETS:
        return _config_of(TARGETS[scheme], kept, group_size)
    if scheme == "block128":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": list(kept),
        }
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "strategy": scheme, "dynamic": False, "observer": "minmax"}
    inputs = {**number, "strategy": "token" if scheme == "channel" else "tensor", "dynamic": True, "observer": None}
    return _config_in_groups("float-quantized", weights, inputs, kept)


def _config_of(target: Target, kept: Sequence[str], group_size: int | None) -> dict[str, object]:
    """The config as compressed-tensors' presets have it."""
    number = {"num_bits": target.bits, "type": "float" if target.is_float else "int", "symmetric": True}
    group = group_size or target.group
    strategy = "tensor_group" if target.has_second else "group" if group else "channel"
    weights: dict[str, object] = {**number, "strategy": strategy, "dynamic": False, "observer": "minmax"}
    if group:
        weights["group_size"] = group
    if target.scales is not None:
        weights["scale_dtype"] = weights["zp_dtype"] = "torch.uint8" if target.scales == U8 else "torch.float8_e4m3fn"
    by_token = {**number, "strategy": "token", "dynamic": True, "observer": None}
    return _config_in_groups(target.form, weights, by_token if target.inputs == "by token" else None, kept)


def _config_in_groups(
    form: str, weights: Mapping[str, object], inputs: Mapping[str, object] | None, kept: Sequence[str]
) -> dict[str, object]:
    """A config of compressed-tensors, in which all linear layers but those that are kept are quantised alike."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }
