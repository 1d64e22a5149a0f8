"""The images' side of a model as llama.cpp's projector file (mmproj): which tensors, their names and types, and the metadata.

For `jobs.to_gguf`. A kind of model is a file in `projector_files`; docs/extending.md explains its keys, and the rules are here.
Source: llama.cpp, conversion/base.py (`MmprojModel`) and its subclasses, convert_image_encoder_to_gguf.py (of 2026); gguf 0.19.0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError
from zckpt.containers.gguf_file import GgmlType
from zckpt.core.catalog import TensorEntry
from zckpt.layouts.gguf.blocks import as_floats, in_blocks
from zckpt.layouts.gguf.write import TYPES
from zckpt.naming.gguf_metadata import library
from zckpt.naming.rows import rows_of, shifted_by, split_rows, swap_head_halves
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, locate

if TYPE_CHECKING:
    import gguf

FILES = os.path.join(os.path.dirname(__file__), "projector_files")
_MOST_BYTES = 16 << 20
"""The most bytes of the config of a preprocessor."""
_MOST_TOKENIZER_BYTES = 1 << 28
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(.+)")
_PARAMS = "params.json"
_MISTRAL = "mistral (params.json)"
_OF_MISTRAL = "vision_language_adapter.w_in.weight"
"""A tensor that a model has in Mistral's own form alone."""
_CONVERTER = "Convert it to transformers' form with to-bf16, and that with llama.cpp's convert_hf_to_gguf.py --mmproj."


@cache
def kind_of_file(name: str) -> Mapping[str, Any]:
    """What the file of a kind says, with what it is like."""
    own = read_json(os.path.join(FILES, f"{name}.json"), _MOST_BYTES, "the description of a projector")
    if name == "base":
        return own  # type: ignore[no-any-return]
    base = kind_of_file(own.get("like", "base"))
    mine = own.get("keys", {})
    keys = {key: {**base["keys"].get(key, {}), **mine.get(key, {})} for key in {**base["keys"], **mine}}
    joined = {key: [*own.get(key, ()), *base.get(key, ())] for key in ("names", "f16 or f32")}
    merged = {key: {**base.get(key, {}), **own.get(key, {})} for key in ("shapes", "when")}
    return {**base, **own, **joined, **merged, "keys": keys}


