"""A Hugging Face model's tensors as MLX's models name and stack them, and how many bits each of them gets there.

For `jobs.to_mlx`, and for `verify`. Names are the hub's, but the experts of a layer are one tensor, and so are the heads of
DeepSeek's keys and values. The weights of linear layers, the embedding, the head and the experts are quantised, where rows are
multiples of a group; a model has some of them in 8 bits whatever is asked for.
Source: mlx-lm 0.32.2, utils.py (`quantize_model`), models/*.py (`sanitize`, `quant_predicate`, `cast_predicate`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zckpt.base.errors import IncompleteError, UnsupportedError, UsageError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.layouts.save.tied import is_tied
from zckpt.naming.rows import split_rows, stack_rows, transpose
from zckpt.naming.schemes import family_of

GROUP_SIZES, BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)


class MlxModel(NamedTuple):
    """The peculiarities of one of MLX's models; the defaults are those of most.

    Attributes:
        eight: ends of the names of modules that have 8 bits, in groups of 64.
        plain: ends of the names of matrices that are not quantised.
        has_more_layers: whether there may be layers that predict more tokens behind the others, which MLX has no place for.
    """

    eight: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    has_more_layers: bool = False


_GRANITE = ("self_attn.o_proj", "mlp.down_proj", "lm_head")

MLX_MODELS: Mapping[str, MlxModel] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "olmoe", "olmo2", "phi3"), MlxModel()
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "smollm3", "starcoder2", "nemotron"), MlxModel()),
    **dict.fromkeys(("seed_oss", "glm4", "hunyuan_v1_dense", "ernie4_5"), MlxModel()),
    "qwen3_moe": MlxModel(eight=("mlp.gate",)),
    "granite": MlxModel(eight=_GRANITE),
    "glm4_moe": MlxModel(plain=("mlp.gate.weight",), has_more_layers=True),
    "deepseek_v3": MlxModel(plain=("mlp.gate.weight",), has_more_layers=True),
}
"""`model_type` of a config -> the peculiarities of MLX's model."""

_EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe))\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MlxForm(NamedTuple):
    """A model in MLX's form.

    Attributes:
        catalog: its tensors, with the numbers of the checkpoint.
        widths: of each weight that is quantised -> columns of a group, and bits.
        own: modules that have other bits than were asked for -> what the config says of them.
        precise: tensors that keep their dtype.
        dropped: tensors that have no place in it -> the rule of `core.ledger` that left them out.
    """

    catalog: Catalog
    widths: Mapping[str, tuple[int, int]]
    own: Mapping[str, dict[str, int]]
    precise: frozenset[str]
    dropped: Mapping[str, str]


def in_mlx_form(catalog: Catalog, config: Mapping[str, Any], bits: int | None, group: int) -> MlxForm:
    """Names, stacks and cuts the tensors of a model as MLX has them, and says how many bits (None for none) each gets, in
    which groups of columns.

    Raises:
        UnsupportedError: mlx-lm has no such model that zckpt knows, or tensors have no place in it.
        IncompleteError: experts are missing.
        UsageError: groups do not divide the columns of a matrix that has its own.
    """
    path, kind = catalog.source.path, config.get("model_type")
    model, family = MLX_MODELS.get(str(kind)), family_of(kind)
    if model is None or family is None:
        raise UnsupportedError(
            "zckpt does not know how MLX has such a model", file=path, found=f"model_type {kind!r}",
            expected=f"one of {', '.join(sorted(MLX_MODELS))}",
            remedy="Write it as transformers has it (to-bf16), and give that to mlx_lm.convert.",
        )  # fmt: skip
    more = f"model.layers.{config.get('num_hidden_layers')}."
    dropped = {name: "form" for name in catalog.tensors if model.has_more_layers and name.startswith(more)}
    fits = family.fits([name for name in catalog.tensors if name not in dropped])
    if strange := [name for name, fit in fits.items() if fit is None and not name.endswith("inv_freq")]:
        raise UnsupportedError(
            f"{count(len(strange), 'tensor has', 'tensors have')} no place in MLX's {kind}", file=path, found=examples(strange),
            expected="the tensors of the model as transformers has it",
            remedy="Leave them out with --exclude; or pass --to hf if another program named them.",
        )  # fmt: skip
    for name, fit in fits.items():
        if fit is None or all(rule.parts is None for rule in fit.rules):
            dropped[name] = "buffer"
        elif name == "lm_head.weight" and is_tied(config):
            dropped[name] = "form"
    kept = {name: entry for name, entry in catalog.tensors.items() if name not in dropped}
    tensors = _stack_experts(_split_heads(kept, config) if kind == "deepseek_v3" else kept, path)
    widths, own = _widths(tensors, model, bits, group, path)
    precise = frozenset(name for name in tensors if name.endswith("e_score_correction_bias"))
    return MlxForm(replace(catalog, tensors=tensors, aliases={}), widths, own, precise, dropped)


