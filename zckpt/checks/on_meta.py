"""What transformers would do with tensors of these names and shapes: its own loader, run on the meta device.

For `like`. transformers is imported only here, when somebody asks; no file is read and no code of a model's page is run. The
class is one of transformers' own, of the config without whatever would fetch or run something else (kernels, backbones).
Source: transformers 4.57-5.23, modeling_utils.py `from_pretrained`, core_model_loading.py `revert_weight_conversion`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from zckpt.core.catalog import TensorEntry
from zckpt.naming.fits import Misfits

_LEFT_OUT = {
    "quantization_config", "auto_map", "kernel_config", "fusion_config", "distributed_config", "transformers_weights",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "use_kernels",
}  # fmt: skip
"""Keys of a config that change no tensor, or would make the loader fetch something."""


def load_on_meta(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> Misfits | None:
    """The result for the class that a config names; None where transformers is not installed, or cannot make it."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    with _nothing_fetched():
        return _load(config, tensors)


def _load(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> Misfits | None:
    import torch
    import transformers

    chosen = _class_of(config)
    if chosen is None:
        return None
    by = f"{chosen.__name__} of transformers {transformers.__version__}"
    try:
        own = chosen.config_class.from_dict(_plain(config))
    except Exception as error:
        return Misfits(by, [], [], {}, f"the config cannot be read: {_line(error)}")
    layers = getattr(own, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > 2 * len(tensors):  # it is not built, since it may be of any size
        found = f"the config has {layers:,} layers, and there are {len(tensors):,} tensors"
        return Misfits(by, [], [], {}, found)
    own._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            model = chosen(own)
    except ImportError:  # of a library that the class needs and that is not here, such as timm
        return None
    except Exception as error:
        return Misfits(by, [], [], {}, f"no model can be made from the config: {_line(error)}")
    memory: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    hub = _as_on_the_hub(model, memory)
    given = {name: _empty(entry) for name, entry in tensors.items()}
    return _judge(by, model, memory, hub, given, *_ask_loader(chosen, own, given))


def _class_of(config: Mapping[str, Any]) -> Any:
    """The transformers class that a config names, or the bare model of its type; None where there is none."""
    import transformers

    said, kind = config.get("architectures"), config.get("model_type")
    name = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if found is None and not name:
        with contextlib.suppress(KeyError):
            found = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[str(kind)]]
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel) or found.config_class is None:
        return None
    return found if kind in (None, found.config_class.model_type) else None


def _plain(value: Any) -> Any:
    """The config and nested ones without keys that change no tensor, with numbers where transformers writes words for
    them.
    """
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    found = {key: _plain(inner) for key, inner in value.items() if key not in _LEFT_OUT}
    return {**found, "use_pretrained_backbone": False} if "use_pretrained_backbone" in found else found


@contextlib.contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Blocks requests to the hub, and most output."""
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    import transformers

    logging: Any = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(60)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _empty(entry: TensorEntry) -> Any:
    import torch

    dtype = getattr(torch, entry.dtype.torch_name, torch.uint8)
    return torch.empty(entry.shape, dtype=dtype, device="meta")


def _as_on_the_hub(model: Any, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> tensor without memory, as `save_pretrained` writes them; tied ones under all of their names."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 saves what it has in memory
        return dict(memory)
    return dict(revert_weight_conversion(model, {name: tensor.detach() for name, tensor in memory.items()}))


def _ask_loader(chosen: Any, config: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """What `from_pretrained` returns for tensors without memory, and why it stops; (None, "") without accelerate, which
    it needs.
    """
    if importlib.util.find_spec("accelerate") is None:
        return None, ""
    try:
        _, info = chosen.from_pretrained(
            None, config=config, state_dict=dict(given), device_map={"": "meta"}, output_loading_info=True,
            ignore_mismatched_sizes=True, attn_implementation="eager",
        )  # fmt: skip
    except Exception as error:
        return None, _line(error)
    return info, "; ".join(map(str, info.get("error_msgs") or ()))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _judge(
    by: str,
    model: Any,
    memory: Mapping[str, Any],
    hub: Mapping[str, Any],
    given: Mapping[str, Any],
    info: Mapping[str, Any] | None,
    error: str,
) -> Misfits:
    """The joint result of the loader, and of the names and shapes on the hub."""
    called = _called_as_on_the_hub(model, hub, given)
    one_of, there = _names_of_tied(memory), set(called.values())
    lacking = [name for name in hub if name not in there and not one_of.get(name, {name}) & there]
    surplus = [name for name, own in called.items() if own not in hub]
    known = {name: (given[name], hub[own]) for name, own in called.items() if own in hub}
    shapes = {n: (tuple(here.shape), tuple(own.shape)) for n, (here, own) in known.items() if here.shape != own.shape}
    kinds = [n for n, (here, own) in known.items() if here.is_floating_point() != own.is_floating_point()]
    in_memory = [name for name in surplus if name in memory]
    if info is None and not error:  # there is no loader to ask
        lacking = _without(lacking, model, "_keys_to_ignore_on_load_missing")
        surplus = [n for n in _without(surplus, model, "_keys_to_ignore_on_load_unexpected") if n not in in_memory]
        return Misfits(by, lacking, surplus, shapes, "", kinds, in_memory)
    if info is None:
        return Misfits(by, lacking, surplus, shapes, "" if lacking or surplus or shapes else error, kinds)
    missing, ignored = ({str(name) for name in info[key]} for key in ("missing_keys", "unexpected_keys"))
    mismatched = {str(name): (tuple(here), tuple(own)) for name, here, own in info["mismatched_keys"]}
    if not (missing or ignored or mismatched or error):
        prefix = (
            f"{getattr(model, 'base_model_prefix', '')}."  # which it takes off, and then has two tensors of one name
        )
        twice = [name for name in surplus if name.startswith(prefix) and name.removeprefix(prefix) in given]
        return Misfits(by, [], twice, {}, "", kinds, in_memory)
    if (mismatched or not missing <= hub.keys()) and lacking:  # it speaks of names in memory
        missing = set(lacking)
    if not ignored <= given.keys() and surplus:
        ignored = set(surplus)
    if not shapes and not missing:
        shapes = mismatched
    missing -= mismatched.keys() - set(lacking)
    return Misfits(by, sorted(missing), sorted(ignored), shapes if mismatched else {}, error, kinds)


def _without(names: Iterable[str], model: Any, patterns: str) -> list[str]:
    """The names that match none of a model's patterns."""
    known = [re.compile(pattern) for pattern in getattr(model, patterns, None) or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in known)]


def _called_as_on_the_hub(model: Any, hub: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Name here -> on the hub, where a prefix is missing here, or is before all names, as in files of bare models."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    forms = [
        {name: name for name in given},
        {name: f"{prefix}{name}" if f"{prefix}{name}" in hub else name for name in given},
        {name: name.removeprefix(prefix) for name in given},
    ]
    return max(forms, key=lambda form: len(hub.keys() & {*form.values()}) if len({*form.values()}) == len(form) else -1)


def _names_of_tied(memory: Mapping[str, Any]) -> dict[str, set[str]]:
    """Name -> all names of the same tensor, for those with several."""
    names: dict[int, set[str]] = {}
    for name, tensor in memory.items():
        names.setdefault(id(tensor), set()).add(name)
    return {name: own for own in names.values() if len(own) > 1 for name in own}
