"""A model's vocabulary in the metadata of a GGUF file: tokens, their kinds and scores, merges, special tokens, chat template.

For `gguf_metadata`. A `tokenizer.model` is read by sentencepiece, a tokenizer.json by `tokenizers`; special tokens and merges by
the `gguf` package. llama.cpp splits text by rules of its own, which have names: `pre_tokenizers.json` has these by a digest of
the tokens that a certain text becomes.
Source: llama.cpp, convert_hf_to_gguf.py `get_vocab_base`, `get_vocab_base_pre`, `_create_vocab_sentencepiece`, `set_vocab` of
LlamaModel, Qwen2Model, Gemma2Model, Gemma3Model (of 2026); gguf 0.19.0, vocab.py.

Of the tokens of a tokenizer.json: the files beside it may name further tokens, or give some another
kind; then transformers decides, as it does in llama.cpp's converter (which takes seconds, and memory with torch in it).
Source: transformers 4.57 and 5.23, tokenization_utils_fast.py and tokenization_utils_tokenizers.py (what is added to a
tokenizer.json's tokens); tests/interop/test_gguf.py compares both ways.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, UnsupportedError, UsageError, ZckptError

if TYPE_CHECKING:
    import gguf


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


_TOLD = ("content", "special", "normalized")
"""What the files say of a token that is matched before text is split: its text, whether it is left out where text is shown, and
whether it is matched in text that is normalised already."""


@dataclass(frozen=True)
class Tokens:
    """A tokenizer's tokens.

    Attributes:
        numbers: of all tokens, by their text.
        added: number -> the token, as `tokenizers` has it, of those that are matched before text is split.
        base: how many tokens there are without those that were added behind them.
        special: what the files name as beginning, end, padding and the like.
        encode: text -> numbers, with the special tokens that are put around it.
        shown: a token's text -> what becomes of it when it is encoded and decoded.
    """

    numbers: Mapping[str, int]
    added: Mapping[int, Any]
    base: int
    special: frozenset[str]
    encode: Callable[[str], list[int]]
    shown: Callable[[str], str]


def tokens_of(directory: Path, *, alone: bool = True) -> Tokens:
    """The tokens of a directory's tokenizer.json: by itself, if the files beside it say nothing else, and `alone` is set.
    Raises UnsupportedError if a package is missing; and whatever the packages raise where a file cannot be read.
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
        numbers, added, base, special, encode,
        lambda text: str(tokenizer.decode(encode(text, around=False), skip_special_tokens=False)),
    )  # fmt: skip


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
        if own is None or any(getattr(own, key) != token.get(key) for key in _TOLD):
            return None
    if said.get("clean_up_tokenization_spaces") and any(mark in text for text in by_text for mark in _TIDIED):
        return None
    return found


def _in_parts(said: Mapping[str, Any], special: frozenset[str]) -> Tokens | None:
    """The tokens of a BPE tokenizer by `tokenizers`, which is given only the tokens that can be in a text.

    All tokens at once take it more memory than the rest of a conversion. None where a token's number is not certain.
    """
    from tokenizers import AddedToken, Tokenizer

    model = said["model"]
    vocabulary = model.get("vocab")
    has_plain_tokens = not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not has_plain_tokens:
        return None
    numbers, added = dict(vocabulary), {}
    for token in said.get("added_tokens") or ():
        if numbers.setdefault(token["content"], len(numbers)) != token["id"]:
            return None
        added[token["id"]] = AddedToken(
            token["content"], special=bool(token["special"]), normalized=bool(token["normalized"])
        )
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


