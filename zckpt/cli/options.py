"""The options that commands share: declared once, so that they mean and say the same everywhere."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from zckpt.base.pace import Pace
    from zckpt.layouts.save.listing import ReadOptions


class Format(str, Enum):
    """Containers that can be written."""

    safetensors = "safetensors"
    bin = "bin"


class Dtype(str, Enum):
    """Dtypes that weights can be given."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class OverflowChoice(str, Enum):
    """What to do with numbers too large for the dtype."""

    error = "error"
    inf = "inf"
    clamp = "clamp"


def _print_version(wanted: bool) -> None:
    if wanted:
        from zckpt import __version__

        typer.echo(f"zckpt {__version__}")
        raise typer.Exit


def split_rename(text: str) -> tuple[str, str]:
    r"""`REGEX=REPL` at its first `=`; one that is escaped (`\=`) or opens a lookaround (`(?=`, `(?<=`) does not count.

    Raises:
        UsageError: there is none.
    """
    import re

    from zckpt.base.errors import UsageError

    found = re.fullmatch(r"((?:\(\?<?=|\\.|[^\\=])*)=(.*)", text, re.DOTALL)
    if not found:
        raise UsageError(
            "a --rename without '='", found=repr(text), expected="it is REGEX=REPL", remedy="Example: '^model\\.='."
        )
    return found[1], found[2]


def wishes(tp_rules: str | None, tp: int | None, pp: int | None, key: str | None = None) -> ReadOptions | None:
    """What was said of a checkpoint that does not say it itself."""
    from zckpt.layouts.save.listing import ReadOptions

    return ReadOptions(tp_rules, tp, pp, key or "") if tp_rules or tp or pp or key else None


def parse_bytes(text: str | None, option: str) -> int | None:
    """`8MiB`, `500MB`, `1.5G` or a plain number, as bytes; None for None.

    Raises:
        UsageError: it is no such thing, or nothing.
    """
    from zckpt.base.errors import UsageError
    from zckpt.storage.paths import to_bytes

    if text is None:
        return None
    try:
        nbytes = to_bytes(text.strip().upper().removesuffix("/S"))
    except UsageError:
        nbytes = 0
    if nbytes < 1:
        raise UsageError(f"an {option} that is no number of bytes", found=repr(text), remedy="Examples: 8MiB, 500MB.")
    return nbytes


def pace(threads: int | None, keep_cache: bool | None, limit_rate: str | None) -> Pace:
    """How hard to work, from the options that say so."""
    from zckpt.base.pace import thread_count

    thread_count(threads)
    return {
        "threads": threads,
        "keep_cache": keep_cache,
        "bytes_per_s": parse_bytes(limit_rate, "--limit-rate"),
    }


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="Checkpoint, tag or trainer output directory, or weights.", show_default=False),
]
Looked = Annotated[
    str, typer.Argument(metavar="CKPT|FILE", help="Checkpoint directory, or one weights file.", show_default=False)
]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Checkpoint, trainer output directory, or weights.", show_default=False)
]
Converted = Annotated[
    str | None,
    typer.Argument(metavar="[CONVERTED]", help="Output that was made from CKPT.", show_default=False),
]
SideA = Annotated[str, typer.Argument(metavar="A", help="Checkpoint, or weights.", show_default=False)]
SideB = Annotated[str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="One file (.safetensors, .bin, .pt), or else a directory of shards. Or an address: s3://..., hf://OWNER/NAME.",
        show_default=False,
    ),
]
Tag = Annotated[str | None, typer.Option("--tag", metavar="T", help="Which save, where there are several.")]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="DIR", help="Directory laid over CKPT: its parts from another node. Repeatable."),
]
TpRules = Annotated[
    str | None,
    typer.Option(
        "--tp-rules",
        metavar="RULES",
        help="How tensor-parallel slices are joined: megatron, megatron-swiglu, neox, bloom, or a JSON file.",
    ),
]
Tp = Annotated[
    int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor-parallel ranks, where the files do not say.")
]
Pp = Annotated[
    int | None, typer.Option("--pp", metavar="N", min=1, help="Pipeline stages, where the files do not say.")
]
To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="hf:NAME", help="Turn Megatron's or GPT-NeoX's model into hf:gpt-neox, hf:gpt2 or hf:llama."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="The model's config.json for --to, where the run does not say it all."
    ),
]
LayerNames = Annotated[
    str | None, typer.Option("--layer-names", metavar="FILE", help="JSON file with names for a pipeline's layers.")
]
CastTo = Annotated[Dtype, typer.Option("--dtype", help="Dtype of the output.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="Which state dict of a torch.distributed.checkpoint save, such as ema."),
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Container of the output; by default what OUT's name says.")
]
CastOrKeep = Annotated[Dtype | None, typer.Option("--dtype", help="Of the weights; by default as they were saved.")]
OutDirectory = Annotated[
    str, typer.Argument(metavar="OUT", help="Directory for the new checkpoint.", show_default=False)
]
Under = Annotated[
    str, typer.Option("--under", metavar="KEY", help="The state dict's key for the weights; '' puts them on top.")
]
OptimizerKey = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="KEY", help="Write the optimizer's states too, under this key."),
]
CastOrConfig = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of the weights; by default what config.json says, or plain weights' own."),
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", metavar="S", help="Most bytes in one shard.")]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="GLOB", help="Keep only tensors that match. Repeatable.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave out tensors that match. Repeatable.")
]
ExcludeFrozen = Annotated[bool, typer.Option("--exclude-frozen", help="Leave out parameters that were not trained.")]
StripPrefix = Annotated[str, typer.Option("--strip-prefix", metavar="P", help="Take P off every name that has it.")]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="REGEX=REPL", help="Replace in every name, in the order given. Repeatable."),
]
OverflowOption = Annotated[
    OverflowChoice, typer.Option("--overflow", help="Numbers too large for the dtype: stop, make infinite, or clamp.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="Threads that move data; by default what fits.")
]
Buffer = Annotated[
    str | None, typer.Option("--buffer", metavar="S", help="Bytes that each thread gathers and writes at once.")
]
KeepCache = Annotated[
    bool | None,
    typer.Option(
        "--keep-cache/--no-cache-pollution",
        help="Whether the page cache keeps what is read; by default unless the job is larger than memory.",
        show_default=False,
    ),
]
LimitRate = Annotated[
    str | None,
    typer.Option("--limit-rate", metavar="S", help="Most bytes a second, read and written together; e.g. 500MB."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what zckpt wrote to OUT, once the new files are complete.")
]
AllowUnknownLayout = Annotated[
    bool, typer.Option("--allow-unknown-layout", help="Convert though the layout cannot be proved.")
]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor and the slices it is made of.")]
AllTensors = Annotated[bool, typer.Option("--tensors", help="List every tensor, also those that are the same.")]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Read every byte: checksums, masters against their copies, NaN and infinity."),
]
Atol = Annotated[
    float | None,
    typer.Option("--atol", metavar="X", min=0, help="The same: |a - b| <= X + Y |b|. By default, bit for bit."),
]
Rtol = Annotated[float | None, typer.Option("--rtol", metavar="Y", min=0, help="See --atol.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
