"""The device as DeepSpeed scripts ask for it: `get_accelerator().device_name()`, `.synchronize()`, `.memory_allocated()`.

For scripts. Everything is asked of torch's own module for the device (`torch.get_device_module`); on a CPU, memory is what the
process holds, and there is nothing to wait for.
Source: DeepSpeed 0.19.8, accelerator/abstract_accelerator.py and cpu_accelerator.py, for the names and for a CPU's answers.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from zckpt.live.device import accelerator, default_backend
from zckpt.runtime.observe.timer import device_memory


def _nothing(*_: Any) -> Any:
    """What there is to do, or to name, on a CPU."""


def _figure(figure: str, device_index: int | None = None) -> int:
    return device_memory()[figure]


def _reset_peak(device_index: int | None = None) -> None:
    """Makes the kernel forget the most that this process has held. Source: proc(5), /proc/pid/clear_refs."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


_OF_TORCH: dict[str, Any] = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "current_stream", "default_stream"), _nothing),
    **dict.fromkeys(("device", "stream"), contextlib.nullcontext),
    **{name: getattr(torch, name) for name in ("manual_seed", "initial_seed", "get_rng_state", "set_rng_state")},
    **dict.fromkeys(("is_available", "is_bf16_supported"), lambda: True),
    "manual_seed_all": torch.manual_seed,
    "device_count": lambda: 1,
    "memory_allocated": functools.partial(_figure, "MA"),
    "max_memory_allocated": functools.partial(_figure, "Max_MA"),
    "memory_reserved": functools.partial(_figure, "CA"),
    "max_memory_reserved": functools.partial(_figure, "Max_CA"),
    "reset_peak_memory_stats": _reset_peak,
    "Stream": None,
    "Event": None,
}
"""What torch's module for the device has under DeepSpeed's name -> what takes its place on a CPU, or where it lacks it."""

_OLD_NAMES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class Accelerator:
    """The device of this process, of torch's kind "cuda", "xpu", "cpu", ...; it has the names of `_OF_TORCH` too."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = None if kind == "cpu" else torch.get_device_module(kind)

    def device_name(self, device_index: int | None = None) -> str:
        """The device as torch takes it: "cuda", or "cuda:1"; on a CPU always "cpu"."""
        return self._name if self._module is None or device_index is None else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        """The number of the current device; on a CPU that of the process on its node."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self._module is None else int(self._module.current_device())

    def current_device_name(self) -> str:
        """The current device as torch takes it."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """The backend of collectives that torch names for the device."""
        return default_backend()

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its work is done: a CPU."""
        return self._module is None

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def visible_devices_envs(self) -> list[str]:
        """The variables that say which devices a process sees."""
        return {"cuda": ["CUDA_VISIBLE_DEVICES"], "xpu": ["ZE_AFFINITY_MASK"]}.get(self._name, [])

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls a function, at once."""
        return callback()

    def random(self) -> Any:
        """Torch's module of random generators."""
        return torch.random

    def default_generator(self, device_index: int) -> Any:
        """The generator of a device."""
        return torch.default_generator if self._module is None else self._module.default_generators[device_index]

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Torch's statistics of the device's memory; for a CPU the two that exist."""
        if self._module is not None:
            return dict(self._module.memory_stats(device_index))
        return {"allocated_bytes.all.current": _figure("MA"), "allocated_bytes.all.peak": _figure("Max_MA")}

    def total_memory(self, device_index: int | None = None) -> int:
        """The total memory of the device; for a CPU, of the machine."""
        if self._module is None:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._module.get_device_properties(device_index or self.current_device()).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Memory that is free."""
        if self._module is None:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._module.mem_get_info(device_index)[0])

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16; in fp64 likewise."""
        return True

    is_fp64_supported = is_fp16_supported

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run on it."""
        return self._name == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that it computes in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy of a tensor in page-locked memory; on a CPU the tensor itself."""
        return tensor if self._module is None else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return self._module is not None and tensor.is_pinned()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begins a range that NVIDIA's profiler shows; on other devices does nothing."""
        if self._name == "cuda":
            self._module.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """Ends the range."""
        if self._name == "cuda":
            self._module.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        name = _OLD_NAMES.get(name, name)
        if name in _OF_TORCH:
            return getattr(self._module, name, _OF_TORCH[name])
        if name.endswith("Tensor"):  # FloatTensor, HalfTensor, ...: constructors on the device
            dtype = {"BFloat16": "bfloat16", "Byte": "uint8", "Int": "int32"}.get(name[:-6], name[:-6].lower())
            return functools.partial(torch.tensor, dtype=getattr(torch, dtype), device=self.current_device_name())
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


DeepSpeedAccelerator = Accelerator


@functools.cache
def get_accelerator() -> Accelerator:
    """The device of this process: its accelerator, or the CPU."""
    found = accelerator()
    return Accelerator("cpu" if found is None else found.type)
