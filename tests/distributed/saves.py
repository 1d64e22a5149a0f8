"""Checkpoints on several ranks: resuming, and saves for `loads.py` to take up in another shape."""

from __future__ import annotations

import copy
import itertools
import os
import random
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import small
import torch
import torch.distributed as dist
from checks import ADAMW, BF16, PRECISIONS, config, refusal, start, train
from harness import check, main, rank, world
from proofs import IS_WHOLE, covering
from torch import nn

from zckpt import runtime
from zckpt.base.errors import InconsistentError, OutputError, UnsupportedError, UsageError, ZckptError
from zckpt.drop_in import get_fp32_state_dict_from_zero_checkpoint
from zckpt.jobs.open import open_catalog
from zckpt.runtime.saves import exchange, rounds, run_state, saving, snapshot
from zckpt.runtime.sharding import gradients
from zckpt.team import meeting

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "Lamb": {}, "Adam": {"weight_decay": 0.1}, "Adagrad": {}, "Lion": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 30, "warmup_num_steps": 7, "warmup_max_lr": 0.01},
}


def home() -> Path:
    """Where this launch keeps its saves: beside those of others."""
    return Path(sys.argv[1]) / "saves"


def parts(engine: runtime.Engine) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float]]]:
    """Copies of this rank's parts."""
    return {
        part.name: (
            part.weight.clone(),
            {name: state.clone() for name, state in part.states.items()},
            dict(part.scalars),
        )
        for part in run_state.capture(engine).parts
    }


def same_parts(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n][0].view(-1), b[n][0].view(-1))
        and a[n][2] == b[n][2]
        and a[n][1].keys() == b[n][1].keys()
        and all(torch.equal(a[n][1][s], b[n][1][s]) for s in a[n][1])
        for n in a
    )


def truth(engine: runtime.Engine) -> dict[str, dict[str, torch.Tensor]]:
    """All masters and states, whole, and what goes with them; on every rank."""
    state = run_state.capture(engine)
    mine = [
        (p.name, tuple(p.parameter.shape), p.parameter.start, p.parameter.count, {"": p.weight, **p.states})
        for p in state.parts
    ]
    everybody: list[Any] = [None] * world()
    dist.all_gather_object(everybody, mine)
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape, first, count, tensors in itertools.chain(*everybody):
        for key, tensor in tensors.items():
            blank = torch.zeros(torch.Size(shape).numel(), dtype=tensor.dtype)
            target = whole.setdefault(name, {}).setdefault(key, blank)
            target[first : first + count] = tensor.reshape(-1)
    return {n: {k: t.view(engine_shape(state, n)) for k, t in ts.items()} for n, ts in whole.items()}


def engine_shape(state: run_state.RunState, name: str) -> tuple[int, ...]:
    return next(part.parameter.shape for part in state.parts if part.name == name)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def begin(kind: str, stage: int, precision: dict[str, Any], **zero: Any) -> runtime.Engine:
    settings = config(stage, zero=zero, scheduler=SCHEDULE, **precision)
    settings["optimizer"] = {"type": kind, "params": {"lr": 1e-2, **KINDS[kind]}}
    model = small.make()
    return start(settings, model, model_parameters=grouped(model))


@check(2)
def resume() -> dict[str, bool]:
    """Steps, and half of them, a save, a load into a new run, the others: equal to the last bit.

    Each kind at every stage and precision for proofs; else they take turns at every stage and precision.
    """
    out, half = {}, 10 if IS_WHOLE else 2
    every = covering(tuple(KINDS), tuple(range(4)), tuple(PRECISIONS))
    if not IS_WHOLE:
        places = itertools.product(range(4), PRECISIONS)
        every = [(kind, *place) for kind, place in zip([*KINDS] * 2, places, strict=True)]
    for kind, stage, name in every:
        engine = begin(kind, stage, PRECISIONS[name])
        train(engine, half)
        engine.save_checkpoint(
            home() / f"{kind}{stage}{name}", client_state={"step": half, "list": [1, torch.arange(3)]}
        )
        saved = parts(engine)
        losses = train(engine, half, start=half)
        again = begin(kind, stage, PRECISIONS[name])
        path, client = again.load_checkpoint(home() / f"{kind}{stage}{name}")
        assert path is not None and Path(path).parent.name == f"global_step{half}" and client is not None
        assert (
            client["step"] == half
            and torch.equal(client["list"][1], torch.arange(3))
            and client["ds_config"] == engine.config
        )
        restored = same_parts(saved, parts(again))
        counted = (again.global_steps, again.global_samples, again.micro_steps) == (half, 8 * half, half)
        went_on = losses == train(again, half, start=half) and same_parts(parts(engine), parts(again))
        like = again.get_lr() == engine.get_lr() and again.cur_scale == engine.cur_scale
        out[f"{kind} {stage} {name}"] = restored and counted and went_on and like
    return out


