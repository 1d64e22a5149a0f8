"""Weights taken from live models on several ranks; the tests of this folder say what must come out."""

from __future__ import annotations

import contextlib
import filecmp
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import small
import torch
import torch.distributed as dist
from checks import BF16, FP16, config, start, train, whole
from harness import CHECKS, check, main, rank, world
from proofs import IS_WHOLE
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zckpt
from zckpt import live
from zckpt.base.errors import CastError, InconsistentError, OutputError, UnsupportedError, UsageError
from zckpt.live import assignment, carry, export, ranks
from zckpt.runtime import utils
from zckpt.team import meeting

CHECKS.clear()  # those of `checks`

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shared:
    """A directory that all ranks know; rank 0 removes it."""

    def __enter__(self) -> Path:
        made = [tempfile.mkdtemp(prefix="live-") if rank() == 0 else ""]
        dist.broadcast_object_list(made)
        self.home = Path(made[0])
        return self.home

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        if rank() == 0:
            import shutil

            shutil.rmtree(self.home)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and bits(found[n]) == bits(t) for n, t in wanted.items()
    )


def cast(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The state dict that must come out: parameters cast, buffers as they are, tied ones under both names."""
    floats = {n for n, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    return {
        name: tensor.detach().to(dtype) if dtype and name in floats else tensor.detach()
        for name, tensor in model.state_dict().items()
    }


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All shards of a directory, tied names filled in from the headers."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
        with safe_open(path, "pt") as file:
            tied |= {name: kept for name, kept in file.metadata().items() if name != "format"}
    return found | {name: found[kept] for name, kept in tied.items()}


def same_files(a: Path, b: Path) -> bool:
    """Whether two directories hold the same, but for what each says of its origin."""
    names = sorted(p.name for p in a.iterdir())
    assert "zckpt.json" in names and zckpt.verify(a).ok
    if names != sorted(p.name for p in b.iterdir()):
        return False
    names.remove("zckpt.json")
    return filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


def many_kinds(odd: bool = False) -> nn.Module:
    """Beside `small`'s: a convolution, doubles, integers, bools, an empty parameter, a frozen half one."""
    model = small.make(3, odd)
    model.conv = nn.Conv2d(3, 5, 3)
    model.doubles = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
    model.halves = nn.Parameter(torch.randn(3, 9).half(), requires_grad=False)
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    return model


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """A model under `fully_shard`, in several ways."""
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("shard",))
    more: dict[str, Any] = {"mesh": mesh}
    if kind == "hsdp":
        more = {"mesh": init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("replicate", "shard"))}
    elif kind == "columns":
        more["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.shape[-1] % world() == 0 else Shard(0)
    elif kind == "offload":
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif kind == "hpz":
        more["reshard_after_forward"] = 2
    elif kind == "gathered":
        more["reshard_after_forward"] = False
    elif kind == "bf16":
        more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ignored = {p for p in model.parameters() if p.dtype != torch.float32 or not p.ndim or not p.numel()}
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored, **more)
    fully_shard(model, ignored_params=ignored, **more)
    return model


@check(1, 2, 4)
def foreign() -> dict[str, bool]:
    """Models that someone else sharded: tensors and files equal those of the plain model, before and after a forward.

    On four ranks in what other worlds do not have, and in one that they have; in all for proofs.
    """
    out: dict[str, bool] = {}
    kinds = ["plain", "rows", "columns", "offload", "gathered", "bf16"] if IS_WHOLE or world() < 4 else ["columns"]
    kinds += ["hsdp", "hpz"] if world() == 4 else []
    for kind in kinds:
        model = many_kinds() if kind == "plain" else sharded(many_kinds(), kind)
        if kind != "plain":
            model(torch.randint(0, small.WORDS, (2, 5)))
        for name, dtype in DTYPES.items() if kind in ("plain", "columns") else (("bf16", torch.bfloat16),):
            wanted = cast(many_kinds(), dtype)
            if name == "fp32":
                wanted["halves"] = wanted["halves"].float()
            with Shared() as home:
                live.save_pretrained(model, home / "out", name, max_shard_size=500)
                out[f"{kind} {name} tensors"] = equal(load(home / "out"), wanted)
                if name == "fp32" and rank() == 0:
                    torch.save(dict(many_kinds().state_dict()), home / "plain.bin")
                    chosen = zckpt.Options(max_shard_size=500)
                    zckpt.convert(home / "plain.bin", home / "offline", dtype=name, options=chosen)
                    out[f"{kind} {name} files"] = same_files(home / "out", home / "offline")
                dist.barrier()
            state = live.consolidate(model, name)
            out[f"{kind} {name} state"] = equal(state, wanted) if rank() == 0 else state == {}
    return out


