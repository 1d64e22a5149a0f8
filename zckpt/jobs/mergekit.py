"""mergekit's YAML: which models are merged and how, for the methods that `average` has; what it has not is refused by name.

For `average`. Numbers are computed in fp32 and rounded once, where mergekit computes in its `dtype`.
Source: mergekit 0.1.5, config.py (settings, filters, gradients), plan.py (what of a model is at which `t`),
parameter_resolver.py, merge_methods/registry.py (methods, and their defaults).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.base.words import join_words
from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Sparsity
from zckpt.core.recipes import Recipe, point_between, weighted_sum_of
from zckpt.core.task_vectors import SparseSum
from zckpt.jobs.merged import find_model
from zckpt.storage.location import locate

_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_LARGEST = 1 << 20
_SUMS = {
    "task_arithmetic": (False, False),
    "ties": (True, False),
    "dare_ties": (False, True),
    "dare_linear": (False, True),
}
"""Methods that move a base -> whether they divide by the weights, and whether they rescale."""
_METHODS = ("linear", "slerp", *_SUMS)
_KEYS = frozenset(
    ("models", "slices", "merge_method", "base_model", "dtype", "out_dtype", "parameters", "tokenizer_source", "name")
)
_PARAMETERS = frozenset(("weight", "density", "normalize", "rescale", "lambda", "int8_mask", "t"))
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


MergeInput = tuple[str, Mapping[str, Any], int | None]
"""The path of a model that is merged, its own parameters, and how many layers it gives, if that is said."""


@dataclass(frozen=True, slots=True)
class Mergekit:
    """What a YAML of mergekit asks for.

    Attributes:
        file: its path.
        method: how models are merged.
        models: without the base, in their order.
        base: the base; its config and tokenizer are the output's. Without one, those of the first model are.
        shared: parameters of the slice, then those of all.
        dtype: of the output, as in "bf16"; None for nothing said.
        notes: sentences for the user.
    """

    file: str
    method: str
    models: tuple[MergeInput, ...]
    base: str | None
    shared: tuple[Mapping[str, Any], ...]
    dtype: str | None
    notes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """The facts for the manifest."""
        models = [{"path": path, "parameters": dict(own)} for path, own, _ in self.models]
        return {"method": self.method, "models": models, "base": self.base, "parameters": [*map(dict, self.shared)]}

    @property
    def paths(self) -> list[str]:
        """The paths of all models; the one with the output's config and tokenizer comes last."""
        others = [path for path, *_ in self.models]
        return [*others[1:], others[0]] if self.base is None else [*others, self.base]

    def recipe(self, inputs: tuple[TensorEntry, ...], layers: int, seed: int) -> Recipe:
        """The recipe of a tensor; `inputs` are in the order of `paths`, `layers` is the model's number of layers.
        Raises CorruptError if a parameter is missing or not a number.
        """
        name = inputs[-1].name
        match = _LAYER.match(name)
        t = int(match[2]) / (layers - 1) if match and layers > 1 else float(bool(match))
        others = [*inputs[-1:], *inputs[:-1]] if self.base is None else [*inputs[:-1]]
        if self.method == "slerp":
            return point_between((inputs[-1], others[0]), self._number("t", name, t, None))
        weights = tuple(self._number("weight", name, t, model) for model in self.models)
        if self.method == "linear":
            total = sum(weights) if self._number("normalize", name, t, None, True) else 1.0
            return weighted_sum_of(tuple(others), tuple(weight / total for weight in weights))
        divides, rescales = _SUMS[self.method]
        how = Sparsity(
            weights,
            tuple(self._number("density", name, t, model, 1.0) for model in self.models)
            if self.method != "task_arithmetic" else (1.0,) * len(weights),
            is_random=self.method.startswith("dare"), elects=self.method.endswith("ties"),
            normalises=bool(self._number("normalize", name, t, None, divides)),
            rescales=bool(self._number("rescale", name, t, None, rescales)),
            factor=self._number("lambda", name, t, None, 1.0), seed=seed,
        )  # fmt: skip
        return SparseSum((inputs[-1], *others), how)

    def check_layers(self, names: Iterable[str]) -> int:
        """The number of layers of a model with tensors of these names. Raises UnsupportedError if the YAML takes only
        some of them, or there are layers of two kinds and it tells one from the next.
        """
        found = [match for name in names if (match := _LAYER.match(name))]
        number = max((int(match[2]) + 1 for match in found), default=0)
        if any(layers not in (None, number) for *_, layers in self.models):
            raise refuse(self.file, "layer_range", f"some of {number} layers", "all layers of each model")
        if len({match[1] for match in found}) > 1 and _has_gradient(
            [*self.shared, *(own for _, own, _ in self.models)]
        ):
            raise refuse(self.file, "gradients", "layers of several towers", "a model with one row of layers")
        return number

    def _number(self, key: str, name: str, t: float, model: MergeInput | None, usual: float | None = None) -> float:
        for settings in (*(() if model is None else (model[1],)), *self.shared):
            if key in settings and (value := self._evaluate(key, settings[key], name, t)) is not None:
                return value
        if usual is None:
            raise self._wrong(key, f"no {key} for {name!r}" + (f" of {model[0]!r}" if model else ""))
        return usual

    def _evaluate(self, key: str, said: object, name: str, t: float) -> float | None:
        """The number of a setting for a tensor: the number itself, that of the first filter that matches, or a point of
        a gradient.
        """
        if isinstance(said, Mapping):
            said = [said]
        if isinstance(said, list) and any(isinstance(one, Mapping) for one in said):
            for one in said:
                pattern = one.get("filter") if isinstance(one, Mapping) else None
                if isinstance(one, Mapping) and (pattern in (None, "*") or str(pattern) in name):
                    return self._evaluate(key, one.get("value"), name, t)
            return None
        numbers: list[Any] = said if isinstance(said, list) else [said]
        try:
            values = [float(number) for number in numbers]
        except (TypeError, ValueError):
            raise self._wrong(key, repr(said)[:80]) from None
        if not values:
            return None
        scaled = t * (len(values) - 1)
        low = int(scaled)
        part = scaled - low
        return (1 - part) * values[low] + part * values[min(len(values) - 1, low + 1)]

    def _wrong(self, key: str, found: str) -> CorruptError:
        return CorruptError(
            f"does not say the {key} in numbers", file=self.file, found=found,
            expected="a number, a list of numbers, or a list of filters with such values", remedy=f"Correct {key} in the YAML.",
        )  # fmt: skip


