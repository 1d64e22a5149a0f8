"""Counts the operations of a model's forward, takes the time of each module, and prints a table.

For `observer` (the config's section `flops_profiler`) and for scripts. Names, and labels of the totals, are DeepSpeed's (0.19.8,
profiling/flops_profiler/profiler.py). Operations are counted by torch's FlopCounterMode: those of matrix products, convolutions
and attention, where one multiplication with its addition is one MAC and two operations. DeepSpeed also estimates activations,
norms and other work on single elements as operations, not as MACs; so MACs are the same, and its operations a little more.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.live.device import synchronize
from zckpt.runtime.observe.timer import BACKWARD, FORWARD, STEP

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_HEAD = ("module", "parameters", "MACs", "ms", "of the forward")


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number with the letter of its magnitude: 2500 is `2.5 K`."""
    if units is None:
        units = next((unit for unit, one in _UNITS.items() if num >= one), "u") if num else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second: `1.2 TFLOPS`."""
    return number_to_string(flops, units, precision) + "FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiplications with an addition: `1.2 GMACs`."""
    return number_to_string(macs, units, precision) + "MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes in decimal units: `1.2 GB`."""
    return number_to_string(b, units, precision) + "B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """How many parameters: `1.2 B` for 1.2 thousand millions."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds: `1.2 ms`."""
    return number_to_string(duration, units, precision) + "s"


@dataclass(slots=True)
class ModuleCost:
    """The cost of one module's forwards, its children's included: operations, seconds, and the elements of its parameters."""

    flops: int = 0
    duration_s: float = 0.0
    params: int = 0

    @property
    def macs(self) -> int:
        """Multiplications with an addition."""
        return self.flops // 2


