"""The engine on several ranks: what `checks` gives, and what it must be."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proofs
import pytest
from hangs import HANG_S
from standby import programs

from zckpt.runtime.sharding import watch

Outcome = Callable[..., list[Any]]
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}


def distance(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def plain(outcome: Outcome) -> dict[str, list[float]]:
    return outcome("checks.py", 1, "losses")[0]


@proofs.MORE
@pytest.mark.parametrize(
    ("world", "precision"), [*((world, precision) for world in (1, 2) for precision in TOLERANCES), (4, "fp32")]
)
def test_losses_are_the_same_at_every_stage_and_world(
    outcome: Outcome, plain: dict[str, list[float]], world: int, precision: str
) -> None:
    given = outcome("checks.py", world, "losses")
    assert all(rank == given[0] for rank in given)
    found = {name: losses for name, losses in given[0].items() if name.startswith(precision)}
    assert {name.split()[1] for name in found} == set("0123")
    for name, losses in found.items():
        assert losses[-1] < losses[0]
        assert distance(losses, plain[f"{precision} 0 1"]) <= TOLERANCES[precision], name
        assert distance(losses, plain["fp32 0 1"]) <= TOLERANCES[precision], name


def test_groups_and_offloading_change_no_loss(outcome: Outcome, plain: dict[str, list[float]]) -> None:
    [given, *_] = outcome("checks.py", 4, "losses_of_groups")
    assert {"hpz 1", "mics 1", "mics 2", "offload 1 1", "offload 2 1", "offload 3 1"} == given.keys()
    for name, losses in given.items():
        assert distance(losses, plain["fp32 0 1"]) <= 1e-6, name


def test_every_optimizer_trains_alike_on_shards(outcome: Outcome) -> None:
    [alone] = outcome("checks.py", 1, "losses_of_optimizers")
    [given, *_] = outcome("checks.py", 2, "losses_of_optimizers")
    for name, losses in given.items():
        assert distance(losses, alone[f"{name.split()[0]} 0"]) <= 1e-5, name
    assert len({tuple(losses) for name, losses in alone.items() if name.endswith("0")}) == 6


def test_every_element_is_in_one_part(outcome: Outcome) -> None:
    ranks = outcome("checks.py", 2, "parts_and_wholes")
    for stage, half in (("0", "torch.float32"), ("1", "torch.bfloat16"), ("3", "torch.bfloat16")):
        for parts in zip(*(rank[stage] for rank in ranks), strict=True):
            name, shape, start, count, replicated, dtype, group, stored, _, states, scalars, _ = parts[0]
            total = 1
            for length in shape:
                total *= length
            assert all(part[:2] == [name, shape] and part[8] == part[3] and part[11] for part in parts)
            if replicated or stage == "0":
                assert all((part[2], part[3]) == (0, total) for part in parts)
                assert replicated == (shape == [] or total == 0)
            else:
                assert (start, count) == (0, parts[1][2]) and count + parts[1][3] == total
                assert count % (total // shape[0]) == 0
            trained = "frozen" not in name and total > 0
            assert (group is not None) == trained and dtype == half
            assert stored == ("torch.float32" if trained else half)
            assert (states, scalars) == ((["exp_avg", "exp_avg_sq"], {"step": 2.0}) if trained else ([], {}))
        names, aliases, buffers, counters, optimizer, number, precision, shard_rank, shard_size = ranks[1][
            f"{stage} run"
        ]
        assert aliases == {"head.weight": "embed.weight"} and buffers == ["seen", "shift"] and optimizer == "AdamW"
        assert counters == {
            "global_steps": 2, "global_samples": 16, "micro_steps": 2, "pending_micro_steps": 0, "skipped_steps": 0
        }  # fmt: skip
        assert (str(number), precision) == (stage, "fp32" if stage == "0" else "bf16")
        assert (shard_rank, shard_size) == ((0, 1) if stage == "0" else (1, 2))
        assert names == [[part[0] for part in ranks[0][stage] if part[6] == 0]]


def test_clipping_by_the_global_norm(outcome: Outcome) -> None:
    for errors in outcome("checks.py", 2, "clipping"):
        assert len(errors) == 8 and max(errors) < 1e-6


def test_an_overflow_on_one_rank_skips_the_step_on_every_rank(outcome: Outcome) -> None:
    ranks = outcome("checks.py", 2, "overflow")
    assert ranks[0] == ranks[1]
    infinite = float("inf")
    for stage in "0123":
        assert ranks[0][stage] == [[1, 16, infinite, False], [2, 8, infinite, False], [3, 4, infinite, False]]
    assert ranks[0]["bf16"] == [1, True]


def test_a_fixed_loss_scale_stays(outcome: Outcome, plain: dict[str, list[float]]) -> None:
    [given, *_] = outcome("checks.py", 2, "static_scale")
    assert distance(given[0], plain["fp32 0 1"][:4]) < 1e-2
    assert given[1:] == [128, 1, float("inf")]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_init_gives_the_plain_models_weights(outcome: Outcome, world: int) -> None:
    for given in outcome("checks.py", world, "init"):
        assert given == {"habits": [True] * 3, "small": [True] * 3, "trained": True, "existing": True}


def test_init_of_real_models(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "init_of_transformers"):
        assert given == [True] * 6


def test_init_follows_rank_0(outcome: Outcome) -> None:
    assert outcome("checks.py", 2, "init_of_other_seeds") == [[True] * 3] * 2


def test_init_never_holds_the_model(outcome: Outcome) -> None:
    """288 MiB of weights: 72 in rows, 36 whole at a time, and what allocators keep."""
    assert max(outcome("checks.py", 4, "init_keeps_memory_small")) < 230


def test_gathered_parameters(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "gathered"):
        assert len(given) == 14 and all(given.values()), given


def test_modules_as_scripts_use_them(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "modules_as_scripts_use_them"):
        assert "zckpt.live.save_pretrained(engine, dir, dtype='fp32')" in given.pop("in parts")
        assert "engine.load_module_state_dict" in given.pop("loaded into parts")
        assert len(given) == 37 and all(given.values()), [name for name, ok in given.items() if not ok]


@pytest.mark.parametrize("world", [2, 4])
def test_a_run_repeats_itself_from_a_save(outcome: Outcome, world: int) -> None:
    for given in outcome("checks.py", world, "again_from_a_save"):
        assert len(given) == {2: 12, 4: 4}[world] and all(given.values()), [
            name for name, ok in given.items() if not ok
        ]


def test_a_new_engine_continues_from_a_save(outcome: Outcome) -> None:
    assert outcome("checks.py", 2, "fresh_from_a_save") == [{"adam": True, "offload": True}] * 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_of_several_dtypes(outcome: Outcome, world: int) -> None:
    [alone] = outcome("checks.py", 1, "several_dtypes")
    for given in outcome("checks.py", world, "several_dtypes"):
        for losses in given:
            assert distance(losses, alone[0]) < 2e-3  # bf16 gradients of another number of samples


def test_what_the_caller_hands_in(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "handed_in"):
        words = {name: value for name, value in given.items() if isinstance(value, str)}
        numbers = {name: value for name, value in given.items() if not isinstance(value, str)}
        assert len(numbers) == 6 and max(numbers.values()) < 2e-6, numbers
        assert "Adafactor" in words["unknown kind"] and "zero_allow_untested_optimizer" in words["unknown kind"]
        assert "does not have" in words["stranger"] and "schedule" in words["lone schedule"]


@proofs.MORE
def test_ways_to_accumulate(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "accumulation"):
        assert len(given) == 13
        assert all(given[f"by hand {stage}"] is True for stage in range(4))
        assert max(value for value in given.values() if value is not True) < 2e-6, given


def test_unused_parameters(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "unused_parameters"):
        assert all(given[stage] == [True] * 6 for stage in "0123")  # decay acts on all
        assert "right.weight" in given["strict"] and "never.weight" in given["strict"]


@pytest.mark.parametrize("world", [1, 2])
def test_inference_without_an_optimizer(outcome: Outcome, world: int) -> None:
    assert outcome("checks.py", world, "inference") == [[True] * 6] * world


def test_evaluation_disturbs_nothing(outcome: Outcome) -> None:
    for given in outcome("checks.py", 2, "evaluation"):
        assert given == dict.fromkeys("0123", True)


def test_what_an_engine_says_of_itself(outcome: Outcome) -> None:
    ranks = outcome("checks.py", 2, "what_is_said")
    loaded = [batch for said in ranks for batch in said.pop("loaded")]
    assert sorted(number for batch in loaded for number in batch) == list(range(30))
    norm = ranks[0]["norm"]
    for rank, said in enumerate(ranks):
        assert said == {
            "rank": rank, "world": 2, "local": rank, "device": "cpu", "batch": [8, 2, 2], "steps": [2, 4, 0, 16],
            "boundaries": [False, True, False, True], "lr": [0.00075], "norm": norm, "scale": 1.0, "stage": 2,
            "mom": [[0.9, 0.999]],
        }  # fmt: skip


def test_what_is_refused(outcome: Outcome) -> None:
    [said, *_] = outcome("checks.py", 2, "refusals")
    assert "3 x gradient_accumulation_steps 1 x world size 2 = 6" in said["batch"] and "8" in said["batch"]
    assert "divisor of 2" in said["mics"] and "'Block'" in said["wrap"] and "shape [3]" in said["loss"]
    assert "another number of ranks" in said["other ranks"] and "no_such_thing" in said["attribute"]
    assert "as a function" in said["states"] and said["unit"] == "8"  # 3 x 2 linear layers, one frozen, and the rest


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@proofs.MORE
def test_losses_are_deepspeeds(launched: Callable[[str, int], Any], outcome: Outcome, stage: int, kind: str) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    found = [name for name in launched("deepspeed_losses.py", 2) if name.startswith(f"{kind} {stage} ")]
    assert len(found) >= (2 if proofs.IS_WHOLE else 1)
    for name in found:
        for theirs, ours in outcome("deepspeed_losses.py", 2, name):
            assert distance(ours, theirs) <= 1e-5


def test_a_unit_that_one_rank_leaves_out_is_named(tmp_path: Path) -> None:
    """In seconds here, since the watch is impatient; slow ranks are not taken for lost ones."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [f"{programs()}/python", str(Path(__file__).parent / "skips.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=HANG_S)
    said, _ = json.loads(done.stdout)
    assert "In forward 3, after 'blocks.1': rank 0 calls 'blocks.2'; rank 1 calls 'blocks.3'" in said
    assert watch.STILL_S + 2 * watch.LOOK_S < 60


