"""transformers' Trainer and accelerate on this engine, against the same on DeepSpeed itself: losses, checkpoints, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import proofs
import pytest
from hangs import HANG_S
from ranks import DEEPSPEED_TRAINER, fork_ranks, run_ranks

import zckpt

pytest.importorskip("deepspeed")

HERE = Path(__file__).parent
BOUND = 2e-6
"""Of a loss: four of fp32's steps at 4; the two engines add the ranks' gradients in different orders."""
pytestmark = pytest.mark.xdist_group("trainer")  # one process, or what they share is made twice

STAGES = [f"stage {stage}" for stage in range(4)]
RUNS = [*STAGES, "LoRA 3"]
FILES = {
    "config.json", "generation_config.json", "global_step2", "latest", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth",
    "trainer_state.json", "training_args.bin", "zero_to_fp32.py",
}  # fmt: skip

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both engines, each on two ranks of its own, at the same time; zckpt's are torchrun's, with an order of sets for each."""
    home = tmp_path_factory.mktemp("trainer")
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    worker = [str(HERE / "trainer_worker.py"), str(home)]
    logs = {engine: home / f"{engine}.log" for engine in ("zckpt", "deepspeed")}
    for engine in logs:
        (home / engine).mkdir()
    with ThreadPoolExecutor() as pool, logs["zckpt"].open("w") as log:
        theirs = pool.submit(
            fork_ranks, 2, [*worker, "deepspeed"], logs["deepspeed"], DEEPSPEED_TRAINER, HF_HUB_OFFLINE="1"
        )
        ours = subprocess.run(
            [*launcher, "-m", "zckpt", "run", *worker, "zckpt"], env={**os.environ, **own}, stdout=log,
            stderr=subprocess.STDOUT, timeout=HANG_S, check=False,
        )  # fmt: skip
    for engine, well in (("zckpt", not ours.returncode), ("deepspeed", not any(theirs.result()))):
        told = [line for line in logs[engine].read_text().splitlines() if "rank" in line]
        assert well, "\n".join([engine, *told[-40:]])
    return home


@pytest.fixture(scope="module")
def results(home: Path) -> dict[str, Results]:
    return {engine: json.loads((home / f"{engine}_0.json").read_text()) for engine in ("zckpt", "deepspeed")}


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    """Rows of numbers within the bound; at stage 0 DeepSpeed's Trainer has no norm of the gradients in fp32."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        pairs = [(a, b) for a, b in zip(mine, other, strict=True) if a is not None and b is not None]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=BOUND), (ours, theirs)


@pytest.mark.parametrize("run", RUNS)
def test_the_trainer(results: dict[str, Results], home: Path, run: str) -> None:
    """Losses, norms, rates and evaluations are DeepSpeed's; the best checkpoint is loaded at the end; files are the Trainer's."""
    ours, theirs = (results[engine][run] for engine in ("zckpt", "deepspeed"))
    assert_alike(ours["history"], theirs["history"])
    at_save, at_end = (row[1] for row in ours["history"] if len(row) == 2)
    assert ours["best"] == pytest.approx(at_save, abs=BOUND) and at_end < at_save - 1e-3 and ours["steps"] == 4
    found = {path.name for path in (home / "zckpt" / run / "checkpoint-2").iterdir()}
    assert found >= FILES if run != "LoRA 3" else "adapter_model.safetensors" in found
    assert results["zckpt"][f"{run} weights"] == pytest.approx(at_save, abs=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_resuming_across_the_engines(results: dict[str, Results], run: str) -> None:
    """Each goes on from the other's checkpoint as the other itself went on."""
    for resumed, whole in (("zckpt", "deepspeed"), ("deepspeed", "zckpt")):
        assert_alike(results[resumed][f"{run} resumed"]["history"], results[whole][run]["history"])


