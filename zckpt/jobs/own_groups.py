"""The groups of options that one job has for itself, declared as those in `groups`.

For these jobs and their commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, ClassVar, Literal, get_args

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.sizes import file_bytes
from zckpt.core.dtypes import DType
from zckpt.jobs.groups import (
    CONFIG_HELP,
    DROPPED,
    GGUF_TYPES,
    QUANTISED,
    SCHEMES,
    WHICH,
    AnyPath,
    Checksum,
    Encoding,
    LoraMerge,
    Scheme,
    adapter_option,
    base_option,
    family_option,
    know_family,
    option,
    vocab_size_option,
)

SparseMethod = Literal["ties", "dare_ties", "dare_linear"]


@dataclass(frozen=True, kw_only=True)
class Average:
    """How `average` makes one model of several; attributes as its arguments."""

    weights: tuple[float, ...] | None = option(
        None, "--weights", "reals", "What each checkpoint counts, such as 0.7,0.3; by default all the same.",
        metavar="LIST",
    )  # fmt: skip
    ema: float | None = option(
        None, "--ema", "real", "Exponential moving average, oldest first: D of what was before stays.", metavar="D"
    )
    last: int | None = option(None, "--last", "number", "Take the newest N saves of the only CKPT.", metavar="N")
    task_vector: AnyPath | None = option(
        None, "--task-vector", "text", "Write BASE plus the weighted differences of CKPT... from it.", metavar="BASE"
    )
    slerp: float | None = option(
        None, "--slerp", "real", "Of two: the point at T (0 to 1) of the way along the arc between them.", metavar="T"
    )
    method: SparseMethod | None = option(
        None, "--method", get_args(SparseMethod),
        "With --task-vector: thin out the differences, and add them, as mergekit does.",
    )  # fmt: skip
    density: tuple[float, ...] | None = option(
        None, "--density", "reals", "For --method: the part of each difference that stays.", metavar="LIST"
    )
    seed: int = option(0, "--seed", "number", "Of DARE's random choice.", metavar="N")


@dataclass(frozen=True, kw_only=True)
class Dcp:
    """What a directory of torch.distributed.checkpoint holds; attributes as arguments of `to_dcp`.

    `max_file_bytes`: of a data file, unless one chunk is larger.
    """

    under: str = option(
        "model", "--under", "text", "The state dict's key for the weights; '' puts them at its top.", metavar="KEY"
    )
    optimizer: str | None = option(
        None, "--optimizer", "text", "Write the optimizer's state too, under this key.", metavar="KEY"
    )
    accelerate: bool = option(
        False, "--accelerate", "flag",
        "Write what accelerate's load_state and transformers' Trainer resume from under FSDP: "
        "pytorch_model_fsdp_0 and optimizer_0.",
    )  # fmt: skip
    names: str | None = option(
        None, "--names", "text", "Name tensors as a program does: torchtitan, megatron-core, hf, hf:NAME.",
        metavar="SCHEME",
    )  # fmt: skip
    config: str | Mapping[str, Any] | None = option(
        None, "--config", "text", "The model's config.json for --names, if none is beside CKPT.", metavar="FILE"
    )
    vocab_size: int | None = vocab_size_option()
    family: str | Mapping[str, Any] | None = family_option()
    max_file_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        know_family(self.family)
        file_bytes(self.max_file_bytes, "max_file_bytes")
        if self.accelerate and (self.under != "model" or self.optimizer is not None or self.names is not None):
            raise UsageError(
                "accelerate says itself what the keys of the weights and of the optimizer are",
                found="--accelerate with --under, --optimizer or --names", remedy="Leave these out, or leave --accelerate out.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """What a checkpoint of Megatron-Core holds; attributes as arguments of `to_mcore`.

    `max_file_bytes`: of a data file, unless one chunk is larger.
    """

    config: str | Mapping[str, Any] | None = option(None, "--config", "text", CONFIG_HELP, metavar="FILE")
    vocab_size: int | None = vocab_size_option()
    family: str | Mapping[str, Any] | None = family_option()
    tensor_parallel: int = option(
        1, "--tensor-parallel", "positive", "Ranks for which the vocabulary is padded.", metavar="N"
    )
    make_vocab_size_divisible_by: int = option(
        128, "--make-vocab-size-divisible-by", "positive",
        "As Megatron's option: times --tensor-parallel, the vocabulary is a multiple of it.", metavar="N",
    )  # fmt: skip
    numbered_layers: bool = option(
        False, "--numbered-layers", "flag", "Number layers in names (non_homogeneous_layers), not stack them."
    )
    optimizer: bool = option(
        False, "--optimizer", "flag", "Write the optimizer's states too, for Megatron-Core's distributed optimizer."
    )
    expert_parallel: int = option(
        1, "--expert-parallel", "positive", "Expert-parallel ranks that load the optimizer's states.", metavar="N"
    )
    max_file_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        know_family(self.family)
        file_bytes(self.max_file_bytes, "max_file_bytes")


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """What `to_fp8` quantises, and how; attributes as its arguments."""

    scheme: Scheme = option(
        "block128", "--scheme", SCHEMES,
        "A scale for 128 x 128 elements (DeepSeek's form), for a row or for a tensor (compressed-tensors' form).",
    )  # fmt: skip
    quantize: Sequence[str] = option(
        (), "--quantize", "texts", "Quantise only weights of linear layers that match. Repeatable.", metavar="GLOB"
    )
    keep: Sequence[str] = option(
        (), "--keep", "texts", "Do not quantise weights that match. Repeatable.", metavar="GLOB"
    )

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UsageError(
                "the scheme is unknown", found=f"scheme {self.scheme!r}",
                expected=f"a scheme of {', '.join(SCHEMES)}", remedy="Choose one of these.",
            )  # fmt: skip

    @property
    def group_size(self) -> None:
        """Returns None: these schemes have no groups."""

    flags: ClassVar[tuple[str, str]] = ("--quantize", "--keep")


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """What `quantize` quantises, and how.

    Attributes:
        target: the form: fp8 in blocks of 128 x 128 elements, or one of compressed-tensors.
        group_size: columns that share a scale, of int4; None for 128.
        quantize, keep: as in `Fp8`.
    """

    target: str = option("fp8", "--to", QUANTISED, "The form of the weights.")
    group_size: int | None = option(
        None, "--group-size", "positive", "Columns that share a scale, of int4; by default 128.", metavar="N"
    )
    quantize: Sequence[str] = option(
        (), "--include", "texts", "Quantise only weights of linear layers that match. Repeatable.", metavar="GLOB"
    )
    keep: Sequence[str] = option(
        (), "--exclude", "texts", "Do not quantise weights that match. Repeatable.", metavar="GLOB"
    )

    def __post_init__(self) -> None:
        if self.target not in QUANTISED:
            raise UsageError(
                "the form is unknown", found=f"{self.target!r}", expected=f"one of {', '.join(QUANTISED)}",
                remedy="Choose one of these.",
            )  # fmt: skip
        if self.group_size is not None and (self.target != "int4" or self.group_size < 1):
            raise UsageError(
                "a size of groups has a meaning for int4 alone", found=f"--group-size {self.group_size} with {self.target}",
                expected="1 or more columns, with int4", remedy="Leave --group-size out.",
            )  # fmt: skip

    flags: ClassVar[tuple[str, str]] = ("--include", "--exclude")

    @property
    def scheme(self) -> Scheme:
        """The same form, by the name that `Fp8` and the config have for it."""
        return "block128" if self.target == "fp8" else self.target  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """What a GGUF file holds; attributes as arguments of `to_gguf`."""

    type: str = option("f16", "--type", GGUF_TYPES, "Of the matrices; norms, biases and routers are always f32.")
    imatrix: str | None = option(
        None, "--imatrix", "text", "An importance matrix, as llama.cpp's llama-imatrix writes it.", metavar="FILE"
    )
    split_max_size: int | str | None = option(
        None, "--split-max-size", "size", "Most bytes of tensors in one file, e.g. 40GB; OUT is then a directory.",
        metavar="SIZE",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "--tokenizer", "text", "Directory with the tokenizer, if none is beside CKPT; or none.", metavar="DIR"
    )
    pre_tokenizer: str | None = option(
        None, "--pre-tokenizer", "text", "llama.cpp's name of it, such as llama-bpe, if it is not known.",
        metavar="NAME",
    )  # fmt: skip
    model_name: str | None = option(
        None, "--model-name", "text", "What the file says that the model is called.", metavar="NAME"
    )
    config: str | Mapping[str, Any] | None = option(None, "--config", "text", CONFIG_HELP, metavar="FILE")

    mmproj: bool = option(
        False, "--mmproj", "flag", "Write the images' side, llama.cpp's mmproj, instead of the text model."
    )

    def __post_init__(self) -> None:
        if self.type not in GGUF_TYPES:
            raise UsageError(
                f"{self.type!r} is not a type that zckpt writes", expected=f"one of {', '.join(GGUF_TYPES)}",
                remedy="Use one of these; llama.cpp's llama-quantize makes others of a file in f16.",
            )  # fmt: skip
        if self.mmproj and (self.type not in ("f32", "f16", "bf16", "q8_0") or self.split_max_size is not None):
            raise UsageError(
                "a projector file has no such form", found=f"--type {self.type}, --split-max-size {self.split_max_size}",
                expected="one file of f32, f16, bf16 or q8_0", remedy="Use one of these types, without --split-max-size.",
            )  # fmt: skip
        if self.imatrix is not None and self.type in ("f32", "f16", "bf16", "q8_0", "mxfp4"):
            raise UsageError(
                "such a file holds nothing that an importance matrix changes", found=f"--type {self.type}",
                expected="a type of 4 to 6 bits, such as q4_k_m", remedy="Leave --imatrix out, or use another --type.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mlx:
    """How `to_mlx` quantises; attributes as its arguments."""

    bits: int | None = option(
        None, "--bits", "positive", "Bits of a weight: 2, 3, 4, 5, 6 or 8; by default all stay.", metavar="N"
    )
    group_size: int = option(
        64, "--group-size", "positive", "Columns with one scale and bias: 32, 64 or 128.", metavar="N"
    )

    def __post_init__(self) -> None:
        if self.bits not in (None, 2, 3, 4, 5, 6, 8) or self.group_size not in (32, 64, 128):
            raise UsageError(
                "MLX has no such form", found=f"{self.bits} bits in groups of {self.group_size}",
                expected="2, 3, 4, 5, 6 or 8 bits, in groups of 32, 64 or 128", remedy="Choose one of these.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Which adapter `to_peft` writes. `adapter`: its name, where there are several."""

    adapter: str | None = option(None, "--adapter", "text", "Which adapter, if there are several.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class TargetWorld:
    """What a resharded checkpoint is for.

    Attributes:
        world_size: data-parallel ranks that will resume.
        stage: 1, 2 or 3; None for the one that the checkpoint has.
        precision: dtype of the module's own weights; None for the one that they have.
    """

    world_size: int = option(
        MISSING, "--world-size", "positive", "Data-parallel ranks.", metavar="N", show_default=False
    )
    stage: int | None = option(
        None, "--stage", "number", "ZeRO stage; by default CKPT's.", metavar="1|2|3", min=1, max=3
    )
    precision: DType | None = option(None, "--precision", "precision", "Dtype of the model's own weights.")

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.stage not in (None, 1, 2, 3):
            raise UsageError(
                "the target is impossible",
                found=f"world size {self.world_size}, stage {self.stage}",
                remedy="Change --world-size or --stage.",
                expected="a world size of 1 or more, and stage 1, 2 or 3",
            )


@dataclass(frozen=True, kw_only=True)
class Slim:
    """What `slim` leaves out. `drop`: kinds, of `DROPPED`."""

    drop: Sequence[str] = option(
        (), "--drop", (*DROPPED, "..."),
        "Leave out the optimizer's states (fp32 weights stay), half-precision weights that "
        "fp32 weights give back, or frozen parameters; repeatable.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if unknown := [what for what in self.drop if what not in DROPPED]:
            raise UsageError(
                f"{unknown[0]!r} cannot be left out",
                expected=", ".join(DROPPED),
                remedy="Correct --drop, or leave it out.",
            )


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What kind of delta is written; attributes as in `DeltaOptions`."""

    version: int | None = option(
        None, "--version", "positive", "Of NEW; by default the one in OUT's name, or 1.", metavar="N"
    )
    encoding: Encoding = option(
        "xor", "--encoding", ("xor", "overwrite"), "xor is smaller; overwrite may be applied more than once."
    )
    checksum: Checksum = option(
        "xxh3-128", "--checksum", ("xxh3-128", "blake3", "adler32"), "Of each tensor's new bytes."
    )
    old_tag: str | None = option(
        None, "--old-tag", "text", "Which save of OLD, if there are several.", WHICH, metavar="TAG"
    )


@dataclass(frozen=True, kw_only=True)
class MergedWith:
    """What was merged into an output, and is not in the checkpoint: the base, and the adapters."""

    base: AnyPath | None = base_option()
    adapter: Sequence[AnyPath] = adapter_option()

    @property
    def lora(self) -> LoraMerge | None:
        """The merge, in the form that `verify` takes."""
        return (
            None if self.base is None and not self.adapter else LoraMerge(base=self.base, adapters=tuple(self.adapter))
        )


MESSAGE = "Upload weights with zckpt"
_PAGE, _CARD, _HUB = "Page", "Model card", "Hub"


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where a push goes, and what it adds; attributes as arguments of `push_to_hub`, but `no_card` for `card`."""

    revision: str = option("main", "--revision", "text", "Branch; made if it does not exist.", _PAGE, metavar="REV")
    private: bool | None = option(
        None, "--private/--public", "flag", "Who sees a new page; by default only you.", _PAGE, show_default=False
    )
    create_pr: bool = option(False, "--create-pr", "flag", "Open a pull request instead of committing.", _PAGE)
    message: str = option(MESSAGE, "--message", "text", "Of the commit.", _PAGE, metavar="TEXT", show_default=False)
    path_in_repo: str = option("", "--path-in-repo", "text", "Directory in the repository.", _PAGE, metavar="DIR")
    yes: bool = option(False, "--yes", "flag", "Go on if the repository holds files already.", _PAGE)
    no_card: bool = option(False, "--no-card", "flag", "Write no model card if CKPT has no README.md.", _CARD)
    license: str | None = option(None, "--license", "text", "As the hub names it: apache-2.0.", _CARD, metavar="NAME")
    base_model: str | None = option(
        None, "--base-model", "text", "The model that was trained further.", _CARD, metavar="REPO_ID"
    )
    token: str | None = option(
        None, "--token", "text", "By default the one you logged in with, or HF_TOKEN.", _HUB, metavar="TOKEN"
    )
    endpoint: str | None = option(
        None, "--endpoint", "text", "Address of the hub; by default HF_ENDPOINT.", _HUB, metavar="URL"
    )
    scratch: str | None = option(
        None, "--scratch", "text", "For shards before they are sent; by default in the hub's cache.", _HUB,
        metavar="DIR",
    )  # fmt: skip
    max_scratch: int | None = option(
        None, "--max-scratch", "size", "Most bytes there; by default two of the largest shard.", _HUB, metavar="SIZE"
    )
