"""What is checked on several ranks; the tests of this folder say what must come out."""

from __future__ import annotations

import copy
import math
import resource
import sys
from pathlib import Path
from typing import Any

import small
import torch
from harness import check, main, mean_over_ranks, rank, world
from proofs import IS_WHOLE
from torch import nn
from zckpt.runtime.utils import zero_to_fp32

from zckpt import live, runtime
from zckpt.base.errors import CastError, InconsistentError, UsageError
from zckpt.runtime import zero
from zckpt.runtime.config.attributes import DTYPES
from zckpt.runtime.saves import run_state
from zckpt.runtime.sharding.deferred import rows_held_by

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": FP16}
STEPS = 10 if IS_WHOLE else 4
"""Of a run whose losses are compared."""


def config(stage: int, accumulation: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": small.GLOBAL_BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }


def start(settings: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> runtime.Engine:
    return runtime.initialize(model=small.make() if model is None else model, config=settings, **arguments)[0]


def train(engine: runtime.Engine, steps: int, start: int = 0) -> list[float]:
    """Losses, averaged over ranks and micro batches."""
    losses = []
    for micros in small.batches(steps, rank(), world(), engine.gradient_accumulation_steps(), start):
        total = torch.zeros(())
        for tokens in micros:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(micros)
        losses.append(mean_over_ranks(total))
    return losses


def whole(engine: runtime.Engine) -> dict[str, torch.Tensor]:
    """All parameters, whole; trained ones as their masters."""
    with zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refusal(function: Any, *arguments: Any, kind: type[BaseException] = UsageError, **named: Any) -> str:
    try:
        function(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


@check(2)
def ranks_that_differ() -> list[str]:
    """What each of several differences between the ranks ends with, on this rank; then a save that all can make."""
    said = []
    for settings, model in (
        (config(2, gradient_clipping=0.5 + rank()), None),
        (config(2 + rank()), None),
        (config(2), nn.Linear(4, 4 + rank())),
        (config(2), nn.Linear(4, 4).requires_grad_(rank() == 0)),
    ):
        try:
            start(settings, model)
            said.append("nothing")
        except InconsistentError as error:
            said.append(str(error))
    engine = start(config(2, csv_monitor={"enabled": False, "output_path": f"of {rank()}"}, steps_per_print=1 + rank()))
    train(engine, 1)
    home = Path(sys.argv[1]) / "differ"
    try:
        engine.save_checkpoint(home / f"of_{rank()}")
        said.append("nothing")
    except InconsistentError as error:
        said.append(str(error))
    engine.save_checkpoint(home / "one" if rank() else f"{home}/two/../one/")
    return [*said, *sorted(path.name for path in home.rglob("*") if not path.is_dir() and rank() == 0)]


@check(1, 2, 4)
def losses() -> dict[str, list[float]]:
    """Some steps at every stage and precision, with and without accumulation, with the same global batch.

    On four ranks in fp32 alone.
    """
    out = {}
    for name, precision in PRECISIONS.items() if world() < 4 else [("fp32", PRECISIONS["fp32"])]:
        for stage in range(4):
            for accumulation in (1, 2) if world() == 1 or (name == "fp32" and world() == 2) else (1,):
                engine = start(config(stage, accumulation, **precision))
                out[f"{name} {stage} {accumulation}"] = train(engine, STEPS)
                counted = engine.global_steps, engine.skipped_steps, engine.micro_steps
                assert counted == (STEPS, 0, STEPS * accumulation)
                assert engine.global_samples == STEPS * small.GLOBAL_BATCH
    return out


@check(4)
def losses_of_groups() -> dict[str, list[float]]:
    """hpZ, MiCS and offloading change where things are, not what they are."""
    cpu = {"device": "cpu"}
    options: dict[str, tuple[int, dict[str, Any]]] = {
        "hpz": (3, {"zero_hpz_partition_size": 2}),
        "mics": (3, {"mics_shard_size": 2}),
        "offload 1": (1, {"offload_optimizer": cpu}),
        "offload 2": (2, {"offload_optimizer": cpu}),
        "offload 3": (3, {"offload_optimizer": cpu, "offload_param": cpu}),
    }
    out = {}
    for name, (stage, zero_options) in options.items():
        for accumulation in (1, 2) if name == "mics" else (1,):
            out[f"{name} {accumulation}"] = train(start(config(stage, accumulation, zero_options)), STEPS)
    return out


@check(1, 2)
def losses_of_optimizers() -> dict[str, list[float]]:
    """Every bundled optimizer."""
    out = {}
    for kind, params in {
        "Adam": {"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False},
        "Adagrad": {"lr": 1e-2},
        "Lion": {"lr": 1e-3, "weight_decay": 0.1},
        "SGD": {"lr": 1e-1, "momentum": 0.9},
        "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
        "RMSprop": {"lr": 1e-3},
    }.items():
        for stage in (0, 3):
            settings = config(stage) | {"optimizer": {"type": kind, "params": params}}
            out[f"{kind} {stage}"] = train(start(settings), STEPS)
    return out


@check(2)
def parts_and_wholes() -> dict[str, Any]:
    """Each rank's parts are disjoint and cover every parameter."""
    out: dict[str, Any] = {}
    for stage, extra in ((0, {}), (1, BF16), (3, BF16)):
        engine = start(config(stage, **extra))
        train(engine, 2)
        state = run_state.capture(engine)
        out[f"{stage}"] = [
            [
                part.name,
                list(part.parameter.shape),
                part.parameter.start,
                part.parameter.count,
                part.parameter.replicated,
                str(part.parameter.dtype),
                part.group,
            ]
            + [str(part.weight.dtype), part.weight.numel(), sorted(part.states), part.scalars]
            + [all(value.numel() == part.parameter.count for value in part.states.values())]
            for part in state.parts
        ]
        out[f"{stage} run"] = [
            [list(group.names) for group in state.groups], state.aliases, sorted(state.buffers), state.counters,
            type(engine.basic_optimizer).__name__, engine.zero_optimization_stage(), engine.settings.config.precision,
            engine.sharded.rank, engine.sharded.size,
        ]  # fmt: skip
        full = whole(engine)
        for part in state.parts:
            mine = full[part.name].reshape(-1)[part.parameter.elements]
            assert torch.equal(mine.to(part.weight.dtype), part.weight.reshape(-1)), part.name
    return out


@check(2)
def clipping() -> list[float]:
    """Norm and weights after one clipped step, against plain torch on the whole batch."""
    out = []
    for stage in range(4):
        engine = start(config(stage, gradient_clipping=0.05) | {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
        train(engine, 1)
        model = small.make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        [tokens] = next(small.batches(1, 0, 1))
        model(tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        out.append(abs(engine.get_global_grad_norm() / norm.item() - 1))
        found = whole(engine)
        out.append(max((found[n] - p.detach()).abs().max().item() for n, p in model.named_parameters() if p.numel()))
    return out


@check(2)
def overflow() -> dict[str, Any]:
    """One rank's gradients overflow: every rank skips, the scale follows DeepSpeed's rules, the schedule waits."""
    out: dict[str, Any] = {}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
    for stage in range(4):
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 2, "min_loss_scale": 4}}
        engine = start(config(stage, scheduler=scheduler, **fp16))
        train(engine, 2)
        before, rates, seen = whole(engine), engine.get_lr(), []
        for _ in range(3):
            [tokens] = next(small.batches(1, rank(), world()))
            loss = engine(tokens)
            engine.backward(loss * (float("inf") if rank() == world() - 1 else 1.0))
            engine.step()
            seen.append(
                [engine.skipped_steps, engine.cur_scale, engine.get_global_grad_norm(), engine.was_step_applied()]
            )
        assert same(before, whole(engine)) and rates == engine.get_lr()
        [tokens] = next(small.batches(1, rank(), world()))
        engine.backward(engine(tokens) * float("inf"))
        message = refusal(engine.step, kind=CastError)
        assert "smallest loss scale" in message
        out[str(stage)] = seen
    nan = start(config(2, **BF16))
    before = whole(nan)
    [tokens] = next(small.batches(1, rank(), world()))
    nan.backward(nan(tokens) * float("nan"))
    nan.step()
    out["bf16"] = [nan.skipped_steps, same(before, whole(nan))]
    return out


@check(2)
def static_scale() -> list[Any]:
    """A fixed scale scales, is taken back, and does not move."""
    engine = start(config(2, fp16={"enabled": True, "loss_scale": 128}))
    losses = train(engine, 4)
    [tokens] = next(small.batches(1, rank(), world()))
    engine.backward(engine(tokens) * float("inf"))
    engine.step()
    return [losses, engine.cur_scale, engine.skipped_steps, engine.get_global_grad_norm()]


class Habits(nn.Module):
    """Initialisations as model code has them, written before anybody thought of sharding."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.drawn = nn.Parameter(torch.randn(5, 3))
        self.low = nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(width, 9, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0).outer(torch.ones(3)))
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(parameter, std=0.02 / len(self.layers) ** 0.5)
        nn.init.orthogonal_(self.layers[2].weight, gain=0.5)
        with torch.no_grad():
            self.layers[0].weight[1, ::2] = 7.0
            self.layers[0].bias.copy_(torch.linspace(-1, 1, width))
            self.drawn.data.mul_(0.5).add_(1.0).clamp_(-0.5, 2.0)
            self.low.normal_().mul_(0.1)
            self.layers[1].bias += self.layers[1].weight.mean()
            self.scale.fill_(float(self.drawn.norm()))
        self.drawn.requires_grad_(False)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            nn.init.xavier_uniform_(module.weight)
            with torch.no_grad():
                module.weight[module.padding_idx].fill_(0)


def deferred(make: Any, seed: int = 5, **arguments: Any) -> tuple[nn.Module, nn.Module, bool]:
    """A model made plainly and under `zero.Init`, and whether the generator is where it would be."""
    torch.manual_seed(seed)
    plain = make()
    after = torch.rand(3)
    torch.manual_seed(seed)
    with zero.Init(**arguments):
        model = make()
    return plain, model, torch.equal(after, torch.rand(3))


@check(1, 2, 4)
def init() -> dict[str, Any]:
    """Under `zero.Init` no rank holds more than its rows, and the weights are the plain model's."""
    out: dict[str, Any] = {}
    for name, make in {"habits": Habits, "small": small.Small}.items():
        plain, model, in_step = deferred(make)
        rows = {n: rows_held_by(p) for n, p in model.named_parameters()}
        assert all(p.is_meta for p in model.parameters()) and all(rows.values())
        assert [n for n, _ in plain.named_parameters(remove_duplicate=False)] == [
            n for n, _ in model.named_parameters(remove_duplicate=False)
        ]
        wanted = {n: p.detach() for n, p in plain.named_parameters()}
        with zero.GatheredParameters(model.parameters()):
            found = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert all(p.is_meta for p in model.parameters())
        held = sum(r.values.numel() for r in rows.values() if r is not None)
        limit = sum(
            -(-p.shape[0] // world()) * (p.numel() // p.shape[0]) if p.numel() and p.ndim else p.numel()
            for p in plain.parameters()
        )
        out[name] = [same(wanted, found), in_step, held <= limit]
        assert dict(plain.named_buffers()).keys() == dict(model.named_buffers()).keys()
        assert same(dict(plain.named_buffers()), dict(model.named_buffers()))
    settings = config(3)
    plain, model, _ = deferred(small.Small, config_dict_or_path=settings)
    out["trained"] = train(start(settings, plain), 6) == train(start(settings, model), 6)
    plain = small.make()
    existing = small.make()
    zero.Init(module=existing)
    engine = start(settings, existing)
    out["existing"] = same(dict(whole(engine)), {n: p.detach() for n, p in plain.named_parameters()})
    return out


@check(2)
def init_of_transformers() -> list[bool]:
    """Real models of the transformers library, tied weights and all."""
    import transformers as t

    sizes = {"vocab_size": 32}
    llama = t.LlamaConfig(
        **sizes, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    gpt2 = t.GPT2Config(
        **sizes, n_embd=8, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    out = []
    for make in (lambda: t.LlamaForCausalLM(llama), lambda: t.GPT2LMHeadModel(gpt2)):
        plain, model, in_step = deferred(make)
        engine = start(config(3), model)
        out.append(same(whole(engine), {n: p.detach() for n, p in plain.named_parameters()}) and in_step)
        assert len([m for m in engine.module.modules() if hasattr(m, "unshard")]) == 3  # two blocks and the rest
        tokens = torch.arange(16).view(2, 8)
        losses = [engine(input_ids=tokens, labels=tokens).loss for _ in range(1)]
        with torch.no_grad():
            wanted = plain(input_ids=tokens, labels=tokens).loss
        out.append(torch.equal(losses[0].detach(), wanted))
        engine.backward(losses[0])
        engine.step()
        with torch.no_grad():
            out.append(bool(engine(input_ids=tokens, labels=tokens).loss < wanted))
    return out


@check(2)
def init_of_other_seeds() -> list[bool]:
    """Ranks with seeds of their own get rank 0's model, and go on with their own numbers."""
    torch.manual_seed(100 + rank())
    with zero.Init():
        model = small.Small()
    mine = torch.rand(2)
    torch.manual_seed(100)
    plain = small.Small()
    engine = start(config(3), model)
    torch.manual_seed(100 + rank())
    if rank() == 0:
        small.Small()
    own = torch.equal(mine, torch.rand(2))
    torch.manual_seed(200 + rank())
    other = start(config(2), small.Small())  # without Init too, everybody begins with rank 0's
    torch.manual_seed(200)
    first = small.Small()
    return [
        same(whole(engine), {n: p.detach() for n, p in plain.named_parameters()}),
        own,
        same(whole(other), {n: p.detach() for n, p in first.named_parameters()}),
    ]


@check(4)
def init_keeps_memory_small() -> float:
    """Peak memory of building a model of 288 MiB, in MiB above what was there before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with zero.Init():
        nn.Sequential(*(nn.Linear(3072, 3072, bias=False) for _ in range(8)))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@check(2)
def gathered() -> dict[str, bool]:
    """Reading, changing and leaving alone, before and after `initialize`, at every stage."""
    out: dict[str, bool] = {}
    for stage in range(4):
        engine = start(config(stage, **BF16))
        train(engine, 1)
        before = whole(engine)
        module = engine.module
        mine = [module.embed.weight, module.blocks[1].gain, module.blocks[0].up.bias]
        with zero.GatheredParameters(mine, modifier_rank=1) as given:
            assert module.head.weight is module.embed.weight is given[0] and given[0].shape == (small.WORDS, 6)
            assert torch.equal(mine[2].to_local() if stage == 3 else mine[2], module.blocks[0].up.bias)
            if rank() == 1:
                given[0].data[3].fill_(0.25)
                module.blocks[1].gain.data.fill_(0.5)
                module.blocks[0].up.bias.data.add_(1.0)
        wanted = {name: value.clone() for name, value in before.items()}
        wanted["embed.weight"][3] = 0.25
        wanted["blocks.1.gain"].fill_(0.5)
        wanted["blocks.0.up.bias"] += 1
        out[f"changed {stage}"] = same(wanted, whole(engine))
        with zero.GatheredParameters(module.embed.weight):
            module.embed.weight.data.zero_()
        with zero.GatheredParameters(module.embed.weight, modifier_rank=0, enabled=False):
            pass
        out[f"discarded {stage}"] = same(wanted, whole(engine))
        train(engine, 1)
        out[f"trained on {stage}"] = not same(wanted, whole(engine))
    with zero.Init():
        model = small.Small()
    with zero.GatheredParameters([model.embed.weight], modifier_rank=0):
        if rank() == 0:
            nn.init.constant_(model.embed.weight, 0.125)
    out["before"] = bool((whole(start(config(3), model))["embed.weight"] == 0.125).all())
    with zero.GatheredParameters(plain := nn.Linear(2, 2).weight, modifier_rank=0):
        plain.data.fill_(float(rank() + 3))
    out["plain"] = bool((plain == 3).all())
    return out


@check(2)
def modules_as_scripts_use_them() -> dict[str, Any]:
    """`.cpu()`, `.half()` and the like between steps, dtypes of parameters, and fp32 weights out of a save into a live model."""
    out: dict[str, Any] = {}
    for stage in range(4):
        settings = config(stage, **BF16)
        engine, plain = start(settings), start(settings)
        losses = [train(engine, 1), train(plain, 1)]
        parameters = [p for p in engine.module.parameters() if p.ndim]
        out[f"dtype {stage}"] = {p.dtype for p in parameters} == {torch.bfloat16}
        if stage == 3:
            out["in parts"] = refusal(engine.module.half().state_dict()["embed.weight"].cpu)
            out["loaded into parts"] = refusal(engine.module.load_state_dict, {})
            with runtime.zero.GatheredParameters(engine.module.parameters()):
                gathered = engine.module.state_dict()
                out["gathered 3"] = all(torch.equal(gathered[name], value) for name, value in whole(plain).items())
        else:
            first = {name: value.clone() for name, value in engine.module.state_dict().items()}
            for change, dtype in ((nn.Module.cpu, "bf16"), (nn.Module.half, "fp16"), (nn.Module.float, "fp32")):
                state = change(engine.module).state_dict()
                kept = DTYPES[dtype] if dtype != "fp32" else torch.float32
                out[f"{dtype} {stage}"] = all(
                    state[name].dtype == kept
                    and torch.allclose(state[name].float(), first[name].float(), rtol=1e-2, atol=1e-4)
                    for name, _ in engine.module.named_parameters()
                )
            out[f"masters {stage}"] = same(whole(engine), whole(plain))
            engine.module.half()
            engine.module.float()
        next(engine.module.children()).half()  # a part of the model, which may be no unit
        losses += [train(engine, 1, 1), train(plain, 1, 1)]
        out[f"goes on {stage}"] = losses[0::2] == losses[1::2] and same(whole(engine), whole(plain))
        masters = live.consolidate(engine)
        home = Path(sys.argv[1]) / f"taken{stage}"
        engine.save_checkpoint(home)
        train(engine, 1, 2)
        found = zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, home)
        state = found.cpu().state_dict()
        out[f"recovered {stage}"] = found is engine.module and all(
            torch.equal(state[name], value.to(state[name].dtype)) for name, value in masters.items()
        )
        out[f"fp32 {stage} recovered"] = {p.dtype for p in found.parameters()} == {torch.float32}
        higher = {name: value + 1 for name, value in state.items()}
        found.load_state_dict(higher)
        out[f"loaded {stage}"] = all(torch.equal(value, higher[name]) for name, value in found.state_dict().items())
        out[f"trains {stage}"] = math.isfinite(train(engine, 1, 2)[0])
    return out


@check(2, 4)
def again_from_a_save() -> dict[str, bool]:
    """Two steps, a save, two steps; back in the same engine, and the same two steps: equal bit for bit.

    On four ranks each stage once.
    """
    out = {}
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_max_lr": 0.01},
    }
    for stage in range(4):
        for number, (name, precision) in enumerate(PRECISIONS.items()):
            if world() == 4 and number != stage % 3:
                continue
            home = Path(sys.argv[1]) / "again" / f"{stage} {name}"
            engine = start(config(stage, scheduler=scheduler, **precision))
            train(engine, 2)
            engine.save_checkpoint(home)
            first, weights = train(engine, 2, start=2), whole(engine)
            engine.load_checkpoint(home)
            counted = engine.global_steps == 2
            out[f"{stage} {name}"] = counted and first == train(engine, 2, start=2) and same(weights, whole(engine))
    return out


@check(2)
def fresh_from_a_save() -> dict[str, bool]:
    """The same, into an engine that was just made."""
    out = {}
    for name, extra in {"adam": {}, "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}}}.items():
        home = Path(sys.argv[1]) / "fresh" / name
        engine = start(config(3, **extra, **FP16))
        train(engine, 3)
        engine.save_checkpoint(home)
        first, weights = train(engine, 2, start=3), whole(engine)
        fresh = start(config(3, **extra, **FP16), small.make(seed=9))
        fresh.load_checkpoint(home)
        out[name] = first == train(fresh, 2, start=3) and same(weights, whole(fresh))
    return out


class Mixed(nn.Module):
    """Trained parameters of three dtypes, one module with two of them, and frozen integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6).bfloat16()
        self.b = nn.Linear(6, 4).double()
        self.odd = nn.Linear(4, 4)
        self.odd.bias = nn.Parameter(self.odd.bias.detach().bfloat16())
        self.packed = nn.Parameter(torch.arange(13, dtype=torch.uint8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        x = self.norm(self.a(x).bfloat16()).double()
        x = self.b(x).float()
        x = x @ self.odd.weight + self.odd.bias.float()
        return (x.square().mean() + self.packed.float().mean() * self.mask.float().mean()).float()


@check(1, 2, 4)
def several_dtypes() -> list[Any]:
    """A config without bf16 or fp16 computes every parameter in the dtype it has; masters are fp32."""
    out: list[Any] = []
    for stage in range(4):
        torch.manual_seed(1)
        engine = start(config(stage), Mixed())
        found = []
        for step in range(4):
            x = torch.randn(small.GLOBAL_BATCH, 4, generator=torch.Generator().manual_seed(step)).view(world(), -1, 4)
            loss = engine(x[rank()])
            engine.backward(loss)
            engine.step()
            found.append(mean_over_ranks(loss))
        out.append(found)
        dtypes = {one.name: str(one.dtype) for one in engine.sharded.parameters}
        masters = {str(one.master.dtype) for one in engine.sharded.parameters if one.master is not None}
        assert masters == {"torch.float32"} and dtypes["norm.weight"] == "torch.bfloat16"
        assert dtypes["b.weight"] == "torch.float64" and dtypes["odd.bias"] == "torch.bfloat16"
        with zero.GatheredParameters(engine.module.parameters()):
            assert torch.equal(engine.module.packed, torch.arange(13, dtype=torch.uint8))
    return out


@check(2)
def handed_in() -> dict[str, Any]:
    """Optimizers, schedules and groups of the caller's; each against the same in plain torch."""
    out: dict[str, Any] = {}

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trained = [p for p in model.parameters() if p.requires_grad]
        return [{"params": trained[::2], "weight_decay": 0.3}, {"params": trained[1::2], "lr": 0.05}]

    def plain(optimizer_of: Any, schedule_of: Any = None, steps: int = 5) -> dict[str, torch.Tensor]:
        model = small.make()
        optimizer = optimizer_of(groups(model))
        schedule = schedule_of(optimizer) if schedule_of else None
        for [tokens] in small.batches(steps, 0, 1):
            model(tokens).backward()
            for p in model.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
        return {n: p.detach() for n, p in model.named_parameters()}

    def distance(engine: runtime.Engine, wanted: dict[str, torch.Tensor]) -> float:
        found = whole(engine)
        return max((found[n] - wanted[n]).abs().max().item() for n in wanted if wanted[n].numel())

    settings = {k: v for k, v in config(3, gradient_clipping=0).items() if k != "optimizer"}
    adam = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
    adagrad = lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1)  # noqa: E731
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    for name, make in {"AdamW": adam, "Adagrad": adagrad}.items():
        model = small.make()
        optimizer = make(groups(model))
        schedule = halving(optimizer)
        engine, given, _, used = runtime.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings
        )
        assert (
            given.optimizer is optimizer
            and used is schedule
            and [g["lr"] for g in optimizer.param_groups] == engine.get_lr()
        )
        train(engine, 5)
        out[name] = distance(engine, plain(make, halving))
        model = small.make()
        engine = start(settings, model, optimizer=make, model_parameters=groups(model), lr_scheduler=halving)
        train(engine, 5)
        out[f"{name} as a function"] = distance(engine, plain(make, halving))
    model = small.make()
    engine = start(config(3, gradient_clipping=0), model, model_parameters=groups(model))
    train(engine, 5)
    out["groups"] = distance(engine, plain(lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)))
    model = small.make()
    optimizer = adam(groups(model))
    for [tokens] in small.batches(5, 0, 1):  # an optimizer that has been at work goes on with its states
        model(tokens).backward()
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    engine = start(settings, model, optimizer=optimizer)
    train(engine, 2, start=5)
    out["at work"] = distance(engine, plain(adam, steps=7))
    out["unknown kind"] = refusal(start, settings, optimizer=lambda p: torch.optim.Adafactor(p))
    train(start(settings | {"zero_allow_untested_optimizer": True}, optimizer=lambda p: torch.optim.Adafactor(p)), 1)
    train(start(settings | {"zero_optimization": {"stage": 0}}, optimizer=lambda p: torch.optim.Adafactor(p)), 1)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    out["stranger"] = refusal(start, settings, optimizer=stranger)
    out["lone schedule"] = refusal(start, config(3), lr_scheduler=halving(stranger))
    return out


@check(2)
def accumulation() -> dict[str, Any]:
    """The ways to say where a step ends, all equal to the plain one."""
    out: dict[str, Any] = {}
    steps = 3 if IS_WHOLE else 2
    for stage in range(4):
        usual = start(config(stage, 4))
        train(usual, steps)
        wanted = whole(usual)
        by_hand = start(config(stage, 4))
        for micros in small.batches(steps, rank(), world(), 4):
            for number, tokens in enumerate(micros):
                by_hand.set_gradient_accumulation_boundary(number == 3)
                by_hand.backward(by_hand(tokens))
            by_hand.step()
        out[f"by hand {stage}"] = same(wanted, whole(by_hand))
        unmanaged = start(config(stage, 4, managed_gradient_accumulation=False))
        for micros in small.batches(steps, rank(), world(), 4):
            for tokens in micros:
                unmanaged.backward(unmanaged(tokens))
            unmanaged.step()
        found = whole(unmanaged)
        out[f"unmanaged {stage}"] = max((found[n] - wanted[n]).abs().max().item() for n in wanted if wanted[n].numel())
        assert (unmanaged.global_steps, unmanaged.global_samples) == (steps, steps * small.GLOBAL_BATCH)
        silent = start(config(stage, 4))
        for micros in small.batches(steps, rank(), world(), 4):
            for tokens in micros[:-1]:
                with silent.no_sync():
                    assert not silent.is_gradient_accumulation_boundary()
                    silent.backward(silent(tokens))
                silent.step()
            silent.backward(silent(micros[-1]))
            silent.step()
        found = whole(silent)
        out[f"silent {stage}"] = max((found[n] - wanted[n]).abs().max().item() for n in wanted if wanted[n].numel())
    rates = [{"optimizer": {"type": "SGD", "params": {"lr": lr}}} for lr in (0.1, 0.1 * world())]
    summed = start(config(2, gradient_allreduce_op="sum", gradient_clipping=0) | rates[0])
    meant = start(config(2, gradient_clipping=0) | rates[1])
    train(summed, 1), train(meant, 1)
    a, b = whole(summed), whole(meant)
    out["sum"] = max((a[n] - b[n]).abs().max().item() for n in a if a[n].numel())
    return out


class Fork(nn.Module):
    """One of two branches runs; a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        """A number."""
        return (self.left if left else self.right)(x).square().mean()


@check(2)
def unused_parameters() -> dict[str, Any]:
    """Ranks that use different parameters agree; what nobody uses counts as a gradient of zeros, or is an error."""
    out: dict[str, Any] = {}
    for stage in range(4):
        torch.manual_seed(0)
        engine = start(
            config(stage, gradient_clipping=0) | {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.5}}},
            Fork(),
        )
        before = whole(engine)
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 3), rank() == 0))
            engine.step()
        after = whole(engine)
        out[str(stage)] = [not torch.equal(before[n], after[n]) for n in before]
    strict = start(config(2, zero={"ignore_unused_parameters": False}), Fork())
    strict.backward(strict(torch.ones(4, 3), True))
    out["strict"] = refusal(strict.step)
    return out


@check(1, 2)
def inference() -> list[bool]:
    """Stage 3 without an optimizer: sharded in the dtype of the computation, the plain model's numbers."""
    out = []
    for extra, dtype in (({}, torch.float32), (BF16, torch.bfloat16)):
        settings = {k: v for k, v in config(3, **extra).items() if k != "optimizer"}
        engine, optimizer, loader, schedule = runtime.initialize(model=small.make(), config=settings)
        assert optimizer is loader is schedule is None
        plain = small.make().to(dtype)
        plain.shift = plain.shift.float()
        [tokens] = next(small.batches(1, 0, 1))
        engine.eval()
        with torch.no_grad():
            out += [torch.equal(engine(tokens), plain(tokens)) for _ in range(2)]
        out.append({one.local().dtype for one in engine.sharded.parameters} == {dtype})
        assert "step needs an optimizer" in refusal(engine.step)
        assert "backward needs an optimizer" in refusal(engine.backward, torch.ones(()))
        settings["zero_optimization"] = {"stage": 2}
        assert "there is no optimizer" in refusal(start, settings)
    return out


@check(2)
def evaluation() -> dict[str, bool]:
    """Looking at the model between backward and step, or between steps, changes nothing."""
    out = {}
    for stage in range(4):
        usual, curious = start(config(stage)), start(config(stage))
        first = train(usual, 3)
        second = []
        for [tokens] in small.batches(3, rank(), world()):
            loss = curious(tokens)
            curious.backward(loss)
            with torch.no_grad():
                curious(tokens)
            curious.step()
            with torch.no_grad():
                curious(tokens)
            second.append(mean_over_ranks(loss))
        out[str(stage)] = first == second and same(whole(usual), whole(curious))
    return out


@check(2)
def what_is_said() -> dict[str, Any]:
    """What scripts ask of an engine."""
    engine, optimizer, loader, schedule = runtime.initialize(
        model=small.make(),
        config=config(2, 2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}),
        training_data=torch.arange(30).view(30, 1),
        collate_fn=lambda samples: torch.stack(samples).view(-1).tolist(),
    )
    assert engine.optimizer is optimizer and engine.lr_scheduler is schedule
    loaded = list(loader)
    boundaries = []
    for micros in small.batches(2, rank(), world(), 2):
        for tokens in micros:
            loss = engine(tokens)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.backward(loss)
            engine.step()
    assert engine.blocks is engine.module.blocks
    return {
        "rank": engine.global_rank,
        "world": engine.world_size,
        "local": engine.local_rank,
        "device": str(engine.device),
        "batch": [
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ],
        "steps": [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples],
        "boundaries": boundaries,
        "lr": engine.get_lr(),
        "norm": engine.get_global_grad_norm(),
        "scale": engine.cur_scale,
        "loaded": loaded,
        "stage": engine.zero_optimization_stage(),
        "mom": engine.get_mom(),
    }


@check(2)
def own_states() -> dict[str, Any]:
    """What the model's own `state_dict` has on a rank that asks alone, and what `load_state_dict` changes."""
    out: dict[str, Any] = {}
    for stage, precision in ((0, BF16), (1, {}), (2, BF16), (2, FP16)):
        engine = start(config(stage, **precision))
        dtype = next(iter(precision), "fp32")
        at_once = engine.module.state_dict() if rank() == 1 else None
        train(engine, 2)
        wanted = {name: value.to(DTYPES[dtype]) for name, value in whole(engine).items()}
        alone = copy.deepcopy(engine.module.state_dict()) if rank() == 1 else None  # the other rank asks nothing
        if alone is not None and at_once is not None:
            tensors = {name: alone[name] for name in wanted}
            plain = all(type(value) is torch.Tensor for value in alone.values())
            out[f"alone {stage} {dtype}"] = plain and same(wanted, tensors) and at_once.keys() == alone.keys()
            held = dict(engine.module.named_parameters())
            out[f"parameters {stage} {dtype}"] = same(wanted, {name: p.detach() for name, p in held.items()})
        halves = {name: value / 2 if value.is_floating_point() else value for name, value in wanted.items()}
        engine.module.load_state_dict({**engine.module.state_dict(), **halves})
        out[f"loaded {stage} {dtype}"] = same({name: value.float() for name, value in halves.items()}, whole(engine))
        train(engine, 1)
        after = whole(engine)
        out[f"near {stage} {dtype}"] = all(
            (after[name] - halves[name].float()).abs().max() < 0.05 for name in after if after[name].numel()
        )
        with torch.no_grad():  # as an average of another network's weights is written
            engine.module.frozen.weight.data.fill_(0.5)
            engine.module.head.weight[2] = 0.25
        exported = live.consolidate(engine)
        train(engine, 1)
        after = whole(engine)
        out[f"written {stage} {dtype}"] = bool(
            (after["frozen.weight"] == 0.5).all() and ((after["embed.weight"][2] - 0.25).abs() < 0.02).all()
        ) and bool(
            (exported["embed.weight"][2] == 0.25).all() and (exported["frozen.weight"] == 0.5).all()
            if exported
            else True
        )
    engine = start(config(3))
    for asked in (engine, engine.module, engine.module.blocks[0]):
        weight = next(value for name, value in asked.state_dict().items() if name.endswith("weight"))
        try:
            weight.float()
        except UsageError as error:
            out[f"refused {type(asked).__name__}"] = str(error)
    return out


@check(2)
def scripts_own_steps() -> dict[str, Any]:
    """The optimizer that `initialize` returns, stepped by the script, with a schedule of torch over it."""
    out: dict[str, Any] = {}
    for stage in range(4):
        losses: dict[str, list[float]] = {}
        for way in ("engine", "script"):
            engine, optimizer, *_ = runtime.initialize(model=small.make(), config=config(stage, 2, **FP16))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            losses[way] = []
            for step, micros in enumerate(small.batches(4, rank(), world(), 2)):
                for tokens in micros:
                    loss = engine(tokens)
                    if way == "engine":
                        engine.backward(loss)
                        engine.step()
                    else:
                        engine.scale(loss).backward()
                    losses[way].append(loss.item())
                if way == "script":
                    if step == 2:  # as if it overflowed
                        optimizer.loss_scale = optimizer.cur_scale
                    optimizer.step()
                    optimizer.zero_grad()
                if engine.was_step_applied():
                    schedule.step()
            facts = (
                engine.global_steps,
                engine.micro_steps,
                engine.pending_micro_steps,
                optimizer.overflow,
                optimizer.get_lr(),
            )
            out.setdefault(f"facts {stage}", []).append(facts)
        out[f"same {stage}"] = losses["engine"] == losses["script"]
        kept = copy.deepcopy(optimizer.state_dict())
        before = whole(engine)
        losses_before = train(engine, 1)
        optimizer.load_state_dict(kept)
        out[f"back {stage}"] = same(before, whole(engine)) and train(engine, 1) == losses_before
    for call in (
        lambda: optimizer.step(lambda: 0.0),
        lambda: optimizer.add_param_group({"params": []}),
        optimizer.optimizer.step,
    ):
        try:
            call()
        except UsageError as error:
            out.setdefault("refused", []).append(error.what)
    try:
        engine(next(small.batches(1, rank(), world()))[0]).backward()
    except UsageError as error:
        out["unscaled"] = error.what
    out["after"] = [math.isfinite(loss) for loss in train(engine, 1)]
    return out


@check(2)
def refusals() -> dict[str, str]:
    """What cannot work is refused before the model is touched."""
    out = {}
    settings = config(2)
    out["batch"] = refusal(start, {**settings, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1})
    out["mics"] = refusal(start, config(3, zero={"mics_shard_size": 3}))
    out["wrap"] = refusal(start, settings, wrap="Blok")
    with zero.Init(config_dict_or_path=config(3)):
        model = small.Small()
    out["other ranks"] = refusal(start, config(0), model)
    engine = start(settings)
    out["loss"] = refusal(engine.backward, torch.ones(3))
    out["attribute"] = refusal(lambda: engine.no_such_thing, kind=AttributeError)
    out["unit"] = str(len([m for m in start(settings, wrap="Linear").module.modules() if hasattr(m, "unshard")]))
    with zero.Init():
        model = small.Small()
    out["states"] = refusal(start, config(3), model, optimizer=torch.optim.Adagrad(model.parameters()))
    return out


if __name__ == "__main__":
    main()
