"""What a job is asked to do, as one value: made once, by a public function or the command line, and passed on whole.

For every job that opens a checkpoint or writes an output.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.pace import Pace, thread_count, window_bytes
from zckpt.base.sizes import file_bytes
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.jobs.opening import OpenOptions as OpenOptions
from zckpt.jobs.opening import output_dtype as output_dtype
from zckpt.jobs.opening import to_dtype as to_dtype
from zckpt.layouts.gguf.write import TYPES
from zckpt.layouts.plain.read import Format
from zckpt.naming.transform import Form
from zckpt.output.signature import signer_of
from zckpt.quantized.configs import SCHEMES, Scheme

Overflow = Literal["error", "inf", "clamp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(OpenOptions):
    """The same, with how an output is written.

    Attributes:
        overwrite: replace an existing output.
        threads: that move data; None for the default.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        keep_cache: whether the page cache keeps what is read; None: unless the job is larger than memory.
        limit_rate: at most so many bytes a second are read and written, together.
        sign: file with a private key, with which the output is signed; None for no signature.
    """

    overwrite: bool = False
    threads: int | None = None
    buffer: int | None = None
    keep_cache: bool | None = None
    limit_rate: int | None = None
    sign: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        thread_count(self.threads)
        window_bytes(self.buffer)
        signer_of(self.sign)

    @property
    def pace(self) -> Pace:
        """How hard to work, as engines take it."""
        return {"threads": self.threads, "keep_cache": self.keep_cache, "bytes_per_s": self.limit_rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMerge:
    """Adapters that are merged into the weights.

    Attributes:
        base: the weights that they were trained on: a directory in any layout, or the name of a model in the hub's cache on this
            machine; None where the checkpoint holds them.
        adapters: names of adapters in the checkpoint, or directories of PEFT; with a weight as `"style:0.5"` or `("style", 0.5)`.
            Empty for the checkpoint's only one.
        allow_untrained: merge an adapter whose matrices are all zeros, too.
    """

    base: str | os.PathLike[str] | None = None
    adapters: Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = ()
    allow_untrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(WriteOptions):
    """What a conversion is to do.

    Attributes:
        dtype: of floating parameters in the output; None keeps each as it is.
        format: container; None for what OUT's suffix says, safetensors for a directory.
        max_shard_size: of a directory's shards.
        include: globs; only tensors that match one are kept.
        exclude: globs; tensors that match one are left out.
        exclude_frozen: leave out parameters that were not trained.
        strip_prefix: taken off every name that has it; "auto" for what wraps all names.
        rename: (regular expression, replacement) pairs, applied in order to every name.
        overflow: what to do with numbers too large for the dtype.
        merge: put the files into an existing directory instead of replacing it.
        beside: allow an output beside the input's tag directories.
        form: names and order of rows that the tensors get, as `--to`, `--config` and `--layer-names` do.
        lora: adapters to merge into the weights; None to write the checkpoint as it is. Of jobs that write whole weights.
        base: the model that the run began with, for the parameters that the save leaves out; without `lora`, which has its own.
    """

    dtype: DType | None = F32
    format: Format | None = None
    max_shard_size: int | str = "5GB"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    exclude_frozen: bool = False
    strip_prefix: str = ""
    rename: Sequence[tuple[str, str]] = ()
    overflow: Overflow = "error"
    merge: bool = False
    beside: bool = False
    form: Form = field(default_factory=Form)
    lora: LoraMerge | None = None
    base: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        WriteOptions.__post_init__(self)  # slots: `super()` does not know this class
        file_bytes(self.max_shard_size, "max_shard_size")
        if self.base is not None and self.lora is not None:
            raise UsageError(
                "base is given twice",
                found="Options(base=..., lora=...)",
                remedy="Say the base in LoraMerge(base=...).",
            )

    @property
    def keeps_dtypes(self) -> bool:  # noqa: D102
        return self.dtype is None


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(Options):
    """What `average` is to do; `tag` and `also` have no meaning.

    Attributes:
        weights: what each checkpoint counts; None for all the same.
        ema: decay of an exponential moving average.
        last: so many of the newest saves of one directory.
        task_vector: a base model; differences from it are added to it.
        slerp: fraction of the way between two checkpoints.
    """

    weights: tuple[float, ...] | None = None
    ema: float | None = None
    last: int | None = None
    task_vector: str | os.PathLike[str] | None = None
    slerp: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOptions(Options):
    """What `to_dcp` is to do.

    Attributes:
        under: the state dict's key for the weights; empty for its top.
        optimizer: its key for the optimizer's states and groups; None leaves them out.
        names: whose names the tensors get: a scheme that can be written, "hf" or "hf:NAME"; None keeps the checkpoint's.
        config: the model's config or the path of its `config.json`, for `names`; None for the one beside the checkpoint.
        vocab_size: words of the vocabulary, for `names`; None for what config, run and tokenizer say.
        max_file_bytes: of a data file, unless one chunk is larger.
        accelerate: whether weights and optimizer are saves of their own, where accelerate looks for those of FSDP.
    """

    under: str = "model"
    optimizer: str | None = None
    accelerate: bool = False
    names: str | None = None
    config: str | Mapping[str, Any] | None = None
    vocab_size: int | None = None
    max_file_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        file_bytes(self.max_file_bytes, "max_file_bytes")
        if self.accelerate and (self.under != "model" or self.optimizer is not None or self.names is not None):
            raise UsageError(
                "accelerate says itself what the keys of the weights and of the optimizer are",
                found="--accelerate with --under, --optimizer or --names", remedy="Leave these out, or leave --accelerate out.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions(Options):
    """What `to_mcore` is to do.

    Attributes:
        config: the model's config or the path of its `config.json`; None for the one beside the checkpoint.
        vocab_size: words of the vocabulary; None for what config, run and tokenizer say.
        tensor_parallel: tensor-parallel ranks that the vocabulary is padded for.
        make_vocab_size_divisible_by: as Megatron's option.
        numbered_layers: number layers in names instead of stacking them.
        optimizer: write the optimizer's states too.
        expert_parallel: expert-parallel ranks of the run that loads them; with several, experts have an optimizer of their own.
        max_file_bytes: of a data file, unless one chunk is larger.
    """

    config: str | Mapping[str, Any] | None = None
    vocab_size: int | None = None
    tensor_parallel: int = 1
    make_vocab_size_divisible_by: int = 128
    numbered_layers: bool = False
    optimizer: bool = False
    expert_parallel: int = 1
    max_file_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        file_bytes(self.max_file_bytes, "max_file_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Options(Options):
    """What `to_fp8` is to do.

    Attributes:
        dtype: of what is not quantised.
        scheme: what each scale is for: a block of 128 x 128 elements, a row ("channel") or a tensor.
        quantize: globs; only matrices that match one are quantised. Where zckpt does not know the model, they name the weights
            of its linear layers.
        keep: globs; matrices that match one are not quantised.
    """

    dtype: DType | None = BF16
    scheme: Scheme = "block128"
    quantize: Sequence[str] = ()
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        WriteOptions.__post_init__(self)  # slots: `super()` does not know this class
        if self.scheme not in SCHEMES or self.dtype is None:
            raise UsageError(
                "the scheme or the dtype is unknown", found=f"scheme {self.scheme!r}, dtype {self.dtype}",
                expected=f"a scheme of {', '.join(SCHEMES)}, and a dtype for what is not quantised",
                remedy="Choose one of these.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufOptions(Options):
    """What `to_gguf` is to do.

    Attributes:
        type: of the matrices: f32, f16, bf16 or q8_0.
        split_max_size: the most bytes of tensors in one of several files; None for one file.
        tokenizer: the directory with the tokenizer, or "none"; None for the checkpoint's own.
        pre_tokenizer: llama.cpp's name of it; None to find it.
        model_name: what the file says; None for what the model's directory is called.
        config: the model's config or the path of its `config.json`; None for the one beside the checkpoint.
    """

    type: str = "f16"
    split_max_size: int | str | None = None
    tokenizer: str | None = None
    pre_tokenizer: str | None = None
    model_name: str | None = None
    config: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # slots: `super()` does not know this class
        if self.type not in TYPES:
            raise UsageError(
                f"{self.type!r} is not a type that zckpt writes", expected=f"one of {', '.join(TYPES)}",
                remedy="Use one of these; llama.cpp's llama-quantize makes others of a file in f16.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftOptions(Options):
    """What `to_peft` is to do; of what `Options` has, what concerns reading, the dtype and the output counts.

    Attributes:
        adapter: which one, where there are several.
    """

    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(WriteOptions):
    """What `reshard` is to do.

    Attributes:
        world_size: data-parallel ranks that will resume.
        stage: 1, 2 or 3; None for the one that the checkpoint has.
        precision: dtype of the module's own weights; None for the one that they have.
    """

    world_size: int
    stage: int | None = None
    precision: DType | None = None

    def __post_init__(self) -> None:
        WriteOptions.__post_init__(self)  # slots: `super()` does not know this class
        if self.world_size < 1 or self.stage not in (None, 1, 2, 3):
            raise UsageError(
                "the target is impossible",
                found=f"world size {self.world_size}, stage {self.stage}",
                remedy="Change --world-size or --stage.",
                expected="a world size of 1 or more, and stage 1, 2 or 3",
            )


DROPPED = ("optimizer", "module-weights", "frozen")
"""What `slim` may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimOptions(WriteOptions):
    """What `slim` is to do.

    Attributes:
        drop: what is left out, of `DROPPED`.
    """

    drop: Sequence[str] = ()

    def __post_init__(self) -> None:
        WriteOptions.__post_init__(self)  # slots: `super()` does not know this class
        if unknown := [what for what in self.drop if what not in DROPPED]:
            raise UsageError(
                f"{unknown[0]!r} cannot be left out",
                expected=", ".join(DROPPED),
                remedy="Correct --drop, or leave it out.",
            )


