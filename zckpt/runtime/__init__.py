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

from zckpt.runtime.names import finder, table

if TYPE_CHECKING:
    from torch.optim import Optimizer as DeepSpeedOptimizer

    from zckpt.runtime.arguments import add_config_arguments
    from zckpt.runtime.config.attributes import DeepSpeedConfig
    from zckpt.runtime.config.read import read_config
    from zckpt.runtime.deepspeed_api.accelerator import get_accelerator
    from zckpt.runtime.deepspeed_api.utilities import OnDevice, log_dist, logger
    from zckpt.runtime.engine import Engine
    from zckpt.runtime.estimation import estimate
    from zckpt.runtime.names.finder import as_deepspeed
    from zckpt.runtime.start import initialize
    from zckpt.runtime.world import init_distributed

    accelerator: Any
    checkpoint: Any
    checkpointing: Any
    comm: Any
    moe: Any
    ops: Any
    pipe: Any
    runtime: Any
    utils: Any
    zero: Any

finder.install()

__version__ = table.VERSION

__all__ = [
    "DeepSpeedConfig", "DeepSpeedOptimizer", "Engine", "OnDevice", "accelerator", "add_config_arguments", "as_deepspeed",
    "checkpoint", "checkpointing", "comm", "estimate", "get_accelerator", "init_distributed", "initialize", "log_dist", "logger",
    "moe", "ops", "pipe", "read_config", "runtime", "utils", "zero",
]  # fmt: skip

_OWN = {"Engine": "engine", "as_deepspeed": "names.finder", "estimate": "estimation", "read_config": "config.read"}
"""zckpt's own name -> its module, which is imported when the name is first used. DeepSpeed's names are in `names.table`."""


def __getattr__(name: str) -> Any:
    if name in _OWN:
        found = getattr(import_module(f"{__name__}.{_OWN[name]}"), name)
    else:
        found = finder.find_name("", name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *finder.names_in(""), "__version__"})