def _stack_experts(tensors: Mapping[str, TensorEntry], path: str) -> dict[str, TensorEntry]:
    """The tensors, with one tensor for each matrix that all experts of a layer have."""
    stacks: dict[str, dict[int, TensorEntry]] = {}
    found: dict[str, TensorEntry | None] = {}
    for name, entry in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = entry
            continue
        block, number, role = match.groups()
        whole = f"{block}.switch_mlp.{_ROLES.get(role, role)}.weight"
        stacks.setdefault(whole, {})[int(number)] = entry
        found.setdefault(whole, None)
    for name, experts in stacks.items():
        if sorted(experts) != [*range(len(experts))]:
            raise IncompleteError(
                f"experts of {name!r} are missing", file=path, found=f"experts {examples(map(str, sorted(experts)))}",
                expected=f"0 to {max(experts)}", remedy="Copy the checkpoint here again; experts cannot be left out.",
            )  # fmt: skip
    return {
        name: stack_rows(name, [stacks[name][n] for n in range(len(stacks[name]))], (len(stacks[name]),))
        if entry is None else entry
        for name, entry in found.items()
    }  # fmt: skip


def _split_heads(tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """The tensors of DeepSeek, with `kv_b_proj` as a stack of keys' matrices, transposed, and one of values' matrices.

    Raises:
        UsageError: the config does not say how wide they are.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if not name.endswith(".kv_b_proj.weight"):
            found[name] = entry
            continue
        sizes = [config.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")]
        heads, keys, values = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        if not heads or not keys or not values or entry.shape[0] != heads * (keys + values):
            raise UsageError(
                f"the config does not say what {name!r} consists of", found=f"{entry.shape[0]:,} rows, and {sizes}",
                expected="num_attention_heads times the sum of qk_nope_head_dim and v_head_dim",
                remedy="Copy the model's own config.json to it.",
            )  # fmt: skip
        columns = entry.shape[1]
        parts = split_rows(entry, [(name, (size, columns)) for _ in range(heads) for size in (keys, values)])
        for end, each in (("embed_q", [transpose(one) for one in parts[::2]]), ("unembed_out", parts[1::2])):
            stack = name.replace("kv_b_proj", end)
            found[stack] = stack_rows(stack, each, (heads,))
    return found


def _widths(
    tensors: Mapping[str, TensorEntry], model: MlxModel, bits: int | None, group: int, path: str
) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """Computes `widths` and `own` of `MlxForm`."""
    widths: dict[str, tuple[int, int]] = {}
    own: dict[str, dict[str, int]] = {}
    for name, entry in tensors.items() if bits is not None else ():
        is_matrix = len(entry.shape) >= 2 and name.endswith(".weight") and entry.dtype.kind == "float"
        if not is_matrix or entry.shape[-1] % group or name.endswith(model.plain) or not entry.numel:
            continue
        widths[name] = group, bits or 0
        if (module := name.removesuffix(".weight")).endswith(model.eight):
            own[module] = {"group_size": 64, "bits": 8}
            widths[name] = 64, 8
            if entry.shape[-1] % 64:
                raise UsageError(
                    f"MLX has {module!r} in groups of 64 columns, which do not divide it", file=path,
                    found=f"{entry.shape[-1]} columns", expected="a multiple of 64",
                    remedy="Pass --group-size 64 or 128, with which it stays as it is.",
                )  # fmt: skip
    return widths, {module: own[module] for module in sorted(own, key=lambda module: _turn(module, model.eight))}


def _turn(module: str, eight: Sequence[str]) -> tuple[bool, int, int]:
    """A sort key of modules: by layers, those outside of layers last, and by their places in `eight`."""
    numbers = [int(part) for part in module.split(".") if part.isdigit()]
    return not numbers, numbers[0] if numbers else 0, next(n for n, end in enumerate(eight) if module.endswith(end))
