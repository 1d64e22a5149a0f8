"""How much memory this process and its machine use, in DeepSpeed's two lines.

For `observer` (`memory_breakdown`), and for scripts as `see_memory_usage`.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

from zckpt.base.dataclass import dataclass
from zckpt.live.device import accelerator

_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device; on a CPU, of the process, of which there is no cache.

    Attributes:
        allocated: held by tensors now.
        most_allocated: the most that tensors held.
        cached: held by torch's allocator now.
        most_cached: the most that it held.
    """

    allocated: int
    most_allocated: int
    cached: int
    most_cached: int


def device_memory() -> DeviceMemory:
    """What this process holds of its device."""
    kind = accelerator()
    if kind is None:
        now, most = _process()
        return DeviceMemory(now, most, now, most)
    module: Any = torch.get_device_module(kind)
    return DeviceMemory(
        module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved(), module.max_memory_reserved()
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints on rank 0, with a message, what the device and the machine have in use, and forgets the device's peak.

    Args:
        message: printed first.
        force: print; without it nothing is done, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    found = device_memory()
    pairs = zip(
        ("MA", "Max_MA", "CA", "Max_CA"),
        (found.allocated, found.most_allocated, found.cached, found.most_cached),
        strict=True,
    )
    total, available = _machine()
    percent = 100 * (total - available) / total if total else 0.0
    lines = [message, " ".join(f"{name} {round(value / _GB, 2)} GB" for name, value in pairs)]
    lines += [f"CPU Virtual Memory: used = {round((total - available) / _GB, 2)} GB, percent = {percent:.1f}%"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    kind = accelerator()
    if kind is not None:
        torch.get_device_module(kind).reset_peak_memory_stats()


def _process() -> tuple[int, int]:
    facts = _kilobytes("/proc/self/status")
    return facts.get("VmRSS", 0), facts.get("VmHWM", 0)


def _machine() -> tuple[int, int]:
    facts = _kilobytes("/proc/meminfo")
    return facts.get("MemTotal", 0), facts.get("MemAvailable", 0)


def _kilobytes(path: str) -> dict[str, int]:
    """The lines "name: number kB" of a file of the kernel, in bytes."""
    with open(path, encoding="ascii", errors="replace") as file:
        parts = [line.replace(":", " ").split() for line in file]
    return {words[0]: int(words[1]) * 1024 for words in parts if len(words) == 3 and words[2] == "kB"}
