"""Counts the operations of a model's forward, and takes the time of each module.

For `observer` (the config's section `flops_profiler`) and for scripts. The names are DeepSpeed's (0.19.8,
profiling/flops_profiler/profiler.py). Operations are counted by torch's FlopCounterMode: those of matrix products, convolutions
and attention, where one multiplication with its addition is one MAC and two operations. DeepSpeed also estimates activations,
norms and other work on single elements as operations, not as MACs; so MACs are the same, and its operations a little more.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.live.device import synchronize
from zckpt.runtime.observe.flops_profiler import table
from zckpt.runtime.observe.flops_profiler.units import (
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

_log = logging.getLogger("zckpt.runtime")


@dataclass(slots=True)
class ModuleCost:
    """What one module's forwards cost, its children's included.

    Attributes:
        flops: operations.
        duration_s: seconds.
        params: elements of its parameters, each counted once.
    """

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
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.costs: dict[nn.Module, ModuleCost] = {}
        self._counter: FlopCounterMode | None = None
        self._hooks: list[Any] = []
        self._open: list[tuple[int, float]] = []

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Begins to measure, from zero.

        Args:
            ignore_list: classes of modules that get no line of their own; their work counts for what they are in.
        """
        self.stop_profile()
        self.reset_profile()
        for module in self.model.modules():
            if type(module) not in (ignore_list or ()):
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(module.register_forward_hook(partial(self._leave), always_call=True))
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
        """Sets all to zero."""
        self.costs = {
            module: ModuleCost(params=sum(p.numel() for p in module.parameters())) for module in self.model.modules()
        }

    def end_profile(self) -> None:
        """Measures no more, and drops what was measured."""
        self.stop_profile()
        self.started = False
        self.costs = {}

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the model's forwards; `as_string` with a unit."""
        total = self._total().flops
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with an addition; `as_string` with a unit."""
        total = self._total().macs
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forwards; `as_string` with a unit."""
        total = self._total().duration_s
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of all parameters, whole ones where they are sharded; `as_string` with a unit."""
        total = self._total().params
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prints what was measured; nothing before `start_profile`.

        Args:
            profile_step: named in the heading.
            module_depth: the deepest modules in the summary, where the model itself is 0; -1 for all.
            top_modules: modules named at each depth.
            detailed: print a line for every module too.
            output_file: where to; its directory is made if need be. By default stdout.
        """
        if not self.started:
            return
        shown = table.Table(self.model, self.costs, self.ds_engine, self.recompute_fwd_factor)
        text = "\n".join(shown.lines(profile_step, module_depth, top_modules, detailed)) + "\n"
        if not output_file:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        path = os.path.abspath(output_file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the costliest modules at each depth, as `print_model_profile` does among other things."""
        shown = table.Table(self.model, self.costs, self.ds_engine, self.recompute_fwd_factor)
        sys.stdout.write("\n".join(shown.aggregated(module_depth, top_modules)) + "\n")

    def _total(self) -> ModuleCost:
        return self.costs.get(self.model, ModuleCost())

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        if self._counter is not None:
            self._open.append((self._counter.get_total_flops(), _clock()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs, output
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
        detailed: with a line for every module.
        module_depth: the deepest modules in the summary; -1 for all.
        top_modules: modules named at each depth.
        warm_up: forwards before the one that is measured.
        as_string: return text with units; otherwise whole numbers.
        output_file: for the table; by default stdout.
        ignore_modules: classes of modules without a line of their own.
        mode: "forward", or "generate" for the model's method of that name.

    Returns:
        Operations, MACs, parameters.

    Raises:
        UsageError: there is no input, or an unknown mode.
    """
    named = dict(kwargs or {})
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not named:
        raise UsageError(
            "get_model_profile needs an input", remedy="Pass input_shape=(...), args=[...] or kwargs={...}."
        )
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
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()


def _on_other_devices() -> dict[Any, Any]:
    """Formulas for kernels of attention that torch's own table lacks (2.13: those of CPUs and of devices beside CUDA)."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
    return {getattr(torch.ops.aten, name): _attention for name in names if hasattr(torch.ops.aten, name)}


def _attention(query: Any, key: Any, value: Any, *more: Any, **named: Any) -> int:
    """Operations of attention, from the shapes of its inputs."""
    del more, named
    return int(sdpa_flop_count(query, key, value))


def _clock() -> float:
    synchronize()
    return time.perf_counter()
