"""Checkpoints of other worlds, stages and precisions, loaded by these ranks."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
from checks import PRECISIONS, train
from harness import check, main, rank, world
from saves import SCHEDULE, grouped, parts, same_parts

from zckpt import runtime
from zckpt.base.errors import ZckptError
from zckpt.runtime.saves import engine_part, run_state


def begin(stage: int, precision: dict[str, Any], model: torch.nn.Module | None = None) -> runtime.Engine:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": SCHEDULE,
        "zero_optimization": {"stage": stage},
        **precision,
    }
    model = small.make(seed=1) if model is None else model
    return runtime.initialize(model=model, config=settings, model_parameters=grouped(model))[0]


@check(1, 2, 3)
def others() -> dict[str, bool]:
    """Saves of `saves.py`, each into another stage: masters, moments and frozen weights to the last bit.

    A third of them, such that every stage, precision and number of ranks that saved meets every other, and each save is loaded
    by one number of ranks.
    """
    out = {}
    homes = sorted(Path(sys.argv[1]).parent.glob("saves_*/saves/? *"))
    for number, home in enumerate(homes):
        if (number + number // 3 + number // 12 + world()) % 3:  # precision, stage, ranks
            continue
        name = home.name.split()[1]
        stage = (number + world()) % 4
        engine = begin(stage, PRECISIONS[name])
        path, client = engine.load_checkpoint(home)
        wanted = torch.load(home / "truth.pt")
        state = run_state.capture(engine)
        fine = path is not None and client["stage"] == int(home.name[0]) and engine.global_steps == 3
        for part in state.parts:
            tensors = {"": part.weight, **part.states}
            whole = {key: tensor.view(-1) for key, tensor in wanted[part.name].items()}
            fine = fine and tensors.keys() == whole.keys()
            fine = fine and (not part.states or part.scalars == {"step": 3.0})
            for key in whole if fine else ():
                fine = fine and torch.equal(
                    tensors[key].view(-1),
                    whole[key][part.parameter.elements],
                )
        out[f"{home.parent.parent.name} {home.name} into {stage}"] = bool(fine)
    return out


@contextlib.contextmanager
def watched(*, general: bool = False) -> Iterator[list[bool]]:
    """The loads inside: for each, whether all ranks took the way of a save of their own layout; `general`: none may."""
    before, found = engine_part.load, list[bool]()
    opened = engine_part.open_same

    def load(*arguments: Any) -> Any:
        found.append(arguments[-1] is not None)
        return before(*arguments)

    engine_part.load = load
    if general:
        engine_part.open_same = lambda *_: None
    try:
        yield found
    finally:
        engine_part.load, engine_part.open_same = before, opened


def everything(engine: runtime.Engine, place: object, client: Any) -> list[Any]:
    """What a load leaves: counters, settings, schedule, generators, whole weights and buffers, and what it returned."""
    state = run_state.capture(engine)
    whole = {} if engine.zero_optimization_stage() == 3 else engine.module.state_dict()
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    rest = [state.counters, state.scaler, state.scheduler, state.data, groups, engine.loaded_checkpoint_dp_world_size]
    tensors = {**whole, **state.buffers, "torch": state.rng["torch"]}
    words = [repr(rest), repr(state.rng["python"]), str(place), repr(client)]
    return [*words, {name: tensor.clone() for name, tensor in tensors.items()}]


def same_values(a: list[Any], b: list[Any]) -> bool:
    return a[:-1] == b[:-1] and a[-1].keys() == b[-1].keys() and all(torch.equal(a[-1][n], b[-1][n]) for n in a[-1])


@check(1, 2, 3)
def same_layout() -> dict[str, bool]:
    """A save of the run's own layout is found, and leaves what the way of all saves leaves; the run continues alike."""
    out = {}
    for number, ((title, settings), stage) in enumerate(itertools.product(PRECISIONS.items(), range(4))):
        home = Path(sys.argv[1]) / "same" / f"{stage} {title}"
        model = None if number % 2 else small.make(odd=False)
        saver = begin(stage, settings, model)
        train(saver, 2)
        torch.manual_seed(7 + rank())
        saver.save_checkpoint(home, client_state={"stage": stage, "rank": rank(), "sizes": (1, {2})})
        found = []
        for general in (False, True):
            engine = begin(stage, settings, None if model is None else small.make(1, odd=False))
            train(engine, 1)
            torch.manual_seed(1)
            with watched(general=general) as ways:
                given = engine.load_checkpoint(home)
            left = everything(engine, *given), parts(engine)
            found.append((ways, *left, train(engine, 2, start=2), parts(engine)))
        (ways, left, mine, losses, after), (_, others, theirs, expected, later) = found
        fine = (
            same_values(left, others) and same_parts(mine, theirs) and losses == expected and same_parts(after, later)
        )
        out[f"{stage} {title}"] = fine and ways == [stage > 0] and same_parts(parts(saver), mine)
    return out


