"""The monitors' sections out of a config that is still JSON, as `deepspeed.monitor.config` offers it.

For scripts that make a `MonitorMaster` of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.runtime.config.reports import CometSection, CSVSection, TensorBoardSection, WandbSection


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """The four sections."""

    tensorboard: TensorBoardSection
    wandb: WandbSection
    csv_monitor: CSVSection
    comet: CometSection

    @property
    def enabled(self) -> bool:
        """Whether any of them is switched on."""
        return any(one.enabled for one in (self.tensorboard, self.wandb, self.csv_monitor, self.comet))


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorConfig:
    """The sections of a config; those that it does not have are switched off.

    Raises:
        ValueError: a section has a key or a value that it cannot have.
    """
    return MonitorConfig(
        TensorBoardSection(**param_dict.get("tensorboard", {})),
        WandbSection(**param_dict.get("wandb", {})),
        CSVSection(**param_dict.get("csv_monitor", {})),
        CometSection(**param_dict.get("comet", {})),
    )
