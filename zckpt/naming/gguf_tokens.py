"""The tokens of a tokenizer.json, for a GGUF file's vocabulary.

For `gguf_vocabulary`. The `tokenizers` package reads the file. The files beside it may name further tokens, or give some another
kind; then transformers decides, as it does in llama.cpp's converter (which takes seconds, and memory with torch in it).
Source: transformers 4.57 and 5.23, tokenization_utils_fast.py and tokenization_utils_tokenizers.py (what is added to a
tokenizer.json's tokens); tests/interop/test_gguf.py compares both ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_END = "<|endoftext|>"
_CLASSES: dict[str, dict[str, str]] = {
    "PreTrainedTokenizer": {}, "TokenizersBackend": {}, "LlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
}  # fmt: skip
"""transformers' classes of tokenizers (without Fast) -> their special tokens where no file names them."""
_TIDIED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Spaces that transformers takes out of decoded text where tokenizer_config.json says so."""


class Added(NamedTuple):
    """A token that is matched before text is split.

    Attributes:
        content: its text.
        special: whether it is left out where text is shown.
        normalized: whether it is matched in text that is normalised already.
    """

    content: str
    special: bool
    normalized: bool


@dataclass(frozen=True)
class Tokens:
    """A tokenizer's tokens.

    Attributes:
        numbers: of all tokens, by their text.
        added: number -> the token, of those that are matched before text is split.
        base: how many tokens there are without those that were added behind them.
        special: what the files name as beginning, end, padding and the like.
        encode: text -> numbers, with the special tokens that are put around it.
        shown: a token's text -> what becomes of it when it is encoded and decoded.
    """

    numbers: Mapping[str, int]
    added: Mapping[int, Added]
    base: int
    special: frozenset[str]
    encode: Callable[[str], list[int]]
    shown: Callable[[str], str]


def tokens_of(directory: Path, *, alone: bool = True) -> Tokens:
    """The tokens of a directory's tokenizer.json.

    Args:
        directory: with the tokenizer's files.
        alone: whether tokenizer.json is enough where the files beside it say nothing else.

    Raises:
        UnsupportedError: a package is missing.
        Exception: whatever the packages raise where a file cannot be read.
    """
    if alone and (found := _by_tokenizers(directory)) is not None:
        return found
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing(error, "transformers") from error
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return _as_tokens(
        tokenizer, tokenizer.get_vocab(), tokenizer.vocab_size, tokenizer.added_tokens_decoder,
        frozenset(tokenizer.all_special_tokens),
    )  # fmt: skip


def _as_tokens(
    tokenizer: Any, numbers: Mapping[str, int], base: int, added: Mapping[int, Any], special: frozenset[str]
) -> Tokens:
    """The tokens of a transformers or tokenizers tokenizer; both have `encode` and `decode`, with results that differ
    in form.
    """

    def encode(text: str, *, around: bool = True) -> list[int]:
        found = tokenizer.encode(text, add_special_tokens=around)
        return list(getattr(found, "ids", found))

    return Tokens(
        numbers, {number: _parse_added(token) for number, token in added.items()}, base, special, encode,
        lambda text: str(tokenizer.decode(encode(text, around=False), skip_special_tokens=False)),
    )  # fmt: skip


def _parse_added(token: Any) -> Added:
    return Added(token.content, token.special, token.normalized)


def _missing(error: ImportError, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the tokenizer needs {name}, which is not installed",
        found=str(error),
        remedy="Run: pip install 'zckpt[gguf]'.",
    )


def _by_tokenizers(directory: Path) -> Tokens | None:
    """The tokens by tokenizer.json alone; None if the files beside it add to it."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _missing(error, "tokenizers") from error
    said = json_in(directory / "tokenizer_config.json")
    special = _special(said, json_in(directory / "special_tokens_map.json"))
    if special is None or "auto_map" in said or said.get("split_special_tokens"):
        return None
    found = _in_parts(json_in(directory / "tokenizer.json"), special)
    if found is None:
        tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        numbers, base = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_vocab_size(with_added_tokens=False)
        found = _as_tokens(tokenizer, numbers, base, tokenizer.get_added_tokens_decoder(), special)
    by_text = {token.content: (number, token) for number, token in found.added.items()}
    if any(text not in by_text or not by_text[text][1].special for text in special):
        return None
    if any(
        text not in by_text or by_text[text][0] != at for text, at in json_in(directory / "added_tokens.json").items()
    ):
        return None
    for number, token in said.get("added_tokens_decoder", {}).items():
        own = found.added.get(int(number))
        if own is None or any(getattr(own, key) != token.get(key) for key in Added._fields):
            return None
    if said.get("clean_up_tokenization_spaces") and any(mark in text for text in by_text for mark in _TIDIED):
        return None
    return found


def _in_parts(said: Mapping[str, Any], special: frozenset[str]) -> Tokens | None:
    """The tokens of a BPE tokenizer by `tokenizers`, which is given only the tokens that can be in a text.

    All tokens at once take it more memory than the rest of a conversion. None where a token's number is not certain.
    """
    from tokenizers import Tokenizer

    model = said["model"]
    vocabulary = model.get("vocab")
    has_plain_tokens = not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not has_plain_tokens:
        return None
    numbers, added = dict(vocabulary), {}
    for token in said.get("added_tokens") or ():
        if numbers.setdefault(token["content"], len(numbers)) != token["id"]:
            return None
        added[token["id"]] = Added(token["content"], bool(token["special"]), bool(token["normalized"]))
    if sorted(numbers.values()) != list(range(len(numbers))):
        return None

    def reduced(text: str) -> Any:
        """A tokenizer with the tokens that are in a text."""
        kept = {token: number for token, number in vocabulary.items() if len(token) == 1 or token in text}
        kept |= {token.content: number for number, token in added.items()}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ())
        merges = [[a, b] for a, b in pairs if a in kept and b in kept and a + b in kept and a + b in text]
        small = {**model, "vocab": kept, "merges": merges}
        return Tokenizer.from_str(json.dumps({**said, "model": small, "truncation": None, "padding": None}))

    bare = reduced("")

    def encode(text: str) -> list[int]:
        words = text if bare.normalizer is None else bare.normalizer.normalize_str(text)
        if bare.pre_tokenizer is not None:
            words = "\n".join(word for word, _ in bare.pre_tokenizer.pre_tokenize_str(words))
        return list(reduced(words).encode(text).ids)

    def shown(text: str) -> str:
        ids = bare.encode(text, add_special_tokens=False).ids
        return str(bare.decode(ids, skip_special_tokens=False))

    return Tokens(numbers, added, len(vocabulary), special, encode, shown)


def json_in(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is no file. Raises ValueError where it holds something else."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def _special(said: Mapping[str, Any], beside: Mapping[str, Any]) -> frozenset[str] | None:
    """The special tokens that the files name; None if they disagree, or the class of the tokenizer is not known here."""
    usual = _CLASSES.get(str(said.get("tokenizer_class")).removesuffix("Fast"))
    if usual is None:
        return None
    found = set()
    for key in _NAMED:
        here, there = _text(said.get(key, usual.get(key))), _text(beside.get(key))
        if there not in (None, here):
            return None
        found.add(here)
    for names in (said, beside):
        found.update(text for key in _LISTED for text in _texts(names.get(key)))
    return frozenset(text for text in found if text is not None)


def _text(token: object) -> str | None:
    """A token's text, which a file gives alone or in an object."""
    return str(token["content"]) if isinstance(token, dict) else None if token is None else str(token)


def _texts(tokens: object) -> Iterator[str | None]:
    for token in tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ():
        yield _text(token)
