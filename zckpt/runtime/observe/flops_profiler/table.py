"""The table that the profiler prints: totals, the costliest modules at each depth, every module.

For `profiler`. The labels of the rows are DeepSpeed's, since logs are searched for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zckpt.runtime.observe.flops_profiler.units import (
    PRECISION,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from zckpt.runtime.observe.timer import BACKWARD, FORWARD, STEP

_ABOUT = """Forward of one micro batch on this rank. One MAC is a multiplication with its addition, two flops. Counted are matrix
products, convolutions and attention. dp_size is the number of data-parallel ranks, mp_size that of model-parallel ones. fwd, bwd
and step latency are the times of forward, backward and weight update; iter latency is their sum over a whole step."""

_EACH = """After each module's name: parameters, MACs and time of its forwards with their shares of the model, and flops per
second. A module's own work (such as a loss in its forward) is what its children do not add up to."""


class Table:
    """What was measured, as lines.

    Args:
        model: the model.
        costs: by module, each with `flops`, `macs`, `params` and `duration_s`.
        engine: the engine that trains it, or None.
        recompute: share of the forward that backward computes once more.
    """

    def __init__(self, model: nn.Module, costs: Mapping[nn.Module, Any], engine: Any, recompute: float) -> None:
        self._model, self._costs, self._engine, self._recompute = model, costs, engine, recompute
        self._total = costs[model]

    def lines(self, step: int, depth: int, top: int, detailed: bool) -> Iterator[str]:
        """All lines."""
        yield "\n---------------------------- zckpt Flops Profiler ----------------------------"
        yield f"Profile Summary at step {step}:"
        yield _ABOUT + "\n"
        yield from (f"{label + ': ':<70}  {value:<8}".rstrip() for label, value in self._summary())
        yield "\n----------------------------- Aggregated Profile per GPU -----------------------------"
        yield from self.aggregated(depth, top)
        if detailed:
            yield "\n------------------------------ Detailed Profile per GPU ------------------------------"
            yield _EACH + "\n"
            yield from self._detailed(self._model, "", "")
        yield "------------------------------------------------------------------------------"

    def aggregated(self, depth: int, top: int) -> Iterator[str]:
        """The costliest classes of modules at each depth."""
        levels: list[dict[str, list[float]]] = []
        self._add(self._model, 0, levels)
        yield f"Top {top} modules in terms of params, MACs or fwd latency at different model depths:"
        columns: tuple[tuple[str, int, Callable[[float], str]], ...] = (
            ("params", 1, params_to_string),
            ("MACs", 0, macs_to_string),
            ("fwd latency", 2, duration_to_string),
        )
        for number, level in enumerate(levels):
            if depth != -1 and number > depth:
                return
            yield f"depth {number}:"
            for label, column, text in columns:
                first = sorted(level.items(), key=lambda item: item[1][column], reverse=True)[:top]
                yield f"    {label:<11} - { ({name: text(values[column]) for name, values in first}) }"

    def _summary(self) -> Iterator[tuple[str, Any]]:
        total, engine = self._total, self._engine
        params, flops, latency = params_to_string(total.params), total.flops, total.duration_s
        if engine is not None:
            yield "world size", engine.world_size
            yield "data parallel size", engine.world_size
            yield "model parallel size", 1
            yield "batch size per GPU", engine.train_micro_batch_size_per_gpu()
        yield "params per GPU", params
        yield "params of model = params per GPU * mp_size", params
        yield "fwd MACs per GPU", macs_to_string(total.macs)
        yield "fwd flops per GPU", number_to_string(flops)
        yield "fwd flops of model = fwd flops per GPU * mp_size", number_to_string(flops)
        times = (
            {name: engine.timers(name).elapsed(False) / 1000.0 for name in (FORWARD, BACKWARD, STEP)} if engine else {}
        )
        if not all(times.values()):
            times = {}
        yield "fwd latency", duration_to_string(latency)
        yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(flops, latency)
        if not times:
            return
        micros = engine.gradient_accumulation_steps()
        forward, backward, step = times[FORWARD], times[BACKWARD], times[STEP]
        more = 2 + self._recompute
        yield "bwd latency", duration_to_string(backward / micros)
        yield f"bwd FLOPS per GPU = {more:g} * fwd flops per GPU / bwd latency", _rate(more * flops * micros, backward)
        label = f"fwd+bwd FLOPS per GPU = {more + 1:g} * fwd flops per GPU / (fwd+bwd latency)"
        yield label, _rate((more + 1) * flops * micros, forward + backward)
        yield "step latency", duration_to_string(step)
        whole = forward + backward + step
        yield "iter latency", duration_to_string(whole)
        label = f"FLOPS per GPU = {more + 1:g} * fwd flops per GPU / iter latency"
        yield label, _rate((more + 1) * flops * micros, whole)
        yield "samples/second", round(engine.train_batch_size() / whole, PRECISION)

    def _add(self, module: nn.Module, depth: int, levels: list[dict[str, list[float]]]) -> None:
        if depth == len(levels):
            levels.append({})
        cost = self._costs[module]
        sums = levels[depth].setdefault(_class(module), [0.0, 0.0, 0.0])
        for column, value in enumerate((cost.macs, cost.params, self._duration(module))):
            sums[column] += value
        for child in module.children():
            self._add(child, depth + 1, levels)

    def _duration(self, module: nn.Module) -> float:
        """Seconds; of a module that is not called, such as a ModuleList, those of its children."""
        own = float(self._costs[module].duration_s)
        return own or sum(self._duration(child) for child in module.children())

    def _detailed(self, module: nn.Module, label: str, indent: str) -> Iterator[str]:
        cost, total, duration = self._costs[module], self._total, self._duration(module)
        facts = [
            f"{params_to_string(cost.params)} = {_share(cost.params, total.params)} Params",
            f"{macs_to_string(cost.macs)} = {_share(cost.macs, total.macs)} MACs",
            f"{duration_to_string(duration)} = {_share(duration, total.duration_s)} latency",
            _rate(cost.flops, duration),
        ]
        more = module.extra_repr()
        begin = f"{indent}{label}{_class(module)}({', '.join([*facts, *([more] if more else [])])}"
        children = list(module.named_children())
        if not children:
            yield begin + ")"
            return
        yield begin
        for name, child in children:
            yield from self._detailed(child, f"({name}): ", indent + "  ")
        yield indent + ")"


def _class(module: nn.Module) -> str:
    """The name of a module's class as its author wrote it: `fully_shard` gives a module a class of its own."""
    kind = type(module)
    return kind.__mro__[2].__name__ if issubclass(kind, FSDPModule) else kind.__name__


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


def _share(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, PRECISION) if whole else 0:g}%"
