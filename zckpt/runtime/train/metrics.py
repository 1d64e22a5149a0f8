"""Reports each step of a run: a line of `metrics.jsonl`, and a picture of losses and learning rates.

For `train`, on rank 0.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.output.durable import replace_file
from zckpt.storage.fsync_queue import make_durable

FILE, PICTURE = "metrics.jsonl", "loss.png"
_MANY = 200


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        step: its number, from 1.
        loss: mean over all samples of the step.
        lr: of the first parameter group.
        scale: the loss scale; 1 without fp16.
        grad_norm: of all gradients, before clipping; None if it was not computed or is not finite.
        skipped: the gradients overflowed, and the step was left out.
        tokens_per_s: of all ranks together.
        memory_bytes: the most that rank 0 has held: of its GPU, or of its process.
        time_s: seconds since 1970.
        eval_loss: mean loss on the text of `--eval-data` after the step; None if it was not computed.
        perplexity: e to `eval_loss`.
    """

    step: int
    loss: float
    lr: float
    scale: float
    grad_norm: float | None
    skipped: bool
    tokens_per_s: float
    memory_bytes: int
    time_s: float
    eval_loss: float | None = None
    perplexity: float | None = None


class Metrics:
    """The metrics file of a run, in its directory, and its picture with a title. The run begins after the step `after`: lines
    of steps before are kept, later ones are dropped.
    """

    def __init__(self, directory: str, after: int, title: str = "") -> None:
        self._path = os.path.join(directory, FILE)
        self._picture = os.path.join(directory, PICTURE)
        self._title = title
        kept = [line for line in _lines(self._path) if line["step"] <= after]
        self._shown = [(line["step"], line["loss"], line["lr"], line.get("eval_loss")) for line in kept]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, step: Step) -> None:
        """Writes a line, and flushes it."""
        self._shown.append((step.step, step.loss, step.lr, step.eval_loss))
        self._file.write(json.dumps(asdict(step)) + "\n")
        self._file.flush()

    def keep(self) -> None:
        """Makes the lines so far durable: steps before a durable save are not repeated."""
        make_durable(self._file.fileno())

    def close(self) -> str | None:
        """Closes the file and draws the picture. Returns a sentence that says why, if it cannot."""
        self._file.close()
        if not self._shown:
            return None
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return f"{PICTURE} was not drawn: matplotlib is not installed. Run: pip install 'zckpt[train]'"
        steps, losses, rates, _ = zip(*self._shown, strict=True)
        evaluated = [(step, loss) for step, _, _, loss in self._shown if loss is not None]
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        figure.suptitle(self._title)
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        many = len(steps) > _MANY
        dots = {"marker": "o", "markersize": 3} if len(steps) < 3 else {}
        left.plot(steps, losses, linewidth=0.8, alpha=0.35 if many else 1.0, label="training, each step", **dots)
        if many:
            width = len(steps) // 50
            label = f"training, mean of {width} steps"
            left.plot(steps, _smooth(losses, width), linewidth=1.6, color="C0", label=label)
        if evaluated:
            left.plot(*zip(*evaluated, strict=True), "o-", color="C1", markersize=4, label="evaluation")
        if many or evaluated:
            left.legend()
        right.plot(steps, rates, linewidth=1.2, color="C2", **dots)
        _name(left, "Loss", "loss (nats per token)")
        _name(right, "Learning rate", "learning rate")
        figure.savefig(self._picture, dpi=120)
        return None


def _name(axes: Any, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=title, xlabel="optimizer step", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(alpha=0.3)


def _smooth(values: tuple[float, ...], width: int) -> list[float]:
    """For each step, the mean of the last `width` values, or of fewer at the beginning."""
    total, out = 0.0, []
    for number, value in enumerate(values):
        total += value - (values[number - width] if number >= width else 0.0)
        out.append(total / min(number + 1, width))
    return out


def _lines(path: str) -> list[dict[str, Any]]:
    """The lines of a file, without one that was cut short."""
    found: list[dict[str, Any]] = []
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    found.append(json.loads(line))
                except ValueError:
                    break
    return found
