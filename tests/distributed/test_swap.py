"""Runs whose weights and states are in files (device nvme): what `swaps` gives on two ranks, and one under a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from hangs import HANG_S
from ranks import BARE, run_ranks
from standby import programs

from zckpt.base.errors import OutputError
from zckpt.checks.verify import verify
from zckpt.drop_in import get_fp32_state_dict_from_zero_checkpoint
from zckpt.runtime.swapping.files import SwapFile

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("swaps")
    run_ranks(2, path, HERE / "swaps.py", BARE)
    yield path


@pytest.fixture(scope="module")
def told(home: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(2)]


pytestmark = pytest.mark.xdist_group("swap")


@proofs.MORE
@pytest.mark.parametrize("what", ["parity", "resumes"])
def test_losses_are_those_of_the_run_in_memory(told: list[dict[str, Any]], what: str) -> None:
    for found in told:
        assert found[what]
        assert {name: wanted for name, (wanted, _) in found[what].items()} == {
            name: losses for name, (_, losses) in found[what].items()
        }
        assert all(len(set(losses)) == len(losses) for losses, _ in found[what].values())


def test_a_weight_that_is_changed_between_steps_is_gathered_as_it_is(told: list[dict[str, Any]]) -> None:
    for found in told:
        memory, files, cached = found["changed"]
        assert memory == files == cached


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_is_named_and_a_load_mends_the_run(told: list[dict[str, Any]], what: str) -> None:
    for found in told:
        (first, second), wanted, after = found["faults"][what]
        verb = "written" if what == "write" else "read"
        assert first[0] == "OutputError"
        assert "zckpt-swap-" in first[1] and f"cannot be {verb}" in first[1] and "Input/output error" in first[1]
        assert second[0] == "InconsistentError" and "failed half-way" in second[1] and "Input/output error" in second[1]
        assert after == wanted


def test_a_disk_that_fails_in_a_load_is_named(told: list[dict[str, Any]]) -> None:
    for found in told:
        said = found["faults"]["load"]
        assert "zckpt-swap-" in said and "cannot be written" in said and "No space left" in said
        assert "load a checkpoint again" in said


@proofs.MORE
def test_saves_are_whole_and_the_same_as_those_from_memory(home: Path, told: list[dict[str, Any]]) -> None:
    assert told
    for stage in (2, 3):
        memory, files = (home / f"{name}{stage}" / "t" for name in ("memory", "files"))
        assert sorted(p.name for p in memory.iterdir()) == sorted(p.name for p in files.iterdir())
        assert verify(files).ok
        one, other = (get_fp32_state_dict_from_zero_checkpoint(str(path.parent)) for path in (memory, files))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for path in memory.glob("*optim_states.pt"):
            assert same(
                *(torch.load(root / path.name, weights_only=False)["optimizer_state_dict"] for root in (memory, files))
            )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "ds_config")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return True


def test_swap_files_are_gone_when_their_processes_are(home: Path, told: list[dict[str, Any]]) -> None:
    assert told[0]["left"]
    assert list(home.glob("zckpt-swap-*")) == []


LIMITED = """
import ctypes, resource, sys, torch
from torch import nn
from zckpt import runtime
ctypes.CDLL(None).mallopt(-3, 262144)  # M_MMAP_THRESHOLD: what is freed goes back to the system
torch.set_num_threads(1)
torch.manual_seed(0)
nvme, offloads = sys.argv[1], sys.argv[2] == "offloads"
with runtime.zero.Init():
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(36)))
numel = sum(rows.numel() for rows in [torch.empty(768, 769, device="meta")] * 36)
device = {"device": "nvme", "nvme_path": nvme, "max_in_cpu": 0}
zero = {"stage": 3, "sub_group_size": 1 << 18}
if offloads:
    zero |= {"offload_param": {**device, "buffer_size": 1 << 20}, "offload_optimizer": {"device": "nvme", "nvme_path": nvme}}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": zero}
config["aio"] = {"queue_depth": 2}
now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = now + 5 * numel  # in memory it takes 12 numel beside the rows of zero.Init, which are there by now
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
engine = runtime.initialize(model=model, config=config, wrap=nn.Linear)[0]
for step in range(3):
    x = torch.randn(2, 768, generator=torch.Generator().manual_seed(step))
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item().hex())
engine.save_checkpoint(nvme + "/save", tag="t")
"""


def limited(path: Path, kind: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = path / f"{kind}.py"
    script.write_text(LIMITED if kind != "unlimited" else free_of_limits())
    command = [f"{programs()}/python", str(script), str(path), kind]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)


def free_of_limits() -> str:
    return LIMITED.replace("resource.setrlimit(", "(lambda *_: None)(")


def test_a_model_whose_states_exceed_the_memory_of_the_process(tmp_path: Path) -> None:
    """A limit that the run in memory exceeds and the run in files keeps, with the same losses as without any limit."""
    failed, done, wanted = (limited(tmp_path, kind) for kind in ("memory", "offloads", "unlimited"))
    assert failed.returncode != 0 and "alloc" in failed.stderr, failed.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert wanted.returncode == 0 and done.stdout == wanted.stdout and done.stdout.count("loss") == 3


def test_files_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    code = "import sys, os, signal; from zckpt.runtime.swapping.files import SwapFile; f = SwapFile(sys.argv[1]); print(f.path)"
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path)],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    (tmp_path / "zckpt-swap-of-somebody").write_text("no swap file")
    assert os.path.exists(killed)
    first = SwapFile(str(tmp_path))
    second = SwapFile(str(tmp_path))
    assert not os.path.exists(killed) and os.path.exists(first.path) and os.path.exists(second.path)
    assert (tmp_path / "zckpt-swap-of-somebody").exists()
    first.close()
    assert not os.path.exists(first.path) and os.path.exists(second.path)


@proofs.MORE
def test_a_run_goes_on_after_its_ranks_were_killed(tmp_path: Path) -> None:
    """In the update of a step and in a save; `swap_kills` compares losses, verifies the checkpoint and looks for swap files."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [f"{programs()}/python", str(HERE / "swap_kills.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    *before, last = told["began"]
    assert len(before) == (8 if proofs.IS_WHOLE else 5) and told["counts"]["step"]["write"] > 20
    assert set(before) == {1} and last == 2, "the last kill comes after the save is published"


def test_a_full_disk_is_an_error_that_says_how_much_is_missing(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from zckpt.runtime.swapping.files import SwapFile;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "SwapFile(sys.argv[1]).reserve(1 << 22)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "the swap file cannot grow" in done.stderr and "4.19 MB more" in done.stderr and str(tmp_path) in done.stderr
    with pytest.raises(OutputError, match="no swap file can be made here"):
        SwapFile("/proc/nowhere")
