"""zckpt: consolidated weights out of sharded training checkpoints.

The public names. Each is imported when it is first used, so `import zckpt` is quick. torch is needed for tensors
(`open_checkpoint` with its default framework), DeepSpeed's functions, `zckpt.live` and `zckpt.runtime` only.
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
    from zckpt.cli.estimate import estimate
    from zckpt.drop_in import (
        convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from zckpt.estimation.choices import Estimate
    from zckpt.hub import PushReport, push_to_hub
    from zckpt.jobs.apply_delta import apply_delta
    from zckpt.jobs.average import average
    from zckpt.jobs.convert import convert
    from zckpt.jobs.delta import DeltaReport, delta
    from zckpt.jobs.diff import Diff, diff
    from zckpt.jobs.groups import Form, LoraMerge
    from zckpt.jobs.inspection import Inspection, inspect_checkpoint
    from zckpt.jobs.open import Checkpoint, open_checkpoint
    from zckpt.jobs.options import ApplyOptions, DeltaOptions, Options
    from zckpt.jobs.planned import Report
    from zckpt.jobs.quantize import quantize, to_fp8
    from zckpt.jobs.reshard import reshard
    from zckpt.jobs.slim import slim
    from zckpt.jobs.to_dcp import to_dcp
    from zckpt.jobs.to_gguf import to_gguf
    from zckpt.jobs.to_mcore import to_mcore
    from zckpt.jobs.to_mlx import to_mlx
    from zckpt.jobs.to_peft import AdapterReport, to_peft
    from zckpt.jobs.to_states import to_states
    from zckpt.jobs.to_universal import to_universal
    from zckpt.layouts.save.listing import ReadOptions
    from zckpt.naming.schemes import add_family
    from zckpt.pictures.map_page import Map, map  # noqa: A004 - the command's name
    from zckpt.upkeep.usage import RunUsage, du

__all__ = [
    "AccessError",
    "AdapterReport",
    "ApplyOptions",
    "CastError",
    "Checkpoint",
    "CorruptError",
    "DeltaOptions",
    "DeltaReport",
    "Diff",
    "Estimate",
    "Form",
    "IncompleteError",
    "InconsistentError",
    "Inspection",
    "LoraMerge",
    "Map",
    "NotACheckpointError",
    "Options",
    "OutputError",
    "PushReport",
    "ReadOptions",
    "RemoteError",
    "Report",
    "ResourceError",
    "RunUsage",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "ZckptError",
    "__version__",
    "add_family",
    "apply_delta",
    "average",
    "convert",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "delta",
    "diff",
    "du",
    "estimate",
    "get_fp32_state_dict_from_zero_checkpoint",
    "inspect_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "map",
    "open_checkpoint",
    "push_to_hub",
    "quantize",
    "reshard",
    "slim",
    "to_dcp",
    "to_fp8",
    "to_gguf",
    "to_mcore",
    "to_mlx",
    "to_peft",
    "to_states",
    "to_universal",
    "verify",
]

_HOMES = {
    "AdapterReport": "jobs.to_peft",
    "ApplyOptions": "jobs.options",
    "Checkpoint": "jobs.open",
    "DeltaOptions": "jobs.options",
    "DeltaReport": "jobs.delta",
    "Diff": "jobs.diff",
    "Estimate": "estimation.choices",
    "Form": "jobs.groups",
    "Inspection": "jobs.inspection",
    "LoraMerge": "jobs.groups",
    "Map": "pictures.map_page",
    "Options": "jobs.options",
    "PushReport": "hub",
    "ReadOptions": "layouts.save.listing",
    "Report": "jobs.planned",
    "RunUsage": "upkeep.usage",
    "Verification": "checks.verdict",
    "add_family": "naming.schemes",
    "apply_delta": "jobs.apply_delta",
    "average": "jobs.average",
    "convert": "jobs.convert",
    "convert_zero_checkpoint_to_fp32_state_dict": "drop_in",
    "convert_zero_checkpoint_to_state_dict": "drop_in",
    "delta": "jobs.delta",
    "diff": "jobs.diff",
    "du": "upkeep.usage",
    "estimate": "cli.estimate",
    "get_fp32_state_dict_from_zero_checkpoint": "drop_in",
    "inspect_checkpoint": "jobs.inspection",
    "load_state_dict_from_zero_checkpoint": "drop_in",
    "map": "pictures.map_page",
    "open_checkpoint": "jobs.open",
    "push_to_hub": "hub",
    "quantize": "jobs.quantize",
    "reshard": "jobs.reshard",
    "slim": "jobs.slim",
    "to_dcp": "jobs.to_dcp",
    "to_fp8": "jobs.quantize",
    "to_gguf": "jobs.to_gguf",
    "to_mcore": "jobs.to_mcore",
    "to_mlx": "jobs.to_mlx",
    "to_peft": "jobs.to_peft",
    "to_states": "jobs.to_states",
    "to_universal": "jobs.to_universal",
    "verify": "checks.verify",
}
"""Public name -> its module, which is imported when the name is first used."""

_PACKAGES = ("drop_in", "live", "runtime")
"""Public packages, which import torch: `zckpt.live.save_pretrained` needs no import of its own."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"zckpt.{_HOMES.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UnsupportedError(
            f"zckpt.{name} needs torch, which is not installed", remedy="Run: pip install 'zckpt[torch]'."
        ) from error
    return getattr(home, name) if name in _HOMES else home


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
