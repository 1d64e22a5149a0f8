"""The metadata of a GGUF file: what llama.cpp has to know of a model beside its tensors, by the `gguf` package's own tables.

For `jobs.to_gguf`. Keys, kinds of values and special tokens are those of the package; which of a config's values become which key
is as in llama.cpp's converter. The vocabulary is `gguf_vocabulary`'s. Both packages read a directory, so config and tokenizer
files are laid into one.
Source: llama.cpp, convert_hf_to_gguf.py `set_gguf_parameters` and `prepare_metadata` (TextModel, LlamaModel, Qwen2MoeModel,
Gemma2Model, Gemma3Model; of 2026); gguf 0.19.0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import size as count_of_bytes
from zckpt.containers.gguf_file import GgufValue, Kind
from zckpt.layouts.save.companions import companions, is_own
from zckpt.naming.gguf_keys import check_config, filled_in
from zckpt.naming.gguf_vocabulary import add_vocabulary
from zckpt.storage.location import Location

if TYPE_CHECKING:
    import gguf

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma3": "gemma3",
}  # fmt: skip
"""A config's `model_type` -> llama.cpp's architecture."""

_MOST_BYTES = 1 << 28
"""The most bytes of a tokenizer's file; the largest real ones have a tenth of it."""
_MOST_CARD_BYTES, _DEEPEST = 1 << 20, 100
_MOST_WORDS = 1 << 22
"""The most words of a model if its embedding is left out."""

NO_VOCABULARY = "none"
"""As `--tokenizer`: the file gets no vocabulary, and its reader takes tokens by number."""