_TABLE = os.path.join(os.path.dirname(__file__), "pre_tokenizers.json")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Kinds of tokens, as llama.cpp numbers them."""

_CODE_LLAMA, _GRANITE = 32016, 49152
"""Sizes of vocabularies by which the converter recognises models with special needs."""


def add_vocabulary(
    writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any], pre_tokenizer: str, home: str
) -> None:
    """Adds the vocabulary of a directory's tokenizer; `pre_tokenizer`: llama.cpp's name of it, empty to find it; `home`:
    for errors.

    Raises:
        UsageError: there is no tokenizer. UnsupportedError: it is of a kind that is not known. CorruptError: it cannot be read.
    """
    try:
        _add(writer, directory, config, pre_tokenizer, home)
    except ZckptError:
        raise
    except BaseException as error:  # tokenizers and sentencepiece raise whatever they like
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # Rust's, which is not an Exception
            raise
        raise CorruptError(
            "the tokenizer cannot be read", file=home, found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            remedy="Copy the model's tokenizer files here again, or name their directory with --tokenizer.",
        ) from error  # fmt: skip


def _add(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any], pre_tokenizer: str, home: str) -> None:
    kind = str(config["model_type"])
    has_pieces, has_json = ((directory / name).is_file() for name in ("tokenizer.model", "tokenizer.json"))
    is_llama = kind in ("llama", "mistral", "mixtral")
    only_json = kind in ("qwen2_moe", "qwen3_moe")
    if not has_pieces and (not has_json or kind == "gemma2"):
        needed = "tokenizer.model" if kind == "gemma2" else "tokenizer.model or tokenizer.json"
        raise UsageError(
            "there is no tokenizer", file=home, found=f"no {needed}",
            remedy="Copy the base model's tokenizer files here, or name their directory with --tokenizer. To leave the "
            "vocabulary out, pass --tokenizer none.",
        )  # fmt: skip
    said = json_in(directory / "tokenizer_config.json")
    if is_llama and said.get("add_prefix_space") is not None:
        writer.add_add_space_prefix(said["add_prefix_space"])
    if has_pieces and not only_json:
        _add_pieces(writer, directory, config, said)
        if kind.startswith("gemma"):
            writer.add_add_space_prefix(False)
    elif not (is_llama and _add_fast_pieces(writer, directory)):
        _add_bytes(writer, directory, config, pre_tokenizer, home)
    if is_llama and config.get("vocab_size") == _CODE_LLAMA:
        _add_infill(writer, directory)
    if is_llama and config.get("vocab_size") == _GRANITE:
        writer.add_add_bos_token(False)


def _looks_special(token: str) -> bool:
    """Whether a token that is not marked as special looks like one."""
    marks = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(begin) and token.endswith(end) for begin, end in marks
    )


def _add_pieces(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Adds a sentencepiece model, with the tokens that tokenizer_config.json and added_tokens.json add to it."""
    import gguf

    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise UnsupportedError(
            "the tokenizer is a sentencepiece model, and sentencepiece is not installed", found=str(error),
            remedy="Run: pip install 'zckpt[gguf]'.",
        ) from error  # fmt: skip
    pieces = SentencePieceProcessor()
    pieces.LoadFromFile(str(directory / "tokenizer.model"))
    size = config.get("vocab_size") or pieces.vocab_size()
    tokens = [f"[PAD{number}]".encode() for number in range(size)]
    scores, kinds = [-10000.0] * size, [_UNUSED] * size
    for number in range(min(size, pieces.vocab_size())):
        tokens[number], scores[number] = pieces.IdToPiece(number).encode(), pieces.GetScore(number)
        kinds[number] = (
            _UNKNOWN if pieces.IsUnknown(number) else _CONTROL if pieces.IsControl(number)
            else _UNUSED if pieces.IsUnused(number) else _BYTE if pieces.IsByte(number) else _NORMAL
        )  # fmt: skip
    for text, number in json_in(directory / "added_tokens.json").items():
        if 0 <= number < size:
            tokens[number], scores[number], kinds[number] = text.encode(), -1000.0, _USER_DEFINED
    for key, token in said.get("added_tokens_decoder", {}).items():
        number, text = int(key), str(token["content"])
        if not 0 <= number < size:
            continue
        if token.get("special") or _looks_special(text):
            kinds[number] = _CONTROL
        else:
            text, kinds[number] = text.replace("\u2581", " "), _USER_DEFINED
        tokens[number], scores[number] = text.encode(), -1000.0
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(directory, n_vocab=size).add_to_gguf(writer, quiet=True)