@check(4)
def resume_of_groups() -> dict[str, bool]:
    """hpZ, MiCS, offloading, and the layouts that only keys of the config ask for."""
    cpu = {"device": "cpu"}
    out = {}
    for name, (stage, precision, zero) in {
        "hpz": (3, "bf16", {"zero_hpz_partition_size": 2}),
        "mics": (3, "fp32", {"mics_shard_size": 2}),
        "offload": (3, "bf16", {"offload_optimizer": cpu, "offload_param": cpu}),
        "round robin": (2, "fp32", {"round_robin_gradients": True}),
        "aligned": (1, "bf16", {"parameter_alignment": True}),
        "sub-groups": (3, "fp16", {"sub_group_size": 30}),
    }.items():
        engine = begin("AdamW", stage, PRECISIONS[precision], **zero)
        train(engine, 3)
        engine.save_checkpoint(home() / name)
        losses = train(engine, 3, start=3)
        again = begin("AdamW", stage, PRECISIONS[precision], **zero)
        again.load_checkpoint(home() / name)
        out[name] = losses == train(again, 3, start=3) and same_parts(parts(engine), parts(again))
    return out


@check(1, 2, 4)
def for_others() -> list[str]:
    """A save of every stage and precision, and what must be found in it."""
    made = []
    for stage, name in itertools.product(range(4), PRECISIONS):
        engine = begin("AdamW", stage, PRECISIONS[name])
        train(engine, 3)
        where = home() / f"{stage} {name}"
        engine.save_checkpoint(where, client_state={"stage": stage})
        found = truth(engine)
        if rank() == 0:
            torch.save(found, where / "truth.pt")
        made.append(str(where))
    return made


@check(2)
def random_generators_and_data() -> dict[str, bool]:
    """Every rank draws what it would have drawn, and goes on with the next batch."""
    data = torch.utils.data.TensorDataset(torch.arange(44))
    out = {}
    for stage in (0, 2, 3):
        torch.manual_seed(50 + rank())
        random.seed(60 + rank())
        numpy.random.seed(70 + rank())
        settings = config(stage) | {"gradient_accumulation_steps": 1}
        model = nn.Linear(3, 3)
        engine, _, loader, _ = runtime.initialize(model=model, config=settings, training_data=data)
        batches = iter(loader)
        seen = [next(batches) for _ in range(2)]
        engine.save_checkpoint(home() / f"rng {stage}")
        drawn = [torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()]
        rest = [batch[0].tolist() for batch in batches]
        torch.manual_seed(0)
        other, _, again, _ = runtime.initialize(model=nn.Linear(3, 3), config=settings, training_data=data)
        other.load_checkpoint(home() / f"rng {stage}")
        same = [torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()] == drawn
        out[f"{stage}"] = same and rest == [batch[0].tolist() for batch in again] and len(seen) == 2
    return out


@check(2)
def tags_and_latest() -> dict[str, Any]:
    """Names of saves, what `latest` says, and a tag that is saved twice."""
    where = home() / "tags"
    engine = begin("AdamW", 2, BF16)
    out: dict[str, Any] = {"nothing": engine.load_checkpoint(where)}
    train(engine, 1)
    engine.save_checkpoint(where, tag="one")
    first = parts(engine)
    train(engine, 1, start=1)
    engine.save_checkpoint(where, tag="two", save_latest=False)
    out["latest"] = (where / "latest").read_text()
    again = begin("AdamW", 2, BF16)
    again.load_checkpoint(where)
    out["one"] = same_parts(first, parts(again)) and again.global_steps == 1
    again.load_checkpoint(where, tag="two")
    out["two"] = same_parts(parts(engine), parts(again)) and again.global_steps == 2
    train(engine, 1, start=2)
    engine.save_checkpoint(where, tag="one")
    long = "x" * 240
    engine.save_checkpoint(where / "long", tag=long)
    engine.save_checkpoint(where / "long", tag=long)
    path, _ = again.load_checkpoint(where / "long")
    out["long"] = path == str(where / "long" / long / "mp_rank_00_model_states.pt")
    again.load_checkpoint(where, tag="one")
    out["one anew"] = same_parts(parts(engine), parts(again)) and again.global_steps == 3
    out["blind"] = refusal(again.load_checkpoint, where / "nowhere" if rank() else where, kind=InconsistentError)
    (where / "logs").mkdir(exist_ok=True)
    out["only logs"] = again.load_checkpoint(where / "logs")
    dist.barrier()
    out["names"] = sorted(path.name for path in where.iterdir())
    return out


