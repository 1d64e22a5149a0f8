"""Every choice of stage, offload, precision and checkpointing for one model, and which of them fits.

For the command and for `zckpt.runtime.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import UsageError
from zckpt.base.words import Printed, count, join_words, short_count, shorten_text, size, wrap_text
from zckpt.estimation.rehearsal import BYTES, Peak, Setting, activations_of, longest, rehearse
from zckpt.estimation.sizes import ModelSize

PRECISIONS = ("fp32", "bf16", "fp16")

_STATES = {
    "adam": 2, "adamw": 2, "lamb": 2, "adagrad": 1, "lion": 1, "sgd": 0, "nadam": 2, "radam": 2, "adamax": 2, "adadelta": 2,
    "rmsprop": 1, "rprop": 2, "asgd": 1,
}  # fmt: skip
"""Optimizer -> fp32 numbers that it keeps for each element."""
_FUSED = frozenset(("adam", "adamw", "sgd", "adagrad"))
_TEMPORARIES = {"lion": 2, "lamb": 3}


@dataclass(frozen=True, slots=True)
class RunShape:
    """What all choices for a run have in common.

    Attributes:
        gpus: per node; without an accelerator, processes.
        nodes: how many.
        optimizer: its name, in any case; torch's or DeepSpeed's.
        states: fp32 numbers that it keeps for each element; None for what is usual for `optimizer`.
        micro_batch: samples per rank and forward.
        length: tokens of a sample; None for what the model was made for, at most 2,048.
        accumulation: micro batches in a step.
        accelerator: GPUs compute; False for a run on CPUs, where `device` is a process's memory.
        bucket: `reduce_bucket_size`.
        shards: ranks that share a parameter at stage 3; 0 for all.
        reduce_bytes: of an element in gradient reductions; 0 for that of the computation.
        fp32_below_2: gradients are reduced in fp32 at stages 0 and 1.
    """

    gpus: int = 1
    nodes: int = 1
    optimizer: str = "Adam"
    states: int | None = None
    micro_batch: int = 1
    length: int | None = None
    accumulation: int = 1
    accelerator: bool = True
    bucket: int = int(5e8)
    shards: int = 0
    reduce_bytes: int = 0
    fp32_below_2: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers. Raises UsageError if one is too small, or the optimizer is unknown."""
        for name in ("gpus", "nodes", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name} is too small", found=f"{getattr(self, name)}", expected="1 or more", remedy="Correct it."
                )
        if self.states is None and self.optimizer.lower() not in _STATES:
            raise UsageError(
                f"optimizer {self.optimizer!r} is not known", expected=join_words(sorted(_STATES), "or"),
                remedy="Choose one of these.",
            )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of all processes."""
        return self.gpus * self.nodes


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train, and what it needs.

    Attributes:
        stage: of ZeRO.
        offload: "none" or "cpu"; here `offload_optimizer` and `offload_param` mean the same.
        precision: fp32, bf16 or fp16.
        checkpointing: of activations; None if the activations of the model are not known.
        peak: bytes of one rank.
        node_host: bytes of host memory of a node, for all its ranks.
        fits: in the memory that was given; None if none was.
    """

    stage: int
    offload: str
    precision: str
    checkpointing: bool | None
    peak: Peak
    node_host: int
    fits: bool | None = None

    def describe(self) -> str:
        """The choice in words: `stage 3 with offload and checkpointing`."""
        extra = [
            word
            for word, is_on in (("offload", self.offload != "none"), ("checkpointing", bool(self.checkpointing)))
            if is_on
        ]
        return f"stage {self.stage}" + (f" with {join_words(extra)}" if extra else "")