def _add_fast_pieces(writer: gguf.GGUFWriter, directory: Path) -> bool:
    """Adds a sentencepiece vocabulary from its tokenizer.json alone; returns False if it is of another kind."""
    import gguf

    said = json_in(directory / "tokenizer.json")
    model = said["model"]
    if (
        model["type"] != "BPE"
        or not model.get("byte_fallback", False)
        or (said.get("decoder") or {}).get("type") != "Sequence"
    ):
        return False
    found = tokens_of(directory)
    by_number = {number: text for text, number in found.numbers.items()}
    behind = sorted(number for number in found.added if number >= found.base)
    tokens = [by_number[number] for number in (*range(found.base), *behind)]
    kinds = [_piece_kind(text, found.special, is_behind=place >= found.base) for place, text in enumerate(tokens)]
    del found, by_number, said, model
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text.encode() for text in tokens])
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types(kinds)
    gguf.SpecialVocab(directory, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
    return True


def _piece_kind(text: str, special: Collection[str], *, is_behind: bool) -> int:
    if not is_behind and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return _BYTE
    return _CONTROL if text in special else _USER_DEFINED if is_behind else _NORMAL


def _add_bytes(
    writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any], pre_tokenizer: str, home: str
) -> None:
    """Adds a vocabulary of byte pairs, as in GPT-2."""
    import gguf

    found = tokens_of(directory)
    size = config.get("vocab_size", len(found.numbers))
    if max(found.numbers.values()) >= size:
        raise UsageError(
            "the tokenizer has more tokens than the model", file=home, found=f"token {max(found.numbers.values()):,}",
            expected=f"tokens below {size:,}, the rows of the embedding",
            remedy="Name the model's own tokenizer with --tokenizer.",
        )  # fmt: skip
    name = pre_tokenizer or _pre_tokenizer(found, directory, home)
    by_number = {number: token for token, number in found.numbers.items()}
    tokens: list[str] = []
    kinds: list[int] = []
    for number in range(size):
        token = by_number.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            kinds.append(_UNUSED)
            continue
        kind = _NORMAL
        if (added := found.added.get(number)) is not None:
            if not added.normalized:
                token = found.shown(token)
            kind = _CONTROL if added.special or _looks_special(token) else _USER_DEFINED
            if kind == _USER_DEFINED:
                token = token.replace("\u2581", " ")
        tokens.append(token)
        kinds.append(kind)
    del found, by_number  # the package reads the file once more
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(directory, load_merges=True).add_to_gguf(writer, quiet=True)


def _pre_tokenizer(found: Tokens, directory: Path, home: str) -> str:
    """llama.cpp's name of a tokenizer's pre-tokenizer.

    What `tokenizers` alone makes of the text is enough if it is known; else transformers may make something else of it.
    Raises UnsupportedError if it is none of those that llama.cpp's converter knew.
    """
    with open(_TABLE, encoding="utf-8") as file:
        table = json.load(file)
    digest = _digest(found, table["text"])
    if digest not in table["names"]:
        digest = _digest(tokens_of(directory, alone=False), table["text"])
    name = table["names"].get(digest)
    if name is None:
        raise UnsupportedError(
            "llama.cpp's name of the tokenizer's pre-tokenizer is not known", file=home, found=f"digest {digest}",
            expected="a tokenizer that llama.cpp's converter knows",
            remedy="If it splits text as a known model's does, pass that one's name, such as --pre-tokenizer llama-bpe or "
            "--pre-tokenizer qwen2.",
        )  # fmt: skip
    return str(name)


def _digest(found: Tokens, text: str) -> str:
    return hashlib.sha256(str(found.encode(text)).encode()).hexdigest()


def _add_infill(writer: gguf.GGUFWriter, directory: Path) -> None:
    """Adds the tokens by which Code Llama fills in text."""
    import gguf

    special = gguf.SpecialVocab(directory, load_merges=False, special_token_types=["prefix", "suffix", "middle", "eot"])
    for number, kind in enumerate(("prefix", "suffix", "middle", "eot"), 32007):
        special._set_special_token(kind, number)
    special.add_to_gguf(writer, quiet=True)
