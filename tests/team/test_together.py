"""Several processes at one conversion give the bytes of one; and when one of them goes away, the others say so and stop."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import proofs
import pytest
import synth
import torch
from hangs import HANG_S
from standby import programs

import zckpt
from zckpt.base.errors import InconsistentError, OutputError, UsageError
from zckpt.engine.move import Mover, run
from zckpt.jobs.convert import prepare
from zckpt.jobs.declarations import CONVERT, RESHARD
from zckpt.jobs.groups import Form
from zckpt.jobs.options import LoraMerge, Options
from zckpt.jobs.reshard import prepare as prepare_reshard
from zckpt.layouts.save.listing import ReadOptions
from zckpt.team import together
from zckpt.team.partition import GRAIN, WrittenPart, begin, move, part_of, seal
from zckpt.team.rendezvous import DirectoryRendezvous
from zckpt.team.together import Team, detect_launcher

TESTS = Path(__file__).parents[1]
FIXTURES = TESTS.parent / "fixtures"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
SMALL = ["--max-shard-size", "300KB"]
LATE = {"zckpt.team.together": {"LOOK_S": 3.0}}
EARLY = {"zckpt.engine.batches": {"LEAST_BYTES": 0}}


def contents(path: Path) -> dict[str, bytes]:
    """Every byte under an output's name; of one file, with its manifest."""
    if path.is_file():
        return {name: path.with_name(name).read_bytes() for name in (path.name, f"{path.name}.zckpt.json")}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def started(*trials: dict[str, Any]) -> list[dict[str, Any]]:
    """What the trials print; those that meet at torch's store are started from a process that has imported torch."""
    python = f"{programs()}/python" if any(trial.get("launcher") == "env" for trial in trials) else sys.executable
    command = [python, str(TESTS / "started.py"), json.dumps(trials)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def zero2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    group = {f"w{i}": torch.randn(80_000 + i, generator=generator) for i in range(8)}
    return synth.zero12(tmp_path_factory.mktemp("together") / "ckpt", [group], 3)


# ---- the parts of a plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(
    "kind",
    ["transformers/llama_zero2", "zero3/groups_w3", "mcore/model_space_tp2_dp2_0_12", "reshard", "hf", "lora"],
    ids=lambda kind: kind.replace("/", " "),
)
def test_parts_make_the_whole(
    kind: str, engine: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.team.partition.GRAIN", 16)
    if kind == "reshard":
        options = RESHARD.ask(world_size=3, stage=2)
        plan = prepare_reshard(str(FIXTURES / "transformers/llama_zero3/checkpoint"), str(tmp_path / "x"), options).plan
    elif kind == "hf":
        checkpoint = str(FIXTURES / "megatron/llama_zero2_tp2_dp2/checkpoint")
        options = CONVERT.ask(form=Form("hf:llama"), read_options=ReadOptions(tp_rules="megatron-swiglu"))
        plan = prepare(checkpoint, str(tmp_path / "x.bin"), options).plan
    elif kind == "lora":
        home = FIXTURES / "peft" / "dora_zero1"
        options = CONVERT.ask(lora=LoraMerge(base=home / "base"), max_shard_size=1_500)
        plan = prepare(str(home / "checkpoint"), str(tmp_path / "x"), options).plan
    else:
        options = CONVERT.ask(max_shard_size=30_000)
        plan = prepare(str(FIXTURES / kind / "checkpoint"), str(tmp_path / "x"), options).plan
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    wanted = run(plan, str(tmp_path / "one"), engine=engine)
    pieces: list[WrittenPart] = []
    begin(plan, str(tmp_path / "many"))
    sizes = []
    for index in reversed(range(count)):
        part = part_of(plan, index, count)
        sizes.append(part.bytes_read + sum(entry.nbytes for _, entry in part.pairs))
        move(Mover(part, engine=engine), part, str(tmp_path / "many"), pieces.append)
    crcs = {}
    for output, _ in plan.files:
        here = [piece.crcs for piece in pieces if piece.path == output.path]
        parts = None if None in here else [part for crcs in here if crcs for part in crcs]
        crcs[output.path], _ = seal(plan, output, str(tmp_path / "many"), parts)
    assert crcs == {written.path: written.crc32 for written in wanted.files}
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert sum(sizes) == plan.bytes_read + sum(entry.nbytes for _, entry in plan.pairs)
    if kind not in ("hf", "lora"):
        assert max(sizes) - min(sizes) <= 64 + max(sizes) // 50


def test_parts_meet_at_pages(zero2: Path, tmp_path: Path) -> None:
    plan = prepare(str(zero2), str(tmp_path / "x.safetensors"), CONVERT.ask()).plan
    borders = []
    for index in range(4):
        runs = [f for _, entry in part_of(plan, index, 4).pairs for f in entry.fragments]
        borders.append((min(f.byte_offset for f in runs), max(f.nbytes_end(4) for f in runs)))
    assert all(a[1] == b[0] and b[0] % GRAIN == 0 for a, b in itertools.pairwise(borders))


# ---- the same bytes ----------------------------------------------------------------------------------------------------


MERGED = FIXTURES / "peft/dora_zero1"
GGUF = FIXTURES / "gguf/llama/model"
JOBS: list[tuple[str, list[str], str]] = [
    ("to-bf16", ["", *SMALL], "shards"),
    ("to-fp32", [str(FIXTURES / "transformers/llama_zero2/checkpoint"), "--max-shard-size", "20KB"], "directory"),
    ("to-fp16", [str(FIXTURES / "zero3/groups_w3/checkpoint")], "one.safetensors"),
    ("to-bf16", [str(FIXTURES / "transformers/llama_zero3/checkpoint")], "one.bin"),
    ("reshard", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--world-size", "3", "--stage", "3"], "resharded"),
    ("to-universal", [str(FIXTURES / "zero3/bf16_w2/checkpoint")], "universal"),
    ("to-dcp", [str(FIXTURES / "zero2/bf16_w2/checkpoint")], "dcp"),
    ("to-peft", [str(FIXTURES / "peft/lora_zero3/checkpoint")], "adapter"),
    ("to-fp8", [str(FIXTURES / "transformers/llama_zero3/checkpoint"), "--max-shard-size", "2KB"], "fp8"),
    ("to-states", [str(FIXTURES / "zero3/bf16_w2/checkpoint"), "--max-shard-size", "20KB"], "states"),
    ("average", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--slerp", "0.3"], "slerp"),
    ("slim", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--drop", "optimizer"], "slim"),
    ("delta", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--max-shard-size", "200"], "weight_v000001"),
    ("apply", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--max-shard-size", "400"], "applied"),
    ("to-fp32", [str(MERGED / "checkpoint"), "--merge-lora", "--base", str(MERGED / "base")], "merged"),
]
COMPUTED: list[tuple[str, list[str], str]] = [
    *(("to-fp8", [str(GGUF), "--scheme", scheme], scheme) for scheme in ("block128", "channel", "tensor")),
    ("to-bf16", ["block128"], "dequantised"),
    *(
        ("to-gguf", [str(FIXTURES / "transformers/llama_zero3/checkpoint"), "--tokenizer", "none", "--type", kind], out)
        for kind, out in (("q8_0", "q.gguf"), ("f16", "f.gguf"), ("f32", "parts"))
    ),
    ("to-gguf", [str(GGUF), "--type", "q8_0", "--pre-tokenizer", "llama-bpe", "--split-max-size", "30KB"], "split"),
    ("to-bf16", [str(FIXTURES / "gguf/llama/llama.q8_0.gguf"), "--max-shard-size", "20KB"], "of_gguf"),
    ("average", [str(FIXTURES / "zero2/bf16_w2/checkpoint")], "mean"),
    ("average", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--weights", "0.25,0.5", "--max-shard-size", "9KB"], "sum"),
    ("average", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--ema", "0.9", "--dtype", "fp16"], "ema.bin"),
    ("average", [str(FIXTURES / "zero2/bf16_w2/checkpoint"), "--task-vector", str(FIXTURES / "zero2/fp16_w2/checkpoint")],
     "moved.safetensors"),
    ("to-states", [str(FIXTURES / "states/adamw8bit_w1/checkpoint")], "quantised"),
    ("to-states", [str(FIXTURES / "megatron_legacy/tied_pp2_dp2/checkpoint"), "--include", "exp_avg/*"], "legacy"),
    *(("to-fp32", [str(FIXTURES / "peft" / kind / "checkpoint"), "--merge-lora", "--base", str(FIXTURES / "peft" / kind / "base"),
       *more], kind) for kind, more in (("lora_zero2", []), ("lora_zero3", ["--max-shard-size", "3KB"]))),
]  # fmt: skip
BESIDE = {
    "average": str(FIXTURES / "zero3/bf16_w2/checkpoint"), "delta": str(FIXTURES / "zero2/fp16_w2/checkpoint"),
    "apply": "weight_v000001",
}  # fmt: skip
"""A second checkpoint that a command takes, or an output of the job before."""


def test_srun_without_torch(zero2: Path, tmp_path: Path) -> None:
    same_from_any_number(JOBS, (1, 3), zero2, tmp_path)


@proofs.only
def test_what_is_computed_on_the_way_is_the_same(zero2: Path, tmp_path: Path) -> None:
    same_from_any_number(COMPUTED, (1, 2, 5), zero2, tmp_path)


def same_from_any_number(
    jobs: list[tuple[str, list[str], str]], sizes: tuple[int, ...], zero2: Path, tmp_path: Path
) -> None:
    trials, outs = [], []
    for command, (checkpoint, *more), name in jobs:
        for size in sizes:
            outs.append(tmp_path / str(size) / name)
            outs[-1].parent.mkdir(exist_ok=True)
            source = (
                checkpoint if os.path.isabs(checkpoint) else str(outs[-1].parent / checkpoint if checkpoint else zero2)
            )
            others = [str(tmp_path / "1" / BESIDE[command])] if command in BESIDE else []
            trials.append({"size": size, "arguments": [command, source, *others, str(outs[-1]), *more]})
    for done, out, trial in zip(started(*trials), outs, trials, strict=True):
        assert done["codes"] == [0] * trial["size"], (trial, done["err"])
        assert done["out"][0].startswith(str(out)) and not any(done["out"][1:])
        assert contents(out) == contents(tmp_path / "1" / out.name)
    assert sorted(path.name for path in (tmp_path / str(sizes[-1])).iterdir()) == sorted(
        path.name for path in (tmp_path / "1").iterdir()
    )


def test_a_call_of_every_rank(zero2: Path, tmp_path: Path) -> None:
    """In Python, under torchrun; it is the same as that of one process."""
    script = tmp_path / "call.py"
    script.write_text("import sys, zckpt\nprint(zckpt.convert(*sys.argv[1:], dtype='bf16', together=True).out)\n")
    launcher = [f"{programs()}/torchrun", "--standalone", "--nproc_per_node=2"]
    out, one = tmp_path / "out", tmp_path / "one"
    done = subprocess.run(
        [*launcher, str(script), str(zero2), str(out)], env=ENVIRONMENT, capture_output=True, text=True, check=False,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    zckpt.convert(zero2, one, dtype="bf16")
    assert contents(out) == contents(one)


@pytest.mark.parametrize("world", [2, 3])
def test_torchrun(world: int, zero2: Path, tmp_path: Path) -> None:
    out, one = tmp_path / "out", tmp_path / "one"
    arguments = ["to-bf16", str(zero2), str(out), *SMALL, "--json"]
    checkpoint = zero2
    if world == 3:
        out, one, checkpoint = tmp_path / "out.bin", tmp_path / "one" / "out.bin", FIXTURES / "zero3/w12/checkpoint"
        arguments = ["to-bf16", str(checkpoint), str(out), "--json"]
    torchrun = [f"{programs()}/torchrun"] if world == 3 else [sys.executable, "-m", "torch.distributed.run"]
    launcher = [*torchrun, "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run(
        [*launcher, "-m", "zckpt", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["out"] == str(out)
    zckpt.convert(checkpoint, one, dtype="bf16", options=Options(max_shard_size="300KB"))
    assert contents(out) == contents(one)


def test_overflows_of_all_are_added(tmp_path: Path) -> None:
    weights = torch.zeros(90_000)
    weights[::30_000] = torch.tensor([1e30, 2e30, 3e30])
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"w": weights}], 2)
    arguments = ["to-fp16", str(checkpoint), str(tmp_path / "out"), "--json"]
    refused, clamped = started(
        {"size": 3, "arguments": arguments}, {"size": 3, "arguments": [*arguments, "--overflow", "clamp"]}
    )
    assert refused["codes"] == [2, 2, 2] and "too large" in refused["err"][0] and "process 0" in refused["err"][2]
    assert json.loads(refused["out"][0])["error"] == "cast" and not any(refused["out"][1:])
    assert clamped["codes"] == [0, 0, 0]
    assert json.loads(clamped["out"][0])["overflows"]["w"]["count"] == 3


# ---- who is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["slurm", "env"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed(launcher: str, victim: int, zero2: Path, tmp_path: Path) -> None:
    arguments = ["to-bf16", str(zero2), str(tmp_path / "out"), *SMALL]
    trial = {"size": 2, "launcher": launcher, "arguments": arguments, "constants": EARLY}
    whole = {**trial, "arguments": ["to-bf16", str(zero2), str(tmp_path / "whole"), *SMALL], "size": 1}
    killed, again, alone = started({**trial, "kill": [victim, 2]}, {**trial, "size": 3}, {**whole, "launcher": "slurm"})
    survivor = 1 - victim
    assert killed["codes"][victim] == -signal.SIGKILL and killed["codes"][survivor] == 2
    assert killed["seconds"] < 60
    told = killed["err"][survivor]
    if launcher == "slurm" or victim == 1:
        assert "is gone" in told and f"process {victim} of 2" in told and "Run the same command again" in told
    else:
        assert "lost touch" in told or "is gone" in told  # the store went with its process
    assert again["codes"] == [0, 0, 0], again["err"]
    assert alone["codes"] == [0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_one_process_goes_on_where_three_ended(zero2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["to-bf16", str(zero2), str(out), *SMALL]
    (killed,) = started({"size": 3, "arguments": arguments, "constants": {**EARLY, **LATE}, "kill": [2, 1]})
    assert killed["codes"] == [2, 2, -signal.SIGKILL] and not out.exists()
    report = zckpt.convert(zero2, out, dtype="bf16", options=Options(max_shard_size="300KB"))
    assert report.kept >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_torchrun_loses_a_process(zero2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "zckpt"]
    arguments = ["to-bf16", str(zero2), str(out), *SMALL]
    running = subprocess.Popen(
        [*launcher, *arguments, "--limit-rate", "200KB"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    journal, until = tmp_path / ".out.zckpt" / "journal", time.monotonic() + HANG_S
    while not journal.exists() and running.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    lock = tmp_path / ".out.zckpt" / "lock"
    lead = int(lock.read_text().split()[1])
    family = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    for child in family:
        if int(child) != lead and b"zckpt" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    _, told = running.communicate(timeout=HANG_S)
    assert running.returncode != 0 and not out.exists()
    assert "process 1 of 2" in told or "process 0 of 2" in told
    zckpt.convert(zero2, out, dtype="bf16", options=Options(max_shard_size="300KB"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_goes_wrong_is_told_to_all(zero2: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(zero2, tmp_path / "ckpt")
    out = str(tmp_path / "out")
    arguments = ["to-bf16", str(zero2), out, *SMALL]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("x")
    different, others, absent, exists, elsewhere = started(
        {"size": 3, "arguments": arguments, "of": {"1": ["to-fp32", *arguments[1:]]}},
        {"size": 2, "arguments": arguments, "of": {"1": ["to-bf16", str(checkpoint), out, *SMALL]}},
        {"size": 3, "arguments": arguments, "absent": [1], "constants": {"zckpt.team.together": {"JOIN_S": 3.0}}},
        {"size": 2, "arguments": ["to-bf16", str(zero2), str(tmp_path / "there")]},
        {"size": 2, "arguments": arguments, "constants": {"zckpt.team.together": {"JOIN_S": 1.0, "LEAVE_S": 1.0}},
         "of": {"1": ["to-bf16", str(zero2), f"{out}2"]}},
    )  # fmt: skip
    assert different["codes"] == [2, 2, 2]
    for told in different["err"]:
        assert "different arguments" in told and "process 1: to-fp32" in told and "process 0: to-bf16" in told
    assert others["codes"] == [2, 2] and "different arguments" in others["err"][0]
    assert absent["codes"] == [2, None, 2]
    assert all("processes 1 of 3 did not come" in absent["err"][rank] for rank in (0, 2))
    assert exists["codes"] == [2, 2] and all("already exists" in told for told in exists["err"])
    assert elsewhere["codes"] == [2, 2] and all("did not come" in told for told in elsewhere["err"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "there"]


# ---- the team itself ---------------------------------------------------------------------------------------------------


def both(path: Path, first: Any, second: Any, lost_s: float = 60.0) -> list[BaseException | None]:
    """Two members of a team in two threads; how each ended."""
    ended: list[BaseException | None] = [None, None]

    def member(rank: int, work: Any) -> None:
        try:
            with Team(rank, 2, DirectoryRendezvous(str(path / "board")), lost_s) as those:
                work(those)
        except BaseException as error:
            ended[rank] = error

    threads = [Thread(target=member, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ended


def test_a_machine_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "BEAT_S", 0.1)
    monkeypatch.setattr(together, "LEAVE_S", 1.0)

    def silent(those: Team) -> None:
        those._over.set()
        time.sleep(4)

    ended = both(tmp_path, lambda those: those.meet(), silent, lost_s=1.0)
    assert isinstance(ended[0], OutputError) and "was silent for" in ended[0].found
    assert not (tmp_path / "board").exists()


def test_an_error_keeps_its_kind(tmp_path: Path) -> None:
    def fails(those: Team) -> None:
        raise InconsistentError("files that do not fit", file="x")

    for first, second in ((fails, lambda those: those.meet()), (lambda those: those.meet(), fails)):
        ended = both(tmp_path, first, second)
        assert all(isinstance(error, InconsistentError) for error in ended)
        assert all("files that do not fit" in str(error) for error in ended)


def test_words_are_heard(tmp_path: Path) -> None:
    heard: list[Any] = []

    def lead(those: Team) -> None:
        heard.append(those.meet("a"))
        those.meet()
        heard.append(list(those.news()))

    def follow(those: Team) -> None:
        heard.append(those.meet("b"))
        for number in range(3):
            those.post({"n": number})
        those.meet()

    (tmp_path / "board").mkdir()
    for name, text in {"welcome": '{"words": {"1": "old"}, "absent": []}', "hello.1": "old"}.items():
        (tmp_path / "board" / name).write_text(text)  # of an earlier run
    assert both(tmp_path, lead, follow) == [None, None]
    assert heard == [["a", "b"], ["a", "b"], [(1, {"n": 0}), (1, {"n": 1}), (1, {"n": 2})]]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_planted_where_processes_meet(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "board").symlink_to(victim) if kind == "link" else (tmp_path / "board").write_text("x")
    with pytest.raises(OutputError, match="is in the way"):
        DirectoryRendezvous(str(tmp_path / "board")).put("hello/1", b"x")
    with pytest.raises(OutputError, match="is in the way"):
        DirectoryRendezvous(str(tmp_path / "board")).open()
    assert list(victim.iterdir()) == []


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, (0, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a batch script
        ({**STEP, "SLURM_NTASKS": "8"}, (1, 8)),
        ({**STEP, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, (1, 4)),
        (TORCH, (1, 2)),
        ({**STEP, "SLURM_NTASKS": "8", **TORCH}, (1, 2)),  # torchrun under srun
        ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),
    ],
)
def test_ranks_that_launchers_give(environ: dict[str, str], wanted: tuple[int, int]) -> None:
    found = detect_launcher(environ)
    assert (found.rank, found.size) == wanted


@pytest.mark.parametrize("bad", [{"RANK": "2"}, {"RANK": "x"}, {"WORLD_SIZE": "-1"}])
def test_impossible_ranks(bad: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="impossible number"):
        detect_launcher({**TORCH, **bad})


def test_a_library_call_is_alone(zero2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a training script, one rank converts what it likes."""
    monkeypatch.setattr(together, "_asked", False)  # the command line may have run in this process
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    assert zckpt.convert(zero2, tmp_path / "out").kept == 0
