"""zckpt: consolidated weights out of sharded training checkpoints.

For users of the library: every public name, and of what is behind it nothing before it is asked for. Without torch,
`open_checkpoint(..., framework="np")` and `convert` work all the same.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zckpt.errors import (
    AccessError,
    CastError,
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    OutputError,
    RemoteError,
    ResourceError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.adapters import AdapterReport, to_peft
    from zckpt.checkpoint import Checkpoint, open_checkpoint
    from zckpt.convert import Options, Report, convert
    from zckpt.diff import Diff, diff
    from zckpt.drop_in import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.hub import push_to_hub
    from zckpt.reshard import reshard
    from zckpt.to_dcp import to_dcp
    from zckpt.universal import to_universal
    from zckpt.verification import Verification
    from zckpt.verify import verify

__all__ = [
    "AccessError",
    "AdapterReport",
    "CastError",
    "Checkpoint",
    "CorruptError",
    "Diff",
    "IncompleteError",
    "InconsistentError",
    "NotACheckpointError",
    "Options",
    "OutputError",
    "RemoteError",
    "Report",
    "ResourceError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "ZckptError",
    "__version__",
    "convert",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "diff",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "open_checkpoint",
    "push_to_hub",
    "reshard",
    "to_dcp",
    "to_peft",
    "to_universal",
    "verify",
]

_HOMES = {
    "AdapterReport": "adapters",
    "Checkpoint": "checkpoint",
    "Diff": "diff",
    "Options": "convert",
    "Report": "convert",
    "Verification": "verification",
    "convert": "convert",
    "convert_zero_checkpoint_to_fp32_state_dict": "drop_in",
    "diff": "diff",
    "get_fp32_state_dict_from_zero_checkpoint": "drop_in",
    "load_state_dict_from_zero_checkpoint": "drop_in",
    "open_checkpoint": "checkpoint",
    "push_to_hub": "hub",
    "reshard": "reshard",
    "to_dcp": "to_dcp",
    "to_peft": "adapters",
    "to_universal": "universal",
    "verify": "verify",
}
"""Public name -> module, for what is imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"zckpt.{_HOMES[name]}"), name)
    if name in ("live", "runtime"):  # packages that need torch: `zckpt.live.save_pretrained` needs no import of its own
        return import_module(f"zckpt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: a module in it does not take the name of a public function, such as `convert`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
