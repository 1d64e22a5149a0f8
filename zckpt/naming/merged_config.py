"""Class, labels and vocabulary of a merged model, where an adapter brings another head or more tokens than its base has.

For `merge` and `jobs.merged`. PEFT saves a head that it trained whole under the names of the run's class; the base is often the
language model that the run began with.
Source: PEFT 0.21.2, utils/peft_types.py `TaskType`, peft_model.py; transformers 5.23, configuration_utils.py (`id2label`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zckpt.base.patterns import compile_late
from zckpt.containers import value_at
from zckpt.core.catalog import TensorEntry
from zckpt.layouts.save.tied import EMBEDDINGS, HEADS, LANGUAGE_HEADS, OTHER_HEADS
from zckpt.naming.adapter_weights import AdapterWeights

_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""PEFT's `task_type` -> the end of the class's name."""

_LABELS = compile_late(r"(?:score|classifier|classifier\.out_proj)\.weight")
_OTHER_HEAD = compile_late(rf"(?:.*\.)?(?:{'|'.join(OTHER_HEADS)})(?:\.\w+)*\.(?:weight|bias)")
_LANGUAGE_HEAD = compile_late(rf"(?:{'|'.join(LANGUAGE_HEADS)}|cls)\..*")
_KIND = compile_late(r"(?:For\w+|LMHeadModel|Model)$")


def is_other_head(name: str) -> bool:
    """Whether a tensor belongs to a head that a language model lacks: a classifier's, or a value head's."""
    return bool(_OTHER_HEAD.fullmatch(name))


def is_of_tokens(name: str) -> bool:
    """Whether a tensor has a row for each token."""
    return name.endswith((*EMBEDDINGS, *HEADS))


def find_class(adapters: Sequence[AdapterWeights], config: Mapping[str, object] | None) -> str:
    """The class that an adapter was trained in, if that is not a language model; empty otherwise."""
    for adapter in adapters:
        named = value_at(adapter.config, "auto_mapping", "base_model_class")
        if isinstance(named, str) and named.endswith(tuple(_CLASSES.values())):
            return named
        end = _CLASSES.get(str(adapter.config.get("task_type")))
        said = (config or {}).get("architectures")
        if end and isinstance(said, list) and said and isinstance(said[0], str):
            return f"{_KIND.sub('', said[0])}{end}"
    return ""


def without_language_head(tensors: Iterable[str]) -> list[str]:
    """The tensors of a language model's head, which a classifier has no place for."""
    return [name for name in tensors if _LANGUAGE_HEAD.fullmatch(name)]


def change_config(
    config: Mapping[str, object], *, untied: bool, kind: str, tensors: Mapping[str, TensorEntry], rows: int | None
) -> dict[str, object]:
    """A base model's config as the merged model needs it: with head and embedding `untied`, of the class (`kind`) in which
    the adapter was trained, and with `rows` of embeddings, where an adapter has another number of them than the base.
    """
    found = dict(config)
    text = config.get("text_config")
    inner = dict(text) if isinstance(text, Mapping) else None
    for place in (found,) if inner is None else (found, inner):
        if untied:
            place["tie_word_embeddings"] = False
        if rows is not None and ("vocab_size" in place or inner is None):
            place["vocab_size"] = rows
    if inner is not None:
        found["text_config"] = inner
    if kind:
        found["architectures"] = [kind]
        found.pop("auto_map", None)
        labels = next((entry.shape[0] for name, entry in tensors.items() if _LABELS.fullmatch(name) and entry.shape), 0)
        known = config.get("id2label")
        if labels and not (isinstance(known, Mapping) and len(known) == labels):
            found["id2label"] = {str(number): f"LABEL_{number}" for number in range(labels)}
            found["label2id"] = {f"LABEL_{number}": number for number in range(labels)}
    return found
