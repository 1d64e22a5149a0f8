"""The forms of packed weights: by which tensors each is known, as a table.

For `packed`. A form is known by names, dtypes and shapes alone, since a save taken from FSDP or DeepSpeed has no
`quantization_config`, and older exports of ModelOpt have `hf_quant_config.json` alone.
Sources: compressed-tensors 0.20 and 0.9.4, compressors/; nvidia-modelopt 0.47, torch/export/quant_utils.py; transformers 5.23,
integrations/mxfp4.py; GPTQModel 7.7, nn_modules/qlinear/; AutoAWQ 0.2.9, awq/modules/linear/gemm.py; bitsandbytes 0.50,
functional.py (`QuantState.as_dict`) and nn/modules.py; hqq 0.2, core/quantize.py; torchao 0.18,
prototype/safetensors/safetensors_support.py; mlx 0.32, nn/layers/quantized.py; optimum-quanto 0.2, tensor/qtensor.py; AQLM 1.1,
inference.py; exllamav3, modules/quant/exl3.py; VPTQ 0.0.5, layers/vqlinear.py; SpQR 0.2, inference/; quip-sharp and QTIP,
lib/linear; SqueezeLLM, squeezellm/quant.py; Marlin 0.1, marlin/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.extensions import extensions

Shape = tuple[int, ...]

FLOATS = "F16 BF16 F32 F64"
WHOLE = "I8 U8 I16 U16 I32 U32"
"""Names of dtypes in which codes are packed."""

_FP8 = "F8_E4M3 F8_E5M2"
_SCALE = "_scale|_weight_scale"
_SCALE_OR_INV = f"{_SCALE}|_scale_inv"
_POWERS = "U8 F8_E8M0"
"""Dtypes of scales that are powers of two."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """A form of quantised weights.

    Attributes:
        about: what it is and who writes it.
        codes: how the name of the tensor ends by which it is known; the rest of the name is the stem.
        dtypes: that this tensor can have, by their names.
        beside: (ends, dtypes) of tensors that must have the same stem; ends are alternatives, with `|` between them.
        fits: whether the shapes of all of these can belong together, the codes' first; None for any.
        others: ends of what belongs to it too, where it is there.
        by: with what it can be dequantised; empty if nothing does that.
        read: the reader of `unpack` that knows what it stands for, by its name; empty if zckpt does not read it. Of a form of
            another package, the function itself: of a `Part`, the config and small values, to a `Recipe` with a name and a shape.
        again: of a form of another package, the reader of `second`.
    """

    about: str
    codes: str
    dtypes: str
    beside: tuple[tuple[str, str], ...] = ()
    fits: Callable[[Sequence[Shape]], bool] | None = None
    others: tuple[str, ...] = ()
    by: str = ""
    read: str | Callable[..., Any] = ""
    again: Callable[..., Any] | None = None


def _by_groups(per_scale: int) -> Callable[[Sequence[Shape]], bool]:
    """A test whether each row has a scale for every `per_scale` elements of its codes."""
    return lambda shapes: shapes[0] == (*shapes[1][:-1], per_scale * shapes[1][-1]) if shapes[1] else False


def _is_matrix(shapes: Sequence[Shape]) -> bool:
    return len(shapes[0]) >= 2


def _by_rows(shapes: Sequence[Shape]) -> bool:
    """Whether there is a matrix of codes, with one scale or those of rows or groups of rows."""
    codes, scales = shapes[:2]
    return len(codes) >= 2 and (all(extent == 1 for extent in scales) or scales[: len(codes) - 1] == codes[:-1])


def _in_columns(packed: int) -> Callable[[Sequence[Shape]], bool]:
    """A test whether both are matrices, and each column of codes holds `packed` columns of scales."""
    return lambda shapes: len(shapes[0]) == len(shapes[1]) == 2 and packed * shapes[0][1] == shapes[1][1]


def _as_marlin(shapes: Sequence[Shape]) -> bool:
    """Whether two columns of codes belong to each column of scales."""
    return len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == 2 * shapes[1][1]


def _as_blocks(shapes: Sequence[Shape]) -> bool:
    """Whether there is a scale for each 16 bytes."""
    return shapes[0] == (*shapes[1], 16)


_COMPRESSED = "compressed-tensors (in transformers: CompressedTensorsConfig(dequantize=True))"
_BNB = "bitsandbytes (in transformers: model.dequantize())"
_OF_4_BITS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_OF_HQQ = (
    *("scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "channel_wise", "encoded_state_dict", "optimize"),
    *("stores_quant_config", "round_zero"),
)

FORMS: tuple[PackedForm, ...] = (
    PackedForm(
        "NVFP4 of ModelOpt", "", "U8", ((_SCALE, "F8_E4M3"), ("_scale_2|_weight_scale_2", FLOATS)), read="nvfp4"
    ),
    PackedForm(
        "NVFP4 of compressed-tensors", "_packed", "U8", (("_scale", "F8_E4M3"), ("_global_scale", FLOATS)),
        by=_COMPRESSED, read="nvfp4, divided",
    ),
    PackedForm("MXFP4 of compressed-tensors", "_packed", "U8", (("_scale", _POWERS),), by=_COMPRESSED, read="mxfp4"),
    PackedForm(
        "packed integers of compressed-tensors", "_packed", "I32 U32", (("_scale", FLOATS),),
        others=("_shape", "_zero_point", "_g_idx"), by=_COMPRESSED, read="packed integers",
    ),
    PackedForm(
        "MXFP4 of gpt-oss", "_blocks", "U8", (("_scales", _POWERS),), _as_blocks,
        by="transformers (Mxfp4Config(dequantize=True))", read="gpt-oss",
    ),
    PackedForm(
        "MXFP4 of gpt-oss", "_proj_blocks", "U8", (("_proj_scales", _POWERS),),
        by="transformers (Mxfp4Config(dequantize=True))", read="gpt-oss",
    ),
    PackedForm("MXFP4", "", "U8", ((_SCALE_OR_INV, _POWERS),), _by_groups(16), read="mxfp4"),
    PackedForm("MXFP8", "", _FP8, ((_SCALE_OR_INV, _POWERS),), _by_groups(32), by=_COMPRESSED, read="mxfp8"),
    PackedForm(
        "fp8 with powers of two as scales", "", _FP8, ((_SCALE_OR_INV, "F8_E8M0"),),
        by="transformers (FineGrainedFP8Config(dequantize=True))", read="fp8 by powers",
    ),
    PackedForm("int8 with scales", "", "I8", ((_SCALE, FLOATS),), _is_matrix, ("_zero_point",), _COMPRESSED, "int8"),
    PackedForm(
        "GPTQ", "qweight", "I32 U32", (("g_idx", "I32 I64"), ("scales", FLOATS)), others=("qzeros",), by="GPTQModel",
        read="gptq",
    ),
    PackedForm(
        "GPTQ", "qweight", "I32 U32", (("scales", FLOATS),), _in_columns(1), ("qzeros", "g_idx"), "GPTQModel", "gptq"
    ),
    PackedForm("AWQ", "qweight", "I32 U32", (("scales", FLOATS),), _in_columns(8), ("qzeros",), "AutoAWQ", "awq"),
    PackedForm("nf4 of bitsandbytes", ".quant_state.bitsandbytes__nf4", "U8", others=_OF_4_BITS, by=_BNB, read="bnb4"),
    PackedForm("fp4 of bitsandbytes", ".quant_state.bitsandbytes__fp4", "U8", others=_OF_4_BITS, by=_BNB, read="bnb4"),
    PackedForm("4 bits of bitsandbytes", ".absmax", "U8 F32", ((".quant_map", FLOATS),), others=_OF_4_BITS, by=_BNB),
    PackedForm("int8 of bitsandbytes", "weight", "I8", (("SCB", FLOATS),), _is_matrix, ("weight_format",), _BNB, "bnb8"),
    PackedForm("int8 of bitsandbytes", "weight_format", "U8", (("SCB", FLOATS),), by=_BNB),
    PackedForm(
        "HQQ", "W_q", WHOLE, (("scale|zero|nbits|packing|scale_q|zero_q", f"{FLOATS} {WHOLE} I64"),),
        others=_OF_HQQ, by="HQQ (HQQLinear.dequantize())",
    ),
    PackedForm(
        "HQQ", "W_q", FLOATS, (("nbits|packing|view_as_float", f"{WHOLE} I64 BOOL"),),
        others=_OF_HQQ, by="HQQ (HQQLinear.dequantize())",
    ),
    PackedForm(
        "torchao's quantised tensors", "_qdata", f"{WHOLE} {_FP8}", (("_scale|_scale_and_zero", f"{FLOATS} U8"),),
        others=("_zero_point",), by="torchao (in transformers: model.dequantize())", read="torchao",
    ),
    PackedForm(
        "torchao's quantised tensors", ":qdata", f"{WHOLE} {_FP8}", ((":scale|:scale_and_zero", f"{FLOATS} U8"),),
        others=(":zero_point",), by="torchao (in transformers: model.dequantize())", read="torchao",
    ),
    PackedForm(
        "optimum-quanto's quantised tensors", "._data", f"{WHOLE} {_FP8}", (("._scale", FLOATS),), others=("._shift",),
        by="optimum-quanto",
    ),
    PackedForm(
        "MLX's quantised tensors", "weight", "U32", (("scales", FLOATS),), _by_rows, ("biases",),
        "mlx-lm (mlx_lm.convert --dequantize)", "mlx",
    ),
    PackedForm(
        "MLX's quantised tensors", "weight", "U32", (("scales", "U8"),), _by_rows,
        by="mlx-lm (mlx_lm.convert --dequantize)", read="mlx",
    ),
    PackedForm(
        "sparse weights of compressed-tensors", "bitmask", "U8", (("compressed", f"{FLOATS} {_FP8} I8"),),
        others=("shape", "row_offsets"), by=_COMPRESSED,
    ),
    PackedForm("AQLM", "codes", "I8 U8 I16", (("codebooks", FLOATS), ("scales", FLOATS)), by="AQLM"),
    PackedForm("EXL2", "q_weight", "I32", (("q_scale", "I32"),), others=("q_groups", "q_invperm", "q_perm", "q_scale_max")),
    PackedForm("EXL3", "trellis", "I16", (("suh|su", "F16 I16"),), others=("svh", "sv", "mcg", "mul1")),
    PackedForm("QTIP", "trellis", "I16", (("SU", FLOATS), ("SV", FLOATS)), others=("tlut", "rcp", "tp_rank")),
    PackedForm(
        "QuIP#", "Qidxs", f"{WHOLE} I64", (("SU", f"{FLOATS} I8"), ("SV", f"{FLOATS} I8")),
        others=("Wscale", "codebook_id"),
    ),
    PackedForm("SqueezeLLM", "qweight", "I32", (("lookup_table", FLOATS),), others=("rows", "cols", "vals")),
    PackedForm("SpQR", "dense_weights", "I64 I32", (("row_offsets", "I32"), ("col_vals", "I32")), others=("in_perm",)),
    PackedForm(
        "VPTQ", "indices", f"{WHOLE} I64",
        (("centroids.weight", FLOATS), ("weight_scale|perm|res_indices|outlier_indices", f"{FLOATS} {WHOLE} I64")),
        others=("weight_bias", "res_centroids.weight", "outlier_centroids.weight"),
    ),
    PackedForm("Marlin", "B", "I32", (("s", FLOATS),), _as_marlin),
)  # fmt: skip

BESIDE_MODULE = (
    *("input_scale", "input_global_scale", "input_zero_point", "input_scale_ub", "input_scale_inv", "activation_scale"),
    *("output_scale", "output_zero_point", "qscale_act", "_weight_act_quant_scale", "_weight_act_quant_zero_point"),
)
"""The tensors beside the weight of a module with quantised activations; plain weights have no use for them."""


def forms_of_packages(names: Collection[str]) -> tuple[PackedForm, ...]:
    """The forms that other packages add, by entry points of the group `zckpt.recipes`, where a tensor may be in them.

    The name of an entry point is a pattern of tensors' names: nothing of its package is imported before a tensor has such a name.

    Raises:
        UnsupportedError: such a package does not work.
    """
    found: list[PackedForm] = []
    for one in extensions("zckpt.recipes"):
        if any(fnmatchcase(name, one.name) for name in names):
            form = one.load(PackedForm)
            if not callable(form.read) or form.again is None:
                raise one.broken("a form without a function to read it (read), or without a second one (again)")
            found.append(form)
    return tuple(found)