@check(2)
def parts_of_a_checkpoint() -> dict[str, bool]:
    """Weights alone, without states, without the schedule; masters by way of the module weights."""
    where = home() / "wishes"
    engine = begin("AdamW", 2, BF16)
    train(engine, 2)
    engine.save_checkpoint(where)
    saved = parts(engine)
    out = {}

    def weights(engine: runtime.Engine) -> bool:
        mine = parts(engine)
        return all(torch.equal(mine[name][0], saved[name][0]) for name in saved)

    module_only = begin("AdamW", 3, BF16)
    module_only.load_checkpoint(where, load_module_only=True)
    out["module"] = weights(module_only) and module_only.global_steps == 0 and not module_only.optimizer.state
    bare = begin("AdamW", 1, BF16)
    bare.load_checkpoint(where, load_optimizer_states=False)
    out["bare"] = weights(bare) and bare.global_steps == 2 and not bare.optimizer.state
    before = bare.lr_scheduler.last_batch_iteration
    unscheduled = begin("AdamW", 2, BF16)
    start_at = unscheduled.lr_scheduler.last_batch_iteration
    unscheduled.load_checkpoint(where, load_lr_scheduler_states=False)
    out["schedule"] = unscheduled.lr_scheduler.last_batch_iteration == start_at != before
    for stage in (2, 3):
        trained = begin("AdamW", stage, BF16)
        train(trained, 1)
        trained.save_checkpoint(where / f"trained {stage}", exclude_frozen_parameters=True)
        fresh = begin("AdamW", stage, BF16)
        weights_before = parts(fresh)["frozen.weight"][0]
        fresh.load_checkpoint(where / f"trained {stage}")
        now = parts(fresh)
        out[f"trained {stage}"] = same_parts(
            {n: p for n, p in now.items() if "frozen" not in n and "nothing" not in n},
            {n: p for n, p in parts(trained).items() if "frozen" not in n and "nothing" not in n},
        ) and torch.equal(now["frozen.weight"][0], weights_before)
        held = [name for name in open_catalog(str(where / f"trained {stage}")).catalog if name.startswith("frozen")]
        out[f"left out {stage}"] = not held
    rounded = begin("AdamW", 2, BF16, load_from_fp32_weights=False)
    rounded.load_checkpoint(where)
    mine = parts(rounded)
    out["rounded"] = all(
        torch.equal(mine[n][0], saved[n][0].bfloat16().to(saved[n][0].dtype))
        and mine[n][1].keys() == saved[n][1].keys()
        for n in saved
    )
    return out


class Unknown:
    """Of no kind that a checkpoint holds."""


@check(2)
def refused_saves() -> dict[str, Any]:
    """What cannot be saved or loaded is said by every rank, and changes nothing."""
    where = home() / "refused"
    engine = begin("AdamW", 2, {})
    train(engine, 1)
    save = engine.save_checkpoint
    kind = UnsupportedError if rank() == 0 else Exception
    out = {
        "client": refusal(save, where, client_state={"x": [Unknown()]}, kind=UnsupportedError),
        "name": refusal(save, where, client_state={"module": 1}, kind=UsageError),
        "tag": refusal(save, where, tag="../x", kind=UsageError),
        "rank 0": refusal(save, where, client_state={"x": Unknown()} if rank() == 0 else {}, kind=kind),
    }
    if rank() == 0:
        (where / "a file").touch()
    dist.barrier()
    out["taken"] = refusal(save, where, tag="a file", kind=OutputError)
    out["left"] = sorted(path.name for path in where.iterdir())
    save(where)
    before = parts(engine)
    other = runtime.initialize(model=nn.Linear(3, 3), config=config(2))[0]
    out["model"] = refusal(other.load_checkpoint, where, kind=InconsistentError)
    lion = begin("Lion", 2, {})
    out["optimizer"] = refusal(lion.load_checkpoint, where, kind=InconsistentError)
    out["unchanged"] = same_parts(before, parts(engine))
    return out