_KINDS: tuple[Kind, ...] = (
    *("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model that gets metadata.

    Attributes:
        config: transformers' config of it.
        home: the directory with its tokenizer and model card; None for no vocabulary.
        name: of the model; empty for the one that its files or directories say.
        pre_tokenizer: llama.cpp's name of the way in which text is split before the vocabulary is used; empty to find it.
        tensors: name, shape and type's name of each.
        file_type: llama.cpp's number of the type that most have.
        named: the path that a person gave, for `companions`.
        vision: of the file of a projector, what adds its parameters; None for a text model.
    """

    config: Mapping[str, object]
    home: Location | None
    name: str
    pre_tokenizer: str
    tensors: Sequence[tuple[str, tuple[int, ...], str]]
    file_type: int
    named: Location | None = None
    vision: Callable[[gguf.GGUFWriter, Path], None] | None = None


def architecture_of(config: Mapping[str, object], path: str) -> str:
    """llama.cpp's architecture of a model. Raises UnsupportedError if zckpt does not write it."""
    kind = config.get("model_type")
    found = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnsupportedError(
            "zckpt writes no GGUF of such a model", file=path, found=f"model_type {kind!r}",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            remedy="Convert it to transformers' form with to-bf16, and that with llama.cpp's convert_hf_to_gguf.py.",
        )  # fmt: skip
    return found


def library() -> Any:
    """The `gguf` package. Raises UnsupportedError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            "GGUF's metadata needs a package that is not installed",
            found=str(error),
            expected="the package gguf",
            remedy="Run: pip install 'zckpt[gguf]'.",
        ) from error
    return gguf


def metadata_of(model: GgufModel) -> tuple[dict[str, GgufValue], tuple[str, ...], str]:
    """The metadata by keys, notes for a person, and the name that llama.cpp's conventions give the file (without
    suffix). Raises UnsupportedError if packages are missing, or the tokenizer is of a kind that is not known;
    UsageError if there is no tokenizer; CorruptError if one of the files cannot be read.
    """
    package = library()
    with _quiet(), _stage_model(model) as directory:
        kind = "clip" if model.vision is not None else architecture_of(model.config, str(model.home or ""))
        writer = package.GGUFWriter(None, kind)
        for name, shape, kind in model.tensors:
            number = getattr(package.GGMLQuantizationType, kind)
            writer.add_tensor_info(name, shape, _stand_in(kind), 0, raw_dtype=number)
        if model.vision is not None:
            title = _add_title(writer, directory, model, package)
            writer.add_type(package.GGUFType.MMPROJ)
            title.set_gguf_meta_model(writer)
            model.vision(writer, directory)
            writer.add_quantization_version(package.GGML_QUANT_VERSION)
            names = (title.name, title.basename, title.finetune, title.version, None, _type_name(model, package))
            stem = f"mmproj-{package.naming_convention(*names)}"
            return {key: _value(value, package) for key, value in writer.kv_data[0].items()}, (), stem
        config = filled_in(model.config, str(model.home or ""))
        _check_words(config, model)
        check_config(model.config, config, str(model.home or ""))
        title = _add_title(writer, directory, model, package)
        writer.add_type(package.GGUFType.MODEL)
        title.set_gguf_meta_model(writer)
        _add_parameters(writer, config, model, package)
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        notes = tuple(_not_recorded(config))
        if model.home is None:
            writer.add_tokenizer_model("none")
            notes += ("The file has no vocabulary: it can be run with tokens by their numbers only.",)
        else:
            add_vocabulary(writer, directory, config, model.pre_tokenizer, str(model.home))
        stem = package.naming_convention(
            title.name, title.basename, title.finetune, title.version, title.size_label, _type_name(model, package)
        )
    return {key: _value(value, package) for key, value in writer.kv_data[0].items()}, notes, stem


def _check_words(config: Mapping[str, Any], model: GgufModel) -> None:
    """Checks that the embedding has a row for each word; raises InconsistentError."""
    rows = next((shape[0] for name, shape, _ in model.tensors if name == "token_embd.weight"), _MOST_WORDS)
    if config["vocab_size"] > rows:
        raise InconsistentError(
            "the config says more words than the embedding has", file=str(model.home or ""),
            found=f"vocab_size {config['vocab_size']:,}", expected=f"at most {rows:,}, the rows of the embedding",
            remedy="Use the config.json that belongs to these weights, with --config if it lies elsewhere.",
        )  # fmt: skip


def _not_recorded(config: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on settings of a config that llama.cpp ignores for long texts."""
    window = config.get("sliding_window")
    if (
        config["model_type"].startswith(("mistral", "mixtral", "qwen"))
        and window
        and window < config["max_position_embeddings"]
    ):
        yield (
            f"The model's attention has a window of {window:,} tokens, which llama.cpp does not have: longer texts give "
            "other results."
        )


def _type_name(model: GgufModel, package: Any) -> str:
    return str(package.LlamaFileType(model.file_type).name.partition("_")[2])


def _stand_in(kind: str) -> Any:
    """A dtype with which the package takes a shape in elements."""
    import numpy as np

    return np.dtype(np.float16 if kind == "F16" else np.float32)


def _value(value: Any, package: Any) -> GgufValue:
    kind = _KINDS[int(value.type)]
    if kind != "array":
        return GgufValue(kind, value.value)
    items = value.sub_type if value.sub_type is not None else package.GGUFValueType.get_type(value.value[0])
    return GgufValue(kind, list(value.value), _KINDS[int(items)], len(value.value))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the packages print and log away from stdout and stderr; errors are raised all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _stage_model(model: GgufModel) -> Iterator[Path]:
    """Makes a temporary directory with the model's small files, named as their own directory; it is removed at the end."""
    name = "model" if model.home is None else os.path.basename(os.path.abspath(model.home.path)) or "model"
    with tempfile.TemporaryDirectory(prefix="zckpt-gguf-") as scratch:
        directory = Path(scratch) / name
        directory.mkdir()
        if model.home is not None:
            for place, file in companions(model.home, model.named)[0]:
                if not file.endswith(".py"):  # code of a model's authors is never run
                    (directory / file).write_bytes(_small(place))
            card = model.home / "README.md"
            if card.is_file() and is_own(card, model.home, model.named):
                (directory / "README.md").write_text(_facts_of(card), encoding="utf-8")
        (directory / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
        yield directory


def _small(place: Location) -> bytes:
    """The contents of a file that the package reads whole. Raises UnsupportedError if it is too large for what it is
    called.
    """
    if place.size() > _MOST_BYTES:
        raise UnsupportedError(
            "is larger than any file of this name should be", file=place, found=count_of_bytes(place.size()),
            expected=f"at most {count_of_bytes(_MOST_BYTES)}", remedy="Copy the model's own file here again, or move it away.",
        )  # fmt: skip
    return place.read()


def _facts_of(card: Location) -> str:
    """The YAML at the beginning of a model card, between two lines of dashes; empty if there is none. Raises UsageError
    if it is not YAML, or it repeats parts of itself or has very many levels, which takes more time and memory than
    there may be.
    """
    import yaml

    text = card.read(min(card.size(), _MOST_CARD_BYTES)).decode(errors="replace")
    first, *rest = text.splitlines() or [""]
    if first != "---" or "---" not in rest:
        return ""
    facts = "\n".join(rest[: rest.index("---")]) + "\n"
    depth = 0
    try:
        for event in yaml.parse(facts, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                raise _bad_card(
                    card, "parts that repeat others" if depth <= _DEEPEST else f"more than {_DEEPEST} levels"
                )
        yaml.safe_load(facts)
    except yaml.YAMLError as error:
        raise _bad_card(card, " ".join(str(error).split())[:200]) from error
    return f"---\n{facts}---\n"


def _bad_card(card: Location, found: str) -> UsageError:
    return UsageError(
        "the model's card cannot be read", file=card, found=found, expected="plain YAML between two lines of ---",
        remedy="Mend the beginning of README.md, or move the file away.",
    )  # fmt: skip


def _add_title(writer: gguf.GGUFWriter, directory: Path, model: GgufModel, package: Any) -> Any:
    """Adds the model's name and author, as the package finds them in the config, the card and the directory's name."""
    total, shared, expert, experts = writer.get_total_parameter_count()
    try:
        title = package.Metadata.load(None, directory, model.name or None, total)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            "the model's card or its config cannot be read", file=str(model.home or directory.name),
            found=" ".join(str(error).split())[:200],
            remedy="Mend the YAML at the beginning of README.md, or move the file away.",
        ) from error  # fmt: skip
    if title.name is None:
        title.name = directory.name
    if title.size_label is None and total > 0:
        title.size_label = package.size_label(total, shared, expert, experts)
    return title


def _add_parameters(writer: gguf.GGUFWriter, config: Mapping[str, Any], model: GgufModel, package: Any) -> None:
    """Adds the sizes and constants of the model."""
    kind, heads = str(model.config["model_type"]), config["num_attention_heads"]
    gemma2 = kind == "gemma2"
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(model.file_type)
    if (size := config.get("head_dim")) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if not gemma2:
        _add_rotary(writer, config, package)
    if (experts := config.get("num_local_experts", config.get("num_experts"))) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if (shared := config.get("shared_expert_intermediate_size")) is not None:
            writer.add_expert_shared_feed_forward_length(shared)
    if ARCHITECTURES[kind] == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    if kind.startswith("gemma"):
        if gemma2:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        if gemma2 or config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


def _add_rotary(writer: gguf.GGUFWriter, config: Mapping[str, Any], package: Any) -> None:
    """Adds the keys of rotary embeddings; the scaling of Llama 3 is a tensor (`rope_freqs.weight`)."""
    both = config["rope_parameters"]
    rotary = both.get("full_attention", both)
    kind, factor = str(rotary.get("rope_type") or "default"), rotary.get("factor")
    if kind == "linear" and factor is not None:
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    elif kind == "yarn" and factor is not None:
        writer.add_rope_scaling_type(package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(
            rotary.get("original_max_position_embeddings") or config["max_position_embeddings"]
        )
        attention = rotary.get("attention_factor", rotary.get("attn_factor"))
        for value, add in (
            (rotary.get("extrapolation_factor"), writer.add_rope_scaling_yarn_ext_factor),
            (attention, writer.add_rope_scaling_yarn_attn_factor),
            (rotary.get("beta_fast"), writer.add_rope_scaling_yarn_beta_fast),
            (rotary.get("beta_slow"), writer.add_rope_scaling_yarn_beta_slow),
        ):
            if value is not None:
                add(value)
    if rotary.get("rope_theta") is not None:
        writer.add_rope_freq_base(rotary["rope_theta"])
    if (local := both.get("sliding_attention", {}).get("rope_theta")) is not None:
        writer.add_rope_freq_base_swa(local)
