"""A line every so many steps of a run: where it is, how it goes, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zckpt.base.words import size

if TYPE_CHECKING:
    from zckpt.runtime.train.metrics import Step


class ProgressLines:
    """Prints a line for the first and the last step, every so many steps, and after each evaluation.

    Args:
        total: steps of the run.
        every: steps between two lines.
        write: prints a line.
        clock: seconds that pass, as `time.monotonic`.
    """

    def __init__(
        self, total: int, every: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._every, self._write, self._clock = total, every, write, clock
        self._first: tuple[int, float] | None = None
        self._tokens: list[float] = []

    def add(self, step: Step) -> None:
        """Takes a step, and prints a line if it is time for one."""
        now = self._clock()
        first, began = self._first or (step.step, now)
        begins = self._first is None
        self._first = first, began
        self._tokens.append(1 / step.tokens_per_s)
        if begins or step.step % self._every == 0 or step.step == self._total or step.eval_loss is not None:
            left_s = None if begins else (now - began) / (step.step - first) * (self._total - step.step)
            self._write(self._line(step, left_s))
            self._tokens.clear()

    def _line(self, step: Step, left_s: float | None) -> str:
        width = len(f"{self._total:,}")
        facts = [f"step {step.step:>{width},}/{self._total:,}", f"loss {step.loss:.4f}", f"lr {step.lr:.3g}"]
        facts += [f"norm {step.grad_norm:.3g}"] if step.grad_norm is not None else []
        facts += [f"scale {step.scale:g}"] if step.scale != 1 else []
        facts += ["skipped"] if step.skipped else []
        facts += [f"{len(self._tokens) / sum(self._tokens):,.0f} tokens/s", size(step.memory_bytes)]
        if step.eval_loss is not None and step.perplexity is not None:
            facts += [f"eval loss {step.eval_loss:.4f}", f"perplexity {step.perplexity:,.2f}"]
        facts += [f"{duration(left_s)} left"] if left_s is not None and step.step < self._total else []
        return "  ".join(facts)


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 0:07, 12:30, 1:02:03, 2 d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
