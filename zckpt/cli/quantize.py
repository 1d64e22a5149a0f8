"""`zckpt to-fp8`: weights of fp8 with scales."""

from __future__ import annotations

import time
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.cli import options as o
from zckpt.cli.declared import command
from zckpt.cli.written import Words, finish

if TYPE_CHECKING:
    from zckpt.jobs.to_fp8 import PlannedFp8


class SchemeChoice(str, Enum):
    """What each scale is for."""

    block128 = "block128"
    channel = "channel"
    tensor = "tensor"


@dataclass(frozen=True, repr=False, eq=False)
class Fp8Model(o.Group):
    """What is quantised, and how."""

    scheme: Annotated[
        SchemeChoice,
        o.what(
            "--scheme",
            help="A scale for 128 x 128 elements (DeepSeek's form), for a row or for a tensor (compressed-tensors' form).",
        ),
    ] = SchemeChoice.block128
    quantize: Annotated[
        list[str],
        o.what("--quantize", metavar="GLOB", help="Quantise only weights of linear layers that match. Repeatable."),
    ] = field(default_factory=list)
    keep: Annotated[
        list[str], o.what("--keep", metavar="GLOB", help="Do not quantise weights that match. Repeatable.")
    ] = field(default_factory=list)
    dtype: Annotated[o.Dtype, o.what("--dtype", help="Of what is not quantised.")] = o.Dtype.bf16
    max_shard_size: o.MaxShardSize = o.SHARD_BYTES
    overflow: o.Overflow = o.OverflowChoice.error


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "to-fp8",
        about="Write weights of fp8 (E4M3) with scales, which transformers, vLLM and compressed-tensors load. Weights of linear "
        "layers are quantised; embeddings, norms, biases, routers and the head are not.",
        example="zckpt to-fp8 out/checkpoint-500 fp8/ --scheme block128",
    )(to_fp8)


def to_fp8(
    ckpt: o.Checkpoint,
    out: o.OutDirectory,
    model: Fp8Model,
    selection: o.Selection,
    names: o.HubNames,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes weights of fp8."""
    from zckpt.jobs.options import Fp8Options
    from zckpt.jobs.to_fp8 import prepare

    began = time.perf_counter()
    planned = prepare(ckpt, out, o.chosen(Fp8Options, model, selection, names, source, speed, writing))
    number = len(planned.quantisers)
    what = (
        f"{count(number, 'matrix', 'matrices')} as fp8 ({model.scheme.value}), "
        f"{count(planned.others, 'other tensor')} as {model.dtype.value}"
    )
    facts: dict[str, object] = {"dtype": model.dtype.value, "scheme": model.scheme.value, "quantized": number}
    words = Words(what, lambda files: f"load it with {_loader(planned)}", facts)
    finish(planned, words, began, writing, shown, more=lambda report: _more(planned))


def _loader(planned: PlannedFp8) -> str:
    """How a person loads the output."""
    from zckpt.cli.loading import loading_line

    line, place = loading_line(planned.out, planned.catalog), planned.out.rstrip("/") or "/"
    return f"{line}, or vllm serve {place}" if ".from_pretrained(" in line else line


def _more(planned: PlannedFp8) -> dict[str, object]:
    return {"quantized_tensors": planned.tensors()}
