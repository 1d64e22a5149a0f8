"""Derives how transformers loads an output, from the config.json in it and from the tensors' names.

For the commands that write weights. What is not known is not promised.
Source: transformers 5.23, models/auto/modeling_auto.py; tests/interop/test_loading.py compares every class of its mappings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zckpt.base.errors import ZckptError
from zckpt.base.words import count, examples
from zckpt.layouts.save.companions import find_config
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.tied import LANGUAGE_HEADS, OTHER_HEADS
from zckpt.naming.families import architecture_of, by_config
from zckpt.naming.schemes import scheme
from zckpt.storage.location import locate

_AUTO = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
    "ForImageClassification": "AutoModelForImageClassification",
}
"""The end of a class's name -> the Auto class for it. Other classes are called by their own names: a class that ends in
`ForConditionalGeneration` may read text, images or speech.
"""

_OWN = (
    *("BlipForQuestionAnswering", "FlaubertWithLMHeadModel", "LayoutLMForQuestionAnswering", "Mistral4ForCausalLM"),
    *("TapasForQuestionAnswering", "ViltForQuestionAnswering"),
    *(
        f"{name}ForSequenceClassification"
        for name in ("Data2VecAudio", "Hubert", "SEW", "SEWD", "UniSpeech", "UniSpeechSat")
    ),
    *(f"{name}ForSequenceClassification" for name in ("Wav2Vec2", "Wav2Vec2Bert", "Wav2Vec2Conformer", "WavLM")),
)
"""Classes with another Auto class than their names suggest: of audio and of pictures, for example."""

_BODIES = ("model", "transformer", "gpt_neox")
_HEADS = {*LANGUAGE_HEADS, *OTHER_HEADS}
_MOST_NAMES = 64
_CLASS = re.compile(r"[A-Za-z]\w{2,99}")


def loading_line(out: str, names: Iterable[str]) -> str:
    """How transformers loads a directory that was written, to be read on after "load it with"; or what is missing.

    Args:
        out: the directory.
        names: of the tensors in it.
    """
    place = out.rstrip("/") or "/"
    try:
        found = find_config(locate(out))
    except (ZckptError, OSError):
        found = None
    names = list(names)
    if len(models := _language_models(names)) > 1:
        return (
            f"transformers after you write each of its {len(models)} models by itself, such as with --include '{models[0]}.*' "
            f"--strip-prefix {models[0]}."
        )
    if found is None:
        return f"transformers after you put the model's config.json into {place}"
    config = found[0]
    if twice := _twice(names):
        return (
            f"transformers after you leave out one of two models: {len(twice):,} tensors are there twice, "
            f"such as {twice[0]!r} and 'model.{twice[0]}'"
        )
    prefix, others = wrong_prefix(names, config)
    if prefix:
        inside = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        others = others and not any(name.partition(".")[0] in inside for name in names if not name.startswith(prefix))
        more = f" and --include '{prefix}*'" if others else ""
        return (
            f"transformers after you write it again with --strip-prefix {prefix}{more}: the tensors' names begin with the name "
            "of an attribute of the module that was trained"
        )
    if missing := _missing(names, config):
        return (
            "transformers after you write it again whole: it would make up "
            f"{count(len(missing), 'tensor that is not here', 'tensors that are not here')}, such as {missing[0]!r}"
        )
    family, _ = by_config(config, "")
    few = names[:: max(len(names) // _MOST_NAMES, 1)]
    fits = scheme(f"hf-{family}").fits(few) if family else {}
    if family and 2 * sum(fits.get(name) is not None for name in few) < len(few):
        return f"transformers after you write it again with --to hf: it has no names such as {examples(few)}"
    if config.get("architectures"):
        return loader_of(config, place)
    return loader_of(config, place, _auto_by_names(config, names, is_known=bool(family) and _writes_text(family)))


def _language_models(names: Iterable[str]) -> list[str]:
    """The beginnings of names that each have a language model's head of their own, such as `policy` and `ref`."""
    heads = [
        name.partition(".") for name in names if name.endswith(tuple(f".{head}.weight" for head in LANGUAGE_HEADS))
    ]
    return list(dict.fromkeys(first for first, _, rest in heads if rest.count(".") == 1))