def plain(
    stage: int, zero: dict[str, Any] | None = None, sizes: tuple[int, ...] = (8, 12, 4), **more: Any
) -> runtime.Engine:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }
    model = torch.nn.Sequential(*layers)
    engine = runtime.initialize(model=model, config=settings, model_parameters=list(model.parameters()))[0]
    advance(engine)
    return engine


def advance(engine: runtime.Engine) -> None:
    width = engine.module[0].in_features
    engine.backward(engine(torch.full((1, width), 1.0 + rank(), dtype=engine.module[0].bias.dtype)).float().mean())
    engine.step()


@check(2)
def other_layouts() -> dict[str, list[tuple[str, bool, bool]]]:
    """Rows that are cut elsewhere than elements, and layouts that differ in one thing: whether each has taken the short way, and
    has every bit.
    """
    out = {}
    changed: dict[str, dict[str, Any]] = {
        "as it was": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}},
        "sub-groups": {"zero": {"sub_group_size": 20}}, "round robin": {"zero": {"round_robin_gradients": True}},
        "aligned": {"zero": {"parameter_alignment": True}},
    }  # fmt: skip
    for stage, sizes in ((1, (8, 12, 4)), (2, (5, 3, 7)), (3, (5, 3, 7))):
        for title, more in changed.items():
            if title in (("round robin", "aligned") if stage == 3 else ("sub-groups",)):
                continue
            home = Path(sys.argv[1]) / "other" / f"{stage} {sizes} {title}"
            saver = plain(stage, sizes=sizes, **more)
            saver.save_checkpoint(home)
            fine = []
            for other in changed if title == "as it was" else (title, "as it was"):
                engine = plain(stage, sizes=sizes, **changed[other])
                advance(engine)
                with watched() as ways:
                    engine.load_checkpoint(home)
                bits = same_parts(parts(saver), parts(engine)) and engine.global_steps == 1
                fine.append((other, ways[0], bits))
            out[f"{stage} {sizes} {title}"] = fine
    return out


def damage_pickle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"step", data.index(b"data.pkl")) + 1] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": cut_short, "missing": Path.unlink, "pickle": damage_pickle,
    "of another rank": lambda path: shutil.copyfile(path.with_name(path.name.replace("rank_1", "rank_0")), path),
    "of another step": lambda path: shutil.copyfile(path.parent.parent / "later" / path.name, path),
    "a file beside": lambda path: (path.parent / "zckpt_rank_0_states.pt").write_bytes(b"no zip"),
}  # fmt: skip


@check(2)
def damaged_saves() -> dict[str, Any]:
    """Damage in a file of rank 1 is said to both ranks as the way of all saves says it, and nothing was changed."""
    out: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for title, damage in DAMAGES.items():
            home = Path(sys.argv[1]) / "damaged" / f"{stage} {title}"
            engine = plain(stage)
            engine.save_checkpoint(home, "one")
            advance(engine)
            engine.save_checkpoint(home, "later", save_latest=False)
            if rank() == 0:
                damage(
                    home
                    / "one"
                    / f"zero_pp_rank_1_mp_rank_00_{'model' if title == 'missing' and stage == 3 else 'optim'}_states.pt"
                )
            dist.barrier()
            before, told = parts(engine), []
            for general in (False, True):
                with watched(general=general):
                    try:
                        engine.load_checkpoint(home)
                        told.append("")
                    except ZckptError as error:
                        told.append(f"{error}")
            unchanged = same_parts(before, parts(engine)) and engine.global_steps == 2
            out[f"{stage} {title}"] = [told, unchanged]
    return out


if __name__ == "__main__":
    main()
