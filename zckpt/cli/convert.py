"""The commands that write weights, of any form and also as an average; `to-dcp` and `to-mcore`, which write shards again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.words import count
from zckpt.cli.declare import Checkpoint, DryRun, Out, OutDirectory, ShownProgress, command
from zckpt.cli.written import Words, finish
from zckpt.core.dtypes import F32, SHORT_NAMES, DType
from zckpt.jobs.declarations import AVERAGE, CONVERT, QUANTIZE, TO_DCP, TO_FP8, TO_GGUF, TO_MCORE, TO_MLX, TO_PEFT
from zckpt.storage.fsspec_io import is_page

if TYPE_CHECKING:
    from zckpt.cli.declare import Shown
    from zckpt.jobs.convert import PlannedConversion
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Adapter, Average, Dcp, Fp8, Gguf, Megatron, Mlx, Quantize
    from zckpt.jobs.planned import Report
    from zckpt.jobs.quantize import PlannedFp8


def _declare(dtype: str) -> None:
    @command(
        f"to-{dtype}",
        about=f"Write a checkpoint's consolidated weights in {dtype}. Run the same command again to resume an interrupted run.",
        job=CONVERT,
        hidden=frozenset({"dtype"}),
        example=f"zckpt to-{dtype} out/checkpoint-500 weights/",
    )
    def convert_to(
        ckpt: Checkpoint, out: Out, asked: Asked[None], dry_run: DryRun = False, *, shown: ShownProgress
    ) -> None:
        from zckpt.jobs.casting import to_dtype

        _write(ckpt, out, asked.having(dtype=to_dtype(dtype)), shown, dry_run=dry_run)


for _dtype in ("fp32", "fp16", "bf16"):
    _declare(_dtype)


@command(
    "convert",
    about="Write a checkpoint's consolidated weights in the dtype that --dtype names, fp32 by default. Run the same command "
    "again to resume an interrupted run.",
    job=replace(CONVERT, usual={"dtype": F32}, words={"dtype": ("Of the weights.",)}),
    example="zckpt convert out/checkpoint-500 weights/ --dtype bf16",
)
def convert(ckpt: Checkpoint, out: Out, asked: Asked[None], dry_run: DryRun = False, *, shown: ShownProgress) -> None:
    """Writes consolidated weights."""
    _write(ckpt, out, asked, shown, dry_run=dry_run)


def _write(ckpt: str, out: str, asked: Asked[None], shown: ShownProgress, *, dry_run: bool) -> None:
    if is_page(out):
        from zckpt.cli import push

        push.to_page(ckpt, out, asked, shown.console, dry_run=dry_run)
    else:
        planned = CONVERT.prepare(ckpt, out, asked)
        finish(planned, words_of(planned, name_of(asked.casting.dtype)), shown, dry_run=dry_run)


@command(
    "to-dcp",
    about="Write weights of any layout as a torch.distributed.checkpoint directory, which FSDP loads on any number of "
    "ranks.",
    job=TO_DCP,
    example="zckpt to-dcp out/checkpoint-500 fsdp/ --optimizer optim",
)
def to_dcp(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Dcp], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes a torch.distributed.checkpoint directory."""
    planned = TO_DCP.prepare(ckpt, out, asked)
    finish(planned, words_of(planned, name_of(asked.casting.dtype)), shown, dry_run=dry_run)