@public
@dataclass(frozen=True, slots=True, repr=False)
class Estimate(Printed):
    """What a model needs under every choice.

    Attributes:
        model: the model.
        run: what all choices have in common.
        length: tokens of a sample that activations were counted for; None if they are not known.
        choices: every combination, by precision, then offload, then stage, with and without checkpointing.
        memory: bytes of a GPU that were given.
        host_memory: bytes of a node's host memory that were given.
        asked: the choice that a config asks for.
        file: of that config.
    """

    model: ModelSize
    run: RunShape
    length: int | None
    choices: tuple[Choice, ...]
    memory: int | None = None
    host_memory: int | None = None
    asked: Choice | None = None
    file: str = ""

    def __repr__(self) -> str:
        return f"<zckpt.Estimate {shorten_text(self.model.name)!r}, {count(self.run.ranks, 'rank')}: fits {self.ok}>"

    def best(self, precision: str) -> Choice | None:
        """The first choice that fits: first those without offload, then those without checkpointing, then lower stages."""
        fitting = [one for one in self.choices if one.fits and one.precision == precision]
        return min(fitting, key=lambda one: (one.offload != "none", bool(one.checkpointing), one.stage), default=None)

    @property
    def ok(self) -> bool:
        """Whether what was asked for fits; without a config, whether anything fits; True if no memory was given."""
        if self.asked is not None:
            return self.asked.fits is not False
        return not self.choices or any(one.fits is not False for one in self.choices)

    def as_json(self) -> dict[str, object]:
        """Returns exact numbers, in bytes."""
        best = {precision: self.best(precision) for precision in dict.fromkeys(one.precision for one in self.choices)}
        gives = self.memory is not None or self.host_memory is not None
        return {
            "model": {
                "name": self.model.name, "counted": self.model.counted, "parameters": self.model.numel,
                "trained": self.model.trained, "frozen": self.model.numel - self.model.trained,
                "units": len(self.model.units), "largest_layer": self.model.largest_layer,
                "buffer_bytes": self.model.buffer_bytes,
            },
            "run": {**asdict(self.run), "ranks": self.run.ranks, "length": self.length},
            "memory_bytes": self.memory,
            "host_memory_bytes": self.host_memory,
            "choices": [_facts(one) for one in self.choices],
            "config": None if self.asked is None else {"file": self.file, **_facts(self.asked)},
            "fits": {name: None if one is None else _facts(one) for name, one in best.items()} if gives else None,
        }  # fmt: skip

    def lines(self, width: int | None = None) -> Iterator[str]:
        """A table for a person, at most 80 columns wide."""
        model, run = self.model, self.run
        frozen = model.numel - model.trained
        trained = "all trained" if not frozen else f"{short_count(model.trained)} trained, {short_count(frozen)} frozen"
        yield from wrap_text(
            f"{model.name}: {short_count(model.numel)} parameters, {trained} ({model.counted})", width, "  "
        )
        what = "GPU" if run.accelerator else "process"
        places = (
            f"{count(run.gpus, what, None if run.accelerator else 'processes')} per node, {count(run.nodes, 'node')}"
        )
        samples = f"micro batch {run.micro_batch:,}" + (f" x {self.length:,} tokens" if self.length else "")
        yield from wrap_text(f"{places}; {run.optimizer}; {samples}; accumulation {run.accumulation:,}", width, "  ")
        gives = self.memory is not None or self.host_memory is not None
        for names in _alike(self.choices):
            yield ""
            yield _row((join_words(names), "", f"per {what}", "", "", "", "", "host"), False)
            yield _row(
                ("stage", "offload", "states", "buffers", "activations", "peak", "checkpointed", "per node"), gives
            )
            rows = [one for one in self.choices if one.precision == names[0]]
            for plain, again in _pairs(rows):
                yield _table_row(plain, again, gives)
        yield ""
        yield from self._verdict(width)

    def _verdict(self, width: int | None) -> Iterator[str]:
        if self.length is None:
            yield from wrap_text("Activations are not counted: there is no formula for this kind of model.", width)
        if self.asked is not None:
            one = self.asked
            needs = f"{size(one.peak.device)} per {'GPU' if self.run.accelerator else 'process'}"
            needs += f" and {size(one.node_host)} of host memory per node" if one.node_host else ""
            fit = "" if one.fits is None else ": it fits" if one.fits else ": it does not fit"
            yield from wrap_text(f"{self.file} asks for {one.describe()}, {one.precision}: {needs}{fit}.", width)
        given = [
            f"{size(nbytes)} {what}"
            for nbytes, what in ((self.memory, "per GPU"), (self.host_memory, "of host memory per node"))
            if nbytes is not None
        ]
        if not given:
            return
        for names in _alike(self.choices):
            best = self.best(names[0])
            if best is not None:
                text = f"{join_words(names)}: {best.describe()} fits in {join_words(given)}."
            else:
                least = min((one for one in self.choices if one.precision == names[0]), key=lambda one: one.peak.device)
                host = f" and {size(least.node_host)} of host memory per node" if least.node_host else ""
                text = (
                    f"{join_words(names)}: nothing fits in {join_words(given)}. The smallest choice is {least.describe()}: "
                    f"{size(least.peak.device)} per GPU{host}."
                )
            yield from wrap_text(text, width, "  ")


