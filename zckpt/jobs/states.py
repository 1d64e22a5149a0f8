"""Optimizer states by name, of every layout that `reshard` reads: lazily for Python, as a catalog for `to-states` and `inspect`.

Names of states are the optimizer's own: `exp_avg` of torch's Adam, `momentum_buffer` of SGD and Muon, `state1` of bitsandbytes'
(with `absmax1` and `qmap1` where it is quantised). Nothing is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import NoTensorError, UnsupportedError
from zckpt.base.words import count, examples, size
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import number_in, step_of
from zckpt.layouts.save.listing import Listing

if TYPE_CHECKING:
    import numpy
    import torch

    Tensor = torch.Tensor | numpy.ndarray[Any, Any]

SEPARATOR = "/"
"""The separator of a state and its parameter in a tensor's name; names of parameters have dots."""


@dataclass(frozen=True, slots=True)
class NamedStates:
    """The states of a save, under the model's names.

    Attributes:
        entries: state -> parameter -> its tensor, in the order in which the optimizer has them.
        aliases: dropped name -> kept name, of tied parameters.
        steps: parameter -> optimizer steps, of those that count them.
        groups: parameter groups as torch has them: settings, and names under `params`; values that are one for a whole group
            (but the step) are under `states`.
    """

    entries: Mapping[str, Mapping[str, TensorEntry]]
    aliases: Mapping[str, str]
    steps: Mapping[str, int]
    groups: tuple[Mapping[str, object], ...]

    def as_json(self) -> dict[str, object]:
        """The part of `zckpt inspect --states --json` on states, as a dict."""
        return {
            "states": [
                {
                    "name": state,
                    "dtypes": sorted({entry.dtype.name for entry in own.values()}),
                    "parameters": len(own),
                    "numel": sum(entry.numel for entry in own.values()),
                    "bytes": sum(entry.nbytes for entry in own.values()),
                }
                for state, own in self.entries.items()
            ],
            "param_groups": [dict(group) for group in self.groups],
            "param_steps": dict(self.steps),
        }

    def lines(self) -> Iterator[str]:
        """The part of `zckpt inspect --states` on states: a line for each state and each parameter group."""
        width = max(map(len, (*self.entries, "state")))
        yield f"  {'state':<{width}}  {'parameters':>10}  {'elements':>15}  {'size':>9}  dtype"
        for state, own in self.entries.items():
            numel, nbytes = sum(e.numel for e in own.values()), sum(e.nbytes for e in own.values())
            dtypes = ", ".join(sorted({entry.dtype.name for entry in own.values()}))
            yield f"  {state:<{width}}  {len(own):>10,}  {numel:>15,}  {size(nbytes):>9}  {dtypes}"
        for number, group in enumerate(self.groups):
            params = group["params"] if isinstance(group["params"], list) else []
            steps = sorted({self.steps[name] for name in params if name in self.steps})
            said = [f"{key} {group[key]}" for key in ("lr", "betas", "momentum", "weight_decay") if key in group]
            said += [f"step {', '.join(map(str, steps))}"] if steps else []
            yield f"  group {number}: {', '.join([count(len(params), 'parameter'), *said])}"

    def catalog(self, weights: Catalog) -> Catalog:
        """All states as tensors `STATE/PARAMETER`; those that several parameters share, such as tables, are aliases of
        one. Raises UnsupportedError if the optimizer keeps no tensors, as SGD without momentum.
        """
        tensors: dict[str, TensorEntry] = {}
        aliases: dict[str, str] = {}
        places: dict[object, str] = {}
        for state, own in self.entries.items():
            for parameter, entry in own.items():
                name = f"{state}{SEPARATOR}{parameter}"
                where = entry.shape, entry.dtype, entry.fragments
                first = places.setdefault(where, name) if entry.numel else name
                if first == name:
                    tensors[name] = replace(entry, name=name, role="buffer", replicas=())
                else:
                    aliases[name] = first
        if not tensors:
            raise UnsupportedError(
                "has an optimizer without states", file=weights.source.path, found="settings and steps alone",
                expected="a tensor for each parameter, such as exp_avg", remedy="Convert the weights alone (to-fp32).",
            )  # fmt: skip
        return Catalog(tensors, weights.source, weights.evidence, aliases, weights.topology)


