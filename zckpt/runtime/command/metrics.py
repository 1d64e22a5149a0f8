"""What a run reports of each step: a line of `metrics.jsonl`, and a picture of the losses.

For `train`, on rank 0.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

FILE, PICTURE = "metrics.jsonl", "loss.png"


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


class Metrics:
    """The metrics file of a run; a resumed run keeps the lines of the steps before.

    Args:
        directory: of the run.
        after: the step that the run begins after; lines of later steps are dropped.
    """

    def __init__(self, directory: str, after: int) -> None:
        self._path = os.path.join(directory, FILE)
        self._picture = os.path.join(directory, PICTURE)
        kept = [line for line in _lines(self._path) if line["step"] <= after]
        self.losses = [(int(line["step"]), float(line["loss"])) for line in kept]
        with open(self._path + ".new", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        os.replace(self._path + ".new", self._path)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, step: Step) -> None:
        """Writes a line, and flushes it."""
        self.losses.append((step.step, step.loss))
        self._file.write(json.dumps(asdict(step)) + "\n")
        self._file.flush()

    def close(self) -> str | None:
        """Closes the file and draws the picture. Returns a sentence that says why, if it cannot."""
        self._file.close()
        if not self.losses:
            return None
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return f"{PICTURE} was not drawn: matplotlib is not installed. Run: pip install 'zckpt[train]'"
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes: Any = figure.subplots()
        axes.plot(*zip(*self.losses, strict=True), linewidth=1)
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(alpha=0.3)
        figure.savefig(self._picture, dpi=120)
        return None


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