def estimate_choices(
    model: ModelSize,
    run: RunShape,
    *,
    precisions: tuple[str, ...] = PRECISIONS,
    memory: int | None = None,
    host_memory: int | None = None,
    asked: tuple[int, bool, str] | None = None,
    file: str = "",
) -> Estimate:
    """Estimates what a model needs under every choice, in the `precisions` that are compared. Bytes of a GPU (`memory`) and of a
    node's host memory say what fits; `asked`: stage, offload and precision that a config asks for, which is in `file`.
    """
    config = model.config or {}
    length = run.length or min(longest(config) or 2048, 2048)
    known = activations_of(config, compute_bytes=4, micro_batch=1, length=1) is not None
    choices = []
    for precision in precisions:
        for offload in (False, True) if run.accelerator else (False,):
            for stage in range(1 if offload else 0, 4):
                for checkpointing in (False, True) if known else (None,):
                    choices.append(_choice(model, run, length, stage, offload, precision, checkpointing))
    fitted = tuple(_fit_choice(one, memory, host_memory) for one in choices)
    mine = None
    if asked is not None:
        stage, offload, precision = asked
        mine = _fit_choice(
            _choice(model, run, length, stage, offload, precision, False if known else None), memory, host_memory
        )
    return Estimate(model, run, length if known else None, fitted, memory, host_memory, mine, file)


def _choice(
    model: ModelSize, run: RunShape, length: int, stage: int, offload: bool, precision: str, checkpointing: bool | None
) -> Choice:
    compute = BYTES[precision]
    name = run.optimizer.lower()
    small = name in _FUSED or not run.accelerator
    setting = Setting(
        stage=stage, offload=offload, precision=precision,
        shards=1 if stage == 0 else (run.shards or run.ranks) if stage == 3 else run.ranks,
        accumulation=run.accumulation, states=_STATES.get(name, 0) if run.states is None else run.states,
        temporaries=_TEMPORARIES.get(name, 0 if small else 1),
        reduce_bytes=4 if run.fp32_below_2 and stage < 2 else run.reduce_bytes or compute,
        accelerator=run.accelerator, bucket=run.bucket, checkpointing=bool(checkpointing),
    )  # fmt: skip
    activations = None
    if checkpointing is not None:
        activations = activations_of(
            model.config or {}, compute_bytes=compute, micro_batch=run.micro_batch, length=length,
            accelerator=run.accelerator,
        )  # fmt: skip
    peak = rehearse(model, setting, activations)
    return Choice(stage, "cpu" if offload else "none", precision, checkpointing, peak, peak.host * run.gpus)


def _fit_choice(one: Choice, memory: int | None, host_memory: int | None) -> Choice:
    if memory is None and host_memory is None:
        return one
    fits = (memory is None or one.peak.device <= memory) and (host_memory is None or one.node_host <= host_memory)
    return replace(one, fits=fits)


def _facts(one: Choice) -> dict[str, Any]:
    return {
        "stage": one.stage, "offload": one.offload, "precision": one.precision, "checkpointing": one.checkpointing,
        "gpu_bytes": one.peak.device, "host_bytes_per_node": one.node_host, "rank": asdict(one.peak), "fits": one.fits,
    }  # fmt: skip


def _alike(choices: tuple[Choice, ...]) -> list[list[str]]:
    """The precisions, with those that have the same numbers together."""
    found: dict[tuple[object, ...], list[str]] = {}
    for precision in dict.fromkeys(one.precision for one in choices):
        rows = tuple((one.peak, one.stage, one.offload) for one in choices if one.precision == precision)
        found.setdefault(rows, []).append(precision)
    return list(found.values())


def _pairs(rows: list[Choice]) -> Iterator[tuple[Choice, Choice | None]]:
    plain = [one for one in rows if not one.checkpointing]
    again = {(one.stage, one.offload): one for one in rows if one.checkpointing}
    for one in plain:
        yield one, again.get((one.stage, one.offload))


def _table_row(plain: Choice, again: Choice | None, gives: bool) -> str:
    peak = plain.peak
    acts = _size(peak.activations) if again is not None else "-"
    ckpt = _size(again.peak.device) if again is not None else "-"
    fits = "yes" if plain.fits else "ckpt" if again is not None and again.fits else "no"
    host = _size(plain.node_host)
    cells = (
        str(plain.stage),
        plain.offload,
        size(peak.states),
        size(peak.buffers),
        acts,
        size(peak.device),
        ckpt,
        host,
    )
    return _row(cells, gives, fits)


_WIDTHS = (5, 7, 8, 8, 11, 8, 12, 8)


def _row(cells: tuple[str, ...], gives: bool, fits: str = "fits") -> str:
    if not cells[1]:  # a heading over several columns
        return f"{cells[0]:<14}{cells[2]:^41}{'':>8}{cells[7]:>11}".rstrip()
    first = f"{cells[0]:<5}  {cells[1]:<7}"
    rest = "".join(f" {cell:>{width}}" for cell, width in zip(cells[2:], _WIDTHS[2:], strict=True))
    return f"{first}{rest}{f' {fits:>4}' if gives else ''}"


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else "0"