class FlopsProfiler:
    """Measures forwards of a model between `start_profile` and `stop_profile`.

        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(batch)
        profiler.stop_profile()
        profiler.print_model_profile()
        profiler.end_profile()

    Args:
        model: what is measured.
        ds_engine: the engine that trains it, for the world size and the times of backward and step; or None.
        recompute_fwd_factor: share of the forward that backward computes once more.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.costs: dict[nn.Module, ModuleCost] = {}
        self._counter: FlopCounterMode | None = None
        self._hooks: list[Any] = []
        self._open: list[tuple[int, float]] = []

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Begins to measure, from zero. `ignore_list`: classes of modules left out; their work counts for what they are in."""
        self.stop_profile()
        self.reset_profile()
        for module in self.model.modules():
            if type(module) not in (ignore_list or ()):
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._counter = FlopCounterMode(display=False, custom_mapping=_on_other_devices())
        self._counter.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Measures no more; what was measured stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def reset_profile(self) -> None:
        """Sets all costs to zero."""
        self.costs = {one: ModuleCost(params=sum(p.numel() for p in one.parameters())) for one in self.model.modules()}

    def end_profile(self) -> None:
        """Measures no more, and drops what was measured."""
        self.stop_profile()
        self.started = False
        self.costs = {}

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the model's forwards; `as_string` with a unit."""
        return number_to_string(self._total.flops) if as_string else self._total.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with an addition; `as_string` with a unit."""
        return macs_to_string(self._total.macs) if as_string else self._total.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forwards; `as_string` with a unit."""
        return duration_to_string(self._total.duration_s) if as_string else self._total.duration_s

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of all parameters, whole ones where they are sharded; `as_string` with a unit."""
        return params_to_string(self._total.params) if as_string else self._total.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prints what was measured, with `profile_step` in the title: modules down to `module_depth` (-1 for all), of each
        depth the `top_modules` of the most MACs, or (`detailed`) all. `output_file` is written instead of
        stdout; its directory is made if need be.
        """
        if not self.started:
            return
        lines = [f"{' zckpt Flops Profiler ':-^78}", f"Profile Summary at step {profile_step}:"]
        lines += [f"{label + ': ':<70}  {value:<8}".rstrip() for label, value in self._summary()]
        text = "\n".join(["", *lines, "", *self._table(module_depth, None if detailed else top_modules), "-" * 78, ""])
        if not output_file:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        path = os.path.abspath(output_file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:  # not synced: the next profile replaces it
            file.write(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the costliest modules at each depth, as `print_model_profile` does among other things."""
        sys.stdout.write("\n".join(self._table(module_depth, top_modules)) + "\n")

    @property
    def _total(self) -> ModuleCost:
        return self.costs.get(self.model, ModuleCost())

    def _summary(self) -> Iterator[tuple[str, Any]]:
        """The totals, under labels that logs are searched for. Counts are those of one micro batch on this rank."""
        total, engine = self._total, self.ds_engine
        if engine is not None:
            yield "world size", engine.world_size
            yield "batch size per GPU", engine.batch.micro
        yield "params per GPU", params_to_string(total.params)
        yield "params of model = params per GPU * mp_size", params_to_string(total.params)
        yield "fwd MACs per GPU", macs_to_string(total.macs)
        yield "fwd flops per GPU", number_to_string(total.flops)
        yield "fwd latency", duration_to_string(total.duration_s)
        yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(total.flops, total.duration_s)
        parts = [engine.timers(name).elapsed(False) / 1000.0 for name in (FORWARD, BACKWARD, STEP)] if engine else []
        if not parts or not all(parts):
            return
        forward, backward, step = parts
        micros, more = engine.batch.accumulation, 2 + self.recompute_fwd_factor
        flops, whole = total.flops * micros, sum(parts)
        yield "bwd latency", duration_to_string(backward / micros)
        yield f"bwd FLOPS per GPU = {more:g} * fwd flops per GPU / bwd latency", _rate(more * flops, backward)
        label = f"fwd+bwd FLOPS per GPU = {more + 1:g} * fwd flops per GPU / (fwd+bwd latency)"
        yield label, _rate((more + 1) * flops, forward + backward)
        yield "step latency", duration_to_string(step)
        yield "iter latency", duration_to_string(whole)
        yield f"FLOPS per GPU = {more + 1:g} * fwd flops per GPU / iter latency", _rate((more + 1) * flops, whole)
        yield "samples/second", round(engine.batch.total / whole, 2)

    def _table(self, depth: int, top: int | None) -> Iterator[str]:
        """A line for each module down to a depth; of each depth the `top` costliest, or all."""
        levels: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in self.model.named_modules():
            levels.setdefault(len(path.split(".")) if path else 0, []).append((path, module))
        wanted = [level for number, level in levels.items() if depth == -1 or number <= depth]
        if top is not None:
            wanted = [sorted(level, key=lambda row: -self.costs[row[1]].macs)[:top] for level in wanted]
        paths = {path for level in wanted for path, _ in level}
        lines = [_HEAD]
        for path, module in [row for row in self.model.named_modules() if row[0] in paths]:
            cost, seconds = self.costs[module], self._duration(module)
            share = 100 * seconds / self._total.duration_s if self._total.duration_s else 0.0
            name = f"{path or 'all'} ({_class_name(module)})"
            lines.append((name, f"{cost.params:,}", f"{cost.macs:,}", f"{seconds * 1000:.2f}", f"{share:.1f}%"))
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        for line in lines:
            cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
            yield "  ".join([f"{line[0]:<{widths[0]}}", *cells])

    def _duration(self, module: nn.Module) -> float:
        """The seconds of a module; for one that is not called, such as a ModuleList, those of its children."""
        return self.costs[module].duration_s or sum(self._duration(child) for child in module.children())

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self._counter is not None:
            self._open.append((self._counter.get_total_flops(), _clock()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._counter is not None and self._open:
            flops, began = self._open.pop()
            cost = self.costs.setdefault(module, ModuleCost())
            cost.flops += self._counter.get_total_flops() - flops
            cost.duration_s += _clock() - began


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | os.PathLike[str] | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, MACs and parameters of one forward. The model is in eval mode afterwards.

        flops, macs, params = get_model_profile(model, input_shape=(1, 3, 224, 224))

    Args:
        model: what is measured.
        input_shape: of the only argument, a tensor of the parameters' dtype and device; without it `args` and `kwargs` hold.
        args: arguments of the model.
        kwargs: named arguments of the model.
        print_profile: print the table.
        detailed: with all modules in the table.
        module_depth: the deepest modules in the table; -1 for all.
        top_modules: modules of each depth, unless all are wanted.
        output_file: for the table; by default stdout.
        warm_up: forwards before the one that is measured.
        as_string: return text with units; otherwise whole numbers.
        ignore_modules: classes of modules that are not measured.
        mode: "forward", or "generate" for the model's method of that name.

    Raises:
        UsageError: there is no input, or an unknown mode.
    """
    named = dict(kwargs or {})
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not named:
        remedy = "Pass input_shape=(...), args=[...] or kwargs={...}."
        raise UsageError("get_model_profile needs an input", remedy=remedy)
    if mode not in ("forward", "generate"):
        raise UsageError(
            "get_model_profile does not know the mode", found=repr(mode), expected="'forward' or 'generate'",
            remedy="Correct mode=.",
        )  # fmt: skip
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    for _ in range(warm_up):
        call(*args, **named)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=ignore_modules)
    try:
        call(*args, **named)
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        flops, macs = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
        return flops, macs, profiler.get_total_params(as_string)
    finally:
        profiler.end_profile()


def _on_other_devices() -> dict[Any, Any]:
    """Formulas for kernels of attention that torch's own table lacks (2.13: those of CPUs and of devices beside CUDA)."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
    return {getattr(torch.ops.aten, name): _attention for name in names if hasattr(torch.ops.aten, name)}


def _attention(query: Any, key: Any, value: Any, *more: Any, **named: Any) -> int:
    """The operations of attention, by the shapes of its inputs."""
    return int(sdpa_flop_count(query, key, value))


def _class_name(module: nn.Module) -> str:
    """The name of a module's class as its author wrote it: `fully_shard` gives a module a class of its own."""
    kind = type(module)
    return kind.__mro__[2].__name__ if issubclass(kind, FSDPModule) else kind.__name__


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


def _clock() -> float:
    synchronize()
    return time.perf_counter()
