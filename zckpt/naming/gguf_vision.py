"""The images' side of a model as llama.cpp's projector file (mmproj): which tensors, their names and types, and the metadata.

For `jobs.to_gguf`. A family is a line of a table; names are those of the `gguf` package's own table.
Source: llama.cpp, conversion/base.py (`MmprojModel`), qwenvl.py, gemma.py and smolvlm.py (of 2026); gguf 0.19.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, UnsupportedError
from zckpt.containers.gguf_file import GgmlType
from zckpt.core.catalog import TensorEntry
from zckpt.layouts.gguf.blocks import as_floats, in_blocks
from zckpt.layouts.gguf.write import TYPES
from zckpt.naming.gguf_metadata import library
from zckpt.naming.rows import rows_of, shifted_by, split_rows
from zckpt.storage.json_files import read_json
from zckpt.storage.location import locate

if TYPE_CHECKING:
    import gguf

_MOST_BYTES = 16 << 20
"""The most bytes of the config of a preprocessor."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of models that see.

    Attributes:
        projector: llama.cpp's name of what turns images' features into embeddings of the text model.
        own: beginnings of the names of the tensors, without a leading `model.`.
        keys: a key of the metadata -> the one of the vision config that says it, where names differ.
        floats: parts of names of tensors that stay fp32.
        halves: parts of names of tensors that are always fp16.
        plus_one: the end of the name of a norm that is counted from zero.
        activation: of its layers, if the metadata says it.
        eps: of the norms: where it is said, under which key, and what it is otherwise.
        usual: sizes where the vision config leaves them out: transformers' defaults; Qwen's image size is the converter's.
    """

    projector: str
    own: tuple[str, ...]
    keys: Mapping[str, str]
    floats: tuple[str, ...] = (".embeddings.",)
    halves: tuple[str, ...] = ()
    plus_one: str = "none"
    activation: str = "gelu"
    eps: tuple[str, str, float] = ("vision_config", "layer_norm_eps", 1e-6)
    usual: Mapping[str, int] = field(default_factory=dict[str, int])

    def size(self, config: Mapping[str, Any], key: str) -> Any:
        """A size of the images' side. Raises IncompleteError if the vision config does not say it, and nothing is usual."""
        return _size_in(config["vision_config"], self.keys.get(key, key), "vision_config", self.usual.get(key))


def _size_in(config: Mapping[str, Any], key: str, where: str, usual: int | None = None) -> Any:
    if (found := config.get(key, usual)) is None:
        raise IncompleteError(
            "the config does not say all sizes of the model", found=f"no {key} in {where}", expected="all that llama.cpp needs",
            remedy="Save the config with transformers' save_pretrained, and copy it here.",
        )  # fmt: skip
    return found


_QWEN = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
_IDEFICS = VisionFamily(
    "idefics3", ("vision_model.", "connector."), {},
    usual={"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
)  # fmt: skip
FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        "qwen2vl_merger", ("visual.",), {**_QWEN, "hidden_size": "embed_dim", "intermediate_size": "hidden_size"},
        (), activation="", eps=("", "rms_norm_eps", 1e-6), usual={"image_size": 560},
    ),
    "qwen2_5_vl": VisionFamily(
        "qwen2.5vl_merger", ("visual.",), _QWEN, (), activation="silu", eps=("", "rms_norm_eps", 1e-6),
        usual={"image_size": 560},
    ),
    "gemma3": VisionFamily(
        "gemma3", ("multi_modal_projector.", "vision_tower."), {}, halves=("input_projection",),
        plus_one="soft_emb_norm.weight",
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}  # fmt: skip
"""A config's `model_type` -> the family."""


def vision_of(config: Mapping[str, Any], path: str) -> VisionFamily:
    """The family of a model. Raises UnsupportedError if it is none that sees, or one that zckpt does not know."""
    found, said = FAMILIES.get(str(config.get("model_type"))), config.get("vision_config")
    if found is None or not isinstance(said, Mapping):
        raise UnsupportedError(
            "zckpt writes no projector file of such a model", file=path,
            found=f"model_type {config.get('model_type')!r}, {'a' if said else 'no'} vision_config",
            expected=f"one of {', '.join(FAMILIES)}, with a vision_config",
            remedy="Convert it to transformers' form with to-bf16, and that with llama.cpp's convert_hf_to_gguf.py --mmproj.",
        )  # fmt: skip
    return found


