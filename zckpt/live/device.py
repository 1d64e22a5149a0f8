"""The accelerator of this process: which one it is, who communicates for it, its memory, its random generator.

The only module that knows kinds of devices; `ranks`, `carry`, `loading` and the trainer ask here. CUDA and ROCm are `cuda` to
torch, Intel's GPUs `xpu`; others come as torch's plug-ins. Without an accelerator everything is done on the CPU.
Source: torch 2.6 to 2.13, `torch.accelerator`, `torch.get_device_module`, distributed/distributed_c10d.py `Backend`.
"""

from __future__ import annotations

import atexit
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

_FUSED = frozenset(("cpu", "cuda", "xpu"))
_HIDDEN_BY = {"cuda": "CUDA_VISIBLE_DEVICES="}


def accelerator() -> torch.device | None:
    """The kind of accelerator that this process can use, without an index; None if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def device_count() -> int:
    """How many accelerators this process sees."""
    return torch.accelerator.device_count() if accelerator() is not None else 0


def hidden_by(kind: torch.device) -> str | None:
    """The variable in the environment that hides accelerators of this kind; None if there is none."""
    return _HIDDEN_BY.get(kind.type)


def default_backend() -> str:
    """The backend that torch names for this machine's accelerator; for CPUs if there is none, or torch names none for it."""
    try:
        return dist.get_default_backend_for_device(accelerator() or CPU)
    except ValueError:
        return dist.get_default_backend_for_device(CPU)


def end_group_with_process() -> None:
    """Has the default process group taken down when this process ends, unless it ends with an error.

    gloo's threads may outlive the interpreter, which then aborts: on two ranks about one script in eight that leaves its group
    alone ends by SIGABRT after its last line, with torch alone too.
    Source: torch 2.13, seen with `torch.distributed.run`.
    """
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def use_device(local_rank: int) -> torch.device:
    """The device that this rank trains on, which becomes its current one: an accelerator, unless the ranks talk over gloo. A
    scheduler may show each process its own accelerator only, whatever its number on its machine is.
    """
    kind = accelerator()
    if kind is None or _backends(None).get(kind.type, "gloo") == "gloo":
        return CPU
    found = torch.device(kind.type, local_rank % max(1, device_count()))
    torch.accelerator.set_device_index(found.index)
    return found


def device_of_messages(group: Any = None) -> torch.device:
    """Where a tensor has to be for the ranks of a group to send it to each other: host memory if they can."""
    kind = accelerator()
    if kind is None or "cpu" in _backends(group):
        return CPU
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _backends(group: Any) -> dict[str, str]:
    """Kind of device -> backend, of a group of processes."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)


def has_fused_kernels(device: torch.device, optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether torch updates parameters on this device in one kernel, for an optimizer with the argument `fused`."""
    return device.type in _FUSED and (device.type == "cpu" or optimizer is not torch.optim.Adagrad)


def pins() -> bool:
    """Whether host memory can be page-locked: there is an accelerator to copy to."""
    return accelerator() is not None


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of host memory to copy to or from a device; page-locked if that is an accelerator, so that copies need not wait."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu" and pins())


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies elements. Between a device and page-locked memory the copy goes on in the background: see `copies_of`."""
    target.copy_(source, non_blocking=True)


def copies_of(devices: Iterable[torch.device]) -> Callable[[], None]:
    """A function that waits for all copies that were begun on these devices so far."""
    marks: list[torch.Event] = []
    for device in {device for device in devices if device.type != "cpu"}:
        mark = torch.Event(device)
        mark.record(torch.accelerator.current_stream(device))
        marks.append(mark)

    def wait() -> None:
        for mark in marks:
            mark.synchronize()

    return wait


def synchronize() -> None:
    """Waits for all work of this process on the accelerator; without one, does nothing."""
    if accelerator() is not None:
        torch.accelerator.synchronize()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used: of the accelerator's memory by tensors, or of host memory for the CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))


def generator_state() -> tuple[str, torch.Tensor] | None:
    """The kind of the accelerator and the state of its random generator; None if this process has not used one."""
    kind = accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return kind.type, module.get_rng_state()


def set_generator_state(states: Mapping[str, Any]) -> None:
    """Restores the accelerator's random generator to the state for its kind; without an accelerator, does nothing."""
    kind = accelerator()
    if kind is not None and kind.type in states:
        torch.get_device_module(kind).set_rng_state(states[kind.type])