@command(
    "to-mcore",
    about="Write a Hugging Face model as a checkpoint of Megatron-Core (torch_dist), which loads at any tensor, "
    "pipeline and expert parallel sizes.",
    job=TO_MCORE,
    example="zckpt to-mcore Qwen3-8B/ megatron/ --dtype bf16 --tensor-parallel 2",
)
def to_mcore(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Megatron], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes a checkpoint of Megatron-Core."""
    planned = TO_MCORE.prepare(ckpt, out, asked)
    words = words_of(planned, name_of(asked.casting.dtype))
    words = replace(words, use=lambda files: f"load it with --load {out.rstrip('/') or '/'} --use-checkpoint-args")
    finish(planned, words, shown, dry_run=dry_run)


@command(
    "to-peft",
    about="Write the adapter alone (LoRA and other PEFT methods), as PeftModel.from_pretrained loads it.",
    job=TO_PEFT,
    example="zckpt to-peft out/checkpoint-500 adapter/",
)
def to_peft(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Adapter], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes an adapter."""
    from zckpt.jobs.to_peft import AdapterReport, carry_out

    def more(report: Report) -> dict[str, object]:
        return {"untrained": list(report.untrained)} if isinstance(report, AdapterReport) else {}

    planned = TO_PEFT.prepare(ckpt, out, asked)
    dtype = SHORT_NAMES[asked.casting.dtype or F32]
    what = f"adapter {planned.adapter!r}, {count(len(planned.catalog), 'tensor')} as {dtype}"
    facts: dict[str, object] = {"adapter": planned.adapter, "dtype": dtype}
    words = Words(
        what, lambda files: f"load it with PeftModel.from_pretrained(base, {out.rstrip('/') or '/'!r})", facts
    )
    finish(planned, words, shown, carry_out, more, dry_run=dry_run)


def name_of(dtype: DType | None) -> str:
    """The name of a dtype in a sentence about weights; None leaves weights as they were saved."""
    return "saved" if dtype is None else SHORT_NAMES[dtype]


def words_of(planned: PlannedConversion, dtype: str) -> Words:
    """The words for weights that were written in this dtype."""
    what = f"{count(len(planned.catalog), 'tensor')} as {dtype}"
    if part := planned.opened.catalog.source.part:
        return Words(what, lambda files: f"it is {part}, and no whole model: nothing loads it as one", {"dtype": dtype})
    if planned.catalog.evidence.left_out:
        part = "it lacks the model's frozen parameters, which are in the model that the run began with: --base MODEL adds them"
        return Words(what, lambda files: part, {"dtype": dtype})
    if lacks := planned.catalog.evidence.lacks:
        part = f"it lacks {count(len(lacks), 'tensor')} of its model: nothing loads it as one"
        return Words(what, lambda files: part, {"dtype": dtype})
    return Words(what, lambda files: f"load it with {_loader(planned, files)}", {"dtype": dtype})


def _loader(planned: PlannedConversion, files: set[str]) -> str:
    """The code with which a person loads the output."""
    from zckpt.layouts.save.trainers import FIRST_OPTIMIZER

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
    from zckpt.cli.loading import loading_line

    return loading_line(planned.out, planned.catalog)


OutGguf = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="A file (.gguf), a directory, or an address of one of these (s3://...).", show_default=False
    ),
]


@command(
    "to-gguf",
    about="Write a model as GGUF, which llama.cpp runs: what its own converter writes, from any checkpoint.",
    job=TO_GGUF,
    example="zckpt to-gguf out/checkpoint-500 model.gguf --type q8_0",
)
def to_gguf(
    ckpt: Checkpoint, out: OutGguf, asked: Asked[Gguf], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes GGUF files."""
    planned, kind = TO_GGUF.prepare(ckpt, out, asked), asked.own.type
    first = planned.plan.files[0][0].path
    path = planned.out if planned.order.single else f"{planned.out.rstrip('/')}/{first}"
    what = f"{count(len(planned.catalog), 'tensor')} as {kind}"
    words = Words(what, lambda files: f"run it with llama-cli -m {path}", {"type": kind})
    finish(planned, words, shown, dry_run=dry_run)


@command(
    "to-mlx",
    about="Write a model that mlx-lm loads on Apple's machines: what mlx_lm.convert writes, from any checkpoint.",
    job=TO_MLX,
    example="zckpt to-mlx out/checkpoint-500 mlx/ --bits 4",
)
def to_mlx(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Mlx], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes the model in MLX's form."""
    planned = TO_MLX.prepare(ckpt, out, asked)
    dtype = name_of(planned.asked.casting.dtype)
    form = dtype if asked.own.bits is None else f"{asked.own.bits} bits and {dtype}"
    what = f"{count(len(planned.catalog), 'tensor')} as {form}"
    facts: dict[str, object] = {"dtype": dtype, "bits": asked.own.bits}
    place = planned.out.rstrip("/") or "/"
    words = Words(what, lambda files: f"run it with mlx_lm.generate --model {place}", facts)
    finish(planned, words, shown, dry_run=dry_run)


Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CKPT...", help="Checkpoints of one model, of any layouts; CKPT:TAG names one save.", show_default=False
    ),
]


