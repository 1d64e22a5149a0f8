"""zckpt: consolidated weights out of sharded training checkpoints.

For users of the library: every public name, and nothing that needs torch until such a name is asked for. Without torch,
`open_checkpoint(..., framework="np")` and `convert` work all the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zckpt.adapters import AdapterReport, to_peft
from zckpt.checkpoint import Checkpoint, open_checkpoint

# Eager, because submodules have the same names: whoever imports one later must not replace the function by the module.
from zckpt.convert import Options, Report, convert
from zckpt.diff import Diff, diff
from zckpt.errors import (
    AccessError,
    CastError,
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    OutputError,
    RemoteError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.reshard import reshard
from zckpt.to_dcp import to_dcp
from zckpt.universal import to_universal
from zckpt.verification import Verification
from zckpt.verify import verify
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.drop_in import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.hub import push_to_hub

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

_NEED_TORCH = frozenset(name for name in __all__ if "zero_checkpoint" in name)


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        from zckpt import drop_in

        return getattr(drop_in, name)
    if name == "push_to_hub":
        from zckpt.hub import push_to_hub

        return push_to_hub
    if name in ("live", "runtime"):  # packages that need torch: `zckpt.live.save_pretrained` needs no import of its own
        return import_module(f"zckpt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