@cache
def kinds_by_model() -> Mapping[str, Sequence[str]]:
    """A config's `model_type` -> the names of the files that may describe its images' side."""
    found: dict[str, list[str]] = {}
    for file in sorted(os.listdir(FILES)):
        if file.endswith(".json"):
            for model in kind_of_file(file.removesuffix(".json"))["models"]:
                found.setdefault(model, []).append(file.removesuffix(".json"))
    return found


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A model that sees, and the description of its kind.

    Attributes:
        said: the description.
        config: of the model.
        images: what the files beside the model say of images; empty if they were not read.
    """

    said: Mapping[str, Any]
    config: Mapping[str, Any]
    images: Mapping[str, Any]

    def at(self, path: str) -> Any:
        """What the config or the preprocessor says under a path; None if nothing. Raises KeyError for an unknown root."""
        root, *keys = path.split(".")
        found: Any = {
            "config": self.config, "vision": self.config.get("vision_config"), "images": self.images,
            "text": {**self.config, **(self.config.get("text_config") or {})},
        }[root]  # fmt: skip
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def value(self, key: str) -> Any:
        """The value of a key of the metadata; None for one that is not written.

        Raises:
            IncompleteError: nothing says it.
            InconsistentError: it cannot be used.
            UnsupportedError: llama.cpp does not compute it.
        """
        asked = self.said["keys"][key]
        if "is" in asked:
            return asked["is"]
        paths = asked.get("from", ())
        found = next((value for path in paths if (value := self.at(path)) is not None), asked.get("else"))
        place = paths[0].replace("vision.", "vision_config.").replace("text.", "text_config.")
        if found is None:
            if asked.get("optional"):
                return None
            where, _, last = place.rpartition(".")
            raise IncompleteError(
                "the config does not say all sizes of the model", found=f"no {last} in {where}",
                expected="all that llama.cpp needs",
                remedy="Save the config with transformers' save_pretrained, and copy it here.",
            )  # fmt: skip
        if found not in asked.get("among", (found,)):
            raise UnsupportedError(
                "llama.cpp does not compute what the config says", found=f"{place}: {found!r}",
                expected=f"one of {', '.join(map(repr, asked['among']))}", remedy=_CONVERTER,
            )  # fmt: skip
        try:
            value = _RULES[asked.get("rule", "as it is")](found, self, asked.get("by"))
            _ACCEPTED[asked["type"]](value)
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise InconsistentError(
                "the config says a number that cannot be that", found=f"{place}: {found!r}",
                expected=f"a source of {key}", remedy="Copy the model's own config.json here.",
            ) from error  # fmt: skip
        return None if value in asked.get("unless", ()) else value

    def size(self, part: object) -> int | None:
        """A size of a shape: a number, a key of the metadata, or a path; None for any."""
        if isinstance(part, str):
            found = self.value(part) if part in self.said["keys"] else self.at(part)
            return found if isinstance(found, int) else None
        return part if isinstance(part, int) else None


def _must(holds: bool) -> None:
    if not holds:
        raise ValueError


def _accept_number(value: Any) -> None:
    _must(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32)


def _accept_list(value: Any) -> None:
    _must(isinstance(value, list) and all(isinstance(one, (bool, int, float, str)) for one in value))


_ACCEPTED: Mapping[str, Callable[[Any], object]] = {
    "uint32": _accept_number, "float32": float, "bool": bool, "string": str, "array": _accept_list,
}  # fmt: skip


def _period(found: Sequence[int], _: VisionFamily, __: Any) -> int:
    """Windows of one size lie between blocks with full attention."""
    period = found[0] + 1
    _must(all(after - before == period for before, after in pairwise(found)))
    return period


def _layers(found: int | Sequence[int], model: VisionFamily, by: Any) -> list[int]:
    """Numbers of hidden states, counted from the embedding; one that is negative counts from the end."""
    blocks = model.at(by)
    counted = [one if one >= 0 else blocks + one + 1 for one in ([found] if isinstance(found, int) else found)]
    _must(all(0 < one <= blocks for one in counted))
    return counted


_RULES: Mapping[str, Callable[[Any, VisionFamily, Any], Any]] = {
    "as it is": lambda found, _, __: found,
    "equals": lambda found, _, by: found == by,
    "inverse": lambda found, _, __: int(1.0 / found),
    "flat": lambda found, _, __: [one for row in found for one in row],
    "layers": _layers,
    "deepest": lambda found, model, by: max(_layers(found, model, by)),
    "marks": lambda found, model, __: [number in found for number in range(model.value("clip.vision.block_count"))],
    "period": _period,
    "side": lambda found, model, __: int(found**0.5 * model.value("clip.vision.patch_size")),
    "patches": lambda found, model, __: (
        model.value("clip.vision.image_size") // model.value("clip.vision.patch_size") // int(found**0.5)
    ),
}
"""What a description calls a rule -> its function, of what the config says, the model, and `by`."""


def config_of_vision(tensors: Collection[str], home: Location, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config for `vision_of`; of a model in Mistral's own form, by its tensors' names, what its `params.json` says.
    `config`: what was given, or is beside it; also a `params.json` itself. Raises IncompleteError if there is none beside
    such a model.
    """
    if _OF_MISTRAL not in tensors:
        return config or {}
    if not isinstance((config or {}).get("vision_encoder"), Mapping):
        if not (home / _PARAMS).is_file():
            raise IncompleteError(
                "nothing says the sizes of the model", file=str(home), found="names of Mistral's own form, and no params.json",
                expected="params.json beside the model", remedy="Copy the model's own file there, or name it with --config.",
            )  # fmt: skip
        said = read_json((home / _PARAMS).path, _MOST_BYTES, "a params.json")
        config = said if isinstance(said, Mapping) else {}
    tower = (config or {}).get("vision_encoder")
    return {
        **(config or {}), "model_type": _MISTRAL, "text_config": {"hidden_size": (config or {}).get("dim")},
        **({"vision_config": {"mm_projector_id": "", **tower}} if isinstance(tower, Mapping) else {}),
    }  # fmt: skip


