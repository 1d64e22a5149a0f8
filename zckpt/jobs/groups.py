"""What a user can ask for, in groups of options: each is declared here once, with its help, its panel and what its value is.

For every job, the command line and `zckpt.Options`, which are made from these. Nothing of layouts and names is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import UsageError
from zckpt.base.pace import Pace, thread_count, window_bytes
from zckpt.base.sizes import file_bytes
from zckpt.core.dtypes import F32, DType

if TYPE_CHECKING:
    from zckpt.layouts.save.listing import ReadOptions
    from zckpt.output.signature import Signing

AnyPath = str | os.PathLike[str]
Overflow = Literal["error", "inf", "clamp"]
Format = Literal["safetensors", "bin"]
Scheme = Literal["block128", "channel", "tensor", "nvfp4", "mxfp4", "mxfp8", "int4", "int8"]
Encoding = Literal["xor", "overwrite"]
Combination = Literal["linear", "cat", "ties", "magnitude_prune"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]
Precision = Literal["keep", "fp32", "fp16", "bf16"]

SCHEMES: tuple[Scheme, ...] = ("block128", "channel", "tensor")
QUANTISED = ("fp8", "nvfp4", "mxfp4", "mxfp8", "int4", "int8")
"""Forms of quantised weights that zckpt writes."""
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
DROPPED = ("optimizer", "module-weights", "frozen")
"""Parts of a save that `slim` can leave out."""

WHICH, SPLIT = "Which checkpoint", "Models split over ranks (tensor and pipeline parallelism)"
WHAT, TENSORS, NAMES, LORA, SPEED, OUTPUT = (
    "What to write", "Which tensors", "Names", "Adapters (LoRA)", "Speed", "Output",
)  # fmt: skip


def option(
    default: object, flag: str, of: str | tuple[str, ...], about: str, panel: str = WHAT, *,
    metavar: str | None = None, **more: object,
) -> Any:  # fmt: skip
    """A field of a group that is an option of commands.

    Args:
        default: its value where the option is not given; `MISSING` for an option that must be given.
        flag: how it is called; several names with spaces between them.
        of: what it takes: "text", "texts", "flag", "number", "positive", "real", "reals", "size", "renames", "dtype", or words.
        about: the sentence for `--help`.
        panel: the heading under which it stands there.
        metavar: what stands for the value.
        more: further arguments of `typer.Option`.
    """
    said = {"flag": flag, "of": of, "help": about, "panel": panel, "metavar": metavar, "more": more}
    return field(default=default, metadata=said)


CONFIG_HELP = "The model's config.json, if none is beside CKPT."
_DTYPE = "Of the weights; by default as they were saved."


vocab_size_option = partial(
    option, None, "--vocab-size", "positive",
    "Words of the vocabulary: further rows are padding. By default what config, run or tokenizer say.", NAMES, metavar="N",
)  # fmt: skip
family_option = partial(
    option, None, "--family", "text",
    "A file that says the names of a family of models that zckpt does not know: docs/families.md.", NAMES, metavar="FILE",
)  # fmt: skip
base_option = partial(
    option, None, "--base", "text",
    "The model that the run began with, for what CKPT lacks: a directory, or a name in the hub's local cache.", LORA,
    metavar="MODEL",
)  # fmt: skip
adapter_option = partial(
    option, (), "--adapter", "texts", "PEFT directory, or an adapter's name in CKPT. Repeatable.", LORA,
    metavar="DIR[:WEIGHT]",
)  # fmt: skip
"""Options of several groups."""


def know_family(said: str | Mapping[str, Any] | None) -> None:
    """Registers a family, if one is given. Errors as in `naming.schemes.add_family`."""
    if said is not None:
        from zckpt.naming.schemes import add_family

        add_family(said)


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What a checkpoint does not say of itself, as commands ask for it; attributes as in `ReadOptions`."""

    key: str | None = option(
        None, "--key", "text", "Which state dict, where a save holds several, such as ema.", WHICH, metavar="KEY"
    )
    shapes: str | None = option(
        None, "--shapes", "text",
        "Weights, JSON or a config that say the shapes in FSDP's flat parameters, or the heads in torchtitan's states.",
        WHICH, metavar="FROM",
    )  # fmt: skip
    tp_rules: str | None = option(
        None, "--tp-rules", "text", "How slices are joined: megatron, megatron-swiglu, neox, bloom, or a JSON file.",
        SPLIT, metavar="RULES",
    )  # fmt: skip
    tp: int | None = option(
        None, "--tp", "positive", "Tensor-parallel ranks, if the files do not say.", SPLIT, metavar="N"
    )
    pp: int | None = option(None, "--pp", "positive", "Pipeline stages, if the files do not say.", SPLIT, metavar="N")

    def as_fields(self) -> dict[str, Any]:
        """The field of `Naming` for this form, by name."""
        if not (self.tp_rules or self.tp or self.pp or self.key or self.shapes):
            return {}
        from zckpt.layouts.save.listing import ReadOptions

        return {"read_options": ReadOptions(self.tp_rules, self.tp, self.pp, self.key or "", self.shapes or "")}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which save is read, and how; attributes as in `Options`."""

    read_options: ReadOptions | None = field(default=None, metadata={"parts": Joining})
    as_part: bool = option(
        False, "--as-part", "flag", "Take one shard, or one rank's file or directory, alone; it is not a whole model.",
        WHICH,
    )  # fmt: skip
    tag: str | None = option(
        None, "--tag", "text", "Which save, if there are several; by default that of 'latest'.", WHICH, metavar="TAG"
    )
    best: bool = option(
        False, "--best", "flag", "Of a Trainer's run, the save that its trainer_state.json calls the best.", WHICH
    )
    also: Sequence[AnyPath] = option(
        (), "--also", "texts", "Directory with other parts of CKPT, from another node. Repeatable.", WHICH,
        metavar="DIR",
    )  # fmt: skip
    allow_unknown_layout: bool = option(
        False, "--allow-unknown-layout", "flag", "Go on if zckpt cannot prove that it reads the layout correctly.",
        OUTPUT,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Selecting:
    """Which tensors are written; attributes as in `Options`."""

    include: Sequence[str] = option(
        (), "--include", "texts", "Write only tensors that match. Repeatable.", TENSORS, metavar="GLOB"
    )
    exclude: Sequence[str] = option(
        (), "--exclude", "texts", "Leave out tensors that match. Repeatable.", TENSORS, metavar="GLOB"
    )
    exclude_frozen: bool = option(
        False, "--exclude-frozen", "flag", "Leave out parameters that were not trained.", TENSORS
    )


@public
@dataclass(frozen=True, slots=True)
class Form:
    """Options: the names and rows of an output.

    Attributes:
        to: "hf" for a Hugging Face model of a family that is found, or "hf:NAME" for the family NAME
        (`naming.schemes.families`).
        config: the model's config or the path of its `config.json`, if the checkpoint does not say enough to make one.
        layer_names: names for a pipeline's layers, or the path of a file with them.
        vocab_size: words of the vocabulary, behind which the embedding has padding; None for what config, run and tokenizer say.
        family: a family that zckpt does not know, or the path of its file.
    """

    to: str | None = option(
        None, "--to", "text", "Write the model as transformers has it; NAME is its family, such as llama.", NAMES,
        metavar="hf[:NAME]",
    )  # fmt: skip
    config: str | Mapping[str, Any] | None = option(
        None, "--config", "text", "The model's config.json for --to, if the checkpoint lacks some of it.", NAMES,
        metavar="FILE",
    )  # fmt: skip
    layer_names: str | Mapping[str, str] | None = option(
        None, "--layer-names", "text", "JSON file with names for a pipeline's layers.", NAMES, metavar="FILE"
    )
    vocab_size: int | None = vocab_size_option()
    family: str | Mapping[str, Any] | None = family_option()

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown architecture, an impossible vocabulary or a family's file that cannot be used."""
        if self.vocab_size is not None:
            from zckpt.naming.vocabulary import check_vocabulary

            check_vocabulary(self.vocab_size)
        know_family(self.family)
        if self.to not in (None, "hf"):
            from zckpt.naming.schemes import families

            if self.to not in (known := [f"hf:{name}" for name in families()]):
                raise UsageError(
                    "the architecture is unknown", found=f"--to {self.to}", expected=f"hf, or one of {', '.join(known)}",
                    remedy="Pass one of these with --to.",
                )  # fmt: skip

    def as_fields(self) -> dict[str, Any]:
        """The field of `Naming` that it is."""
        return {"form": self}


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How tensors are called in the output; attributes as in `Options`."""

    strip_prefix: str = option(
        "", "--strip-prefix", "text", "Remove PREFIX, or with 'auto' what wraps all names.", NAMES, metavar="PREFIX"
    )
    rename: Sequence[tuple[str, str]] = option(
        (), "--rename", "renames", "Replace in every name, in the order given. Repeatable.", NAMES, metavar="REGEX=REPL"
    )
    form: Form = field(default=Form(), metadata={"parts": Form})


@dataclass(frozen=True, kw_only=True)
class Casting:
    """Which dtype the numbers get; attributes as in `Options`."""

    dtype: DType | None = option(F32, "--dtype", "dtype", _DTYPE)
    keep_dtype: Sequence[str] = option(
        (), "--keep-dtype", "texts", "Tensors that match keep the dtype that they have in CKPT. Repeatable.",
        metavar="GLOB",
    )  # fmt: skip
    like: AnyPath | None = option(
        None, "--like", "text",
        "Give tensors the dtypes and files that they have in MODEL: a directory, an index, or hf://OWNER/NAME.",
        metavar="MODEL",
    )  # fmt: skip
    overflow: Overflow = option(
        "error", "--overflow", ("error", "inf", "clamp"),
        "For numbers too large for the dtype: stop, write infinity, or clamp.",
    )  # fmt: skip


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMerge:
    """Adapters that are merged into the weights.

    Attributes:
        base: the weights that they were trained on: a directory in any layout, or the name of a model in the hub's cache on this
            machine; None where the checkpoint holds them.
        adapters: names of adapters in the checkpoint, or directories of PEFT; with a weight as `"style:0.5"` or `("style", 0.5)`.
            Empty for the checkpoint's only one.
        allow_untrained: merge an adapter with matrices that are all zeros, too.
        combine: make one adapter of several first, as PEFT's `add_weighted_adapter` does; None to merge one after the other.
        density: the part of each matrix that stays, for "ties" and "magnitude_prune".
    """

    base: AnyPath | None = None
    adapters: Sequence[AnyPath | tuple[AnyPath, float]] = ()
    allow_untrained: bool = False
    combine: Combination | None = None
    density: float | None = None


@dataclass(frozen=True, kw_only=True)
class MergeAsked:
    """A base and adapters, as commands ask for them; attributes as in `Merging` and `LoraMerge`."""

    merge_lora: bool = option(
        False, "--merge-lora", "flag", "Merge LoRA adapters into the weights: those of CKPT, or --adapter.", LORA
    )
    base: str | None = base_option()
    adapter: Sequence[str] = adapter_option()
    allow_untrained: bool = option(
        False, "--allow-untrained", "flag", "Merge an adapter with matrices that are all zeros, too.", LORA
    )
    combine: Combination | None = option(
        None, "--combine", get_args(Combination),
        "Make one adapter of several first, as PEFT's add_weighted_adapter does.", LORA,
    )  # fmt: skip
    density: float | None = option(
        None, "--density", "real", "For ties, magnitude_prune: the part of a matrix that stays.", LORA, metavar="D"
    )

    def as_fields(self) -> dict[str, Any]:
        """The fields of `Merging` that these options set. Raises UsageError if adapters are named without a merge."""
        if self.merge_lora:
            lora = LoraMerge(
                base=self.base, adapters=tuple(self.adapter), allow_untrained=self.allow_untrained,
                combine=self.combine, density=self.density,
            )  # fmt: skip
            return {"lora": lora}
        given = {
            "--adapter": self.adapter, "--allow-untrained": self.allow_untrained, "--combine": self.combine,
            "--density": self.density is not None,
        }  # fmt: skip
        if others := [name for name, value in given.items() if value]:
            raise UsageError(
                f"{others[0]} is of use only with --merge-lora", found=f"{others[0]} without --merge-lora",
                remedy=f"Add --merge-lora, or leave out {others[0]}.",
            )  # fmt: skip
        return {} if self.base is None else {"base": self.base}


@dataclass(frozen=True, kw_only=True)
class Merging:
    """What the checkpoint is completed with; attributes as in `Options`."""

    lora: LoraMerge | None = field(default=None, metadata={"parts": MergeAsked})
    base: AnyPath | None = None

    def __post_init__(self) -> None:
        if self.base is not None and self.lora is not None:
            raise UsageError(
                "base is given twice",
                found="Options(base=..., lora=...)",
                remedy="Say the base in LoraMerge(base=...).",
            )


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The files of an output; attributes as in `Options`."""

    format: Format | None = option(
        None, "--format", ("safetensors", "bin"), "Container of the output; by default what OUT's name says."
    )
    max_shard_size: int | str = option(
        "5GB", "--max-shard-size", "size", "Most bytes in one shard; by default 5GB.", metavar="SIZE"
    )

    def __post_init__(self) -> None:
        file_bytes(self.max_shard_size, "max_shard_size")


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What an output may replace, and where it may be; attributes as in `Options`."""

    overwrite: bool = option(
        False, "--overwrite", "flag", "Replace what zckpt wrote to OUT, when the new files are complete.", OUTPUT
    )
    merge: bool = False
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How hard to work; attributes as in `Options`."""

    threads: int | None = option(
        None, "--threads", "number", "Threads that move data; by default 2 to 4, on mounts of other machines 16.",
        SPEED, metavar="N",
    )  # fmt: skip
    keep_cache: bool | None = option(
        None, "--keep-cache/--no-cache-pollution", "flag",
        "Whether the page cache keeps what is read; by default unless the job is larger than memory.", SPEED,
        show_default=False,
    )  # fmt: skip
    limit_rate: int | None = option(
        None, "--limit-rate", "size", "Most bytes per second, read and written, e.g. 500MB.", SPEED, metavar="SIZE"
    )
    buffer: int | None = option(
        None, "--buffer", "size", "Bytes that each thread gathers and writes at once.", SPEED, metavar="SIZE"
    )

    def __post_init__(self) -> None:
        thread_count(self.threads)
        window_bytes(self.buffer)

    @property
    def pace(self) -> Pace:
        """The pace, in the form that engines take."""
        return {"threads": self.threads, "keep_cache": self.keep_cache, "bytes_per_s": self.limit_rate}


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """The key with which the output is signed. `sign`: file with a private key; None for no signature."""

    sign: AnyPath | None = option(
        None, "--sign", "text", "Sign OUT with a private key: model.sig, for model_signing.", OUTPUT, metavar="KEY"
    )

    def __post_init__(self) -> None:
        self.signing()

    def signing(self, provenance: Callable[[], Mapping[str, object]] = dict) -> Signing | None:
        """The order to sign, with what `provenance` returns; None without a key. Errors as in `signature.signing_with`."""
        if self.sign is None:
            return None
        from zckpt.output.signature import signing_with

        return replace(signing_with(self.sign), provenance=provenance())

    def known_as(self) -> str:
        """The hint by which verifiers know the key; empty without one. Errors as in `signature.signing_with`."""
        signing = self.signing()
        return "" if signing is None else signing.hint


SHARED = (Reading, Selecting, Naming, Casting, Merging, Sharding, Publishing, Pacing, SigningKey)
"""The groups that jobs share; each of them is a base of `zckpt.Options`."""
