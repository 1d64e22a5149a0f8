"""An optimizer in a torch.distributed.checkpoint save: its groups of parameters, their settings and their states.

For `dcp`. Both forms of [Note: the forms of an optimizer] in `state` come out alike. Settings are pickled objects, a
kilobyte each: they are opened only when they are asked for.

[Note: fused parameters] A model may have in one what is saved apart: torchtitan 0.3 can hold the three matrices of an attention
as one parameter `wqkv`. A hook of the module saves the weights as `wq`, `wk` and `wv`; the optimizer has its states under `wqkv`.
Its rows lie in a group for each key head: the queries of the group's heads, then the key's, then the value's rows. So the number
of key heads is needed, which the shapes of the three do not say: the length of `q_norm` says it, or the model's config.
Source: torchtitan 0.3.0, models/common/attention.py `FusedQKVLinear`; torch/distributed/checkpoint/state_dict.py
`_get_optim_state_dict`, `_flatten_optim_state_dict` (2.13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers import brief
from zckpt.core.catalog import TensorEntry
from zckpt.core.fragments import Block
from zckpt.core.overlaps import reorder_rows
from zckpt.layouts.dcp.chunks import Shape
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Path, TensorItem
from zckpt.layouts.dcp.state import DcpOptimizer, join_path
from zckpt.layouts.run.training import ParameterGroup
from zckpt.layouts.run.values import single_value
from zckpt.layouts.save.companions import config_near, config_of
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.state_names import WRAPPERS

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


Item = TensorItem | BytesItem
Settings = Mapping[str, Item]


def plain_name(name: str) -> str:
    """A parameter's name in the optimizer's state, without the parts that wrappers add."""
    return WRAPPERS.sub("", name).removeprefix("module.")


class States:
    """One optimizer's states, for the parameters of a model.

    Args:
        optimizer: its items.
        items: opens them.
        shapes: of the model's tensors, by name.

    Attributes:
        singles: parameter -> state -> item, of states that are one value for the whole parameter, such as the step.
        tensors: parameter -> state -> item, of those that each element has.
    """

    def __init__(self, optimizer: DcpOptimizer, items: Items, shapes: Mapping[str, Shape]) -> None:
        self.items = items
        self.shapes = shapes
        self._names = {plain_name(name): name for name in shapes}
        self._fused = fused_parameters({plain_name(name): shape for name, shape in shapes.items()})
        self._whole: dict[str, dict[str, TensorItem]] = {}  # fused parameter -> state -> item
        self._list: Item | None = None  # before torch 2.4 all groups were one object
        self._listed: dict[int, dict[str, Item]] = {}
        self._flat: dict[str, dict[str, Item]] = {}
        for path, item in optimizer.settings:
            if not path:
                self._list = item
            elif (number := _number(path)) is not None:
                self._listed.setdefault(number[0], {})[number[1]] = item
            elif (split := self._split(path)) is not None:
                for name in self._parts(split[0]):
                    self._flat.setdefault(name, {})[split[1]] = item
        self.singles: dict[str, dict[str, Item]] = {}
        self.tensors: dict[str, dict[str, TensorItem]] = {}
        for path, item in optimizer.states:
            if (split := self._split(path)) is None:
                continue
            fused, state = self._fused.get(split[0]), split[1]
            for name in self._parts(split[0]):
                if isinstance(item, BytesItem) or _is_single(item, state, shapes[name]):
                    self.singles.setdefault(name, {})[state] = item
                elif fused is None:
                    self.tensors.setdefault(name, {})[state] = item
                else:
                    self._whole.setdefault(split[0], {})[state] = item
                    self.tensors.setdefault(name, {})[state] = fused.part(item, plain_name(name))

    def _split(self, path: Path) -> tuple[str, str] | None:
        """(parameter, state or setting) of a path after `state` or `param_groups`; None for no parameter of the model.

        The parameter is the model's, or one of `fused_parameters`.
        """
        if len(path) > 1:
            name = self._known(str(path[0]))
            return None if name is None else (name, join_path(path[1:]))
        text = str(path[0]) if path else ""
        head = text.rpartition(".")[0]
        while head:
            if name := self._known(head):
                return name, text[len(head) + 1 :]
            head = head.rpartition(".")[0]
        return None

    def _known(self, said: str) -> str | None:
        plain = plain_name(said)
        return self._names.get(plain) or (plain if plain in self._fused else None)

    def _parts(self, name: str) -> tuple[str, ...]:
        """The names in the model of one of the optimizer's parameters: its own, or those of the parameters fused in it."""
        fused = self._fused.get(name)
        return (name,) if fused is None else tuple(self._names[part] for part in fused.parts)

    def is_of_model(self) -> bool:
        """Whether the optimizer owns any of the model's parameters, or has numbers instead of names."""
        if self.tensors or self.singles or self._flat:
            return True
        owned = [param for params, _ in self._groups() if isinstance(params, list | tuple) for param in params]
        return any(type(param) is not str or self._known(param) is not None for param in owned)

    def parameters(self) -> list[str]:
        """The names of all groups' parameters in their order, without opening their settings."""
        if self._list is None and not self._listed:
            return list(self._flat)
        return [name for params, _ in self._groups() for name in self._named(params)]

    def _groups(self) -> list[tuple[object, dict[str, object]]]:
        """(params, settings) of each group; a setting may be an item that has not been opened."""
        if self._list is not None:
            listed = self.value(self._list)
            if not isinstance(listed, list | tuple) or not all(isinstance(group, Mapping) for group in listed):
                raise CorruptError(
                    "the parameter groups cannot be read", file=self.items.file, found=brief(listed), remedy=COPY_AGAIN
                )
            return [(group.get("params"), {k: v for k, v in group.items() if k != "params"}) for group in listed]
        if self._listed:
            groups = [self._listed[number] for number in sorted(self._listed)]
            self.items.open_all(group["params"] for group in groups if "params" in group)
            return [
                (
                    self.value(group["params"]) if "params" in group else None,
                    {k: v for k, v in group.items() if k != "params"},
                )
                for group in groups
            ]
        return self._regrouped()

    def _regrouped(self) -> list[tuple[object, dict[str, object]]]:
        """The groups of a flattened optimizer: parameters with equal settings form a group."""
        self.items.open_all(item for settings in self._flat.values() for item in settings.values())
        groups: dict[str, tuple[list[str], dict[str, object]]] = {}
        for name, settings in self._flat.items():
            values = {key: self.value(item) for key, item in settings.items()}
            groups.setdefault(repr(sorted(values.items())), ([], values))[0].append(name)
        return list(groups.values())

    def _named(self, params: object) -> list[str]:
        """The model's names of a group's parameters. Raises UnsupportedError if they are numbers, as a plain optimizer
        has them; InconsistentError if the model does not have one of them.
        """
        listed = list(params) if isinstance(params, list | tuple) else []
        if any(type(param) is not str for param in listed):
            raise UnsupportedError(
                "optimizer states have numbers instead of parameter names",
                file=self.items.file,
                found=examples(listed),
                expected="parameter names, as torch.distributed.checkpoint.state_dict.get_state_dict gives them",
                remedy="Save it again with get_state_dict, or convert the weights alone (to-fp32).",
            )
        missing = [param for param in listed if self._known(param) is None]
        if missing:
            raise InconsistentError(
                "the optimizer is of another model", file=self.items.file, found=f"parameters {examples(missing)}",
                expected=f"parameters of the model, such as {examples(self._names)}",
            )  # fmt: skip
        return [name for param in listed for name in self._parts(self._known(param) or param)]

    def value(self, item: object) -> object:
        """The inert value of a pickled object or of a tensor of one element; any other value as it is."""
        return self.items.value(item) if isinstance(item, TensorItem | BytesItem) else item

    def groups(self) -> list[ParameterGroup]:
        """The groups with their settings and the values that all their parameters share. Raises InconsistentError if
        parameters of one group differ in one, such as the step.
        """
        made: list[ParameterGroup] = []
        self.items.open_all(item for states in self.singles.values() for item in states.values())
        for params, settings in self._groups():
            self.items.open_all(item for item in settings.values() if isinstance(item, TensorItem | BytesItem))
            names = tuple(self._named(params))
            states = dict.fromkeys(
                s for name in names for s, i in self.tensors.get(name, {}).items() if i.shape == self.shapes[name]
            )
            kept = {key: self.value(value) for key, value in settings.items()}
            made.append(ParameterGroup(names, kept, self._shared(names), tuple(states)))
        return made

    def _shared(self, names: Sequence[str]) -> dict[str, object]:
        shared: dict[str, object] = {}
        for name in names:
            for state, item in self.singles.get(name, {}).items():
                value = self.value(item)
                first = shared.setdefault(state, value)
                if first is not value and single_value(first) != single_value(value):
                    raise InconsistentError(
                        f"parameters of one group have different values of {state!r}",
                        file=self.items.file,
                        found=f"{single_value(value)} of {name!r}",
                        expected=f"{single_value(first)}, as the parameters before it",
                    )
        return shared

    def entries(self) -> dict[str, dict[str, TensorEntry]]:
        """Parameter -> state -> its elements, for states with as many elements as the parameter."""
        return self._opened(alike=True)

    def other_shapes(self) -> dict[str, dict[str, TensorEntry]]:
        """Parameter -> state -> its elements, for all other states of several elements."""
        return {name: states for name, states in self._opened(alike=False).items() if states}

    def _opened(self, *, alike: bool) -> dict[str, dict[str, TensorEntry]]:
        chosen = {
            name: {s: i for s, i in self.tensors.get(name, {}).items() if (i.shape == self.shapes[name]) == alike}
            for name in self.parameters()
        }
        made = self._taken_apart() if alike else {}
        wanted = {item.name: item for states in chosen.values() for item in states.values() if item.name not in made}
        entries = made | self.items.tensors(wanted, dict.fromkeys(wanted, "parameter"))
        return {
            name: {s: replace(entries[i.name], name=name) for s, i in states.items()} for name, states in chosen.items()
        }

    def _taken_apart(self) -> dict[str, TensorEntry]:
        """The states of the parts of fused parameters, by the names of their items; errors as in `check_fused`."""
        groups = self.check_fused()
        made: dict[str, TensorEntry] = {}
        for name, states in self._whole.items():
            entries = self.items.tensors(states, dict.fromkeys(states, "parameter"))
            for state, entry in entries.items():
                for part in apart(entry, self._fused[name], groups[name]):
                    made[self._fused[name].part(states[state], part.name).name] = part
        return made

    def check_fused(self) -> dict[str, int]:
        """Fused parameter -> the number of groups in which its rows lie. Raises UnsupportedError, InconsistentError if
        its states cannot be taken apart; see [Note: fused parameters].
        """
        plain = {plain_name(name): shape for name, shape in self.shapes.items()}
        found: dict[str, int] = {}
        for name, states in self._whole.items():
            check_splits([(state, item.shape) for state, item in states.items()], self._fused[name], self.items.listing)
            found[name] = key_heads(self._fused[name], plain, self.items.listing)
        return found


def _number(path: Path) -> tuple[int, str] | None:
    """(group, setting) of a path after `param_groups` that begins with a number."""
    head, rest = (path[0], join_path(path[1:])) if len(path) > 1 else str(path[0]).partition(".")[::2]
    return (int(head), rest) if str(head).isdecimal() and rest and "." not in rest else None


def _is_single(item: TensorItem, state: str, shape: Shape) -> bool:
    return math.prod(item.size) == 1 and (state == "step" or (not item.shape and bool(shape)))