def named_states(
    listing: Listing, names: Mapping[str, str], aliases: Mapping[str, str], *, allow_unknown: bool = False
) -> NamedStates:
    """The states of a save, with names of tensors as they are wanted, which `names` gives for those of the layout. Raises
    UnsupportedError if the save names no states, or none that zckpt reads; it says why.
    """
    training = layouts.read_training(listing, allow_unknown=allow_unknown, any_shape=True)
    entries: dict[str, dict[str, TensorEntry]] = {}
    for group in training.groups:
        for parameter in group.names:
            held = {**training.states.get(parameter, {}), **training.other_shapes.get(parameter, {})}
            for state, entry in held.items():
                entries.setdefault(state, {})[names.get(parameter, parameter)] = entry
    steps = {
        names.get(parameter, parameter): step
        for group in training.groups
        for parameter in group.names
        if (step := step_of(group.scalars.get("step", group.settings.get("step")))) is not None
    }
    return NamedStates(entries, aliases, steps, _groups(training, names))


def _groups(training: Training, names: Mapping[str, str]) -> tuple[Mapping[str, object], ...]:
    found: list[Mapping[str, object]] = []
    for group in training.groups:
        settings = {key: plain(value) for key, value in group.settings.items() if key != "params"}
        single = {key: plain(value) for key, value in group.scalars.items() if key != "step"}
        params = [names.get(name, name) for name in group.names]
        found.append({"params": params, **settings, **({"states": single} if single else {})})
    return tuple(found)


def plain(value: object) -> object:
    """The value as numbers, texts and lists of these; a tensor of one element becomes its number, any other value a
    text.
    """
    if isinstance(value, TensorRef) and value.numel == 1:
        number = number_in(value)
        return number if isinstance(number, int | float) else str(value.dtype)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return str(value)


class StateTensors(Mapping[str, "Tensor"]):
    """One state of all parameters that have it, read on access; tied names give equal tensors."""

    def __init__(
        self,
        state: str,
        entries: Mapping[str, TensorEntry],
        aliases: Mapping[str, str],
        read: Callable[[TensorEntry], Tensor],
    ) -> None:
        self._state, self._entries, self._read = state, entries, read
        self._aliases = {dropped: kept for dropped, kept in aliases.items() if kept in entries}

    def __repr__(self) -> str:
        return f"<zckpt state {self._state!r} of {len(self):,} parameters>"

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._entries) + len(self._aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self.entry(name))

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and places of a parameter's state. Raises NoTensorError if the parameter has none, which is a
        KeyError too.
        """
        found = self._entries.get(self._aliases.get(name, name))
        if found is None:
            raise NoTensorError(
                f"there is no optimizer state {self._state!r} of {name!r}", found=f"{len(self):,} other parameters",
                expected=f"names such as {examples(self._entries)}",
            )  # fmt: skip
        return found


class OptimizerStates(Mapping[str, StateTensors]):
    """The states of an open checkpoint: state -> parameter -> tensor."""

    def __init__(self, named: NamedStates, read: Callable[[TensorEntry], Tensor]) -> None:
        self._named, self._read = named, read

    def __repr__(self) -> str:
        return f"<zckpt optimizer states: {', '.join(self) or 'none'}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._named.entries)

    def __len__(self) -> int:
        return len(self._named.entries)

    def __getitem__(self, state: str) -> StateTensors:
        if state not in self._named.entries:
            raise NoTensorError(
                f"there is no optimizer state {state!r}", found=examples(self) if len(self) else "none",
                expected="one of these" if len(self) else "",
            )  # fmt: skip
        return StateTensors(state, self._named.entries[state], self._named.aliases, self._read)
