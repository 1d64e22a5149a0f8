"""Which weights of a transformers model are one weight: its config says it, or its class where the config lacks the key.

For merges, and for saves that hold a tied weight twice. transformers leaves a key out of config.json that has its class's
default, so a missing `tie_word_embeddings` is not False. `tied_weights.json` has the default of each model type, and for each
class with a head which tensors are one; tests hold it against transformers.
[Note: nested configs] Of a model with a `text_config`, transformers 4 asks that one; transformers 5 asks the outer one, and most
of its configs take over a True from the inner one. A config says which version wrote it.
[Note: parted heads] A head may hold other numbers than the embedding, although a config says that both are one weight: training
may part the two, by an adapter merged into one of them or a framework that does not keep ties. Loaders that believe the config
(transformers 4, vLLM, mlx-lm) then leave out the head. transformers 5 keeps both where they differ (`tie_weights`,
`missing_keys`), and so do outputs: their config says that the two are apart.
Source: transformers 5.23, modeling_utils.py `get_expanded_tied_weights_keys`, models/*/configuration_*.py, `_tied_weights_keys`
in models/*/modeling_*.py; 4.57.6, modeling_utils.py `tie_embeddings_and_encoder_decoder`, configuration_utils.py.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping

from zckpt.base.errors import ZckptError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.engine.elements import ElementReader, Wanted
from zckpt.engine.replicas import ends

KEY = "tie_word_embeddings"
LANGUAGE_HEADS = ("lm_head", "embed_out")
"""Modules of transformers that turn a language model's last states into tokens."""
HEADS = (*(f"{head}.weight" for head in LANGUAGE_HEADS), "output.weight")
OTHER_HEADS = ("score", "classifier", "qa_outputs", "v_head", "value_head", "summary")
"""Modules that a language model has not: of classifiers, taggers and reward models."""
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
_TABLE = os.path.join(os.path.dirname(__file__), "tied_weights.json")
_HAS_HEAD = compile_late(r".*(?:ForCausalLM|LMHeadModel|ForConditionalGeneration)\w*")
_HEADS_OF = {"embed_in.weight": "embed_out.weight", "tok_embeddings.weight": "output.weight"}
_OLD = "language_model."
"""The prefix of the text model in vision models before transformers 4.52; it had a head of its own."""


@functools.cache
def _read_table() -> tuple[Mapping[str, bool], Mapping[str, Mapping[str, str]]]:
    """Model type -> whether its weights are tied if its config says nothing; and class -> name of a tensor -> the tensor
    that it is, if the weights are tied.
    """
    with open(_TABLE, encoding="utf-8") as file:
        said = json.load(file)
    tied = {**dict.fromkeys(said["tied"], True), **dict.fromkeys(said["apart"], False)}
    return tied, {name: weights for weights, names in said["weights"] for name in names}


def is_tied(config: Mapping[str, object]) -> bool | None:
    """Whether a model's head and embedding are one weight; None if its config does not tell. See [Note: nested configs]."""
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, Mapping)]
    said = [_is_tied(part) for part in parts]
    if any(part.get(KEY) is True for part in parts):
        return True
    if len({*said}) == 1:
        return said[0]
    version = str(config.get("transformers_version")).partition(".")[0]
    if version == "4":
        return said[-1]
    return said[0] if version.isdecimal() and (said[0] is True or said[-1] is False) else None


def _is_tied(config: Mapping[str, object]) -> bool | None:
    """Whether a config, or its class's default, ties the weights; nested configs are not read."""
    value, kind = config.get(KEY), config.get("model_type")
    if isinstance(value, bool):
        return value
    tied, _ = _read_table()
    return tied.get(kind) if isinstance(kind, str) else None


def _weights(config: Mapping[str, object]) -> tuple[str, Mapping[str, str]]:
    """A model's class, and its tensors that may be another tensor."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return name, _read_table()[1].get(name, {})


def heads_of(config: Mapping[str, object], embedding: str) -> tuple[str, ...]:
    """The names of tensors that are the embedding if a model's weights are tied; empty for a model without a head."""
    name, weights = _weights(config)
    if found := tuple(other for other, kept in weights.items() if kept == embedding):
        return found
    if not embedding.endswith(EMBEDDINGS) or (name and not weights and not _HAS_HEAD.fullmatch(name)):
        return ()
    last = ".".join(embedding.rsplit(".", 2)[-2:])
    before, old, _ = embedding.rpartition(_OLD + "model.")
    return ((before + _OLD if old else "") + _HEADS_OF.get(last, "lm_head.weight"),)


def embedding_of(config: Mapping[str, object], head: str, names: Mapping[str, object]) -> str | None:
    """The name, among `names`, of the tensor that a head is if a model's weights are tied; None if it is not known."""
    _, weights = _weights(config)
    if weights.get(head) in names:
        return weights[head]
    found = [name for name in names if name.endswith(EMBEDDINGS)]
    return found[0] if head.endswith(HEADS) and len(found) == 1 else None


_BLOCKS = 64
_WIDTH = 16
"""Elements of each block that is compared."""


def samples(reader: ElementReader, a: TensorEntry, b: TensorEntry) -> Iterator[tuple[bytes, bytes]]:
    """The elements of two tensors of one shape and dtype at the ends of the first one's fragments, and spread over them."""
    last = max(a.numel - _WIDTH, 0)
    spread = {last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}
    for start, stop in [
        *ends(a.fragments),
        *((start, min(start + _WIDTH, a.numel)) for start in sorted(spread)),
    ]:
        one, other = (reader.read(Wanted(entry.fragments, entry.dtype, start, stop)) for entry in (a, b))
        yield one, other


def untied_heads(catalog: Catalog, config: Mapping[str, object] | None) -> list[str]:
    """The heads that differ, where they are compared, from the embedding that the config says they are."""
    heads = [name for name in catalog.tensors if name.endswith(HEADS)] if config is not None and is_tied(config) else []
    found: list[str] = []
    for name in heads:
        kept = embedding_of(config or {}, name, catalog.tensors)
        if kept is None or kept == name:
            continue
        head, embedding = catalog.tensors[name], catalog.tensors[kept]
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not head.numel:
            continue
        try:
            with ElementReader() as reader:
                if any(one != other for one, other in samples(reader, head, embedding)):
                    found.append(name)
        except (ZckptError, OSError):  # a file that is not here, or is damaged: who reads it says so
            continue
    return found


def as_untied(config: Mapping[str, object]) -> dict[str, object]:
    """The config of a model, saying that head and embedding are two weights."""
    text = config.get("text_config")
    return {**config, KEY: False, **({"text_config": {**text, KEY: False}} if isinstance(text, Mapping) else {})}


def note_on(heads: list[str]) -> tuple[str, ...]:
    """A sentence on heads that are not the embedding; none where there are none."""
    if not heads:
        return ()
    return (
        f"{examples(heads)}: holds other numbers than the embedding, although the config says that both are one weight ({KEY}). "
        "Both are kept, and the output's config says that they are apart.",
    )