def vision_of(config: Mapping[str, Any], path: str, images: Mapping[str, Any] | None = None) -> VisionFamily:
    """The kind of a model. Raises UnsupportedError if it is none that sees, or one that zckpt does not know."""
    names, odd = kinds_by_model().get(str(config.get("model_type")), ()), list[str]()
    for name in names if isinstance(config.get("vision_config"), Mapping) else ():
        found = VisionFamily(kind_of_file(name), config, images or {})
        said = {where: found.at(where) for where in found.said["when"]}
        if all(
            value in found.said["when"][where] or (value is None and "model_type" not in where)
            for where, value in said.items()
        ):
            return found
        odd += (f"{where}: {value!r}" for where, value in said.items() if value not in found.said["when"][where])
    raise UnsupportedError(
        "zckpt writes no projector file of such a model", file=path,
        found=f"model_type {config.get('model_type')!r}, {'a' if 'vision_config' in config else 'no'} vision_config"
        + "".join(f", {one.replace('vision.', 'vision_config.')}" for one in dict.fromkeys(odd)),
        expected=f"one of {', '.join(sorted(kinds_by_model()))}, with a vision_config", remedy=_CONVERTER,
    )  # fmt: skip


def vision_tensors(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], asked: str, home: Location
) -> Iterator[tuple[TensorEntry, GgmlType]]:
    """The tensors of the file under its names, each with its type; `asked` is that of matrices, `home` has the tokenizer.

    Raises:
        IncompleteError: one that llama.cpp needs is missing.
        InconsistentError: the config says other sizes than the tensors have.
        UnsupportedError: a tensor has no name there.
    """
    family = vision_of(config, "")
    said, count = family.said, family.value("clip.vision.block_count")
    table = library().get_tensor_name_map(library().MODEL_ARCH.MMPROJ, max(3, min(count, 1 << 12)))
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        bare = name.removeprefix("model.")
        if (word := said.get("word")) and bare.endswith(word["of"]) and (number := _number_of(family, word, home)):
            found[word["name"]] = _row_of(entry, word["name"], number)
        if not bare.startswith(tuple(said["take"])) or any(part in name for part in said.get("leave", ())):
            continue
        for old, part in _parts(family, bare, entry):
            new = _name_of(family, old, table)
            if new is None:
                raise UnsupportedError(
                    "llama.cpp has no name for a tensor of the model", found=repr(name), expected="a tensor of its family",
                    remedy=_CONVERTER,
                )  # fmt: skip
            block = _BLOCK.match(new)
            if not (said.get("cut") and block and int(block[1]) >= count):
                moved = shifted_by(part, 1) if new in said.get("plus_one", ()) else part
                found[new] = replace(moved, name=new)
    _check_tensors(family, found, count)
    yield from ((entry, _type_of(said, new, entry.shape, asked)) for new, entry in found.items())


def _name_of(family: VisionFamily, name: str, table: Any) -> str | None:
    """llama.cpp's name of a tensor; None if it has none."""
    if name.startswith("v."):
        return name
    for pattern, place in family.said["names"]:
        name = re.sub(pattern, lambda match, place=place: _put_in(family, match, place), name)  # type: ignore[misc]
    if name.startswith("="):
        return name[1:]
    ends = (".weight", ".bias")
    return table.get_name(name, try_suffixes=ends) or table.get_name(f"model.{name}", try_suffixes=ends)  # type: ignore[no-any-return]