def test_bf16_with_the_trainers_optimizer_and_schedule(results: dict[str, Results]) -> None:
    whole, resumed = (results["zckpt"][f"bf16, the Trainer's optimizer{end}"]["history"] for end in ("", ", resumed"))
    assert whole == resumed and whole[3][1] == pytest.approx(results["zckpt"]["stage 3"]["history"][3][1], abs=0.02)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_with_accelerate(results: dict[str, Results], stage: int) -> None:
    ours, theirs = (results[engine][f"accelerate {stage}"] for engine in ("zckpt", "deepspeed"))
    assert_alike(ours["losses"], theirs["losses"])
    assert_alike(ours["again"], ours["losses"][4:])
    assert ours["shapes"] == theirs["shapes"] and ours["shapes"]["model.embed_tokens.weight"] == [64, 32]
    assert ours["kind"].removeprefix("FSDP") == theirs["kind"]


@pytest.fixture(scope="module")
def resharded(home: Path) -> dict[str, Any]:
    """DeepSpeed on one rank goes on from what zckpt made of the directories of two."""
    run_ranks(1, home, HERE / "resharded_worker.py", DEEPSPEED_TRAINER, HF_HUB_OFFLINE="1")
    return json.loads((home / "resharded.json").read_text())


@pytest.mark.parametrize("kind", ["stage 2, resharded", "stage 1, universal", "LoRA 3, resharded"])
def test_the_trainer_goes_on_at_another_world_size(
    results: dict[str, Results], resharded: dict[str, Any], kind: str
) -> None:
    """`resume_from_checkpoint` of the output gives the losses, norms, rates and evaluations of the run that never stopped."""
    found, whole = resharded["results"][kind], results["deepspeed"][kind.split(",")[0]]
    assert [row[0] for row in found["history"]] == [1, 2, 3, 4, 2, 4] and found["steps"] == 4
    assert_alike(found["history"], whole["history"])
    assert any("rank 1" in note and "random states" in note for note in resharded["notes"]["reshard"])


@pytest.mark.parametrize("kind", ["resharded", "universal"])
def test_accelerate_goes_on_at_another_world_size(
    results: dict[str, Results], resharded: dict[str, Any], kind: str
) -> None:
    """Losses and norms; accelerate's own schedule takes a step for each rank, so it only goes on where it was."""
    found = resharded["results"][f"accelerate 2, {kind}"]["again"]
    assert_alike([row[:2] for row in found], [row[:2] for row in results["deepspeed"]["accelerate 2"]["again"]])
    steps = 2 * 2
    assert [row[2] for row in found if len(row) == 3] == pytest.approx([5e-3 / (1 + steps + n) for n in (1, 2)])


@proofs.only
@pytest.mark.parametrize(("before", "ranks"), [(2, 4), (1, 2)])
def test_the_trainer_goes_on_with_more_ranks(
    before: int, ranks: int, home: Path, results: dict[str, Results], resharded: dict[str, Any]
) -> None:
    """DeepSpeed under transformers' Trainer, from a save of fewer ranks, at every stage: the losses of the run that went on."""
    source = home / "deepspeed" / "stage 2" if before == 2 else home / "resharded" / "alone"
    for stage in (1, 2, 3):
        out = home / "resharded" / f"on {ranks}" / f"stage {stage}"
        zckpt.reshard(source / "checkpoint-2", out, world_size=ranks, stage=stage)
        assert {f"rng_state_{rank}.pth" for rank in range(before)} >= {path.name for path in out.glob("rng_state*")}
    run_ranks(ranks, home, HERE / "resharded_worker.py", DEEPSPEED_TRAINER, HF_HUB_OFFLINE="1")
    found = json.loads((home / f"grown_{ranks}_0.json").read_text())
    whole = results["deepspeed"]["stage 2"] if before == 2 else resharded["results"]["alone"]
    assert len(found) == 3
    for name, one in found.items():
        assert one["steps"] == 4, name
        assert_alike(one["history"], whole["history"])