@check(4)
def boxes() -> dict[str, bool]:
    """DTensors cut along any dimensions of a mesh of two, whatever divides what; every second one in small pieces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(7)
    out = {}
    for shape in ((5, 7), (4, 3, 5), (1, 9), (3,), (2, 2, 2, 3)):
        for first in (Replicate(), *(Shard(d) for d in range(len(shape)))):
            for second in (Replicate(), *(Shard(d) for d in range(len(shape)))):
                truth = torch.randn(shape)
                model = nn.Module()
                model.w = nn.Parameter(distribute_tensor(truth, mesh, (first, second)))
                with mock.patch.object(assignment, "PIECE_BYTES", assignment.PIECE_BYTES if len(out) % 2 else 12):
                    state = live.consolidate(model)
                out[f"{shape} {first} {second}"] = equal(state, {"w": truth}) if rank() == 0 else state == {}
    return out


@check(2, 4)
def engines() -> dict[str, bool]:
    """Our engine at every stage and precision: masters of trained parameters, odd parameters and buffers too.

    Without proofs two precisions at each stage.
    """
    out: dict[str, bool] = {}
    places = [(s, p, {}) for s in range(4) for p in ({}, BF16, FP16)]
    cases = [place for number, place in enumerate(places) if IS_WHOLE or number % 3 != place[0] % 3]
    if world() == 4:
        cases = [(3, BF16, {"zero_hpz_partition_size": 2}), (3, BF16, {"mics_shard_size": 2})]
    for stage, precision, zero in cases:
        engine = start(config(stage, zero=zero, **precision))
        train(engine, 2)
        own = next(iter(precision), "fp32")
        name = f"{stage} {own} {zero}"
        wanted = whole(engine)
        wanted["head.weight"] = wanted["embed.weight"]
        wanted |= {n: b.detach().clone() for n, b in engine.module.named_buffers()}
        cut = {
            target: {
                n: t.to(DTYPES[target]) if t.is_floating_point() and n != "shift" else t for n, t in wanted.items()
            }
            for target in ("fp32", own)
        }
        with Shared() as home:
            engine.save_checkpoint(home / "run")
            for target in cut:
                live.save_pretrained(engine, home / target, target, max_shard_size=300)
                out[f"{name} {target}"] = equal(load(home / target), cut[target])
                if rank() == 0:
                    chosen = zckpt.Options(max_shard_size=300)
                    zckpt.convert(home / "run", home / "offline" / target, dtype=target, options=chosen)
                    out[f"{name} {target} files"] = same_files(home / target, home / "offline" / target)
            if precision:
                assert engine.save_16bit_model(str(home / "half"))
                out[f"{name} half"] = equal(load(home / "half"), cut[own])
        state = live.consolidate(engine.module)
        out[f"{name} state"] = rank() > 0 or equal(
            {n: t for n, t in state.items() if "frozen" not in n},
            {n: t for n, t in wanted.items() if "frozen" not in n},
        )
        again = train(engine, 1, start=2)
        other = start(config(stage, zero=zero, **precision))
        train(other, 2)
        out[f"{name} goes on"] = again == train(other, 1, start=2)
    return out


@check(2, 4)
def loading() -> dict[str, bool]:
    """A checkpoint straight into sharded models and engines: every rank fills its part, of weights and masters.

    On four ranks into what two do not have, and into one that they have; into all for proofs.
    """
    out: dict[str, bool] = {}
    kinds = ["rows", "columns", "offload", "gathered"] if IS_WHOLE or world() < 4 else ["columns"]
    for kind in [*kinds, *(["hsdp", "hpz"] if world() == 4 else [])]:
        with Shared() as home:
            truth = cast(many_kinds(), None)
            if rank() == 0:
                torch.save(truth, home / "pytorch_model.bin")
            dist.barrier()
            model = sharded(many_kinds(), kind)
            model(torch.randint(0, small.WORDS, (2, 5)))
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.zero_()
            zckpt.load_state_dict_from_zero_checkpoint(model, str(home))
            state = live.consolidate(model)
            out[kind] = rank() > 0 or equal(state, truth)
    for stage, precision in ((0, {}), (1, BF16), (2, FP16), (3, BF16)) if IS_WHOLE or world() < 4 else ((3, BF16),):
        engine, other = (start(config(stage, **precision)) for _ in range(2))
        train(engine, 2)
        with Shared() as home:
            engine.save_checkpoint(home)
            zckpt.load_state_dict_from_zero_checkpoint(other.module, str(home))
            name = f"{stage} {next(iter(precision), 'fp32')}"
            out[f"{name} weights"] = equal(whole(other), whole(engine))
            once, twice = live.consolidate(engine), live.consolidate(other)
            out[f"{name} state"] = {n: bits(t) for n, t in once.items() if "frozen" not in n} == {
                n: bits(t) for n, t in twice.items() if "frozen" not in n
            }
            train(other, 1)
    return out


@check(2)
def transformers_models() -> dict[str, Any]:
    """`from_pretrained` reads what was saved, tied weights and config included."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    out: dict[str, Any] = {}
    configs = (
        GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=31, n_positions=16),
        LlamaConfig(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, vocab_size=31),
    )
    for told in configs:
        torch.manual_seed(1)
        plain = AutoModelForCausalLM.from_config(told)
        wanted = {name: tensor.detach().bfloat16() for name, tensor in plain.state_dict().items()}
        for layer in plain.model.layers if told.model_type == "llama" else plain.transformer.h:
            fully_shard(layer)
        fully_shard(plain)
        with Shared() as home:
            live.save_pretrained(plain, home, "bf16", "2KB")
            again = AutoModelForCausalLM.from_pretrained(home, dtype="auto")
            out[told.model_type] = [
                equal(dict(again.state_dict()), wanted),
                str(again.dtype),
                type(again).__name__,
                sorted(p.name for p in home.glob("*.json")),
            ]
    return out