def _put_in(family: VisionFamily, match: re.Match[str], place: str) -> str:
    """What takes the place of a part of a name, where a path in braces is a list, and the first group a number in it."""
    if listed := re.search(r"\{(.+?)\}", place):
        numbers = family.at(listed[1]) or []
        if int(match[1]) >= len(numbers):
            raise InconsistentError(
                "the config names fewer layers than there are tensors of", found=f"{listed[1]}: {numbers}, and {match[0]!r}",
                expected="a layer for each", remedy="Copy the model's own config.json here.",
            )  # fmt: skip
        place = place.replace(listed[0], str(numbers[int(match[1])]))
    return match.expand(place)


def _check_tensors(family: VisionFamily, found: Mapping[str, TensorEntry], count: int) -> None:
    """Checks that the file has the projector, as many blocks as the config says, and their sizes."""
    for name, shape in family.said["shapes"].items():
        if shape is None:
            continue
        if name not in found:
            raise IncompleteError(
                "the tower or the projector is not whole", found=f"no {name!r} among {len(found):,} tensors",
                expected="the tower and the projector",
                remedy="Were both saved? Convert the whole model, or copy the rest from the base model.",
            )  # fmt: skip
        wanted, held = [family.size(part) for part in shape], found[name].shape
        if len(wanted) != len(held) or any(size not in (None, own) for size, own in zip(wanted, held, strict=True)):
            raise InconsistentError(
                f"the config says other sizes than {name!r} has", found=str(list(held)),
                expected=str(["any" if one is None else one for one in wanted]).replace("'", ""),
                remedy="Copy the model's own config.json here.",
            )  # fmt: skip
    blocks: dict[int, set[str]] = {}
    for match in map(_BLOCK.match, found):
        if match:
            blocks.setdefault(int(match[1]), set()).add(match[2])
    if blocks.keys() != set(range(count)) or len({frozenset(one) for one in blocks.values()}) > 1:
        most = max(blocks.values(), key=len, default=set())
        odd = [f"{number}: no {', '.join(sorted(most - one))}" for number, one in sorted(blocks.items()) if most - one]
        raise InconsistentError(
            "the tower has not the blocks that the config says", found="; ".join([f"{len(blocks):,} blocks", *odd[:3]]),
            expected=f"{count:,}, each with the same tensors", remedy="Copy the model's own config.json and all its shards here.",
        )  # fmt: skip


def _number_of(family: VisionFamily, word: Mapping[str, str], home: Location) -> int:
    """The number of a token: as the config says it, where it does, or else as the tokenizer's files do."""
    said = family.at(word["from"]) if "from" in word else None
    return said if isinstance(said, int) and said >= 0 else _word(home, word["token"])


def _word(home: Location, token: str) -> int:
    """The number of a token. Raises IncompleteError if no file of the tokenizer says it."""
    for file in ("tokenizer_config.json", "tokenizer.json", "tekken.json"):
        if (home / file).is_file():
            said = read_json((home / file).path, _MOST_TOKENIZER_BYTES, "a tokenizer's file")
            listed = {str(one.get("id")): one for one in said.get("added_tokens") or ()}
            listed |= {
                str(one.get("rank")): {"content": one.get("token_str")} for one in said.get("special_tokens") or ()
            }
            for number, one in {**(said.get("added_tokens_decoder") or {}), **listed}.items():
                if one.get("content") == token and str(number).isdecimal():
                    return int(number)
    raise IncompleteError(
        "no file says the number of a token that the images' side needs", file=str(home), found=f"no {token}",
        expected="tokenizer_config.json or tokenizer.json beside the model", remedy="Copy the model's own files there.",
    )  # fmt: skip


def _row_of(entry: TensorEntry, name: str, number: int) -> TensorEntry:
    """A row of an embedding. Raises InconsistentError if there is none."""
    rows, width = entry.shape
    if number >= rows:
        raise InconsistentError(
            "the embedding has no row for a token", found=f"token {number:,}, and {rows:,} rows",
            expected="the tokenizer of this model", remedy="Copy the model's own tokenizer here.",
        )  # fmt: skip
    pieces = [
        ("", (number, width)),
        (name, (width,)),
        *([("", (rows - number - 1, width))] if number + 1 < rows else []),
    ]
    return split_rows(entry, pieces)[1]