class Broken:
    """A schedule that can be saved, and on rank 1 not be loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.broken = rank() == 1

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.broken:
            raise KeyError("y")


@check(2)
def loads_that_fail_on_one_rank() -> dict[str, Any]:
    """They fail on both; before anything is changed, or both say that the run's state is undefined."""
    where = home() / "loads that fail"
    out: dict[str, Any] = {}
    for stage in (0, 2, 3):
        engine = start(config(stage), lr_scheduler=lambda optimizer: Broken(optimizer))
        train(engine, 1)
        engine.save_checkpoint(where / f"{stage}", "one")
        saved = parts(engine)
        train(engine, 1, start=1)
        before, drawn = parts(engine), torch.get_rng_state()
        seen = where / f"{stage}"
        if rank() == 1:  # this rank sees a file that ends too early
            seen = where / f"cut {stage}"
            shutil.copytree(where / f"{stage}", seen)
            cut = max((seen / "one").iterdir())
            cut.write_bytes(cut.read_bytes()[:-1000])
        told = refusal(engine.load_checkpoint, seen, kind=ZckptError)
        unchanged = same_parts(before, parts(engine)) and torch.equal(drawn, torch.get_rng_state())
        out[f"cut {stage}"] = [told, unchanged and (engine.global_steps, engine.micro_steps) == (2, 2)]
        told = refusal(engine.load_checkpoint, where / f"{stage}", kind=ZckptError)
        engine.lr_scheduler.broken = False
        engine.load_checkpoint(where / f"{stage}")
        out[f"schedule {stage}"] = [told, same_parts(saved, parts(engine)) and engine.global_steps == 1]
    return out


@check(2)
def in_the_background() -> dict[str, Any]:
    """Training goes on while a copy is written; the next save waits, and hears of what went wrong."""
    where = home() / "background"
    settings = config(3, scheduler=SCHEDULE, checkpoint={"async_save": True}, **BF16)
    engine = start(settings)
    train(engine, 2)
    (home() / "blocked").write_text("no directory")
    dist.barrier()
    blocked = refusal(engine.save_checkpoint, home() / "blocked", kind=OutputError)  # rank 0's alone
    engine.save_checkpoint(where)
    first = parts(engine)
    train(engine, 2, start=2)
    engine.save_checkpoint(where)
    train(engine, 1, start=4)
    again = start(config(3, scheduler=SCHEDULE, **BF16))
    engine.wait_for_checkpoint()
    dist.barrier()
    again.load_checkpoint(where, tag="global_step2")
    out: dict[str, Any] = {"copied": same_parts(first, parts(again)), "latest": (where / "latest").read_text()}
    out["blocked"] = blocked
    out |= {f"meanwhile {stage}": while_others_write(stage) for stage in (1, 3)}
    again.load_checkpoint(where)
    train(again, 1, start=4)
    out["went on"] = same_parts(parts(engine), parts(again))
    write = rounds.Rounds.carry_out

    def broken(*arguments: Any) -> None:
        write(*arguments)
        if rank() == 1:
            raise OutputError("a disk that broke", file="x")

    rounds.Rounds.carry_out = broken
    try:
        engine.save_checkpoint(where, tag="bad")
        out["bad"] = refusal(engine.wait_for_checkpoint, kind=OutputError)
    finally:
        rounds.Rounds.carry_out = write
    engine.save_checkpoint(where, tag="good")
    engine.wait_for_checkpoint()
    dist.barrier()
    out["names"] = sorted(path.name for path in where.iterdir())
    return out