@check(2, 4)
def no_shared_files() -> dict[str, Any]:
    """Ranks that do not see the directory send what they have to rank 0, which says so."""
    out: dict[str, Any] = {}
    for blind in ({1}, set(range(1, world()))):
        model = sharded(many_kinds(), "rows")
        wanted = cast(many_kinds(), torch.bfloat16)
        with Shared() as home, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen = os.path.exists
            if rank() in blind:
                export.os.path.exists = lambda path: False
            try:
                live.save_pretrained(model, home / "out", "bf16", 700)
            finally:
                export.os.path.exists = seen
            name = f"{len(blind)}"
            out[name] = equal(load(home / "out"), wanted)
            out[f"{name} told"] = [str(w.message) for w in told if "Rank 0 writes" in str(w.message)]
    with (
        Shared() as home,
        mock.patch.object(export.os.path, "exists", lambda path: rank() == 0),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        full = OutputError("the disk is full", remedy="Free some room.")
        with mock.patch.object(carry.Files, "put", side_effect=full) if rank() == 0 else contextlib.nullcontext():
            try:
                live.save_pretrained(model, home / "full", "bf16")
            except OutputError as error:
                out["what others send is taken after an error"] = "the disk is full" in str(error)
        live.save_pretrained(model, home / "out", "bf16")
        out["and the next save is whole"] = equal(load(home / "out"), wanted)
    return out


@check(2)
def failures() -> dict[str, Any]:
    """What goes wrong on one rank is raised on all, and nothing is left."""
    out: dict[str, Any] = {}

    def refused(name: str, kind: type[Exception], model: nn.Module, *arguments: Any, **named: Any) -> None:
        with Shared() as home:
            try:
                live.save_pretrained(model, home / "out", *arguments, **named)
                out[name] = "nothing was refused"
            except kind as error:
                dist.barrier()
                out[name] = [str(error), sorted(os.listdir(home))]

    meta = sharded(many_kinds(), "rows")
    if rank() == 1:
        meta.late = nn.Parameter(torch.empty(3, device="meta"))
    refused("meta", Exception, meta)
    other = nn.Linear(3, 2 + rank())
    refused("shapes", InconsistentError, other)
    large = sharded(many_kinds(), "rows")
    with torch.no_grad():
        for p in large.blocks[1].parameters():
            p.to_local().fill_(1e6)
    refused("large", CastError, large, "fp16")
    engine = start(config(1, **FP16))
    weight = engine.module.blocks[1].up.weight
    utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 1e6))  # infinite in the whole copy
    refused("large whole", CastError, engine, "fp16")
    refused("file", UsageError, large, None, file="a/b.bin")
    live.consolidate(large, "bf16")
    with Shared() as home:
        live.save_pretrained(large, home, "fp16", overflow="clamp")
        out["clamp"] = load(home)["blocks.1.up.weight"].unique().tolist()
    strange = nn.Module()
    strange.w = nn.Parameter(torch.eye(3).to_sparse())
    refused("sparse", UnsupportedError, strange)
    with Shared() as home:
        (home / "out").touch()
        refused_by = None
        dist.barrier()
        try:
            live.save_pretrained(large, home / "out")
        except OutputError as error:
            refused_by = str(error)
        out["a file"] = refused_by
    return out


