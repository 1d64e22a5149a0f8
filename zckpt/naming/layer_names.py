"""Names for the layers of a pipeline, where files only have numbers.

For `--layer-names FILE`.

[Note: layer name files] A JSON object: a layer's number, a range of numbers, or `tied_modules.<key>` -> the new beginning of its
tensors' names, in which `{}` is the layer's number in its range, from 0. Layers that are not listed keep their names.
Example: {"0": "embed", "2-25": "blocks.{}", "27": "", "tied_modules.embed": "embed"}: `2.attn.bias` becomes `blocks.0.attn.bias`,
`27.weight` becomes `weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog

_KEY = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?|tied_modules\.[^.]+")
_LAYER = re.compile(r"(?:sequential\.)?(?P<layer>\d+|tied_modules\.[^.]+)\.(?P<local>.+)")


def read_layer_names(path: str) -> dict[str, str]:
    """Reads a file of layer names: layer -> beginning of its names. Raises UsageError if the file cannot be understood."""
    try:
        with open(path, "rb") as file:
            listed = json.load(file)
        found: dict[str, str] = {}
        for key, prefix in listed.items():
            match = _KEY.fullmatch(key)
            if match is None or not isinstance(prefix, str):
                raise ValueError(f"{key!r}: {prefix!r}")
            if match["first"] is None:
                found[key] = prefix
                continue
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if last - first >= 100_000:
                raise ValueError(f"{key!r}: too many layers")
            for layer in range(first, last + 1):
                if str(layer) in found:
                    raise ValueError(f"layer {layer} is listed twice")
                found[str(layer)] = prefix.replace("{}", str(layer - first))
    except OSError as error:
        raise UsageError(
            "the file of layer names cannot be read", file=path, found=error.strerror or str(error),
            remedy="Check the path that is given with --layer-names.",
        ) from error  # fmt: skip
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            "the file of layer names is not of the right form", file=path, found=str(error),
            expected='{"0": "embed", "2-25": "blocks.{}", "tied_modules.embed": "embed"}',
            remedy="Write it in this form: layers, or ranges of them, and the new beginnings of their names.",
        ) from error  # fmt: skip
    return found


def with_layer_names(catalog: Catalog, prefixes: Mapping[str, str]) -> Catalog:
    """The catalog with names for its layers, as `read_layer_names` returns them. Raises UsageError if the catalog has
    none of these layers, InconsistentError if two tensors would have the same name.
    """
    layers = {match["layer"] for name in (*catalog, *catalog.aliases) if (match := _LAYER.fullmatch(name))}
    if not layers & prefixes.keys():
        raise UsageError(
            "the layer names fit no layer of this checkpoint", file=catalog.source.path,
            found=f"layers {examples(sorted(prefixes))}",
            expected=f"layers {examples(sorted(layers))}" if layers else f"layers in names such as {examples(catalog)}",
            remedy="List this checkpoint's layers in the file of --layer-names; zckpt inspect prints the names.",
        )  # fmt: skip

    def new_name(name: str) -> str:
        match = _LAYER.fullmatch(name)
        if match is None or match["layer"] not in prefixes:
            return name
        return f"{prefixes[match['layer']]}.{match['local']}".removeprefix(".")

    return catalog.rename(new_name)