def while_others_write(stage: int) -> dict[str, Any]:
    """What a script does between a save and the next step is not in the save, whose copy has hardly begun."""
    where = home() / f"meanwhile {stage}"
    engine = start(config(stage, 2, checkpoint={"async_save": True}, **BF16))
    train(engine, 1)
    tokens = next(iter(small.batches(1, rank(), world(), 2, 1)))[0]
    engine.backward(engine(tokens))
    engine.step()  # a save between two micro batches has gradients
    copy_left, out = snapshot.Snapshot.finish, {}

    def unhurried(self: snapshot.Snapshot) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1.0)
        copy_left(self)

    snapshot.Snapshot.finish = unhurried
    try:
        for what in ("written", "stepped", "behind"):
            before, client = parts(engine), {"seen": torch.ones(3)}
            grads = [
                grad
                for kind in gradients.take_gradients(engine.module, engine.sharded.parameters).values()
                for grad in kind.values()
            ]
            grads_before = [grad.clone() for grad in grads]
            kept = [state for one in engine.basic_optimizer.state.values() for state in one.values() if state.ndim]
            engine.save_checkpoint(where, tag=what, client_state=client)
            client["seen"].zero_()
            if what == "written":
                for grad in grads:
                    grad.zero_()
                for one in (one for one in engine.sharded.parameters if one.master is not None):
                    with torch.no_grad():
                        one.master.data.add_(1)
                        for state in engine.optimizer.state[one.master].values():
                            state.add_(1)
            elif what == "stepped":
                engine.backward(engine(tokens))
                engine.step()
            elif rank() == 1:
                kept[0].add_(1)
            if what == "behind":
                out[what] = refusal(engine.wait_for_checkpoint, kind=ZckptError)
                continue
            engine.wait_for_checkpoint()
            dist.barrier()
            again = start(config(stage, 2, **BF16))
            _, seen = again.load_checkpoint(where, tag=what)
            out[what] = same_parts(before, parts(again)) and bool(seen["seen"].all())
            held = [
                g
                for kind in gradients.take_gradients(again.module, again.sharded.parameters).values()
                for g in kind.values()
            ]
            out[f"gradients {what}"] = [
                len(held),
                len(held) == len(grads_before) and all(map(torch.equal, held, grads_before)),
            ]
    finally:
        snapshot.Snapshot.finish = copy_left
    return out


@check(2)
def some_ranks_only() -> dict[str, Any]:
    """Who did not come is named, soon; and the run goes on."""
    where = home() / "some"
    engine = begin("AdamW", 2, {})
    train(engine, 1)
    out: dict[str, Any] = {"within": meeting.ENTRY_S + meeting._EXTRA_S}
    patient, meeting._EXTRA_S, saving.ENTRY_S = (meeting._EXTRA_S, saving.ENTRY_S), 0.5, 1.0
    for lonely in (0, 1):
        if rank() == lonely:
            out["told"] = refusal(engine.save_checkpoint, where, kind=InconsistentError)
        dist.barrier()
        train(engine, 1, start=1 + lonely)
    meeting._EXTRA_S, saving.ENTRY_S = patient
    engine.save_checkpoint(where)
    out["names"] = sorted(path.name for path in where.iterdir())
    return out


@check(2)
def tags_that_differ() -> dict[str, Any]:
    """Both are told; rank 0's is taken where that is not an error."""
    out: dict[str, Any] = {}
    for what in ("FAIL", "WARN", "IGNORE"):
        engine = start(config(1, checkpoint={"tag_validation": what}))
        where = home() / f"tags {what}"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if what == "FAIL":
                out[what] = refusal(engine.save_checkpoint, where, tag=f"of {rank()}", kind=InconsistentError)
                continue
            engine.save_checkpoint(where, tag=f"of {rank()}")
        out[what] = [[str(w.message) for w in told], sorted(path.name for path in where.iterdir())]
    return out


@check(2)
def last_ones_kept() -> dict[str, Any]:
    """Older saves are deleted after a good one: by their steps, and never what `latest` names or what is not a save."""
    where = home() / "kept"
    engine = start(config(2, checkpoint={"keep_last": 2}))
    where.mkdir(parents=True, exist_ok=True)
    (where / "global_step0").mkdir(exist_ok=True)
    (where / "global_step0" / "notes.txt").write_text("mine")
    dist.barrier()
    out = []
    for step, named in enumerate((True, True, False, False, True)):
        train(engine, 1, start=step)
        engine.save_checkpoint(where, tag=f"step{9 - step}", save_latest=named)
        out.append(sorted(path.name for path in where.iterdir() if path.is_dir()))
        dist.barrier()
    return {"names": out}


