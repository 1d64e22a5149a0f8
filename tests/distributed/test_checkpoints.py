"""Checkpoints of the engine: what `saves`, `loads`, `kills` and `deepspeed_goes_on` give, and what must be in the files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from bits import same_bits
from ending import WHOLE
from hangs import HANG_S
from hub_server import TOKEN, HubServer
from safetensors.torch import load_file
from standby import programs

from zckpt.checks.verify import verify
from zckpt.containers import Placeholder, TensorRef, open_container
from zckpt.drop_in import get_fp32_state_dict_from_zero_checkpoint
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import Checkpoint, open_catalog, open_checkpoint

Outcome = Callable[..., list[Any]]
HERE = Path(__file__).parent
SAVES = [f"{stage} {precision}" for stage in range(4) for precision in ("fp32", "bf16", "fp16")]


def all_of(given: dict[str, bool]) -> list[str]:
    return [name for name, fine in given.items() if fine is not True]


def home_of(outcome: Outcome, world: int) -> Path:
    """Where the saves of `saves.py` lie."""
    return Path(outcome("saves.py", world, "for_others")[0][0]).parent


@proofs.MORE
@pytest.mark.xdist_group("saves")
def test_steps_before_and_after_a_save_are_those_of_one_run(outcome: Outcome) -> None:
    for given in outcome("saves.py", 2, "resume"):
        assert len(given) == (24 if proofs.IS_WHOLE else 12) and not all_of(given)


@pytest.mark.xdist_group("saves")
def test_options_that_change_the_layout_resume(outcome: Outcome) -> None:
    for given in outcome("saves.py", 4, "resume_of_groups"):
        assert len(given) == 6 and not all_of(given)


@pytest.mark.xdist_group("saves")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_save_is_loaded_by_other_worlds_and_stages(outcome: Outcome, world: int) -> None:
    for saver in (1, 2, 4):
        outcome("saves.py", saver, "for_others")
    for given in outcome("loads.py", world, "others"):
        assert len(given) == 12 and not all_of(given)


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_of_the_same_layout_is_loaded_the_short_way(outcome: Outcome, world: int) -> None:
    for given in outcome("loads.py", world, "same_layout"):
        assert len(given) == 12 and not all_of(given)


def test_a_save_of_another_layout_is_loaded_the_long_way(outcome: Outcome) -> None:
    first, second, third = "1 (8, 12, 4)", "2 (5, 3, 7)", "3 (5, 3, 7)"
    other = {(place, name) for place in (first, second, third) for name in ("bf16", "fp16")}
    other |= {(first, "round robin"), (second, "round robin"), (second, "aligned"), (third, "sub-groups")}
    for given in outcome("loads.py", 2, "other_layouts"):
        assert len(given) == 14
        for name, loads in given.items():
            place, saved = name.partition(")")[0] + ")", name.partition(") ")[2]
            for loaded, short, right in loads:
                differs = saved != loaded and ((place, saved) in other or (place, loaded) in other)
                assert right is True and short is not differs, (name, loaded)


def test_damage_is_said_as_without_the_short_way(outcome: Outcome) -> None:
    for given in outcome("loads.py", 2, "damaged_saves"):
        assert len(given) == 18
        for name, ((said, as_before), unchanged) in given.items():
            assert said == as_before and said and unchanged, name


@proofs.only
def test_sixteen_ranks_save_and_load(outcome: Outcome) -> None:
    for given in outcome("saves.py", 16, "many_ranks"):
        assert len(given) == 3 and not all_of(given)


@pytest.mark.xdist_group("saves")
def test_generators_data_and_parts(outcome: Outcome) -> None:
    for given in outcome("saves.py", 2, "random_generators_and_data"):
        assert given == {"0": True, "2": True, "3": True}
    for given in outcome("saves.py", 2, "parts_of_a_checkpoint"):
        assert given == dict.fromkeys(
            ("module", "bare", "schedule", "rounded", "trained 2", "trained 3", "left out 2", "left out 3"), True
        )


@pytest.mark.xdist_group("saves")
def test_tags(outcome: Outcome) -> None:
    for given in outcome("saves.py", 2, "tags_and_latest"):
        assert "no checkpoint on rank 1" in given.pop("blind")
        assert given == {
            "nothing": [None, None], "latest": "one", "one": True, "two": True, "one anew": True, "long": True,
            "names": ["README.txt", "latest", "logs", "long", "one", "two", "zero_to_fp32.py"], "only logs": [None, None],
        }  # fmt: skip
    for rank, given in enumerate(outcome("saves.py", 2, "tags_that_differ")):
        assert "'of 0' on rank 0 and 'of 1' on rank 1" in given["FAIL"]
        assert "'of 1' on rank 1. Rank 0's is used" in given["WARN"][0][0] and len(given["WARN"][0]) == 1, rank
        assert given["WARN"][1] == given["IGNORE"][1] == ["README.txt", "latest", "of 0", "zero_to_fp32.py"]
        assert given["IGNORE"][0] == []


@pytest.mark.xdist_group("saves")
def test_what_cannot_be_saved_or_loaded(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("saves.py", 2, "refused_saves")):
        assert (
            "client_state['x'][0] cannot be saved" in given["client"]
            and "__main__.Unknown" in given["client"]
            and "'module'" in given["name"]
        )
        assert (
            "'../x'" in given["tag"]
            and given["left"] == ["a file"]
            and "a file: exists" in given["taken"]
            and given["unchanged"]
        )
        assert "client_state['x']" in given["rank 0"] and ("rank 0:" in given["rank 0"]) == (rank == 1)
        assert "another model" in given["model"] and "Lion" in given["optimizer"] and "exp_avg_sq" in given["optimizer"]


@pytest.mark.xdist_group("saves")
def test_a_load_that_fails_on_one_rank_fails_on_all(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("saves.py", 2, "loads_that_fail_on_one_rank")):
        assert len(given) == 6
        for name, (told, fine) in given.items():
            assert fine is True and ("rank 1: " in told) == (rank == 0), (name, told)
            if name.startswith("cut"):
                assert rank == 1 or told.endswith("Nothing was changed.")
            else:
                assert "KeyError: 'y'" in told and told.endswith("load a checkpoint again before you train on.")


@pytest.mark.xdist_group("saves")
def test_saves_in_the_background(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("saves.py", 2, "in_the_background")):
        assert given["copied"] is given["went on"] is True and given["latest"] == "global_step4"
        assert "cannot be written here" in given["blocked"] and ("rank 0:" in given["blocked"]) == (rank == 1)
        assert "a disk that broke" in given["bad"] and ("rank 1:" in given["bad"]) == (rank == 0)
        assert given["names"] == ["README.txt", "global_step2", "global_step4", "good", "latest", "zero_to_fp32.py"]
        for stage in (1, 3):
            found = given[f"meanwhile {stage}"]
            assert found["written"] is found["stepped"] is True
            assert (
                found["gradients written"][0] and found["gradients written"][1] is found["gradients stepped"][1] is True
            )
            assert "states of the optimizer were changed" in found["behind"]
            assert ("rank 1:" in found["behind"]) == (rank == 0)


@pytest.mark.xdist_group("saves")
def test_ranks_that_do_not_come_are_named(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("saves.py", 2, "some_ranks_only")):
        assert f"rank {1 - rank} did not come" in given["told"] and given["within"] < 60
        assert given["names"] == ["README.txt", "global_step3", "latest", "zero_to_fp32.py"]


@pytest.mark.xdist_group("saves")
def test_older_saves_are_deleted(outcome: Outcome) -> None:
    for given in outcome("saves.py", 2, "last_ones_kept"):
        assert given["names"] == [
            ["global_step0", "step9"], ["global_step0", "step8", "step9"], ["global_step0", "step7", "step8"],
            ["global_step0", "step6", "step7", "step8"], ["global_step0", "step5", "step6"],
        ]  # fmt: skip


@pytest.mark.xdist_group("saves")
def test_a_rank_that_fails_alone_is_named_soon(outcome: Outcome) -> None:
    for rank, given in enumerate(outcome("saves.py", 2, "a_rank_that_fails_alone")):
        for kind in ("foreground", "background"):
            told, seconds = given[kind]
            assert "can't allocate memory" in told and ("rank 1:" in told) == (rank == 0) and seconds < 300
            assert given[f"{kind} left"] == ["README.txt", "first", "latest", "third", "zero_to_fp32.py"]


@pytest.mark.xdist_group("saves")
def test_a_save_takes_little_memory(outcome: Outcome) -> None:
    """Of 576 MiB of masters and moments, half on each rank, and 192 MiB of weights for rank 0's model file."""
    assert max(outcome("saves.py", 2, "memory")) < 256