def _has_gradient(said: object) -> bool:
    values = said.values() if isinstance(said, Mapping) else said if isinstance(said, list) else ()
    numbers = [one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return (isinstance(said, list) and len(numbers) > 1) or any(map(_has_gradient, values))


def refuse(file: str, what: str, found: str, expected: str) -> UnsupportedError:
    """The error for a feature of mergekit that `average` lacks."""
    return UnsupportedError(
        f"{what} of mergekit is not done here", file=file, found=found, expected=expected,
        remedy="Change the YAML, or merge with mergekit itself.",
    )  # fmt: skip


def read_mergekit(path: str) -> Mergekit:
    """The request in a YAML of mergekit.

    Raises:
        CorruptError: it is not YAML, or lacks what it needs. UnsupportedError: it asks for more than `average` does.
        UsageError: a model is not here.
    """
    said = _load(path)
    method = said.get("merge_method")
    if method not in _METHODS:
        raise refuse(path, "this merge_method", repr(method), join_words(_METHODS))
    for key in said.keys() - _KEYS:
        if said[key] is not None:
            raise refuse(path, repr(key), repr(said[key])[:80], "a YAML without it")
    if said.get("tokenizer_source") not in (None, "base"):
        raise refuse(path, "tokenizer_source", repr(said["tokenizer_source"]), "'base', or none")
    rows, shared = said.get("models"), [_settings(path, said.get("parameters"))]
    if rows is None:
        slices = said.get("slices")
        if not isinstance(slices, list) or len(slices) != 1 or not isinstance(slices[0], dict):
            raise refuse(
                path, "slices", f"{len(slices) if isinstance(slices, list) else repr(slices)}", "models, or one slice"
            )
        shared.insert(0, _settings(path, slices[0].get("parameters")))
        rows = slices[0].get("sources")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptError("has no list of models", file=path, found=repr(rows)[:80], remedy="Correct the YAML.")
    base = None if said.get("base_model") is None else _model(path, said["base_model"])
    models = [
        (_model(path, row.get("model")), _settings(path, row.get("parameters")), _layers(path, row)) for row in rows
    ]
    if base is not None and method != "linear":
        models = [model for model in models if model[0] != base]
    elif method == "linear":
        base = None
    if (method == "slerp" and len(models) != 1) or not models or (method != "linear" and base is None):
        needs = {"linear": "models", "slerp": "base_model and one more"}.get(str(method), "base_model and others")
        raise CorruptError(
            f"has another number of models than {method} needs", file=path, found=f"{len(models)} beside base_model {base!r}",
            expected=needs, remedy="Correct the YAML.",
        )  # fmt: skip
    dtype, used = said.get("out_dtype") or said.get("dtype"), said.get("dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise refuse(path, "this dtype", repr(dtype), join_words(list(_DTYPES)))
    notes = []
    if used not in (None, "float32"):
        notes.append(f"Computed in fp32 and rounded once, where mergekit would compute in {used}.")
    if method.startswith("dare"):
        notes.append(
            "The random choice is zckpt's own, by --seed: mergekit's depends on torch and on the order of its work."
        )
    return Mergekit(
        path, method, tuple(models), base, tuple(shared), None if dtype is None else _DTYPES[dtype], tuple(notes)
    )


def _load(path: str) -> dict[str, Any]:
    import yaml

    try:
        said = yaml.safe_load(locate(path).read(_LARGEST))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptError(
            "is not YAML", file=path, found=str(error).partition("\n")[0], remedy="Correct it."
        ) from None
    if not isinstance(said, dict):
        raise CorruptError(
            "is not a YAML file of mergekit", file=path, found=type(said).__name__, expected="merge_method and models",
            remedy="Pass checkpoints, or a YAML of mergekit of at most 1 MiB.",
        )  # fmt: skip
    return said


def _settings(path: str, said: object) -> Mapping[str, Any]:
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise CorruptError(
            "has parameters that are not a mapping", file=path, found=repr(said)[:80], remedy="Correct the YAML."
        )
    if other := said.keys() - _PARAMETERS:
        raise refuse(
            path,
            f"the parameter {sorted(map(str, other))[0]!r}",
            join_words(sorted(map(str, said))),
            join_words(sorted(_PARAMETERS)),
        )
    return said


def _model(path: str, said: object) -> str:
    if isinstance(said, dict):
        inner = said.get("model", said)
        more = {**said, **(inner if isinstance(inner, dict) else {})}.keys() - {"model", "path", "revision"}
        if isinstance(inner, dict) and isinstance(inner.get("path"), str) and not more:
            revision = inner.get("revision")
            said = inner["path"] + (f"@{revision}" if revision else "")
        elif more:
            raise refuse(
                path, f"{sorted(map(str, more))[0]!r} of a model", repr(said)[:80], "its path, and its revision"
            )
    if not isinstance(said, str) or not said:
        raise CorruptError("has a model without a path", file=path, found=repr(said)[:80], remedy="Correct the YAML.")
    if "+" in said and not locate(said).is_dir():
        raise refuse(
            path, "a LoRA that is added to a model", repr(said), "models; zckpt to-bf16 --merge-lora makes one first"
        )
    return find_model(said, "a model of the YAML", "the path in the YAML")


def _layers(path: str, row: Mapping[str, Any]) -> int | None:
    found = row.get("layer_range")
    if found is None:
        return None
    if not isinstance(found, Sequence) or len(found) != 2 or found[0] != 0 or not isinstance(found[1], int):
        raise refuse(path, "layer_range", repr(found), "all layers of each model")
    return found[1]