T = TypeVar("T", bound=OpenOptions)


def extended(options: OpenOptions, kind: type[T], **more: object) -> T:
    """The same options as a kind that has more of them; `more` gives these, and replaces others."""
    known = {field.name: getattr(options, field.name) for field in fields(options)}
    return kind(**{**known, **more})


_SHARDS = ("format", "max_shard_size")
_NAMES = ("form", "strip_prefix", "rename")
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "to_dcp": (*_SHARDS, "merge", "form", "lora", "base"),
    "to_mcore": (*_SHARDS, "merge", "form", "lora", "base"),
    "to_fp8": ("format", "lora", "base"),
    "to_gguf": ("dtype", *_SHARDS, "merge", "form", "lora", "base"),
    "to_states": ("dtype", "format", *_NAMES, "exclude_frozen", "overflow", "merge", "beside", "lora", "base"),
    "average": ("tag", "lora", "base"),
    "push_to_hub": ("dtype", "format", "overwrite", "merge", "beside"),
}
"""Job -> fields of `Options` that it has no use for."""


def refuse_unused(job: str, options: Options) -> None:
    """Raises UsageError for an option that was given and has no meaning for a job: none is ignored in silence.

    Args:
        job: the name of the public function.
        options: what its caller gave.
    """
    known = {field.name for field in fields(options)}
    usual = Options()
    for name in _UNUSED[job]:
        given = getattr(options, name) if name in known else None
        if name in known and given != getattr(usual, name) and (name, given) != ("format", "safetensors"):
            raise UsageError(
                f"{name} has no meaning for {job}", found=f"Options({name}={given!r:.60})",
                expected="the options that this job has a use for", remedy=f"Leave {name} out.",
            )  # fmt: skip