@pytest.mark.xdist_group("saves")
def test_nodes_without_a_shared_disk(outcome: Outcome) -> None:
    ranks = outcome("saves.py", 2, "without_a_shared_disk")
    home = home_of(outcome, 2)
    for rank, given in enumerate(ranks):
        optim = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        assert given["names"] == ["README.txt", "latest", "stage0", "stage2", "stage3", "zero_to_fp32.py"]
        names = ["mp_rank_00_model_states.pt", optim] if rank == 0 else [optim, "zckpt_rank_1_states.pt"]
        assert sorted(given["2"]) == sorted(f"stage2/{name}" for name in names)
        assert all(given[name] is True for name in ("2 into 2", "2 into 1", "3 into 3", "3 into 1", "a new node"))
        assert given["3"] == [f"stage3/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
    for stage in (2, 3):
        opened = open_catalog(str(home / "node 0"), Reading(tag=f"stage{stage}", also=[str(home / "node 1")]))
        truth = torch.load(home / f"truth of nodes {stage}.pt")
        checkpoint = Checkpoint(opened)
        assert all(same_bits(checkpoint[name], wanted[""]) for name, wanted in truth.items())


@pytest.mark.xdist_group("saves")
@pytest.mark.parametrize("save", SAVES)
def test_the_files_hold_the_run(outcome: Outcome, save: str) -> None:
    """Read back as any checkpoint is: the masters, and plain values for any torch to load."""
    stage, precision = int(save[0]), save.split()[1]
    for world in (1, 2, 4):
        home = home_of(outcome, world) / save
        truth = torch.load(home / "truth.pt")
        with open_checkpoint(str(home)) as checkpoint:
            assert {name for name in checkpoint.catalog if name not in ("shift", "seen")} == truth.keys()
            for name, wanted in truth.items():
                assert same_bits(checkpoint[name], wanted[""]), name
            assert checkpoint.catalog.aliases == {"head.weight": "embed.weight"}
        for path in (home / "global_step3").iterdir():
            has_class = path.name.endswith("optim_states.pt") and (stage == 3 or precision == "fp16")
            if not has_class:
                assert isinstance(torch.load(path, weights_only=True), dict)
            else:
                classes = {str(item) for item in placeholders(open_container(path).root)}
                assert all(name.startswith("deepspeed.runtime.fp16.loss_scaler.") for name in classes) and classes


def placeholders(value: Any) -> Iterator[Placeholder]:
    if isinstance(value, Placeholder):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from placeholders(inner)


@pytest.mark.xdist_group("saves")
def test_deepspeeds_script_converts_to_the_same_bytes(outcome: Outcome, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as theirs
    for save in (save for save in SAVES if save[0] != "0"):
        home = home_of(outcome, 2) / save
        wanted, found = theirs(str(home)), get_fp32_state_dict_from_zero_checkpoint(home)
        without = (
            {name for name in found if name.startswith("frozen") or "nothing" in name} if save[0] == "1" else set()
        )
        assert wanted.keys() == found.keys() - without  # DeepSpeed's saves of stage 1 do not say what is frozen
        for name, tensor in wanted.items():
            frozen = name.startswith("frozen") or "nothing" in name  # which DeepSpeed leaves in half precision
            assert same_bits(tensor.float() if frozen else tensor, found[name]), name


@pytest.mark.xdist_group("saves")
def test_the_script_in_the_checkpoint(outcome: Outcome, tmp_path: Path) -> None:
    home = home_of(outcome, 2) / "2 bf16"
    script = [f"{programs()}/python", "zero_to_fp32.py", "."]
    wanted = get_fp32_state_dict_from_zero_checkpoint(home)
    for arguments in ([str(tmp_path / "pytorch_model.bin")], [f"{tmp_path}/dir/", "--safe_serialization"]):
        subprocess.run([*script, *arguments], cwd=home, check=True, capture_output=True)
    whole = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert whole.keys() == wanted.keys() and all(same_bits(whole[name], wanted[name]) for name in wanted)
    safe = load_file(tmp_path / "dir" / "model.safetensors")
    assert all(same_bits(safe[name], wanted[name]) for name in safe) and len(safe) == len(wanted) - 1
    failed = subprocess.run([*script, str(tmp_path / "x"), "-t", "none"], cwd=home, check=False, capture_output=True)
    assert failed.returncode == 2 and b"error: " in failed.stderr and b"Traceback" not in failed.stderr


@proofs.MORE
def test_a_killed_save_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Many times SIGKILL at random moments of saving, in the foreground and in the background."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        f"{programs()}/python",
        str(HERE / "kills.py"),
        str(tmp_path),
        str(times := 50 if proofs.IS_WHOLE else 12),
        "1",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["killed"] == times


@proofs.MORE
def test_a_save_may_end_at_every_call(tmp_path: Path) -> None:
    """Killed, or because the call fails; with directories that change places in one step, and without; one rank and two."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [f"{programs()}/python", str(HERE / "save_kill_points.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert told.pop("two ranks")["ends"] >= 5 and len(told) == (4 if proofs.IS_WHOLE else 2)
    assert all(given["ends"] > 30 and 0 < given["new"] < given["ends"] for given in told.values())


def test_a_process_ends_when_its_save_is_done(tmp_path: Path) -> None:
    """By its last line, by an exception, without its process group; and a save that fails is told."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", WHOLE: "1"}
    command = [f"{programs()}/python", str(HERE / "ends.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    said = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    statuses = json.loads(done.stdout)
    assert statuses["well"] == statuses["destroyed"] == [0, 0] and statuses["exception"] == [1, 0], said
    assert all(code for how in ("failed", "failed and exception") for code in statuses[how])
    for how in ("well", "exception", "destroyed"):
        assert verify(tmp_path / how, deep=True).ok
        assert sorted(path.name for path in (tmp_path / how).iterdir()) == [
            "README.txt",
            "global_step0",
            "latest",
            "zero_to_fp32.py",
        ]
    for how in ("failed", "failed and exception"):
        assert all("a disk that broke" in said[f"{how}.{rank}"] for rank in (0, 1)) and not list(
            (tmp_path / how).iterdir()
        )
    assert "the script is wrong" in said["exception.0"] and "the script is wrong" in said["failed and exception.0"]


GOING_ON = [
    *SAVES, "2 fp32 round_robin_gradients", "2 bf16 parameter_alignment", "3 bf16 sub_group_size", "1 bf16 data_types",
    "1 fp32 nvme", "2 bf16 nvme", "3 bf16 nvme",
]  # fmt: skip


@proofs.MORE
@pytest.mark.xdist_group("deepspeed goes on")
@pytest.mark.parametrize("variant", GOING_ON)
def test_deepspeed_goes_on(outcome: Outcome, variant: str) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for given in outcome("deepspeed_goes_on.py", 2, variant):
        for name, run in given.items():
            assert run["fine"] and run["lr"] == run["rates"] and run["scale"] == 256.0
            far = max(abs(a - b) / abs(b) for a, b in zip(run["found"], run["wanted"], strict=True))
            if name == "round":
                assert far == 0.0
            elif variant != "0 fp16":  # the two differ there from the second step on, without any checkpoint
                assert far <= (1e-5 if "fp32" in variant else 1e-2), name


@pytest.mark.xdist_group("deepspeed goes on")
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_begins_a_step_again_that_was_saved_between_micro_batches(outcome: Outcome, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for run in outcome("deepspeed_goes_on.py", 2, f"between {stage}"):
        assert run["is_between"] and run["steps"] == 4
        assert max(abs(a - b) / abs(b) for a, b in zip(run["found"], run["wanted"], strict=True)) <= 1e-5


@pytest.mark.xdist_group("deepspeed goes on")
@pytest.mark.parametrize("variant", GOING_ON)
def test_the_files_are_deepspeeds(outcome: Outcome, variant: str) -> None:
    """DeepSpeed's own save, and what this trainer makes of it: the same names, keys, types, shapes and numbers."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    outcome("deepspeed_goes_on.py", 2, variant)
    theirs, ours = pairs_of_files(outcome, variant)
    assert sorted(p.name for p in theirs) == sorted(p.name for p in ours)
    stage, precision = variant[0], variant.split()[1]
    needless = {"param_slice_mappings", *(("loss_scaler",) if stage in "12" and precision != "fp16" else ())}
    for path in theirs:
        a, b = open_container(path).root, open_container(ours[0].parent / path.name).root
        different = [where for where in differences(a, b) if not expected(where, needless)]
        assert not different, (path.name, different[:8])


def pairs_of_files(outcome: Outcome, variant: str) -> tuple[list[Path], list[Path]]:
    number = GOING_ON.index(variant)
    places = outcome("deepspeed_goes_on.py", 2, "home")[0]
    files = [list((Path(places) / f"{name}{number}" / "global_step4").iterdir()) for name in ("theirs", "round")]
    return files[0], files[1]


def expected(where: str, needless: set[str]) -> bool:
    """Differences that are meant: what is ours, what only names a kernel, and an enum that is written as its number."""
    last = where.rsplit(".", 1)[-1]
    return (
        last in needless or last in ("zckpt", "fused", "foreach", "zero_stage", "ds_version") or ".ds_config" in where
    )


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, TensorRef) and isinstance(b, TensorRef):
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        if not same or (bytes_of(a) != bytes_of(b) and not ("fp32_flat_groups" in where and differ_in_padding(a, b))):
            yield where
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key not in a or key not in b:
                yield f"{where}.{key}"
            else:
                yield from differences(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield where
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{where}.{number}")
    elif isinstance(a, Placeholder) and isinstance(b, Placeholder):
        if str(a) != str(b):
            yield where
        yield from differences(a.state, b.state, where)
    elif a != b:
        yield where


def differ_in_padding(a: TensorRef, b: TensorRef) -> bool:
    """Whether `b` has zeros wherever they differ, and that only at the ends of the parts: DeepSpeed leaves there what was."""
    x, y = (torch.frombuffer(bytearray(bytes_of(ref)), dtype=torch.float32) for ref in (a, b))
    return bool((y[x.view(torch.int32) != y.view(torch.int32)] == 0).all()) and int((x != y).sum()) <= PADDING


PADDING = 12
"""At two ranks, one element for each parameter of an odd number of elements."""


def bytes_of(ref: TensorRef) -> bytes:
    with open(ref.store.path, "rb") as file:
        return os.pread(file.fileno(), math.prod(ref.shape) * ref.dtype.itemsize, ref.byte_offset)


def test_a_run_is_pushed(launched: Callable[[str, int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("HUB_URL", server.url)
        monkeypatch.setenv("HUB_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        first, second = (one["value"] for one in launched("pushes.py", 2)["pushed"])
        assert first["report"] == f"{server.url}/alice/m" and second["report"] is None
        assert first["left"] == ["journal.jsonl", "lock"] and "bob" in first["failed"] and "rank 0:" in second["failed"]
        page = server.files("alice/m")
        meanwhile = [one["value"] for one in launched("pushes.py", 2)["pushed_while_saving"]]
        assert [one.pop("report") for one in meanwhile] == [f"{server.url}/alice/while", None]
        assert meanwhile == [{"latest": "global_step1", "again": True}] * 2
    weights = {name: data for name, data in page.items() if name.endswith(".safetensors")}
    wanted = Path(first["want"])
    assert weights and weights == {path.name: path.read_bytes() for path in wanted.glob("*.safetensors")}
