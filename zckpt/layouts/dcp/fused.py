"""States of parameters that a model has in one, while its weights are saved apart: torchtitan's queries, keys and values.

For `dcp.optimizer`. torchtitan 0.3 can hold the three matrices of an attention as one parameter `wqkv`. A hook of the module
saves the weights as `wq`, `wk` and `wv`; the optimizer has its states under `wqkv`. Its rows lie in a group for each key head:
the queries of the group's heads, then the key's, then the value's rows. So the number of key heads is needed, which the shapes of
the three do not say: the length of `q_norm` says it, or the model's config.
Source: torchtitan 0.3.0, models/common/attention.py `FusedQKVLinear`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import Block
from zckpt.core.overlaps import reorder_rows
from zckpt.layouts.dcp.chunks import Shape
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.companions import config_near, config_of
from zckpt.layouts.save.listing import Listing

_FUSED = "wqkv"
_APART = ("wq", "wk", "wv")


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A parameter of the optimizer that holds several of the model's.

    Attributes:
        name: the optimizer's.
        parts: the model's names, in the order of their rows in a group.
        shapes: of the parts.
        norm: what a norm of the heads would be called; its length is that of a head.
    """

    name: str
    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    norm: str

    @property
    def shape(self) -> Shape:
        """The shape of the fused parameter."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def part(self, item: TensorItem, name: str) -> TensorItem:
        """A state of one part, without chunks: `apart` makes its elements from those of the fused state."""
        shape = self.shapes[self.parts.index(name)]
        return TensorItem(f"{item.name}: {name}", item.path, item.dtype, shape, ())


def fused_parameters(shapes: Mapping[str, Shape]) -> dict[str, FusedParameter]:
    """The parameters that an optimizer may hold fused -> the model's parameters in each. `shapes`: of the model's
    tensors, by name.
    """
    found: dict[str, FusedParameter] = {}
    for name in shapes:
        head, _, rest = name.rpartition(f".{_APART[0]}.")
        parts = tuple(f"{head}.{part}.{rest}" for part in _APART)
        if not head or not all(part in shapes for part in parts):
            continue
        own = tuple(shapes[part] for part in parts)
        if own[1] == own[2] and all(own) and own[0][1:] == own[1][1:]:
            norm = f"{head.removesuffix('.qkv_linear')}.q_norm.weight"
            found[f"{head}.{_FUSED}.{rest}"] = FusedParameter(f"{head}.{_FUSED}.{rest}", parts, own, norm)
    return found


def key_heads(parameter: FusedParameter, shapes: Mapping[str, Shape], listing: Listing) -> int:
    """The number of groups in which the rows of a fused parameter lie.

    Args:
        parameter: the one with the rows.
        shapes: of the model's tensors, by name.
        listing: the save, beside which the model's config may be.

    Raises:
        UnsupportedError: nothing says it.
        InconsistentError: what the config says does not fit the rows.
    """
    queries, keys = (shape[0] for shape in parameter.shapes[:2])
    norm = shapes.get(parameter.norm)
    if norm is not None and len(norm) == 1 and norm[0] and keys % norm[0] == 0:
        return keys // norm[0]
    config = _config(listing)
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    heads = inner.get("num_attention_heads")
    groups = inner.get("num_key_value_heads") or heads
    if type(heads) is not int or type(groups) is not int:
        raise UnsupportedError(
            f"the optimizer has {parameter.name!r} in one, and nothing says how many heads its rows are", file=listing.directory,
            found="no norm of the queries, and no config.json in the save or beside it",
            expected="the number of heads, which a config.json of the model says",
            remedy="Put the model's config.json into the directory of the save, or pass --shapes with it.",
        )  # fmt: skip
    said = inner.get("head_dim")
    size = said if type(said) is int and said else keys // max(groups, 1)
    if groups < 1 or heads < 1 or (queries, keys) != (heads * size, groups * size) or heads % groups:
        raise InconsistentError(
            f"the config does not fit the rows of {parameter.name!r}", file=listing.directory,
            found=f"{heads:,} heads of queries and {groups:,} of keys for {queries:,} and {keys:,} rows",
            expected="as many heads as the model was trained with", remedy="Use the config.json of the model that was trained.",
        )  # fmt: skip
    return groups


def _config(listing: Listing) -> Mapping[str, object]:
    if listing.options.shapes.endswith(".json"):
        said = config_of(listing.options.shapes)
        if "num_attention_heads" in said:
            return said
    return listing.once("config near", lambda: config_near(listing.directory))


def apart(whole: TensorEntry, parameter: FusedParameter, groups: int) -> list[TensorEntry]:
    """The states of the parts, in their order, from the fused state."""
    widths = [shape[0] // groups * math.prod(shape[1:]) for shape in parameter.shapes]
    found: list[TensorEntry] = []
    for number, (name, shape) in enumerate(zip(parameter.parts, parameter.shapes, strict=True)):
        own, pitch = widths[number], sum(widths)
        block = Block(sum(widths[:number]), own, groups, pitch, pitch, 1)
        fragments = reorder_rows(whole.fragments, [(block, 0, own)], whole.dtype.itemsize)
        found.append(replace(whole, name=name, shape=shape, fragments=fragments))
    return found


def check_splits(states: Sequence[tuple[str, Shape]], parameter: FusedParameter, listing: Listing) -> None:
    """Checks that states are of the parameter's own shape. Raises UnsupportedError if one is not, such as the scales of
    a quantised state.
    """
    odd = [(state, shape) for state, shape in states if shape != parameter.shape]
    if odd:
        raise UnsupportedError(
            f"the state {odd[0][0]!r} of {parameter.name!r} cannot be taken apart", file=listing.directory,
            found=str(list(odd[0][1])), expected=f"{list(parameter.shape)}, the shape of the parameter",
            remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
