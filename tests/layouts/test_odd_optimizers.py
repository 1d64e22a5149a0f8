"""Values of another type in the optimizer's part of any save: no error of Python's, and sound weights are still exported."""

from __future__ import annotations

import pickle
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.tensor  # noqa: F401  before the stubs that `edited` has for other modules
from proofs import IS_WHOLE, MORE

import zckpt
from zckpt.base.errors import ZckptError
from zckpt.checks.verify import verify
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.pictures.checkpoint_map import checkpoint_map

sys.path.insert(0, str(Path(__file__).parent))
from test_megatron_legacy import edited

FIXTURES = Path(__file__).parents[2] / "fixtures"
VALUES: tuple[Any, ...] = ([], {}, None, 7, "x", float("nan"), float("inf"), 10**30, -1, [[]], [3, None], True)
KEYS = {
    "optimizer",
    "optimizer_state_dict",
    "last_optimizer_state",
    "base_optimizer_state",
    "optimizer_states",
    "state",
    "optim",
}
APART = ("ranks/", "optimizers/", "torch_checkpointing/")
"""Saves of which no weight is in an optimizer's file."""
PICKLED = {".pt", ".ckpt", ".bin", ".pth"}
EVERY = sorted(
    str(home.parent.relative_to(FIXTURES))
    for home in FIXTURES.glob("*/*/checkpoint")
    if any(path.suffix in PICKLED for path in home.rglob("*"))
)
SOME = [
    "zero1/bf16_w3", "zero2/bf16_w2", "zero3/bf16_w2", "zero0/bf16_groups", "autoep/zero1_w2", "moe/zero2_w2", "ranks/hsdp_w4",
    "ranks/fsdp1_alone_w1", "optimizers/oss_whole_w2", "optimizers/zero_ranks_w2", "fairscale/alone_w1",
    "fairscale_parts/metaseq_w4", "megatron_legacy/old_tp2_pp2", "torch_checkpointing/torch_files_w2", "trainers/lightning_w1",
    "states/adamw8bit_w1", "autotp/zero1_tp2_dp2", "pipeline/zero0_pp2",
]  # fmt: skip
KNOWN: list[tuple[str, str, list[Any], Any]] = [
    ("ranks/fsdp1_alone_w1", "optim_world_size_1_rank_0.pt", ["state"], []),
    ("ranks/hsdp_w4", "optim_world_size_4_rank_2.pt", ["state"], float("inf")),
    ("optimizers/oss_whole_w2", "optimizer.pt", ["param_groups", 0, "params", 1], {}),
    ("fairscale_parts/metaseq_w4", "checkpoint_last-model_part-0-shard0.pt",
     ["last_optimizer_state", "param_groups", 0, "params", 1], []),
    ("fairscale/alone_w1", "checkpoint_last-shard0.pt", ["last_optimizer_state", "param_groups", 0], None),
    ("states/adamw8bit_w1", "optimizer.pt", ["param_groups", 0, "params"], float("nan")),
    ("autoep/zero0_bf16_w4", "global_step2/expp_rank_1_mp_rank_00_optim_states.pt", ["optimizer"], "x"),
    ("autoep/zero1_w2", "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
     ["optimizer_state_dict", "base_optimizer_state", "param_groups", 1, "params"], 2),
]  # fmt: skip


def places_in(held: Any, inside: bool, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values of an optimizer are: the first ones of every mapping and list."""
    items = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
    for number, (key, value) in enumerate(items):
        within = inside or key in KEYS
        if within:
            yield (*path, key)
        if len(path) < 7 and (number < 3 or not inside):
            yield from places_in(value, within, (*path, key))


def put(root: Any, path: Any, value: Any) -> None:
    for key in path[:-1]:
        root = root[key]
    root[path[-1]] = value


def check_jobs(run: Path, out: Path, *, exports: bool) -> None:
    """No job raises an error of Python's."""
    jobs: dict[str, Any] = {
        "inspect": lambda: list(inspect_checkpoint(run).lines()), "map": lambda: checkpoint_map(run).as_json(),
        "verify": lambda: verify(run), "to-states": lambda: zckpt.to_states(run, out / "states"),
        "reshard": lambda: zckpt.reshard(run, out / "again", world_size=1),
    }  # fmt: skip
    for job in jobs.values():
        try:
            job()
        except ZckptError:
            pass
    try:
        zckpt.convert(run, out / "o.safetensors")
    except ZckptError:
        assert not exports


@pytest.mark.parametrize(("name", "file", "path", "value"), KNOWN)
@pytest.mark.filterwarnings("ignore")
def test_values_that_were_not_looked_at(name: str, file: str, path: list[Any], value: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "run"))
    edited(run / file, lambda root: put(root, path, value))
    check_jobs(run, tmp_path, exports=not name.startswith("autoep"))


@pytest.mark.parametrize(("path", "value"), [(["state"], []), (["param_groups"], 7)])
@pytest.mark.filterwarnings("ignore")
def test_an_export_says_that_states_are_not_read(path: list[Any], value: Any, tmp_path: Path) -> None:
    """Of ranks' files whose weights are sound."""
    run = Path(shutil.copytree(FIXTURES / "ranks/fsdp1_alone_w1/checkpoint", tmp_path / "run"))
    edited(run / "optim_world_size_1_rank_0.pt", lambda root: put(root, path, value))
    assert any("states are not read" in note for note in zckpt.convert(run, tmp_path / "o.safetensors").notes)


@MORE
@pytest.mark.parametrize("name", EVERY if IS_WHOLE else SOME)
@pytest.mark.filterwarnings("ignore")
def test_any_value(name: str, tmp_path: Path) -> None:
    """At places that differ from save to save: every value in every save, or two in some."""

    choice = random.Random(zlib.crc32(name.encode()))
    source = FIXTURES / name / "checkpoint"
    files = sorted(path for path in source.rglob("*") if path.is_file() and path.suffix in PICKLED)
    files = [path for path in files if "optim" in path.name] or files
    for number, value in enumerate(VALUES if IS_WHOLE else choice.sample(VALUES, 2)):
        file = choice.choice(files)
        run = Path(shutil.copytree(source, tmp_path / str(number) / "run"))
        done: list[tuple[Any, ...]] = []

        def edit(root: Any, file: Path = file, done: list[tuple[Any, ...]] = done, value: Any = value) -> None:
            if places := list(places_in(root, "optim" in file.name and "states" not in file.name)):
                done.append(choice.choice(places))
                put(root, done[0], value)

        try:
            edited(run / file.relative_to(source), edit)
        except (
            RuntimeError,
            ValueError,
            AttributeError,
            ModuleNotFoundError,
            pickle.UnpicklingError,
        ):
            continue  # of a framework that is not here
        exports = name.startswith(APART) and "optim" in file.name and zckpt.inspect_checkpoint(source).exportable.ok
        check_jobs(run, tmp_path / str(number), exports=exports)
