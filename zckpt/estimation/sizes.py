"""How large a model is, in the parts that a trainer handles: parameters, and the units that are gathered as one.

For all of `estimate`. Nothing here holds numbers of a model, only shapes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """One parameter.

    Attributes:
        name: as in the model's state dict.
        shape: in elements.
        trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def part(self, ranks: int) -> int:
        """The elements that one of `ranks` ranks holds: whole rows of dim 0, the same number on each, so the last part
        is padded.
        """
        if not self.shape or not self.numel:
            return self.numel
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


Unit = tuple[ParameterSize, ...]
"""Parameters that are gathered together: those of a block of a transformer that no other unit has."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model.

    Attributes:
        name: for messages.
        counted: from what the parameters were counted, for a person.
        before: parameters outside of every unit that the forward uses before the units, such as embeddings.
        units: in the order of the forward.
        after: parameters outside of every unit that the forward uses after the units, such as the head.
        tied: the head uses the weight of the embedding.
        buffer_bytes: of buffers, which every rank has whole.
        largest_layer: elements of the module with the most parameters of its own, as DeepSpeed's estimator counts it.
        config: of transformers, if it is known.
    """

    name: str
    counted: str
    before: tuple[ParameterSize, ...]
    units: tuple[Unit, ...]
    after: tuple[ParameterSize, ...]
    tied: bool = False
    buffer_bytes: int = 0
    largest_layer: int = 0
    config: Mapping[str, object] | None = None

    @property
    def parameters(self) -> tuple[ParameterSize, ...]:
        """All parameters, each once."""
        return (*self.before, *(one for unit in self.units for one in unit), *self.after)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(one.numel for one in self.parameters)

    @property
    def trained(self) -> int:
        """Elements of parameters that are trained."""
        return sum(one.numel for one in self.parameters if one.trained)

    def with_parameters(self, change: Mapping[str, tuple[ParameterSize, ...]]) -> ModelSize:
        """The same model with each named parameter replaced by others, in its unit."""

        def changed(parameters: Iterable[ParameterSize]) -> tuple[ParameterSize, ...]:
            return tuple(new for one in parameters for new in change.get(one.name, (one,)))

        units = tuple(map(changed, self.units))
        return replace(self, before=changed(self.before), units=units, after=changed(self.after))


_BLOCK = re.compile(r"(.*?\.)?(\d+)\.")


def model_of(parameters: Iterable[ParameterSize], *, name: str, counted: str, **more: object) -> ModelSize:
    """A model from its parameters' names: parameters under the same first number (`model.layers.3.`) are a unit. `parameters`: in
    the model's order, tied ones once; all other arguments are fields of `ModelSize`.
    """
    blocks: dict[str, list[ParameterSize]] = {}
    places: list[tuple[ParameterSize, str | None]] = []
    for one in parameters:
        found = _BLOCK.match(one.name)
        key = f"{found[1] or ''}{found[2]}" if found else None
        if key is not None:
            blocks.setdefault(key, []).append(one)
        places.append((one, key))
    repeated = Counter(key.rpartition(".")[0] for key in blocks)
    units = {key: tuple(held) for key, held in blocks.items() if repeated[key.rpartition(".")[0]] > 1}
    before: list[ParameterSize] = []
    after: list[ParameterSize] = []
    begun = False
    for one, key in places:
        if key in units:
            begun = True
        else:
            (after if begun else before).append(one)
    layers: Counter[str] = Counter()
    for one, _ in places:
        layers[one.name.rpartition(".")[0]] += one.numel
    fields = {"largest_layer": max(layers.values(), default=0), **more}
    return ModelSize(name, counted, tuple(before), tuple(units.values()), tuple(after), **fields)  # type: ignore[arg-type]
