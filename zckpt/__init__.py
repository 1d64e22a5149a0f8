"""zckpt: consolidated weights out of sharded training checkpoints.

For users of the library: every public name, and nothing that needs torch until such a name is asked for. Without torch,
`open_checkpoint(..., framework="np")` and `convert` work all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.checkpoint import Checkpoint, open_checkpoint

# Eager, because a submodule has the same name: whoever imports it later must not replace the function by the module.
from zckpt.convert import Options, Report, convert
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
from zckpt.universal import to_universal

if TYPE_CHECKING:
    from zckpt.drop_in import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.hub import push_to_hub

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "CastError",
    "Checkpoint",
    "CorruptError",
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
    "ZckptError",
    "__version__",
    "convert",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "open_checkpoint",
    "push_to_hub",
    "reshard",
    "to_universal",
]

_NEED_TORCH = frozenset(name for name in __all__ if "zero_checkpoint" in name)


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        from zckpt import drop_in

        return getattr(drop_in, name)
    if name == "push_to_hub":
        from zckpt.hub import push_to_hub

        return push_to_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