def _parts(family: VisionFamily, name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors that one becomes: queries, keys and values apart, and a kernel over two images as two."""
    for old, *kinds in family.said.get("thirds", ()):
        if old in name:
            shape = (entry.shape[0] // 3, *entry.shape[1:])
            yield from (
                (one.name, one) for one in split_rows(entry, [(name.replace(old, kind), shape) for kind in kinds])
            )
            return
    if name.endswith(tuple(family.said.get("pairs", ()))) and len(entry.shape) == 5:
        out, channels, images, *kernel = entry.shape
        flat = replace(entry, shape=(out * channels * images, *kernel), replicas=())
        for number in range(images):
            one = rows_of(flat, name, out * channels, (1,) * images, number)
            yield "v.patch_embd.weight" + (f".{number}" if number else ""), replace(one, shape=(out, channels, *kernel))
    elif any(part in name for part in family.said.get("interleaved", ())):
        heads = family.value("clip.vision.attention.head_count")
        yield name, swap_head_halves(entry, heads, apart=False)
    else:
        yield name, entry


def _type_of(said: Mapping[str, Any], name: str, shape: tuple[int, ...], asked: str) -> GgmlType:
    """The type of a tensor."""
    kind = TYPES[asked]

    def is_in(key: str) -> bool:
        return any(part in name for part in said.get(key, ()))

    if len(shape) < 2 or name.endswith("_norm.weight"):
        return TYPES["f32"]
    if is_in("f16"):
        return TYPES["f16"]
    if is_in("f32"):
        return TYPES["f32"]
    if is_in("f16 or f32"):
        return TYPES["f16" if asked == "f16" else "f32"]
    if "position_embd" in name or not name.endswith(".weight"):
        return TYPES["f32"]
    return TYPES["f16"] if shape[-1] % kind.block else kind


def vision_as_read(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], asked: str, home: Location
) -> dict[str, TensorEntry]:
    """What such a file holds: with the numbers that blocks stand for."""
    return {
        entry.name: as_floats(in_blocks(entry, kind, None, again=True), kind) if kind.block > 1 else entry
        for entry, kind in vision_tensors(tensors, config, asked, home)
    }


def vision_parameters(config: Mapping[str, Any], file_type: int) -> Callable[[gguf.GGUFWriter, Path], None]:
    """A function that adds the sizes and constants of the images' side to a writer; `file_type`: llama.cpp's number of the
    type that most tensors have.
    """

    def add(writer: gguf.GGUFWriter, directory: Path) -> None:
        is_said = "is" in vision_of(config, "").said["keys"]["clip.vision.image_mean"]
        family = vision_of(config, "", {} if is_said else _preprocessor(directory))
        writer.add_file_type(file_type)
        for key, asked in family.said["keys"].items():
            if (value := family.value(key)) is not None:
                getattr(writer, f"add_{asked['type']}")(key, value)

    return add


def _preprocessor(directory: Path) -> Mapping[str, Any]:
    """What the files beside the model say of images. Raises IncompleteError if they do not."""
    found: dict[str, Any] = {}
    for name, inner in (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor")):
        if (directory / name).is_file():
            said = read_json(locate(directory / name).path, _MOST_BYTES, "the config of a preprocessor")
            if isinstance(said, Mapping):
                found |= {**said, **(said.get(inner) or {})}
    if "image_mean" not in found or "image_std" not in found:
        raise IncompleteError(
            "nothing says how images are prepared", file=str(directory.name), found="no image_mean and image_std",
            expected="preprocessor_config.json or processor_config.json beside the model",
            remedy="Copy the model's own file there.",
        )  # fmt: skip
    return found