OutAverage = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://...).",
        show_default=False,
    ),
]


@command(
    "average",
    about="Average checkpoints of one model in fp32, in one pass, or merge them: weighted, as a moving average, as task "
    "vectors on a base, or along an arc.",
    job=AVERAGE,
    example="zckpt average run:global_step100 run:global_step200 averaged/ --dtype bf16",
)
def average(
    ckpts: Checkpoints, out: OutAverage, asked: Asked[Average], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes one model out of several checkpoints."""
    planned = AVERAGE.prepare(ckpts, out, asked)
    words = words_of(planned, SHORT_NAMES[planned.order.dtype or F32])
    what = f"{words.what}, of {count(len(planned.made_from), 'checkpoint')}"
    finish(planned, replace(words, what=what), shown, dry_run=dry_run)


@command(
    "to-fp8",
    about="Write weights of fp8 (E4M3) with scales, which transformers, vLLM and compressed-tensors load. Weights of linear "
    "layers are quantised; embeddings, norms, biases, routers and the head are not.",
    job=TO_FP8,
    example="zckpt to-fp8 out/checkpoint-500 fp8/ --scheme block128",
)
def to_fp8(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Fp8], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes weights of fp8."""
    _write_quantised(TO_FP8.prepare(ckpt, out, asked), asked, f"fp8 ({asked.own.scheme})", dry_run, shown)


@command(
    "quantize",
    about="Write quantised weights, which vLLM, transformers and compressed-tensors load. Weights of linear layers are "
    "quantised; embeddings, norms, biases, routers and the head are not.",
    job=QUANTIZE,
    example="zckpt quantize out/checkpoint-500 nvfp4/ --to nvfp4",
)
def quantize(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Quantize], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes quantised weights."""
    _write_quantised(QUANTIZE.prepare(ckpt, out, asked), asked, asked.own.target, dry_run, shown)


def _write_quantised(planned: PlannedFp8, asked: Asked[Fp8 | Quantize], form: str, dry_run: bool, shown: Shown) -> None:
    scheme, dtype = asked.own.scheme, name_of(asked.casting.dtype)
    number = len(planned.quantisers) + planned.carried
    what = f"{count(number, 'matrix', 'matrices')} as {form}, {count(planned.others, 'other tensor')} as {dtype}"
    facts: dict[str, object] = {"dtype": dtype, "scheme": scheme, "quantized": number}
    words = Words(what, lambda files: f"{_lossless(planned)}load it with {_loader_of_quantised(planned)}", facts)
    finish(planned, words, shown, more=lambda report: _more(planned), dry_run=dry_run)


def _loader_of_quantised(planned: PlannedFp8) -> str:
    """The code with which a person loads the output."""
    from zckpt.cli.loading import loading_line

    place = planned.out.rstrip("/") or "/"
    if not planned.quantisers:
        return f"vllm serve {place}, or what loads the source"
    if any(name.endswith("_weight_scale_2") for name in planned.catalog.tensors):
        return f"trtllm-serve {place}, or another server that reads ModelOpt's experts"
    line = loading_line(planned.out, planned.catalog)
    return f"{line}, or vllm serve {place}" if ".from_pretrained(" in line else line


def _more(planned: PlannedFp8) -> dict[str, object]:
    return {
        "quantized_tensors": planned.tensors(),
        **({"lossless": list(found)} if (found := planned.lossless()) else {}),
    }


def _lossless(planned: PlannedFp8) -> str:
    """How many matrices of MXFP4 lost nothing; empty if there are none, or if others made a part of them."""
    found = planned.lossless()
    return f"without loss: {found[0]:,} of {count(found[1], 'matrix', 'matrices')} of MXFP4\n" if found else ""
