"""`zckpt to-fp32`, `to-fp16`, `to-bf16`: whole weights; `to-dcp`, `to-mcore`: in shards again; `to-peft`: the adapter alone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.cli import options as o
from zckpt.cli import push
from zckpt.cli.declared import command
from zckpt.cli.written import Words, finish

if TYPE_CHECKING:
    from zckpt.jobs.convert import PlannedConversion
    from zckpt.jobs.planned import Report


@dataclass(frozen=True, repr=False, eq=False)
class WeightOptions(o.Group):
    """The files of whole weights."""

    format: Annotated[
        o.Format | None, o.what("--format", help="Container of the output; by default what OUT's name says.")
    ] = None
    max_shard_size: o.MaxShardSize = o.SHARD_BYTES
    overflow: o.Overflow = o.OverflowChoice.error


@dataclass(frozen=True, repr=False, eq=False)
class StateDict(o.Group):
    """What a torch.distributed.checkpoint directory holds."""

    dtype: Annotated[o.Dtype | None, o.what("--dtype", help="Of the weights; by default as they were saved.")] = None
    under: Annotated[
        str, o.what("--under", metavar="KEY", help="The state dict's key for the weights; '' puts them at its top.")
    ] = "model"
    optimizer: Annotated[
        str | None, o.what("--optimizer", metavar="KEY", help="Write the optimizer's state too, under this key.")
    ] = None
    accelerate: Annotated[
        bool,
        o.what(
            "--accelerate",
            help="Write what accelerate's load_state and transformers' Trainer resume from under FSDP: pytorch_model_fsdp_0 and "
            "optimizer_0.",
        ),
    ] = False
    names: Annotated[
        str | None,
        o.what(
            "--names", metavar="SCHEME", help="Name tensors as a program does: torchtitan, megatron-core, hf, hf:NAME."
        ),
    ] = None
    config: Annotated[
        str | None,
        o.what("--config", metavar="FILE", help="The model's config.json for --names, if none is beside CKPT."),
    ] = None
    vocab_size: o.VocabSize = None
    overflow: o.Overflow = o.OverflowChoice.error


@dataclass(frozen=True, repr=False, eq=False)
class MegatronModel(o.Group):
    """What a Megatron-Core checkpoint holds."""

    dtype: Annotated[o.Dtype | None, o.what("--dtype", help="Of the weights; by default as they were saved.")] = None
    config: Annotated[
        str | None, o.what("--config", metavar="FILE", help="The model's config.json, if none is beside CKPT.")
    ] = None
    vocab_size: o.VocabSize = None
    tensor_parallel: Annotated[
        int,
        o.what("--tensor-parallel", metavar="N", callback=o.positive, help="Ranks for which the vocabulary is padded."),
    ] = 1
    make_vocab_size_divisible_by: Annotated[
        int,
        o.what(
            "--make-vocab-size-divisible-by",
            metavar="N",
            callback=o.positive,
            help="As Megatron's option: times --tensor-parallel, the vocabulary is a multiple of it.",
        ),
    ] = 128
    numbered_layers: Annotated[
        bool, o.what("--numbered-layers", help="Number layers in names (non_homogeneous_layers), not stack them.")
    ] = False
    optimizer: Annotated[
        bool, o.what("--optimizer", help="Write the optimizer's states too, for Megatron-Core's distributed optimizer.")
    ] = False
    expert_parallel: Annotated[
        int,
        o.what(
            "--expert-parallel",
            metavar="N",
            callback=o.positive,
            help="Expert-parallel ranks that load the optimizer's states.",
        ),
    ] = 1
    overflow: o.Overflow = o.OverflowChoice.error


@dataclass(frozen=True, repr=False, eq=False)
class Adapter(o.Group):
    """Which adapter is written."""

    adapter: Annotated[str | None, o.what("--adapter", metavar="NAME", help="Which adapter, if there are several.")] = (
        None
    )
    dtype: Annotated[o.Dtype, o.what("--dtype", help="Of the adapter's tensors.")] = o.Dtype.fp32
    overflow: o.Overflow = o.OverflowChoice.error


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for dtype in ("fp32", "fp16", "bf16"):
        _register(app, dtype)
    command(
        app,
        "to-dcp",
        about="Write weights of any layout as a torch.distributed.checkpoint directory, which FSDP loads on any number of "
        "ranks.",
        example="zckpt to-dcp out/checkpoint-500 fsdp/ --optimizer optim",
    )(to_dcp)
    command(
        app,
        "to-mcore",
        about="Write a model of transformers as a checkpoint of Megatron-Core (torch_dist), which loads at any tensor, "
        "pipeline and expert parallel sizes.",
        example="zckpt to-mcore Qwen3-8B/ megatron/ --dtype bf16 --tensor-parallel 2",
    )(to_mcore)
    command(
        app,
        "to-peft",
        about="Write the adapter alone (LoRA and other PEFT methods), as PeftModel.from_pretrained loads it.",
        example="zckpt to-peft out/checkpoint-500 adapter/",
    )(to_peft)


def _register(app: typer.Typer, dtype: str) -> None:
    @command(
        app,
        f"to-{dtype}",
        about=f"Write a checkpoint's whole weights in {dtype}. Run the same command again to resume an interrupted run.",
        example=f"zckpt to-{dtype} out/checkpoint-500 weights/",
    )
    def convert(
        ckpt: o.Checkpoint,
        out: o.Out,
        weights: WeightOptions,
        merging: o.Merging,
        selection: o.Selection,
        names: o.HubNames,
        source: o.SourceOptions,
        speed: o.WriteSpeed,
        writing: o.Writing,
        shown: o.ShownProgress,
    ) -> None:
        from zckpt.jobs.convert import prepare
        from zckpt.jobs.options import Options, to_dtype

        began = time.perf_counter()
        groups = (weights, merging, selection, names, source, speed, writing)
        options = o.chosen(Options, *groups, dtype=to_dtype(dtype))
        if out.startswith("hf://"):
            push.to_page(ckpt, out, options, shown.console, dry_run=writing.dry_run)
        else:
            planned = prepare(ckpt, out, options)
            finish(planned, words_of(planned, dtype), began, writing, shown)


def to_dcp(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    state: StateDict,
    selection: o.Selection,
    names: o.Names,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes a torch.distributed.checkpoint directory."""
    from zckpt.jobs.options import DcpOptions
    from zckpt.jobs.to_dcp import prepare

    began = time.perf_counter()
    options = o.chosen(DcpOptions, state, selection, names, source, speed, writing)
    planned = prepare(ckpt, out, options)
    finish(planned, words_of(planned, state.dtype.value if state.dtype else "saved"), began, writing, shown)


