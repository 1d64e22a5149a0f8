"""zckpt: consolidated weights out of sharded training checkpoints.

For users of the library: every public name, and of what is behind it nothing before it is asked for. Without torch,
`open_checkpoint(..., framework="np")` and `convert` work all the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import (
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
from zckpt.base.version import __version__

if TYPE_CHECKING:
    from zckpt.checks.verdict import Verification
    from zckpt.checks.verify import verify
    from zckpt.drop_in import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.hub import push_to_hub
    from zckpt.jobs.convert import Options, Report, convert
    from zckpt.jobs.diff import Diff, diff
    from zckpt.jobs.open import Checkpoint, open_checkpoint
    from zckpt.jobs.reshard import reshard
    from zckpt.jobs.to_dcp import to_dcp
    from zckpt.jobs.to_peft import AdapterReport, to_peft
    from zckpt.jobs.to_universal import to_universal

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
    "AdapterReport": "jobs.to_peft",
    "Checkpoint": "jobs.open",
    "Diff": "jobs.diff",
    "Options": "jobs.convert",
    "Report": "jobs.convert",
    "Verification": "checks.verdict",
    "convert": "jobs.convert",
    "convert_zero_checkpoint_to_fp32_state_dict": "drop_in",
    "diff": "jobs.diff",
    "get_fp32_state_dict_from_zero_checkpoint": "drop_in",
    "load_state_dict_from_zero_checkpoint": "drop_in",
    "open_checkpoint": "jobs.open",
    "push_to_hub": "hub",
    "reshard": "jobs.reshard",
    "to_dcp": "jobs.to_dcp",
    "to_peft": "jobs.to_peft",
    "to_universal": "jobs.to_universal",
    "verify": "checks.verify",
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
