"""The bundled trainer: DeepSpeed's config and calls on PyTorch's own sharding.

    engine, optimizer, loader, lr_scheduler = zckpt.runtime.initialize(model=model, config="ds_config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

For a script written for `deepspeed.initialize`, change the import. docs/config.md says what each key of the config does.
"""

from zckpt.runtime import zero
from zckpt.runtime.ds_config.read import read_config
from zckpt.runtime.engine import Engine
from zckpt.runtime.start import initialize

__all__ = ["Engine", "initialize", "read_config", "zero"]
