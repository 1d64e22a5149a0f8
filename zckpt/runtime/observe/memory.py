"""Prints how much memory this process and its machine use, in DeepSpeed's two lines.

For `observer` (`memory_breakdown`), `timer`, and scripts as `see_memory_usage`.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

from zckpt.live.device import accelerator

GIB = 1 << 30


def device_memory() -> dict[str, int]:
    """Bytes on the device (CPU: of this process): `MA` of tensors, `CA` of torch's allocator, and the peak of each."""
    kind = accelerator()
    if kind is None:
        facts = _read_kilobytes("/proc/self/status")
        now, most = facts.get("VmRSS", 0), facts.get("VmHWM", 0)
        return {"MA": now, "Max_MA": most, "CA": now, "Max_CA": most}
    module: Any = torch.get_device_module(kind)
    return {
        "MA": module.memory_allocated(),
        "Max_MA": module.max_memory_allocated(),
        "CA": module.memory_reserved(),
        "Max_CA": module.max_memory_reserved(),
    }


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints on rank 0, after a message, what the device and the machine have in use, and forgets the device's peak; without
    `force` does nothing, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    machine = _read_kilobytes("/proc/meminfo")
    total = machine.get("MemTotal", 1)
    used = total - machine.get("MemAvailable", 0)
    lines = [message, " ".join(f"{name} {round(value / GIB, 2)} GB" for name, value in device_memory().items())]
    lines += [f"CPU Virtual Memory: used = {round(used / GIB, 2)} GB, percent = {100 * used / total:.1f}%"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    kind = accelerator()
    if kind is not None:
        torch.get_device_module(kind).reset_peak_memory_stats()


def _read_kilobytes(path: str) -> dict[str, int]:
    """Name -> bytes, from lines "name: number kB" of a file of the kernel."""
    with open(path, encoding="ascii", errors="replace") as file:
        parts = [line.replace(":", " ").split() for line in file]
    return {words[0]: int(words[1]) * 1024 for words in parts if len(words) == 3 and words[2] == "kB"}