@check(2)
def some_ranks_only() -> dict[str, Any]:
    """Who did not come is named, soon, whatever the call; and the same call works when all come."""
    engine = start(config(2))
    out: dict[str, Any] = {"within": ranks.ENTRY_S + meeting._EXTRA_S}
    meeting._EXTRA_S, ranks.ENTRY_S = 0.3, 0.7
    with Shared() as home:
        calls: dict[str, Any] = {
            "save_pretrained": lambda: live.save_pretrained(engine, home / "out"),
            "consolidate": lambda: live.consolidate(engine),
            "save_pretrained of save_16bit_model": lambda: engine.save_16bit_model(home / "out"),
        }
        for lonely in (0, 1):
            for name, call in calls.items():
                if rank() == lonely:
                    try:
                        call()
                    except InconsistentError as error:
                        out[name] = str(error)
                dist.barrier()
        out["left"] = sorted(os.listdir(home))
        ranks.ENTRY_S = 30.0
        state = live.consolidate(engine)
        live.save_pretrained(engine, home / "out")
        out["saved"] = rank() == 1 or equal(load(home / "out"), state)
    return out


@check(2)
def inference() -> dict[str, Any]:
    """Stage 3 without an optimizer: a checkpoint is refused with the call that works, and that call works."""
    out: dict[str, Any] = {}
    for precision, dtype in (({}, torch.float32), (BF16, torch.bfloat16)):
        settings = {key: value for key, value in config(3, **precision).items() if key != "optimizer"}
        engine = start(settings)
        with Shared() as home:
            try:
                engine.save_checkpoint(home / "run")
            except UsageError as error:
                out[f"{dtype} told"] = str(error)
            engine.save_16bit_model(home / "weights")
            dist.barrier()
            out[f"{dtype} weights"] = equal(load(home / "weights"), cast(small.make(), dtype))
            out[f"{dtype} left"] = sorted(os.listdir(home / "run"))
    return out


@check(2)
def directories() -> dict[str, Any]:
    """A second save replaces the first, whatever its shards; other files stay. One file of torch's format is CRC-true."""
    import zipfile

    model = sharded(many_kinds(), "rows")
    out: dict[str, Any] = {}
    with Shared() as home:
        (home / "tokenizer.json").write_text("{}")
        (home / "global_step1").mkdir(exist_ok=True)
        for size in (400, "5GB", 900):
            live.save_pretrained(model, home, "bf16", size)
            out[str(size)] = sorted(p.name for p in home.iterdir())
            out[f"{size} sound"] = zckpt.verify(home).ok
            out[f"{size} equal"] = equal(load(home), cast(many_kinds(), torch.bfloat16))
            dist.barrier()
        live.save_pretrained(model, home, file="pytorch_model.bin")
        state = torch.load(home / "pytorch_model.bin", weights_only=True)
        columns = sharded(many_kinds(), "columns")
        dist.barrier()
        live.save_pretrained(columns, home / "columns", file="pytorch_model.bin")
        same = (home / "columns" / "pytorch_model.bin").read_bytes() == (home / "pytorch_model.bin").read_bytes()
        out["columns"] = same and zckpt.verify(home / "columns").ok
        out["bin"] = equal(state, cast(many_kinds(), None))
        with zipfile.ZipFile(home / "pytorch_model.bin") as archive:
            out["crc"] = archive.testzip()
        out["frozen"] = sorted(live.consolidate(model, exclude_frozen=True))
    return out


@check(4)
def memory() -> list[int]:
    """MiB that saving, and consolidating, 256 MiB of weights needs beside them."""
    model = nn.Module()
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("shard",))
    for number in range(4):
        setattr(model, f"w{number}", nn.Parameter(distribute_tensor(torch.ones(4096, 4096), mesh, (Shard(0),))))
    grown = []
    with Shared() as home:
        for work in (lambda: live.save_pretrained(model, home, "bf16"), lambda: live.consolidate(model, "bf16")):
            before = resident()
            work()
            grown.append(resident(peak=True) - before)
    return grown


def resident(peak: bool = False) -> int:
    """MiB of memory now; or the most since this was last asked for."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) // 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
