"""What pushes, live models and training runs write: for the tests of power failures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from kill_points import contents
from power_trial import Trial

from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.hub import pipeline
from zckpt.live.assignment import Contribution, ElementPlace, pieces
from zckpt.live.carry import Files
from zckpt.output.saves import find_displaced

SHARDS = {f"shard {n}": f"{n:064x}" for n in range(2)}


class Push(Trial):
    """Hashes of shards that are made: what was remembered is known to the next push."""

    def __init__(self, work: Path) -> None:
        self.place = work / "place"

    def prepare(self) -> None:
        self.place.mkdir()

    def known(self) -> dict[str, str]:
        return pipeline.read_known_shards(str(self.place / "s"), "page")

    def run(self) -> None:
        with pipeline.open_scratch(str(self.place / "s"), "page") as opened:
            for identity, sha256 in SHARDS.items():
                opened.remember(identity, "name", sha256)

    def judge(self, *, done: bool) -> None:
        known = self.known()
        assert known.items() <= SHARDS.items(), "hashes of nothing"
        assert known == SHARDS or not done, "what was remembered is lost"

    def finish(self, *, failing: bool) -> None:
        self.run()
        self.judge(done=True)


class PushThatEnds(Push):
    """The journal is written again at the end: no hash is lost."""

    def prepare(self) -> None:
        super().prepare()
        super().run()

    def run(self) -> None:
        with pipeline.open_scratch(str(self.place / "s"), "page") as opened:
            opened.finish(list(SHARDS))

    def judge(self, *, done: bool) -> None:
        super().judge(done=True)


class Carried(Trial):
    """What one node writes of a file of all: it says that it is done when this is durable."""

    def __init__(self, work: Path) -> None:
        self.place, self.elements = work / "place", torch.arange(64, dtype=torch.float32)

    def prepare(self) -> None:
        self.place.mkdir()
        (self.place / "model.safetensors").write_bytes(bytes(256))

    def run(self) -> None:
        os.truncate(self.place / "model.safetensors", 256)  # a moment before anything is written
        store = MemoryStore(self.elements.data_ptr(), 256, self.elements)
        whole = Contribution("w", F32, Fragment(store, 0, 0, 64), ElementPlace(0, 0, F32))
        with Files([str(self.place / "model.safetensors")], [[(0, 256)]]) as files:
            for piece in pieces(whole):
                files.put(piece, self.elements.view(torch.uint8))
            files.sync()

    def judge(self, *, done: bool) -> None:
        found = (self.place / "model.safetensors").read_bytes()
        assert not done or found == self.elements.numpy().tobytes(), "elements are lost"

    def finish(self, *, failing: bool) -> None:
        self.run()
        self.judge(done=True)


class MetricsFile(Trial):
    """A resumed run writes the file again: the steps before the save that it began from stay, those it kept too."""

    def __init__(self, work: Path) -> None:
        self.place = work / "place"

    def write(self, after: int, loss: float, *steps: int) -> None:
        from zckpt.runtime.train.metrics import Metrics, Step

        metrics = Metrics(str(self.place), after)
        for step in steps:
            metrics.add(Step(step, loss, 1.0, 1.0, None, False, 1.0, 1, 0.0))
            metrics.keep()
        metrics._file.close()

    def prepare(self) -> None:
        self.place.mkdir()
        self.write(0, 1.0, 1, 2, 3)

    def run(self) -> None:
        self.write(2, 9.0, 3)

    def judge(self, *, done: bool) -> None:
        lines = (self.place / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines[:2]] == [1, 2]
        assert not done or [json.loads(line)["loss"] for line in lines[2:]] == [9.0], "the step is lost"

    def finish(self, *, failing: bool) -> None:
        self.run()
        self.judge(done=True)


class WholeSave(Trial):
    """`save_checkpoint` of an engine, over a save of the same tag: `latest` names a whole save at every moment."""

    tags = ("older", "again", "next")

    def __init__(self, work: Path) -> None:
        self.place, self.run_directory = work / "place", work / "place" / "run"

    def save(self, tag: str) -> None:
        for seed in (
            random.seed,
            np.random.seed,
            torch.manual_seed,
        ):  # a save has the states; other tests' threads may draw
            seed(0)
        self.engine.save_checkpoint(str(self.run_directory), tag=tag)

    def step(self) -> None:
        self.engine.backward(self.engine(torch.ones(2, 3)).square().mean())
        self.engine.step()

    def prepare(self) -> None:
        from zckpt import runtime

        self.place.mkdir()
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }  # fmt: skip
        self.engine: Any = runtime.initialize(model=torch.nn.Linear(3, 2), config=config)[0]
        self.step()
        self.save("older")
        self.step()
        self.save("again")
        self.save("older")
        self.wholes = {tag: [contents(self.run_directory / tag)] for tag in ("older", "again")}
        self.step()

    def run(self) -> None:
        self.save("again")
        self.wholes["again"].append(contents(self.run_directory / "again"))
        self.wholes["next"] = self.wholes["again"][-1:]

    def judge(self, *, done: bool) -> None:
        latest = (self.run_directory / "latest").read_text()
        moved = find_displaced(str(self.run_directory))
        for tag in ("older", "again"):
            found = contents(Path(moved.get(tag, self.run_directory / tag)))
            assert found in self.wholes[tag], (tag, "is half a save", sorted(found))
        assert latest == "again" or (latest == "older" and not done)
        assert not done or found == self.wholes["again"][-1], "the new save is lost"

    def finish(self, *, failing: bool) -> None:
        tag = "next" if failing else "again"
        self.save(tag)
        assert (self.run_directory / "latest").read_text() == tag
        assert contents(self.run_directory / tag) == self.wholes["again"][-1]
        left = {name for name in os.listdir(self.run_directory) if name.startswith(".")}
        assert not left, left
        shutil.rmtree(self.run_directory / "next", ignore_errors=True)
        (self.run_directory / "latest").write_text("again")
        self.judge(done=not failing)


def end() -> None:
    """Ends the process group that `WholeSave` has begun."""
    with contextlib.suppress(ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()
