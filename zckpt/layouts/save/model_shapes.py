"""The names and shapes of a model's parameters, in the model's order, from a file that the user names (`--shapes FROM`).

For families with files that do not say them. FROM is a torch file of the model's state dict, with names in the model's
order; or JSON, `{"embed.weight": [7, 5], ...}` in that order; or the config.json of a kind of model with parameters
known by formula (`known_shapes`). A safetensors file is written with its tensors sorted by name, so
it counts only where they are in another order.
Source: safetensors 0.6, src/tensor.rs `prepare`; torch 2.13, nn/modules/module.py `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.base.errors import CorruptError, NotACheckpointError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers import TensorRef, brief, mapping_at, open_container, value_at
from zckpt.containers.tensor_ref import MAX_DIMS, is_count
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.module_states import Shape, flatten
from zckpt.layouts.save.state_names import WRAPPERS
from zckpt.storage.json_files import read_json
from zckpt.storage.location import locate

_MOST_BYTES = 64 << 20
"""The most bytes of a JSON file: it then has a million names."""

_STATES = ("model", "state_dict", "model_state_dict", "module")
MAKE = (
    "On any machine, make one of the model: json.dump({n: list(p.shape) for n, p in model.named_parameters()}, "
    'open("shapes.json", "w")).'
)


ModelShapes = tuple[Mapping[str, Shape], Mapping[str, str]]
"""A model's tensors: name -> shape, in the model's order; and further name of a tensor -> the name among these."""


def read_shapes(path: str) -> ModelShapes:
    """What a file says of a model; errors name the file. Raises UnsupportedError if it does not say the order of the
    tensors, or it is a model's config; CorruptError, NotACheckpointError if it is no such file.
    """
    place = locate(path)
    if not place.is_file():
        raise NotACheckpointError(
            "is not a file", file=path, expected="a torch file of the model's weights, or a JSON file of names and shapes",
            remedy=f"Correct --shapes. {MAKE}",
        )  # fmt: skip
    if place.name.endswith(".json"):
        return _of_json(path)
    container = open_container(place)
    root = container.root
    for key in _STATES:
        inner = value_at(root, key)
        root = inner if isinstance(inner, Mapping) else root
    tensors = flatten(mapping_at(root), [])
    if not tensors:
        raise NotACheckpointError("holds no tensors", file=path, remedy=f"Correct --shapes. {MAKE}")
    if container.kind == "safetensors" and is_sorted(tensors):
        raise UnsupportedError(
            "does not say the order of the model's parameters", file=path,
            found="tensors sorted by name, as safetensors has them",
            expected="a torch file of the model's weights, or a JSON file of names and shapes", remedy=MAKE,
        )  # fmt: skip
    shapes: dict[str, Shape] = {}
    tied: dict[str, str] = {}
    places: dict[object, str] = {}
    for name, ref in tensors.items():
        if ref.dtype.kind not in ("float", "complex"):  # a buffer
            continue
        own = own_name(name)
        kept = places.setdefault(ref.place, own) if ref.numel else own
        if kept == own:
            shapes[own] = ref.shape
        else:
            tied[own] = kept
    return shapes, tied


def is_sorted(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether the tensors of each dtype stand in the order of their names, as a writer of safetensors puts them."""
    names: dict[str, list[str]] = {}
    for name, ref in tensors.items():
        names.setdefault(ref.dtype.name, []).append(name)
    return all(own == sorted(own) for own in names.values()) and any(len(own) > 1 for own in names.values())


def own_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return WRAPPERS.sub("", name).replace("_fpw_module.", "").removeprefix("module.")


def _of_json(path: str) -> ModelShapes:
    root = read_json(path, _MOST_BYTES, "a file of names and shapes")
    if isinstance(root, Mapping) and ("model_type" in root or "architectures" in root):
        known = known_shapes(root)
        if known is None or not known.in_order:
            raise UnsupportedError(
                "is the config of a model with parameters not known in their order", file=path,
                found=f"model_type {brief(root.get('model_type'))}, architectures {brief(root.get('architectures'))}",
                expected="a llama, mistral, qwen2, qwen3, gpt2 or bert; the model's weights in a torch file; or a "
                "JSON file of names and shapes",
                remedy=MAKE,
            )  # fmt: skip
        return known.shapes, {}
    if not isinstance(root, Mapping) or not root or not all(map(_is_shape, root.values())):
        odd = [name for name, shape in root.items() if not _is_shape(shape)] if isinstance(root, Mapping) else []
        raise CorruptError(
            "is not a file of names and shapes", file=path, found=f"{examples(odd)}" if odd else brief(root),
            expected='{"embed.weight": [7, 5], ...}', remedy=MAKE,
        )  # fmt: skip
    return {own_name(name): tuple(shape) for name, shape in root.items()}, {}


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(map(is_count, value))
