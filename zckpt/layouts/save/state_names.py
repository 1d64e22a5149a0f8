"""Which entries of a state dict are which parameters, where `state_dict()` gives other names than `named_parameters()`.

For `module_states`. A class may rename what it saves: TRL's models with a value head drop the wrapper's prefix, torch's
CheckpointWrapper its own part of the name, and hooks may do anything. DeepSpeed saves that state dict as it is; its lists of
parameters (`param_shapes`, `frozen_param_shapes`, `shared_params`) and of buffers have the names in the module. What stands in
no list, while names of the lists are not in the state dict, is one of these under another name.
Source: DeepSpeed 0.19.8, runtime/engine.py `module_state_dict`, `_get_zero_param_shapes`, `_get_buffer_names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from zckpt.base.patterns import compile_late
from zckpt.containers import TensorRef

Shape = tuple[int, ...]

WRAPPERS = compile_late(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""The parts that torch.compile, FSDP and activation checkpointing put into names."""


def match_names(
    module: Mapping[str, TensorRef],
    shapes: Mapping[str, Shape],
    buffers: Iterable[str],
    shared: Mapping[str, str],
) -> dict[str, str]:
    """The names of a state dict that stand for other names in DeepSpeed's lists: state dict's name -> parameter's name.

    Args:
        module: the state dict.
        shapes: parameters, trained and frozen ones.
        buffers: names of buffers.
        shared: dropped name -> kept name of tied parameters.
    """
    listed: dict[str, Shape | None] = {**dict.fromkeys(buffers), **shapes}
    listed.update((dropped, shapes.get(kept)) for dropped, kept in shared.items() if dropped not in shapes)
    missing = {name: shape for name, shape in listed.items() if name not in module}
    extra = {name: module[name] for name in module if name not in listed and name not in shared.values()}
    if not missing or not extra:
        return {}
    found: dict[str, str] = {}
    deepest = max(len(_parts(name)) for name in (*missing, *extra))
    for whole in (True, False):  # first those that only lost or got a prefix
        for depth in range(deepest, 0, -1):
            if not whole:
                missing = {name: shape for name, shape in missing.items() if shape is not None}
            for own, name in _pairs(extra, missing, depth, whole):
                if own in extra and name in missing:
                    found[own] = name
                    del extra[own], missing[name]
    return found | dict(_by_one_rule(found, extra, {*module, *listed}))


_PARTS = 64
"""The most parts at a name's end that are compared: a name of many dots must not cost more."""


def _parts(name: str) -> list[str]:
    tail = ".".join(name.rsplit(".", 2 * _PARTS)[-2 * _PARTS :])
    return WRAPPERS.sub("", tail).split(".")[-_PARTS:]


def _pairs(
    extra: Mapping[str, TensorRef], missing: Mapping[str, Shape | None], depth: int, whole: bool
) -> Iterator[tuple[str, str]]:
    """Names that alone have the same last `depth` parts and the same shape; `whole`: one of them has no further parts."""
    owns: dict[tuple[object, ...], list[str]] = {}
    for own, ref in extra.items():
        if len(parts := _parts(own)) >= depth:
            owns.setdefault((*parts[-depth:], None if _is_empty(ref) else ref.shape), []).append(own)
    names: dict[tuple[object, ...], list[str]] = {}
    for name, shape in missing.items():
        if len(parts := _parts(name)) >= depth:
            for each in {shape, None}:
                names.setdefault((*parts[-depth:], each), []).append(name)
    for key, held in owns.items():
        wanted = names.get(key) or (names.get((*key[:-1], None)) if _has_no_shape(names, missing, key) else None)
        if wanted is None or len(held) != 1 or len(wanted) != 1:
            continue
        if not whole or depth in (len(_parts(held[0])), len(_parts(wanted[0]))):
            yield held[0], wanted[0]


def _is_empty(ref: TensorRef) -> bool:
    """Whether a tensor may be the placeholder of a parameter with elements elsewhere (ZeRO-3)."""
    return ref.shape == (0,)


def _has_no_shape(
    names: Mapping[tuple[object, ...], Sequence[str]], missing: Mapping[str, Shape | None], key: tuple[object, ...]
) -> bool:
    """Whether the only name with these last parts belongs to a tensor without a recorded shape, such as a buffer."""
    found = names.get((*key[:-1], None), ())
    return len(found) == 1 and missing[found[0]] is None


def _by_one_rule(found: Mapping[str, str], extra: Iterable[str], taken: set[str]) -> Iterator[tuple[str, str]]:
    """Names for what no list has (frozen parameters of a save without them), where all renamed ones follow one rule."""
    rules: set[tuple[str, str]] = set()
    for own, name in found.items():
        olds, news = own.split("."), name.split(".")
        while olds and news and olds[-1] == news[-1]:
            olds.pop()
            news.pop()
        rules.add(("".join(f"{part}." for part in olds), "".join(f"{part}." for part in news)))
    if len(rules) == 1:
        ((old, new),) = rules
        for own in extra:
            name = new + own.removeprefix(old)
            if own.startswith(old) and name not in taken:
                yield own, name
