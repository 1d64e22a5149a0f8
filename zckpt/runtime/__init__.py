"""The bundled trainer: DeepSpeed's config and calls on PyTorch's own sharding.

    engine, optimizer, loader, lr_scheduler = zckpt.runtime.initialize(model=model, config="config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

For a script written for DeepSpeed, change the import: `import zckpt.runtime as deepspeed`, `from zckpt.runtime.X import Y`.
docs/training.md says what each of DeepSpeed's names does here, docs/config.md what each key of the config does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.runtime import accelerator, checkpoint, checkpointing, comm, moe, ops, pipe, runtime, utils, zero
    from zckpt.runtime.accelerator import get_accelerator
    from zckpt.runtime.alias import as_deepspeed
    from zckpt.runtime.arguments import add_config_arguments
    from zckpt.runtime.comm import init_distributed
    from zckpt.runtime.config.attributes import DeepSpeedConfig
    from zckpt.runtime.config.read import read_config
    from zckpt.runtime.engine import Engine
    from zckpt.runtime.estimation.live import estimate
    from zckpt.runtime.runtime.base_optimizer import DeepSpeedOptimizer
    from zckpt.runtime.start import initialize
    from zckpt.runtime.utils import OnDevice, log_dist, logger

__version__ = "0.19.8"
"""The version of DeepSpeed whose names these are; scripts compare it."""

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedOptimizer",
    "Engine",
    "OnDevice",
    "accelerator",
    "add_config_arguments",
    "as_deepspeed",
    "checkpoint",
    "checkpointing",
    "comm",
    "estimate",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "read_config",
    "runtime",
    "utils",
    "zero",
]

_HOMES = {
    "DeepSpeedConfig": "config.attributes",
    "DeepSpeedConfigError": "runtime.config",
    "DeepSpeedDataLoader": "runtime.dataloader",
    "DeepSpeedEngine": "runtime.engine",
    "DeepSpeedOptimizer": "runtime.base_optimizer",
    "Engine": "engine",
    "OnDevice": "utils",
    "PipelineModule": "pipe",
    "add_config_arguments": "arguments",
    "as_deepspeed": "alias",
    "estimate": "estimation.live",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "initialize": "start",
    "log_dist": "utils",
    "logger": "utils",
    "read_config": "config.read",
}
"""Public name -> its module, which is imported when the name is first used."""

_UNBUILT = (
    "DeepSpeedHybridEngine",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "DualPipeVModule",
    "InferenceEngine",
    "PipelineEngine",
    "init_inference",
    "replace_transformer_layer",
    "set_autotp_mode",
    "tp_model_init",
)
"""Names that are there, and say when they are called that they are not built."""

_MODULES = ("accelerator", "checkpoint", "checkpointing", "comm", "moe", "ops", "pipe", "runtime", "utils", "zero")
"""Public modules, imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        found = import_module(f"{__name__}.{name}")
    elif name in _UNBUILT:
        found = import_module(f"{__name__}.unbuilt").unbuilt(name)
    elif name == "dist":
        found = import_module(f"{__name__}.comm")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, *_UNBUILT, "__version__"})