def _twice(names: Iterable[str]) -> list[str]:
    """The names that are there with `model.` before them, too, if that is most of what is there: transformers takes it off."""
    there = {*names}
    found = [name for name in names if f"model.{name}" in there]
    return found if 4 * len(found) > len(there) else []


def _missing(names: Iterable[str], config: Mapping[str, object]) -> list[str]:
    """The tensors of the config's model that are not there, where most of them are, and zckpt knows the model's shapes."""
    known = known_shapes(config) if "quantization_config" not in config else None
    lacking = [] if known is None else sorted(known.shapes.keys() - {*names})
    return lacking if known is not None and 2 * len(lacking) < len(known.shapes) else []


def _writes_text(family: str) -> bool:
    """Whether a family's class is a causal language model; those of BERT and Whisper, for example, are not."""
    return auto_class(architecture_of(scheme(f"hf-{family}"))) == "AutoModelForCausalLM"


def _auto_by_names(config: Mapping[str, object], names: Iterable[str], *, is_known: bool) -> str:
    """The Auto class of a text model with a config that names no class; empty if nothing tells it.

    Args:
        config: the model's.
        names: of its tensors.
        is_known: whether it is a language model of a family that zckpt knows, with that family's names.
    """
    from zckpt.layouts.save.tied import is_tied
    from zckpt.naming.merged_config import is_other_head

    names = list(names)
    if any(map(is_other_head, names)):
        return ""
    has_head = any(name.rpartition("lm_head.")[1] for name in names)
    if is_known:
        return "AutoModelForCausalLM" if has_head or is_tied(config) else ""
    if has_head and all(isinstance(config.get(key), Mapping) for key in ("text_config", "vision_config")):
        return "AutoModelForImageTextToText"
    return ""


def loader_of(config: Mapping[str, object], place: str, auto: str = "") -> str:
    """The call that loads a model with this config; or what is known of the class, if the call is not known.

    Args:
        config: the model's.
        place: where it lies.
        auto: the Auto class, as its tensors show it, for a config that names no class.
    """
    if "model_type" not in config:
        return f"the class {config.get('_class_name')} that its config.json names"
    said = config.get("architectures")
    name = said[0] if isinstance(said, list) and said else None
    if name is None and auto:
        return f'transformers.{auto}.from_pretrained({place!r}, dtype="auto")'
    if not isinstance(name, str) or not _CLASS.fullmatch(name):
        return f"the transformers class for your task: {place}/config.json has no architectures, which would name the class"
    remote = config.get("auto_map")
    remote = remote if isinstance(remote, Mapping) else {}
    own = [key for key, value in remote.items() if str(value).endswith(f".{name}")]
    if own and _CLASS.fullmatch(str(own[0])):
        call = f'transformers.{own[0]}.from_pretrained({place!r}, dtype="auto", trust_remote_code=True)'
        return f"{call}, which runs code of the model's authors"
    return f'transformers.{auto_class(name)}.from_pretrained({place!r}, dtype="auto")'


def auto_class(name: str) -> str:
    """The Auto class for a transformers class; the class itself if its name does not determine one."""
    return name if name in _OWN else next((auto for end, auto in _AUTO.items() if name.endswith(end)), name)


def wrong_prefix(names: Iterable[str], config: Mapping[str, object]) -> tuple[str, bool]:
    """The prefix of a Hugging Face model's names beyond its own, and whether there are names of something else.

    Lightning's names begin with the attribute of the module that holds the model. A model of several has them itself.
    """
    parts: dict[str, set[str]] = {}
    for name in names:
        first, _, rest = name.partition(".")
        parts.setdefault(first, set()).add(rest.partition(".")[0])
    if any(first in _HEADS for first in parts):
        return "", False
    of_several = any(
        isinstance(value, Mapping) and (key.endswith("_config") or key in ("encoder", "decoder"))
        for key, value in config.items()
        if key != "quantization_config"
    )
    if of_several:
        wrapped = [first for first, inner in parts.items() if inner <= _HEADS.union(_BODIES)] if len(parts) == 1 else []
    else:
        wrapped = [first for first, inner in parts.items() if inner & _HEADS or inner <= {*_BODIES}]
    return (f"{wrapped[0]}.", len(parts) > 1) if len(wrapped) == 1 else ("", False)
