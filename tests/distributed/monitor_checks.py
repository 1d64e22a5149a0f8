"""What a run shows of itself, beside what DeepSpeed shows of the same run; the tests of this folder say what must come out."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import check, main, rank
from live_checks import Shared

from zckpt import runtime
from zckpt.base.errors import UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed_on_cpu

STEPS, ACCUMULATION = 5, 2


class Net(torch.nn.Module):
    """Two layers; its forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).float().square().mean()


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        **more,
    }


def run(initialize: Any, asked: dict[str, Any]) -> tuple[list[float], str, Any]:
    """This rank's loss of each step, what was printed, and the engine."""
    torch.manual_seed(3)
    model, printed = Net(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=asked)
        draw = torch.Generator().manual_seed(10 + rank())
        losses = []
        for _ in range(STEPS):
            total = 0.0
            for _ in range(ACCUMULATION):
                batch = torch.randn(2, 8, generator=draw)
                loss = engine(batch.half() if "fp16" in asked else batch)
                engine.backward(loss)
                engine.step()
                total += loss.item() / ACCUMULATION
            losses.append(total)
    return losses, printed.getvalue(), engine


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@check(2)
def beside_deepspeed() -> dict[str, Any]:
    """The same run in both: the files of the CSV monitor, and what the timers and the profiler print."""
    import deepspeed

    deepspeed_on_cpu.initialize()
    out: dict[str, Any] = {}
    with Shared() as home:
        printed, losses = {}, []
        for name, initialize in (("theirs", deepspeed.initialize), ("ours", runtime.initialize)):
            asked = config(
                fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
                csv_monitor={"enabled": True, "output_path": str(home / name), "job_name": "job"},
                wall_clock_breakdown=True,
                flops_profiler={"enabled": True, "profile_step": 2},
            )
            losses, printed[name], _ = run(initialize, asked)
        if rank():
            return {"silent": printed["ours"] == ""}
        theirs, ours = home / "theirs" / "job", home / "ours" / "job"
        names = {path.name for path in theirs.iterdir()}
        out["names"] = sorted({path.name for path in ours.iterdir()} ^ names)
        out["lr"] = (theirs / "Train_Samples_lr.csv").read_bytes() == (ours / "Train_Samples_lr.csv").read_bytes()
        scales = [rows(one / "Train_Samples_loss_scale.csv") for one in (theirs, ours)]
        out["heads"] = scales[0][0] == scales[1][0]
        out["scales"] = [[float(v) for v in row] for row in scales[0][1:]] == [
            [float(v) for v in row] for row in scales[1][1:]
        ]
        loss = rows(ours / "Train_Samples_train_loss.csv")
        out["samples"] = [int(row[0]) for row in loss[1:]]
        out["losses"] = max(abs(float(row[1]) - one) for row, one in zip(loss[1:], losses, strict=True)) < 1e-3
        timed = {
            name: [
                re.findall(r"(\w+): [\d.]+", line)
                for line in text.splitlines()
                if re.search(r"\| (fwd|fwd_micro)", line)
            ]
            for name, text in printed.items()
        }
        out["timers"] = timed["theirs"] == timed["ours"] and len(timed["ours"]) == STEPS * (ACCUMULATION + 1)
        begin = {line.split(" | ")[0] for line in printed["ours"].splitlines() if " | fwd: " in line}
        out["begins"] = begin == {line.split(" | ")[0] for line in printed["theirs"].splitlines() if " | fwd: " in line}
        counted = {
            name: dict(
                re.findall(r"^(fwd MACs per GPU|params of model[^:]*|world size): +(.*?) *$", text, re.MULTILINE)
            )
            for name, text in printed.items()
        }
        out["counted"] = counted["theirs"] == counted["ours"] and len(counted["ours"]) == 3
    return out


@check(2)
def libraries() -> dict[str, Any]:
    """What each library reads back of what was written with it, on rank 0 alone."""
    with Shared() as home:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(home), "WANDB_SILENT": "true"}
        os.environ |= {"COMET_OFFLINE_DIRECTORY": str(home / "comet"), "COMET_LOGGING_CONSOLE": "ERROR"}
        asked = config(
            tensorboard={"enabled": True, "output_path": str(home), "job_name": "board"},
            wandb={"enabled": True, "project": "numbers", "group": "these"},
            comet={
                "enabled": True,
                "online": False,
                "samples_log_interval": 16,
                "project": "numbers",
                "mode": "create",
            },
        )
        asked["comet"]["api_key"] = "no" * 16
        losses, _, engine = run(runtime.initialize, asked)
        found = {name: getattr(engine.monitor, name) is not None for name in ("tb_monitor", "wandb_monitor")}
        if rank():
            return {"enabled": engine.monitor.enabled, **found, "wandb_run": sys.modules.get("wandb") is not None}
        engine.monitor.write_events([("Mine/number", 7.0, 3)])
        import wandb

        wandb.finish()
        engine.monitor.comet_monitor.experiment.end()
        out = {"board": board(home / "board"), "wandb": wandb_history(home), "comet": comet_metrics(home / "comet")}
        return {"losses": losses, **out}


def board(directory: Path) -> dict[str, list[list[float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory))
    read.Reload()
    return {tag: [[one.step, one.value] for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def wandb_history(home: Path) -> dict[str, Any]:
    """What a run's file says: the project, the group, and what was logged at each step."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {}
    history: dict[int, dict[str, Any]] = {}
    [path] = (home / "wandb").glob("offline-run-*/*.wandb")
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found["project"], found["group"] = record.run.project, record.run.run_group
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            row = {key: json.loads(value) for key, value in items.items() if not key.startswith("_")}
            history.setdefault(record.history.step.num, {}).update(row)
    return {**found, "history": sorted(history.items())}


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, in them a checksum, a length, a kind and bytes."""
    at, whole = 7, b""  # after the file's head
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def comet_metrics(directory: Path) -> list[list[Any]]:
    found = []
    for path in directory.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                metric = json.loads(line).get("payload", {}).get("metric")
                if metric and metric["metricName"].startswith(("Train/", "Mine/")):
                    found.append([metric["metricName"], metric["metricValue"], metric["step"]])
    return found


@check(2)
def a_missing_library() -> dict[str, Any]:
    """It is an error on every rank, before the model is touched."""
    before = sys.path[:], sys.modules.pop("comet_ml", None)
    sys.path[:] = [one for one in sys.path if "site-packages" not in one]
    model = Net()
    try:
        runtime.initialize(model=model, config=config(comet={"enabled": True}))
    except UnsupportedError as error:
        return {"says": str(error), "plain": type(model).__name__}
    finally:
        sys.path[:] = before[0]
        if before[1] is not None:
            sys.modules["comet_ml"] = before[1]
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
