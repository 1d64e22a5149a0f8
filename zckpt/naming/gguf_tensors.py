"""A model's tensors under GGUF's names, with the one that a GGUF file has beside them.

For `jobs.to_gguf`. Names, pairs and norms are those of the scheme `gguf`. [Note: factors of frequencies] Models with
rotary
embeddings scaled as Llama 3.1's have a tensor `rope_freqs.weight`: by how much each frequency is divided. High
frequencies
stay, low ones are divided by the factor, those between by something between. Powers are taken in fp64 and rounded to fp32; all
else is fp32.
Source: llama.cpp, convert_hf_to_gguf.py `LlamaModel.generate_extra_tensors`, `Gemma3Model.modify_tensors` (of 2026).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zckpt.base.errors import UsageError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.layouts.gguf.blocks import as_floats, in_blocks
from zckpt.layouts.gguf.importance import REMEDY, ImportanceMatrix, read_importance
from zckpt.layouts.gguf.write import Mixed, types_of
from zckpt.naming.gguf_keys import filled_in
from zckpt.naming.gguf_metadata import ARCHITECTURES
from zckpt.naming.rows import with_rows
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, locate

FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_MOST_BYTES = 64 << 20
"""The most bytes of a tokenizer.json that is read for its number of tokens."""


def add_frequency_factors(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], rows: int | None
) -> list[TensorEntry]:
    """The tensors in their order, with the factors of frequencies, if the model has some, before them; `rows`: that the
    embedding keeps, None for all.
    """
    found = dict(tensors)
    if rows is not None and _EMBEDDING in found:
        embedding = found[_EMBEDDING]
        found[_EMBEDDING] = with_rows(embedding, min(rows, embedding.shape[0]))
    rotary = filled_in(config, "")["rope_parameters"]
    if ARCHITECTURES.get(str(config.get("model_type"))) == "llama" and rotary["rope_type"] == "llama3":
        return [_factors(config, rotary), *found.values()]
    return list(found.values())


def vocabulary_rows(config: Mapping[str, Any], home: Location | None) -> int | None:
    """How many rows Gemma 3's embedding keeps: the tokens of a tokenizer.json without a tokenizer.model; None for all rows."""
    if config.get("model_type") not in ("gemma3", "gemma3_text") or home is None:
        return None
    path = home / "tokenizer.json"
    if (home / "tokenizer.model").is_file() or not path.is_file():
        return None
    said = read_json(path.path, _MOST_BYTES, "a tokenizer.json")
    try:
        return len(said["model"]["vocab"]) + len(said["added_tokens"])
    except (KeyError, TypeError) as error:
        raise UsageError(
            "is not a tokenizer.json with a vocabulary", file=path, found=f"{type(error).__name__}: {error}",
            remedy="Copy the model's tokenizer files here again.",
        ) from error  # fmt: skip


def as_read(catalog: Catalog, config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Catalog:
    """What a GGUF file of a model under GGUF's names holds, with the numbers that blocks stand for, by the type and the
    rows of the embedding in its manifest.
    """
    said = recorded.get("imatrix")
    matrix = None if said is None else _matrix_again(str(said["file"]), str(said["digest"]))
    tensors = add_frequency_factors(catalog.tensors, config, recorded.get("rows"))
    types = types_of(tensors, str(recorded["type"]), mixed_of(config, matrix))
    read: dict[str, TensorEntry] = {}
    for entry in tensors:
        kind = types[entry.name]
        weighting = None if matrix is None or kind.block == 1 else matrix.of(entry.name, entry.shape)
        blocks = in_blocks(entry, kind, weighting, again=True) if kind.block > 1 else entry
        read[entry.name] = as_floats(blocks, kind) if kind.block > 1 else blocks
    return replace(catalog, tensors=read, aliases={}, padding=())


def mixed_of(config: Mapping[str, Any], matrix: ImportanceMatrix | None) -> Mixed:
    """The facts that a mixture of types depends on, from a model's config."""
    full = filled_in(config, "")
    layers, heads = full["num_hidden_layers"], full["num_attention_heads"]
    experts = full.get("num_local_experts", full.get("num_experts")) or 0
    shares = {"llama": full.get("num_key_value_heads", heads) != heads and experts != 8, "qwen2": True}
    is_70b = layers == 80 and shares.get(ARCHITECTURES.get(str(config.get("model_type")), ""), False)
    return Mixed(layers, experts, is_70b, matrix is not None)


def _matrix_again(path: str, digest: str) -> ImportanceMatrix:
    """The importance matrix with which an output was made. Raises UsageError if it is not there any more, or is another
    one.
    """
    there = locate(path)
    found = digest_of(there) if there.is_file() else "no such file"
    if found != digest:
        raise UsageError(
            "the importance matrix of this output is needed to verify it", file=path, found=found[:16], expected=digest[:16],
            remedy=f"Put the file with which it was made back there. {REMEDY}",
        )  # fmt: skip
    return read_importance(path)


def digest_of(file: Location) -> str:
    """The SHA-256 of a file's bytes."""
    found = hashlib.sha256()
    with file.open() as opened:
        for start in range(0, opened.size, 1 << 20):
            found.update(opened.read(start, min(1 << 20, opened.size - start)))
    return found.hexdigest()


def _factors(config: Mapping[str, Any], rotary: Mapping[str, Any]) -> TensorEntry:
    """The factors as a tensor; see [Note: factors of frequencies]."""
    import numpy as np

    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    data = bytearray(np.array(llama3_factors(rotary, size), "<f4").tobytes())
    store = ComputedStore(len(data), lambda: data, ())
    return TensorEntry(FACTORS, (size // 2,), F32, "buffer", (Fragment(store, 0, 0, size // 2),))


def llama3_factors(rotary: Mapping[str, Any], size: int) -> list[float]:
    """The divisor of each frequency for heads of this size."""
    import numpy as np

    one = np.float32(1)
    base, factor = np.float32(rotary.get("rope_theta", 10000.0)), np.float32(rotary.get("factor", 8.0))
    low, high = rotary.get("low_freq_factor", 1.0), rotary.get("high_freq_factor", 4.0)
    context = rotary.get("original_max_position_embeddings", 8192)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = one / np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    factors: list[float] = []
    for frequency in frequencies:
        length = one / frequency * np.float32(2 * math.pi)  # as torch divides a number by a tensor
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(float(factor))
        else:
            smooth = (one / length * np.float32(context) - np.float32(low)) / np.float32(high - low)
            factors.append(float(one / ((one - smooth) / factor + smooth)))
    return factors
