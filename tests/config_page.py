"""docs/config.md, made from the models: what each key does here. `make golden` writes it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from torch.optim import SGD, Adagrad, AdamW

from zckpt.runtime.config.fields import Section, keys_of, kind_of, section_of
from zckpt.runtime.config.sections import Config
from zckpt.runtime.optimizers.lion_lamb import Lamb, Lion
from zckpt.runtime.optimizers.schedules import SCHEDULES

_HEAD = """# The config of the trainer

`zckpt.runtime.initialize(model=..., config=...)` reads DeepSpeed's JSON: a path, a dict, or the text itself. `make
golden` makes this page from the classes that read the config, and a test compares both.

- **used**: the engine acts on it.
- **zckpt's own**: DeepSpeed does not have it.
- *accepted*: it changes nothing here, for the reason given. At the start the engine logs which of these keys a config has.
- *without effect*: it asks to show something that is not built; a warning at the start says so.
- *refused*: it would change the training and is not built. Values that switch it off are accepted.

An unknown key, at any depth, is an error that names the most similar known key; `initialize(..., allow_unknown=True)`
leaves it out instead. `"auto"` takes its value from `initialize(..., auto={"optimizer.params.lr": 1e-4, ...})`. Two of
the three batch sizes give the third, and "auto" means: computed from the other two. Keys that are only accepted need no
value. The three keys that transformers computes from a model's width are computed here too, or keep their defaults. Any
other "auto" without a value is an error.
"""

_WORDS = {
    "used": "**used**",
    "own": "**zckpt's own**",
    "unused": "*accepted*",
    "missed": "*without effect*",
    "refused": "*refused*",
}


def page() -> str:
    """The text of docs/config.md."""
    lines = [_HEAD, "## The top level", "", *_table(Config, "")]
    for path, section in _sections(Config, ""):
        lines += ["", f"## `{path}`", "", inspect.cleandoc(section.__doc__ or ""), "", *_table(section, path)]
    lines += ["", "## `optimizer.params`", "", _OPTIMIZERS, ""]
    lines += _arguments({"Adam, AdamW": AdamW, "Adagrad": Adagrad, "Lion": Lion, "SGD": SGD, "Lamb": Lamb}, "params")
    lines += ["", "## `scheduler.params`", "", _SCHEDULES, ""]
    lines += _arguments(dict(SCHEDULES), "optimizer")
    return "\n".join(lines) + "\n"


_OPTIMIZERS = """As in DeepSpeed, `Adam` decouples weight decay unless `adam_w_mode` is false, and its default is no weight decay;
with `torch_adam` torch's own defaults hold. `fused` is on if torch has the kernel. Any other name is looked up in torch.optim;
optimizers that look across elements would see shards at stages 1 to 3 and are refused there."""

_ADAM = (
    "`lr=0.001`, `betas=(0.9, 0.999)`, `eps=1e-08`, `weight_decay=0.0`, `adam_w_mode=True`, `torch_adam=False`, `amsgrad=False`, "
    "`fused`, `foreach`; `bias_correction`, `fp32_optimizer_states` only true"
)
_SCHEDULES = (
    "The learning rates equal DeepSpeed's at every step. Any other name is looked up in torch.optim.lr_scheduler."
)


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    seen: set[type[Section]] = set()
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield f"{prefix}{name}", inner
            yield from _sections(inner, f"{prefix}{name}.")


def _table(section: type[Section], path: str) -> Iterator[str]:
    yield "| key | values | default | | what it does, or why not |"
    yield "|---|---|---|---|---|"
    for name, field in section.model_fields.items():
        shown = f"`{field.alias or name}`" + (f", `{name}`" if field.alias else "")
        about = _escape(field.description or "")
        keys = keys_of(field)
        if keys:
            about += " (inside: " + ", ".join(f"`{key}`" for key in keys) + ")"
        yield f"| {shown} | {_escape(_values(field))} | {_default(field)} | {_WORDS[kind_of(field)]} | {about} |"


def _values(field: FieldInfo) -> str:
    if section_of(field) is not None or keys_of(field) is not None:
        return "object"
    return _type(field.annotation)


def _type(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_type(inner) for inner in typing.get_args(kind) if inner is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {_type(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "object"
    names = {bool: "true, false", int: "integer", float: "number", str: "text"}
    return names.get(kind, "any")


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None or isinstance(value, BaseModel) or value == {}:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 and value < 2**62 else f"{value}"


def _arguments(built: dict[str, Callable[..., Any]], first: str) -> Iterator[str]:
    yield "| type | arguments and defaults |"
    yield "|---|---|"
    for name, cls in built.items():
        parameters = [p for p in inspect.signature(cls).parameters.values() if p.name != first]
        if cls is AdamW:
            yield f"| {name} | {_ADAM} |"
            continue
        shown = [
            f"`{p.name}`" if p.default is inspect.Parameter.empty else f"`{p.name}={p.default!r}`" for p in parameters
        ]
        yield f"| {name} | {', '.join(shown)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
