"""`zckpt formats`: what this version reads and writes, from the tables that reading and writing use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from zckpt.base.extensions import extensions
from zckpt.base.version import __version__
from zckpt.base.words import wrap_text
from zckpt.cli.commands import COMMANDS, GROUPS
from zckpt.cli.declare import Shown, command

if TYPE_CHECKING:
    from zckpt.naming.schemes import Scheme

_WRITE = ("Weights", "Resume elsewhere", "Several versions")


@command(
    "formats",
    about="List what this version reads and writes: layouts of checkpoints, kinds of files, models with tensors that it "
    "renames, forms of quantised weights.",
    example="zckpt formats",
)
def formats(shown: Shown) -> None:
    """Prints the list."""
    sink = shown.console
    found = known_formats()
    sink.result(lambda: found, lambda: _lines(found, sink.width))


def known_formats() -> dict[str, Any]:
    """The formats, models and families, as `--json` has them."""
    from zckpt.containers.container import Kind
    from zckpt.containers.gguf_file import BY_NUMBER
    from zckpt.core.dtypes import ALL, SHORT_NAMES
    from zckpt.layouts.gguf.write import TYPES
    from zckpt.naming.gguf_vision import kinds_by_model
    from zckpt.output.names import FILES
    from zckpt.quantized.configs import SCHEMES
    from zckpt.quantized.forms import FORMS
    from zckpt.quantized.plain import is_fp8
    from zckpt.quantized.targets import TARGETS

    read = {form.about for form in FORMS if form.read}
    added = [one for group in ("zckpt.layouts", "zckpt.schemes", "zckpt.recipes") for one in extensions(group)]
    return {
        "version": __version__,
        "reads": {
            "layouts": _layouts(),
            "files": [*get_args(Kind)],
            "dtypes": [dtype.name for dtype in ALL],
            "fp8": [dtype.name for dtype in ALL if is_fp8(dtype)],
            "gguf_types": [kind.name for kind in BY_NUMBER.values()],
        },
        "writes": {
            "commands": {
                name: COMMANDS[name][1] for name in (*(name for group in _WRITE for name in GROUPS[group]), "slim")
            },
            "files": [*FILES],
            "dtypes": [*SHORT_NAMES.values()],
            "fp8": [*SCHEMES],
            "quantized": [*TARGETS],
            "gguf_types": [*TYPES],
            "mmproj": sorted(kinds_by_model()),
        },
        **_models(),
        "packed": [
            {"name": name, "dequantised_by": by}
            for name, by in {form.about: form.by for form in FORMS if form.about not in read}.items()
        ],
        **({"added": [one.as_json() for one in added]} if added else {}),
    }


def _layouts() -> list[dict[str, Any]]:
    """The families of `layouts`, each with its own description or its package's."""
    from zckpt import layouts

    packages = [one for one in vars(layouts).values() if isinstance(one, ModuleType) and hasattr(one, "FAMILY")]
    about = {one.FAMILY.name: (one.__doc__ or "").partition("\n")[0] for one in packages}
    about |= {one.name: one.about for one in layouts.FAMILIES if one.about}
    found = {one.name: one.read_training is not None for one in layouts.FAMILIES}
    return [{"name": name, "about": about[name], "optimizer_states": states} for name, states in found.items()]


def _models() -> dict[str, Any]:
    """The schemes of names: of transformers' families, and of other writers."""
    from zckpt.naming.families import architecture_of, model_types
    from zckpt.naming.gguf_metadata import ARCHITECTURES
    from zckpt.naming.mlx_names import MLX_MODELS
    from zckpt.naming.schemes import scheme, schemes

    known = [scheme(name) for name in schemes()]
    families = [one for one in known if one.is_of_transformers]
    return {
        "models": [
            {
                "name": one.name.removeprefix("hf-"),
                "class": architecture_of(one),
                "model_types": model_types(one),
                "megatron_core": _has_place(one),
                "gguf": not ARCHITECTURES.keys().isdisjoint(model_types(one)),
                "mlx": not MLX_MODELS.keys().isdisjoint(model_types(one)),
            }
            for one in families
        ],
        "names": [{"name": one.name, "about": one.about} for one in known if not one.is_of_transformers],
    }


def _has_place(family: Scheme) -> bool:
    """Whether Megatron-Core computes models of a family, and has a place for every tensor of theirs."""
    from zckpt.naming.schemes import scheme

    writer = scheme((family.megatron or {}).get("scheme", "megatron-core"))
    placed = {part for rule in writer.rules for part in rule.parts or ()}
    needed = {part for rule in family.rules if not rule.optional for part in rule.parts or ()}
    return family.megatron is not None and "cannot" not in family.megatron and needed <= placed


def _lines(found: dict[str, Any], width: int) -> Iterator[str]:
    reads, writes, models = found["reads"], found["writes"], found["models"]
    yield f"zckpt {found['version']}"
    yield from ("", "Layouts that it reads, with optimizer states where a + stands:")
    yield from _entries(
        {f"{one['name']}{' +' * one['optimizer_states']}": one["about"] for one in reads["layouts"]}, width
    )
    yield from ("", "In files of these kinds, and with elements of these types:")
    yield from _entries({key: ", ".join(reads[key]) for key in ("files", "dtypes", "fp8", "gguf_types")}, width)
    yield from ("", "Commands that write:")
    yield from _entries(writes["commands"], width)
    yield from ("", "Single files, and the types of what is written:")
    keys = ("files", "dtypes", "fp8", "quantized", "gguf_types", "mmproj")
    yield from _entries({key: ", ".join(writes[key]) for key in keys}, width)
    yield from ("", "Models that it renames (+: to GGUF too; ^: to MLX; *: to Megatron-Core):")
    signs = {one["name"]: " +" * one["gguf"] + " ^" * one["mlx"] + " *" * one["megatron_core"] for one in models}
    yield from _entries({f"{one['name']}{signs[one['name']]}": one["class"] for one in models}, width)
    yield from ("", "Writers, besides transformers, with names of tensors that it knows:")
    yield from _entries({one["name"]: one["about"] for one in found["names"]}, width)
    yield from ("", "Packed weights that it refuses, by what turns them into plain ones:")
    forms: dict[str, list[str]] = {}
    for one in found["packed"]:
        forms.setdefault(one["dequantised_by"] or "the program that made them", []).append(one["name"])
    yield from _entries({by: ", ".join(names) for by, names in forms.items()}, width)
    if added := found.get("added"):
        yield from ("", "Added by other packages:")
        yield from _entries(
            {f"{one['package']} {one['version']}": f"{one['name']} ({one['group']})" for one in added}, width
        )


def _entries(rows: Mapping[str, str], width: int) -> Iterator[str]:
    for name, about in rows.items():
        yield from wrap_text(f"  {name}: {about}", width, "      ")