def test_where_forwards_differ() -> None:
    def of(*forwards: tuple[list[int], bool]) -> object:
        return watch.difference({rank: watch.Forward(1, calls, done) for rank, (calls, done) in enumerate(forwards)})

    assert of(([0, 1], False), ([0], False)) is None and of(([0, 1], True), ([0, 1], True)) is None
    assert of(([0, 1], False), ([0], True)) == (1, {0: 1, 1: None})
    assert of(([0, 2], False), ([0, 1], False), ([0], False)) == (1, {0: 2, 1: 1})
    assert of(([], True), ([], False)) is None


def test_the_models_own_state_is_whole_on_one_rank_alone(outcome: Outcome) -> None:
    given = outcome("checks.py", 2, "own_states")
    told = {name: value for rank in given for name, value in rank.items()}
    kinds = ["0 bf16", "1 fp32", "2 bf16", "2 fp16"]
    assert all(
        told[f"{what} {kind}"] for what in ("alone", "parameters", "loaded", "near", "written") for kind in kinds
    )
    refused = [value for name, value in told.items() if name.startswith("refused")]
    assert len(refused) == 3 and all("engine.save_16bit_model(dir) on every rank" in value for value in refused)


def test_a_script_steps_the_optimizer_itself(outcome: Outcome) -> None:
    [given, other] = outcome("checks.py", 2, "scripts_own_steps")
    assert given == other and given["after"] == [True]
    for stage in range(4):
        assert given[f"same {stage}"] and given[f"back {stage}"]
        assert given[f"facts {stage}"] == [[4, 8, 0, False, 0.00075]] * 2
    assert [what.split()[0] for what in given["refused"]] == ["optimizer.step", "a", "the"]
    assert given["unscaled"] == "loss.backward() without the loss scale that fp16 needs"


def test_ranks_that_differ_are_told_at_once(outcome: Outcome) -> None:
    """On every rank, before the first collective that they would hang or die in; nothing is written."""
    for said in outcome("checks.py", 2, "ranks_that_differ"):
        clip, stage, shape, trained, directory, *files = said
        assert "gradient_clipping: 0.5 on rank 0 and 1.5 on rank 1" in clip
        assert "zero_optimization.stage: 2 on rank 0 and 3 on rank 1" in stage
        assert "parameter weight: float32 [4, 4] on rank 0 and float32 [5, 4] on rank 1" in shape
        assert "parameter bias: float32 [4] on rank 0 and float32 [4], not trained on rank 1" in trained
        assert "/of_0 on rank 0 and " in directory and "Nothing was written" in directory
        assert len(files) in (0, 6) and ("latest" in files) == bool(files), files