def to_mcore(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    model: MegatronModel,
    selection: o.Selection,
    names: o.Names,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes a checkpoint of Megatron-Core."""
    from zckpt.jobs.options import MegatronOptions
    from zckpt.jobs.to_mcore import prepare

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(MegatronOptions, model, selection, names, source, speed, writing))
    words = words_of(planned, model.dtype.value if model.dtype else "saved")
    words = replace(words, use=lambda files: f"load it with --load {out.rstrip('/') or '/'} --use-checkpoint-args")
    finish(planned, words, began, writing, shown)


def to_peft(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    adapter: Adapter,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes an adapter."""
    from zckpt.jobs.options import PeftOptions
    from zckpt.jobs.to_peft import AdapterReport, carry_out, prepare

    def more(report: Report) -> dict[str, object]:
        return {"untrained": list(report.untrained)} if isinstance(report, AdapterReport) else {}

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(PeftOptions, adapter, source, speed, writing))
    what = f"adapter {planned.adapter!r}, {count(len(planned.catalog), 'tensor')} as {adapter.dtype.value}"
    facts: dict[str, object] = {"adapter": planned.adapter, "dtype": adapter.dtype.value}
    words = Words(
        what, lambda files: f"load it with PeftModel.from_pretrained(base, {out.rstrip('/') or '/'!r})", facts
    )
    finish(planned, words, began, writing, shown, carry_out, more)


def words_of(planned: PlannedConversion, dtype: str) -> Words:
    """How to speak of weights that were written in this dtype."""
    what = f"{count(len(planned.catalog), 'tensor')} as {dtype}"
    if part := planned.opened.catalog.source.part:
        return Words(what, lambda files: f"it is {part}, and no whole model: nothing loads it as one", {"dtype": dtype})
    if planned.catalog.evidence.left_out:
        part = "it lacks the model's frozen parameters, which are in the model that the run began with: --base MODEL adds them"
        return Words(what, lambda files: part, {"dtype": dtype})
    return Words(what, lambda files: f"load it with {_loader(planned, files)}", {"dtype": dtype})


def _loader(planned: PlannedConversion, files: set[str]) -> str:
    """How a person loads the output."""
    from zckpt.cli.loading import loading_line
    from zckpt.layouts.save.accelerate import FIRST_OPTIMIZER

    out = planned.out.rstrip("/") or "/"
    if planned.order.single:
        weights = (
            "safetensors.torch.load_file({!r})"
            if out.endswith(".safetensors")
            else "torch.load({!r}, weights_only=True)"
        )
        return weights.format(out)
    if f"{FIRST_OPTIMIZER}/.metadata" in files:
        trainers = f"trainer.train(resume_from_checkpoint={out!r})"
        load = trainers if "trainer_state.json" in files else f"accelerator.load_state({out!r})"
        return f"{load}, under FSDP with SHARDED_STATE_DICT"
    if ".metadata" in files:
        return f"torch.distributed.checkpoint.load(state_dict, checkpoint_id={out!r})"
    if any(".lora_" in name for name in planned.catalog):
        return "the program that trained it; merged weights need --merge-lora, and PEFT loads what to-peft writes"
    return loading_line(planned.out, planned.catalog)
