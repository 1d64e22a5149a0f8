"""The options that commands share, in groups: a command declares the groups that it takes, and gets each as one value.

A group is declared once: an option means the same everywhere. Its `options` are keywords of the values in `jobs.options`.
"""

from __future__ import annotations

from dataclasses import field, fields
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.pace import thread_count
from zckpt.cli.choices import Dtype as Dtype
from zckpt.cli.choices import Format as Format
from zckpt.cli.choices import OverflowChoice as OverflowChoice
from zckpt.cli.choices import ProgressForm
from zckpt.cli.output import Console
from zckpt.cli.texts import positive as positive
from zckpt.cli.texts import size_in_bytes as size_in_bytes
from zckpt.cli.texts import split_rename as split_rename

if TYPE_CHECKING:
    from zckpt.base.pace import Pace
    from zckpt.jobs.options import OpenOptions
    from zckpt.layouts.save.listing import ReadOptions

    JobOptions = TypeVar("JobOptions", bound=OpenOptions)


which = partial(typer.Option, rich_help_panel="Which checkpoint")
_split = partial(typer.Option, rich_help_panel="Models split over ranks (tensor and pipeline parallelism)")
what = partial(typer.Option, rich_help_panel="What to write")
_tensors = partial(typer.Option, rich_help_panel="Which tensors")
_names = partial(typer.Option, rich_help_panel="Names")
_lora = partial(typer.Option, rich_help_panel="Adapters (LoRA)")
_speed = partial(typer.Option, rich_help_panel="Speed")
output = partial(typer.Option, rich_help_panel="Output")

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="Checkpoint, tag or trainer output directory, or weights.", show_default=False),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://..., hf://OWNER/NAME).",
        show_default=False,
    ),
]
OutDirectory = Annotated[
    str, typer.Argument(metavar="OUT", help="Directory for the output, or an address.", show_default=False)
]
Overflow = Annotated[
    OverflowChoice, what("--overflow", help="For numbers too large for the dtype: stop, write infinity, or clamp.")
]
VocabSize = Annotated[
    int | None,
    _names(
        "--vocab-size",
        metavar="N",
        callback=positive,
        help="Words of the vocabulary: further rows are padding. By default what config, run or tokenizer say.",
    ),
]
MaxShardSize = Annotated[
    int,
    what(
        "--max-shard-size",
        metavar="SIZE",
        parser=size_in_bytes,
        help="Most bytes in one shard; by default 5GB.",
        show_default=False,
    ),
]
SHARD_BYTES = 5 * 10**9
Sign = Annotated[
    str | None, output("--sign", metavar="KEY", help="Sign OUT with a private key: model.sig, for model_signing.")
]
BaseModel = Annotated[
    str | None,
    _lora(
        "--base",
        metavar="MODEL",
        help="The model that the run began with, for what CKPT lacks: a directory, or a name in the hub's local cache.",
    ),
]
Adapters = Annotated[
    list[str],
    _lora("--adapter", metavar="DIR[:WEIGHT]", help="PEFT directory, or an adapter's name in CKPT. Repeatable."),
]


