"""`zckpt train` and `zckpt demo` as a person, a scheduler or a launcher meets them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import proofs
import pytest
from hangs import HANG_S
from schemas import check
from standby import programs

from zckpt.runtime.train.launch import first_host

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    tmp_path.joinpath("text.txt").write_text("All happy families are alike. " * 60)
    return tmp_path


def command(*words: object, program: tuple[str, ...] = ()) -> list[str]:
    """The command line, by default of a process that need not import torch again."""
    program = program or (f"{programs()}/python",)
    return [*program, "-m", "zckpt", "train", "config.json", "--data", "text.txt", *map(str, words)]


def begin(home: Path, words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=home, env={**ENVIRONMENT, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    return out, err


def steps(home: Path, run: str = "run") -> list[dict[str, Any]]:
    path = home / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(home: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + HANG_S
    while len(steps(home)) < count:
        assert process.poll() is None and time.monotonic() < until, end(process)
        time.sleep(0.1)


def test_sigterm_saves_and_the_run_goes_on(home: Path) -> None:
    process = begin(home, command("--out", "run", "--steps", 100_000, "--nproc", 2, "--json"))
    wait_for(home, 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = end(process)
    assert (process.returncode, err) == (0, "")
    outcome = check("train", out)
    stopped_at = outcome["step"]
    assert outcome["stopped"] and stopped_at == len(steps(home)) < 100_000
    assert (home / "run" / "latest").read_text() == f"global_step{stopped_at}"
    told = ("--resume", "--eval-data", "text.txt")
    again = begin(home, command("--out", "run", "--steps", stopped_at + 1, *told))
    out, err = end(again)
    assert again.returncode == 0 and out.startswith(f"done: step {stopped_at + 1:,} of"), err
    first, line = err.splitlines()
    assert first.startswith("training tiny-gpt, 842,496 parameters, on 1 rank, ZeRO stage 3, fp32; steps "), err
    assert line.startswith(f"step {stopped_at + 1:,}/{stopped_at + 1:,}  loss ") and "  perplexity " in line, err
    last = steps(home)[-1]
    assert last["perplexity"] == math.exp(last["eval_loss"]) and f"perplexity {last['perplexity']:,.2f}\n" in out
    assert [line["step"] for line in steps(home)] == list(range(1, stopped_at + 2))
    assert steps(home)[-1].keys() == {
        "step", "loss", "lr", "scale", "grad_norm", "skipped", "tokens_per_s", "memory_bytes", "time_s", "eval_loss",
        "perplexity",
    }  # fmt: skip


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank that a launcher started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in words:
            return int(path.name)
    raise AssertionError(f"no rank {rank}")


def test_a_rank_that_hangs_or_dies_is_named(home: Path) -> None:
    words = ("--out", "run", "--steps", 100_000, "--nproc", 2, "--log-every", 1_000_000)
    process = begin(home, command(*words, program=(sys.executable,)))
    wait_for(home, 2, process)
    stopped, killed = rank_of(process.pid, 1), rank_of(process.pid, 0)
    os.kill(stopped, signal.SIGSTOP)
    assert process.stderr is not None
    patience = threading.Timer(HANG_S, lambda: (os.kill(stopped, signal.SIGCONT), process.kill()))
    patience.start()
    said = [process.stderr.readline() for _ in range(3)][2]  # two lines tell of the beginning
    patience.cancel()
    assert said.startswith("The ranks wait for rank 1, which does not run: "), said
    assert f"(process {stopped} on {socket.gethostname()})" in said and " of step " in said
    os.kill(stopped, signal.SIGCONT)
    assert process.stderr.readline() == "The ranks go on.\n"
    at = steps(home)[-1]["step"]
    os.kill(killed, signal.SIGKILL)
    out, err = end(process)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: rank 0 was killed by SIGKILL, and the run ended\n"), err
    where = re.search(rf"found     process {killed} on \S+ was in .* of step (\d+)\n", err)
    assert where is not None and int(where[1]) >= at and "--resume" in err and len(err.splitlines()) == 3, err


def test_a_terminal_sees_a_bar(home: Path) -> None:
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    process = subprocess.Popen(
        command("--out", "run", "--steps", 3), cwd=home, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=slave
    )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(HANG_S) == 0
    os.close(master)
    last = shown.decode().replace("\r", "\n").strip().splitlines()[-1]
    assert ("3/3" in last and "step/s" in last) or "s/step" in last, shown
    assert all(fact in last for fact in ("loss=", "tok/s=", "lr=0.001", "mem=")), shown


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


def test_two_agents_of_torchrun(home: Path) -> None:
    launcher = (f"{programs()}/torchrun", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d")
    launcher += (f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=run")
    agents = [begin(home, command("--out", "run", "--steps", 2, program=launcher)) for _ in range(2)]
    told = [end(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert sorted(out.count("steps 1-2") for out, _ in told) == [0, 1]
    assert len(list((home / "run" / "global_step2").glob("*zero_pp_rank_*_optim_states.pt"))) == 2


def test_a_slurm_step(home: Path) -> None:
    """The variables of srun(1) are all that tells each task who it is."""
    tasks, port = [], free_port()
    for number in range(2):
        told = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_STEP_NUM_TASKS": 2, "SLURM_JOB_ID": 1}
        slurm = {name: str(value) for name, value in told.items()}
        where = {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
        tasks.append(begin(home, command("--out", "run", "--steps", 2), **slurm, **where))
    told_by = [end(task) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told_by
    assert told_by[0][0].startswith("done: steps 1-2") and told_by[1] == ("", "")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("n[3-5]", "n3"), ("a100-[07-09,12],b1", "a100-07"), ("n[1,4]-ib", "n1-ib"),
        ("rack1-node2.cluster", "rack1-node2.cluster"),
    ],
)  # fmt: skip
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_cannot_work_is_said_before_anything_starts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.base.errors import ZckptError
    from zckpt.runtime.train.train import TrainingJob, check

    monkeypatch.chdir(home)
    (home / "plain.json").write_text(json.dumps({"train_batch_size": 4}))
    (home / "old" / "global_step1").mkdir(parents=True)
    (home / "old" / "global_step1" / "mp_rank_00_model_states.pt").touch()
    (home / "old" / "latest").write_text("global_step1")
    (home / "empty.txt").touch()
    (home / "small.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 40}))
    (home / "odd.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    cases = {
        "Pass --resume": TrainingJob("config.json", "text.txt", "old", 1),
        "has no optimizer": TrainingJob("plain.json", "text.txt", "run", 1),
        "none.txt: no such file": TrainingJob("config.json", "none.txt", "run", 1),
        "has too little text": TrainingJob("config.json", "empty.txt", "run", 1),
        "gpt-5: no such model": TrainingJob("config.json", "text.txt", "run", 1, "gpt-5"),
        "too few tokens for bytes": TrainingJob("config.json", "text.txt", "run", 1, "small.json"),
        "transformers cannot make a model": TrainingJob("config.json", "text.txt", "run", 1, "odd.json"),
    }
    for words, job in cases.items():
        with pytest.raises(ZckptError, match=words):
            check(job)
    process = begin(home, command("--out", "old", "--steps", 1, "--nproc", 2))
    out, err = end(process)
    assert (process.returncode, out) == (2, "") and err.count("error: ") == 1 and "Pass --resume" in err
    assert not (home / "run").exists()


@proofs.only
def test_the_demo_proves_itself(tmp_path: Path) -> None:
    done = begin(tmp_path, [sys.executable, "-m", "zckpt", "demo"])
    out, err = end(done)
    assert done.returncode == 0 and all(line.startswith(("training ", "step ")) for line in err.splitlines()), (
        out,
        err,
    )
    assert "parallelism data 3\n" in out and out.endswith(
        "$ zckpt diff offline live\nthe same: 52 tensors, bit for bit\n"
    )


def test_without_torch_the_demo_converts(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None; import zckpt.cli; zckpt.cli.main()"
    done = begin(tmp_path, [sys.executable, "-c", hide, "demo"])
    out, err = end(done)
    assert done.returncode == 0 and out.count("the same: 10 tensors, bit for bit") == 1 and "zckpt[train]" in err
    assert "every weight is in the output, rounded to BF16" in " ".join(out.split())
    done = begin(tmp_path, [sys.executable, "-c", hide, *command("--out", "run", "--steps", 1)[3:]])
    out, err = end(done)
    assert (done.returncode, out) == (2, "") and "pip install 'zckpt[train]'" in err