def vision_tensors(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], asked: str
) -> Iterator[tuple[TensorEntry, GgmlType]]:
    """The tensors of the file under its names, each with its type.

    Args:
        tensors: of the model, under transformers' names.
        config: of the model.
        asked: the type of matrices.

    Raises:
        UnsupportedError: a tensor has no name there.
    """
    family, package = vision_of(config, ""), library()
    layers = max(3, family.size(config, "num_hidden_layers"))
    table = package.get_tensor_name_map(package.MODEL_ARCH.MMPROJ, layers)
    for name, entry in tensors.items():
        if not name.removeprefix("model.").startswith(family.own) or ".head." in name:
            continue
        for old, part in _parts(_as_on_the_hub(name), entry):
            new = old if old.startswith("v.") else table.get_name(old, try_suffixes=(".weight", ".bias"))
            if new is None and old.startswith("model."):
                new = table.get_name(old.removeprefix("model."), try_suffixes=(".weight", ".bias"))
            if new is None:
                raise UnsupportedError(
                    "llama.cpp has no name for a tensor of the model", found=repr(name), expected="a tensor of its family",
                    remedy="Convert it to transformers' form with to-bf16, and that with llama.cpp's convert_hf_to_gguf.py.",
                )  # fmt: skip
            moved = shifted_by(part, 1) if old.endswith(family.plus_one) else part
            yield replace(moved, name=new), _type_of(family, old, new, part.shape, asked)


def _as_on_the_hub(name: str) -> str:
    """Gemma's names as transformers 4 had them, which llama.cpp knows; others as they are."""
    if not name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return name
    inner = "" if ".vision_model." in name else "vision_model."
    return name.replace("vision_tower.", f"vision_tower.{inner}").replace("projection_weight", "projection.weight")


def _parts(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors that one becomes: queries, keys and values apart, and a kernel over two images as two."""
    if ".qkv." in name:
        shape = (entry.shape[0] // 3, *entry.shape[1:])
        yield from (
            (one.name, one) for one in split_rows(entry, [(name.replace("qkv", kind), shape) for kind in "qkv"])
        )
    elif name.endswith("patch_embed.proj.weight") and len(entry.shape) == 5:
        out, channels, images, *kernel = entry.shape
        flat = replace(entry, shape=(out * channels * images, *kernel), replicas=())
        for number in range(images):
            one = rows_of(flat, name, out * channels, (1,) * images, number)
            yield "v.patch_embd.weight" + (f".{number}" if number else ""), replace(one, shape=(out, channels, *kernel))
    else:
        yield name, entry


def _type_of(family: VisionFamily, old: str, new: str, shape: tuple[int, ...], asked: str) -> GgmlType:
    """The type of a tensor."""
    kind = TYPES[asked]
    if len(shape) < 2 or new.endswith("_norm.weight"):
        return TYPES["f32"]
    if any(part in old for part in family.halves):
        return TYPES["f16"]
    if any(part in old for part in family.floats) or "position_embd" in new:
        return TYPES["f32"]
    if ".patch_embd.weight" in new:
        return TYPES["f16" if asked == "f16" else "f32"]
    if not new.endswith(".weight"):
        return TYPES["f32"]
    return TYPES["f16"] if shape[-1] % kind.block else kind


def vision_as_read(tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], asked: str) -> dict[str, TensorEntry]:
    """What such a file holds: with the numbers that blocks stand for."""
    return {
        entry.name: as_floats(in_blocks(entry, kind, None, again=True), kind) if kind.block > 1 else entry
        for entry, kind in vision_tensors(tensors, config, asked)
    }


def vision_parameters(config: Mapping[str, Any], file_type: int) -> Callable[[gguf.GGUFWriter, Path], None]:
    """A function that adds the sizes and constants of the images' side to a writer.

    Args:
        config: of the model.
        file_type: llama.cpp's number of the type that most tensors have.
    """
    family, own = vision_of(config, ""), config["vision_config"]
    text = {**config, **(config.get("text_config") or {})}

    def add(writer: gguf.GGUFWriter, directory: Path) -> None:
        images = _preprocessor(directory)
        size, patch = family.size(config, "image_size"), family.size(config, "patch_size")
        writer.add_file_type(file_type)
        writer.add_clip_has_vision_encoder(True)
        writer.add_vision_projection_dim(_size_in(text, "hidden_size", "text_config"))
        writer.add_vision_image_size(size)
        writer.add_vision_patch_size(patch)
        writer.add_vision_embedding_length(family.size(config, "hidden_size"))
        writer.add_vision_feed_forward_length(family.size(config, "intermediate_size"))
        writer.add_vision_block_count(family.size(config, "num_hidden_layers"))
        writer.add_vision_head_count(family.size(config, "num_attention_heads"))
        writer.add_vision_image_mean(images["image_mean"])
        writer.add_vision_image_std(images["image_std"])
        writer.add_clip_projector_type(family.projector)
        if (full := own.get("fullatt_block_indexes")) and family.activation == "silu":
            writer.add_vision_use_silu(True)
            writer.add_vision_n_wa_pattern(full[0] + 1)
        place, key, usual = family.eps
        writer.add_vision_attention_layernorm_eps((own if place else config).get(key, usual))
        if family.projector == "idefics3":
            writer.add_vision_projector_scale_factor(config.get("scale_factor", 2))
        if family.activation == "gelu":
            writer.add_vision_use_gelu(True)
        if family.projector == "idefics3":
            longest = images.get("size") or {}
            writer.add_vision_preproc_image_size(longest.get("longest_edge", size))
        scale = (size // patch) // int(images.get("image_seq_length", 256) ** 0.5)
        if family.projector == "gemma3" and scale > 0 and scale != 4:
            writer.add_vision_projector_scale_factor(scale)

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