@dataclass(frozen=True, repr=False, eq=False)
class Group:
    """Options that belong together. Groups have no repr and no comparison, which would cost time whenever zckpt starts."""

    def options(self) -> dict[str, Any]:
        """What was chosen, by the names of `jobs.options`."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: object) -> object:
    if isinstance(value, Dtype):
        from zckpt.jobs.options import to_dtype

        return to_dtype(value.value)
    return tuple(value) if isinstance(value, list) else value.value if isinstance(value, Enum) else value


@dataclass(frozen=True, repr=False, eq=False)
class Joining(Group):
    """What a checkpoint does not say of itself."""

    key: Annotated[
        str | None,
        which("--key", metavar="KEY", help="Which state dict, where a save holds several, such as ema."),
    ] = None
    shapes: Annotated[
        str | None,
        which(
            "--shapes",
            metavar="FROM",
            help="Weights, JSON or a config that say the shapes in FSDP's flat parameters, or the heads in torchtitan's states.",
        ),
    ] = None
    as_part: Annotated[
        bool, which("--as-part", help="Take one shard, or one rank's file or directory, alone; it is no whole model.")
    ] = False
    tp_rules: Annotated[
        str | None,
        _split(
            "--tp-rules",
            metavar="RULES",
            help="How slices are joined: megatron, megatron-swiglu, neox, bloom, or a JSON file.",
        ),
    ] = None
    tp: Annotated[
        int | None,
        _split("--tp", metavar="N", callback=positive, help="Tensor-parallel ranks, if the files do not say."),
    ] = None
    pp: Annotated[
        int | None, _split("--pp", metavar="N", callback=positive, help="Pipeline stages, if the files do not say.")
    ] = None

    @property
    def read_options(self) -> ReadOptions | None:
        """The same as jobs take it."""
        from zckpt.layouts.save.listing import ReadOptions

        given = self.tp_rules or self.tp or self.pp or self.key or self.shapes
        return ReadOptions(self.tp_rules, self.tp, self.pp, self.key or "", self.shapes or "") if given else None


@dataclass(frozen=True, repr=False, eq=False)
class SourceOptions(Joining):
    """Which save is read, and how."""

    tag: Annotated[
        str | None, which("--tag", metavar="TAG", help="Which save, if there are several; by default that of 'latest'.")
    ] = None
    also: Annotated[
        list[str],
        which("--also", metavar="DIR", help="Directory with other parts of CKPT, from another node. Repeatable."),
    ] = field(default_factory=list)

    def options(self) -> dict[str, Any]:  # noqa: D102
        given = {"tag": self.tag, "also": tuple(self.also), "as_part": self.as_part}
        return {**given, "read_options": self.read_options}


@dataclass(frozen=True, repr=False, eq=False)
class Selection(Group):
    """Which tensors are written."""

    include: Annotated[
        list[str], _tensors("--include", metavar="GLOB", help="Write only tensors that match. Repeatable.")
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str], _tensors("--exclude", metavar="GLOB", help="Leave out tensors that match. Repeatable.")
    ] = field(default_factory=list)
    exclude_frozen: Annotated[
        bool, _tensors("--exclude-frozen", help="Leave out parameters that were not trained.")
    ] = False


@dataclass(frozen=True, repr=False, eq=False)
class Names(Group):
    """How tensors are called in the output."""

    strip_prefix: Annotated[
        str, _names("--strip-prefix", metavar="PREFIX", help="Remove PREFIX, or with 'auto' what wraps all names.")
    ] = ""
    rename: Annotated[
        list[str],
        _names("--rename", metavar="REGEX=REPL", help="Replace in every name, in the order given. Repeatable."),
    ] = field(default_factory=list)

    def options(self) -> dict[str, Any]:  # noqa: D102
        return {"strip_prefix": self.strip_prefix, "rename": [split_rename(text) for text in self.rename]}


@dataclass(frozen=True, repr=False, eq=False)
class HubNames(Names):
    """The same, and names as transformers has them."""

    to: Annotated[
        str | None,
        _names(
            "--to",
            metavar="hf[:NAME]",
            help="Write the model as transformers has it; NAME is its family, such as llama.",
        ),
    ] = None
    config: Annotated[
        str | None,
        _names(
            "--config", metavar="FILE", help="The model's config.json for --to, if the checkpoint lacks some of it."
        ),
    ] = None
    vocab_size: VocabSize = None
    layer_names: Annotated[
        str | None, _names("--layer-names", metavar="FILE", help="JSON file with names for a pipeline's layers.")
    ] = None

    def options(self) -> dict[str, Any]:  # noqa: D102
        from zckpt.naming.transform import Form

        return {**Names.options(self), "form": Form(self.to, self.config, self.layer_names, self.vocab_size)}


@dataclass(frozen=True, repr=False, eq=False)
class MergedWith(Group):
    """What was merged into an output, and is not in the checkpoint."""

    base: BaseModel = None
    adapter: Adapters = field(default_factory=list)

    def options(self) -> dict[str, Any]:  # noqa: D102
        if self.base is None and not self.adapter:
            return {"lora": None}
        from zckpt.jobs.options import LoraMerge

        return {"lora": LoraMerge(base=self.base, adapters=tuple(self.adapter))}


@dataclass(frozen=True, repr=False, eq=False)
class Merging(Group):
    """Adapters that are merged into the weights."""

    merge_lora: Annotated[
        bool, _lora("--merge-lora", help="Merge LoRA adapters into the weights: those of CKPT, or --adapter.")
    ] = False
    base: BaseModel = None
    adapter: Adapters = field(default_factory=list)
    allow_untrained: Annotated[
        bool, _lora("--allow-untrained", help="Merge an adapter whose matrices are all zeros, too.")
    ] = False

    def options(self) -> dict[str, Any]:  # noqa: D102
        given = {"--adapter": self.adapter, "--allow-untrained": self.allow_untrained}
        if not self.merge_lora:
            if others := [name for name, value in given.items() if value]:
                raise UsageError(
                    f"{others[0]} is of use only with --merge-lora", found=f"{others[0]} without --merge-lora",
                    remedy=f"Add --merge-lora, or leave out {others[0]}.",
                )  # fmt: skip
            return {} if self.base is None else {"base": self.base}
        from zckpt.jobs.options import LoraMerge

        lora = LoraMerge(base=self.base, adapters=tuple(self.adapter), allow_untrained=self.allow_untrained)
        return {"lora": lora}


@dataclass(frozen=True, repr=False, eq=False)
class Speed(Group):
    """How hard to work."""

    threads: Annotated[
        int | None, _speed("--threads", metavar="N", help="Threads that move data; by default 2 to 4.")
    ] = None
    keep_cache: Annotated[
        bool | None,
        _speed(
            "--keep-cache/--no-cache-pollution",
            help="Whether the page cache keeps what is read; by default unless the job is larger than memory.",
            show_default=False,
        ),
    ] = None
    limit_rate: Annotated[
        int | None,
        _speed(
            "--limit-rate",
            metavar="SIZE",
            parser=size_in_bytes,
            help="Most bytes per second, read and written, e.g. 500MB.",
        ),
    ] = None

    @property
    def pace(self) -> Pace:
        """The same as engines take it."""
        return {"threads": thread_count(self.threads), "keep_cache": self.keep_cache, "bytes_per_s": self.limit_rate}


@dataclass(frozen=True, repr=False, eq=False)
class WriteSpeed(Speed):
    """The same, of commands that write."""

    buffer: Annotated[
        int | None,
        _speed(
            "--buffer", metavar="SIZE", parser=size_in_bytes, help="Bytes that each thread gathers and writes at once."
        ),
    ] = None


@dataclass(frozen=True, repr=False, eq=False)
class Writing(Group):
    """Whether and how an output is written."""

    dry_run: Annotated[bool, output("--dry-run", help="Print what would be written, and write nothing.")] = False
    overwrite: Annotated[
        bool, output("--overwrite", help="Replace what zckpt wrote to OUT, when the new files are complete.")
    ] = False
    allow_unknown_layout: Annotated[
        bool, output("--allow-unknown-layout", help="Go on if zckpt cannot prove that it reads the layout correctly.")
    ] = False
    sign: Sign = None

    def options(self) -> dict[str, Any]:  # noqa: D102
        return {
            "overwrite": self.overwrite, "allow_unknown_layout": self.allow_unknown_layout, "sign": self.sign,
        }  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class Shown(Group):
    """What a command prints."""

    as_json: Annotated[bool, output("--json", help="Print one JSON object on stdout.")] = False
    quiet: Annotated[bool, output("--quiet", help="Print errors only.")] = False

    @property
    def console(self) -> Console:
        """Where the command prints."""
        return Console(as_json=self.as_json, quiet=self.quiet)


@dataclass(frozen=True, repr=False, eq=False)
class ShownProgress(Shown):
    """The same of commands that work for long, and show how far they are."""

    progress_form: Annotated[
        ProgressForm, output("--progress", help="A bar in a terminal, or JSON lines on stderr for programs.")
    ] = ProgressForm.bar

    @property
    def console(self) -> Console:  # noqa: D102
        lines = self.progress_form is ProgressForm.json
        return Console(as_json=self.as_json, quiet=self.quiet, progress_lines=lines)


def chosen(kind: type[JobOptions], *groups: Group, **more: Any) -> JobOptions:
    """What groups of options ask of a job, as one value."""
    for group in groups:
        more |= group.options()
    return kind(**more)
