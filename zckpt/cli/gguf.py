"""`zckpt to-gguf`: a model as GGUF, which llama.cpp runs."""

from __future__ import annotations

import time
from enum import Enum
from typing import Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.cli import options as o
from zckpt.cli.declared import command
from zckpt.cli.written import Words, finish


class Type(str, Enum):
    """Types that matrices can be given."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


OutGguf = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="A file (.gguf), a directory, or an address of one of these (s3://...).", show_default=False
    ),
]


@dataclass(frozen=True, repr=False, eq=False)
class GgufFile(o.Group):
    """What a GGUF file holds."""

    type: Annotated[Type, o.what("--type", help="Of the matrices; norms, biases and routers are always f32.")] = (
        Type.f16
    )
    split_max_size: Annotated[
        int | None,
        o.what(
            "--split-max-size",
            metavar="SIZE",
            parser=o.size_in_bytes,
            help="Most bytes of tensors in one file, e.g. 40GB; OUT is then a directory.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        o.what("--tokenizer", metavar="DIR", help="Directory with the tokenizer, if none is beside CKPT; or none."),
    ] = None
    pre_tokenizer: Annotated[
        str | None,
        o.what(
            "--pre-tokenizer", metavar="NAME", help="llama.cpp's name of it, such as llama-bpe, if it is not known."
        ),
    ] = None
    model_name: Annotated[
        str | None, o.what("--model-name", metavar="NAME", help="What the file says that the model is called.")
    ] = None
    config: Annotated[
        str | None, o.what("--config", metavar="FILE", help="The model's config.json, if none is beside CKPT.")
    ] = None
    overflow: o.Overflow = o.OverflowChoice.error


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "to-gguf",
        about="Write a model as GGUF, which llama.cpp runs: what its own converter writes, from any checkpoint.",
        example="zckpt to-gguf out/checkpoint-500 model.gguf --type q8_0",
    )(to_gguf)


def to_gguf(
    ckpt: o.Checkpoint,
    out: OutGguf,
    model: GgufFile,
    selection: o.Selection,
    names: o.Names,
    source: o.SourceOptions,
    speed: o.WriteSpeed,
    writing: o.Writing,
    shown: o.ShownProgress,
) -> None:
    """Writes GGUF files."""
    from zckpt.jobs.options import GgufOptions
    from zckpt.jobs.to_gguf import prepare

    began = time.perf_counter()
    options = o.chosen(GgufOptions, model, selection, names, source, speed, writing, dtype=None)
    planned = prepare(ckpt, out, options)
    first = planned.plan.files[0][0].path
    path = planned.out if planned.order.single else f"{planned.out.rstrip('/')}/{first}"
    words = Words(
        f"{count(len(planned.catalog), 'tensor')} as {model.type.value}", lambda files: f"run it with llama-cli -m {path}",
        {"type": model.type.value},
    )  # fmt: skip
    finish(planned, words, began, writing, shown)