@check(2)
def without_a_shared_disk() -> dict[str, Any]:
    """Each node has its own directory, `latest` and script; together they are the checkpoint."""
    before, os.environ["LOCAL_RANK"] = os.environ["LOCAL_RANK"], "0"  # as on two nodes
    mine = home() / f"node {rank()}"
    out: dict[str, Any] = {}
    for stage in (2, 3):
        engine = start(config(stage, checkpoint={"use_node_local_storage": True}))
        train(engine, 1)
        engine.module.seen.add_(rank())
        engine.save_checkpoint(mine, tag=f"stage{stage}", client_state={"big": torch.arange(20000)})
        found = truth(engine)
        if rank() == 0:
            torch.save(found, home() / f"truth of nodes {stage}.pt")
        out[f"{stage}"] = sorted(str(path.relative_to(mine)) for path in (mine / f"stage{stage}").iterdir())
        for target in (stage, 1):
            again = start(config(target, checkpoint={"use_node_local_storage": True}), small.make(seed=1))
            path, client = again.load_checkpoint(mine)
            fine = (
                Path(path).parent == mine / f"stage{stage}"
                and client["big"].shape == (20000,)
                and again.global_steps == 1
            )
            fine = fine and again.module.seen.item() == rank()
            mine_now = run_state.capture(again).parts
            out[f"{stage} into {target}"] = fine and all(
                torch.equal(
                    tensor.reshape(-1),
                    found[part.name][key].view(-1)[part.parameter.elements],
                )
                for part in mine_now
                for key, tensor in {"": part.weight, **part.states}.items()
            )
    engine = start(config(0, checkpoint={"use_node_local_storage": True}))
    engine.save_checkpoint(mine, tag="stage0")
    engine.module.seen.add_(1 + rank())
    if rank() == 1:  # a new node, which has nothing yet
        mine = mine / "new"
    out["a new node"] = engine.load_checkpoint(mine, tag="stage0")[0] is not None and engine.module.seen.item() == 0
    mine = home() / f"node {rank()}"
    out["names"] = sorted(path.name for path in mine.iterdir())
    os.environ["LOCAL_RANK"] = before
    return out


@check(2)
def a_rank_that_fails_alone() -> dict[str, Any]:
    """Rank 1 runs out of memory between two rounds of a save: both hear of it within seconds, and the next save is good."""
    where = home() / "alone"
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(4)))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": ADAMW, **BF16}
    limit, rounds.LIMIT_BYTES = rounds.LIMIT_BYTES, 1 << 17  # several rounds
    whole = exchange.Exchange.bytes_of

    def too_much(self: exchange.Exchange, request: exchange.Request) -> torch.Tensor:
        torch.empty(1 << 50, dtype=torch.uint8)
        return whole(self, request)

    out: dict[str, Any] = {}
    for kind in ("foreground", "background"):
        engine = start(settings | {"checkpoint": {"async_save": kind == "background"}}, copy.deepcopy(model))
        for tag in ("first", "second", "third"):
            began = time.monotonic()
            if tag == "second" and rank() == 1:
                exchange.Exchange.bytes_of = too_much
            try:
                engine.save_checkpoint(where / kind, tag=tag)
                engine.wait_for_checkpoint()
                assert tag != "second", "nothing was refused"
            except (OutputError, RuntimeError) as error:
                out[kind] = [str(error), time.monotonic() - began]
            finally:
                exchange.Exchange.bytes_of = whole
        dist.barrier()
        out[f"{kind} left"] = sorted(path.name for path in (where / kind).iterdir())
    rounds.LIMIT_BYTES = limit
    return out


@check(16)
def many_ranks() -> dict[str, bool]:
    """Saves of sixteen ranks, in rounds of a few KiB, are what the ranks hold, and are loaded by the same number."""
    limit, rounds.LIMIT_BYTES = rounds.LIMIT_BYTES, 1 << 12
    out = {}
    for stage in (1, 2, 3):
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": ADAMW,
            **BF16,
        }
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 19), nn.Linear(19, 2)) for _ in range(2))
        engine = start(settings, model)
        torch.manual_seed(rank())
        engine.backward(engine(torch.randn(1, 37, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.save_checkpoint(home() / f"many {stage}")
        held = truth(engine)
        written = get_fp32_state_dict_from_zero_checkpoint(home() / f"many {stage}")
        again = start(settings, other)
        again.load_checkpoint(home() / f"many {stage}")
        out[f"{stage}"] = same_parts(parts(engine), parts(again)) and all(
            torch.equal(written[name], tensors[""]) for name, tensors in held.items()
        )
    rounds.LIMIT_BYTES = limit
    return out


@check(2)
def memory() -> float:
    """The most memory that a save takes beside the run, in MiB: at stage 2, where nearly every element moves."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    engine = start({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": ADAMW}, model)
    loss = engine(torch.ones(1, 4096)).mean()
    engine.backward(loss)
    engine.step()
    del loss
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    engine.save_checkpoint(home() / "memory")
    peak = _memory("VmHWM") - before
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(home() / "memory")
    return peak


def _memory(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
