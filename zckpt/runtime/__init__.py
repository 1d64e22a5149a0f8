"""The bundled trainer: DeepSpeed's config and calls on PyTorch's own sharding.

    engine, optimizer, loader, lr_scheduler = zckpt.runtime.initialize(model=model, config="ds_config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

For a script written for DeepSpeed, change the import: `import zckpt.runtime as deepspeed`. docs/training.md says what each of
its names does here, docs/config.md what each key of the config does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.runtime import checkpointing, zero
    from zckpt.runtime.alias import as_deepspeed
    from zckpt.runtime.ds_config.read import read_config
    from zckpt.runtime.engine import Engine
    from zckpt.runtime.start import initialize

__all__ = ["Engine", "as_deepspeed", "checkpointing", "initialize", "read_config", "zero"]

_HOMES = {
    "Engine": "engine",
    "as_deepspeed": "alias",
    "initialize": "start",
    "read_config": "ds_config.read",
}
"""Public name -> its module, which is imported when the name is first used."""

_MODULES = ("checkpointing", "zero")
"""Public modules, imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
