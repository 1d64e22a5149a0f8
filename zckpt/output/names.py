"""What the name of OUT asks for: one file of weights, or a directory; and names that ask for something else.

For the jobs that write weights. A name that ends in one of `FILES` is one file, any other is a directory; a slash at its end
always means a directory. A name that looks like a file of another kind is refused: it would become a directory of that name.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from zckpt.base.errors import UsageError
from zckpt.storage.location import Location

FILES: dict[str, Literal["safetensors", "bin"]] = {".safetensors": "safetensors", ".bin": "bin", ".pt": "bin"}
"""Suffix of one file of weights -> its container."""

_TORCH = "Give OUT a name that ends in .pt or .bin, which torch.load reads; or in .safetensors."
_OTHERS = {
    ".gguf": "Use 'zckpt to-gguf', which writes GGUF.",
    **dict.fromkeys((".pth", ".ckpt", ".th", ".tar", ".pkl", ".pickle"), _TORCH),
    **dict.fromkeys(
        (".npz", ".npy", ".h5", ".hdf5", ".keras", ".onnx", ".msgpack", ".tflite", ".mlmodel", ".zip", ".gz", ".zst"),
        "zckpt writes single files of weights as .safetensors, .bin or .pt.",
    ),
    ".json": "Give OUT the name of a directory, or of a .safetensors file: zckpt makes the index itself.",
}
"""Suffix of a file of another kind -> what to do instead."""


def check_name(out: Location) -> None:
    """Refuses an output with a name that asks for something that would not be written. `out`: an output that becomes a
    directory. Raises UsageError if the name is that of a file of another kind, a suffix spelled wrongly, or `-`.
    """
    if out.path == "-":
        raise UsageError(
            "OUT is '-', and weights are not written to standard output", file=out,
            remedy="Give OUT a name; ./- is a directory that is called so.",
        )  # fmt: skip
    if out.path.endswith("/"):
        return
    suffix = os.path.splitext(out.name)[1]
    remedy = _OTHERS.get(suffix.lower())
    if suffix in FILES:
        remedy = "This command writes a directory."
    if remedy is None and (meant := _suffix_meant(suffix)):
        remedy = f"Did you mean {out.name.removesuffix(suffix) + meant!r}?"
    if remedy is not None:
        raise UsageError(
            "OUT has the name of a file, and a directory would be written", file=out, found=f"the suffix {suffix}",
            remedy=f"{remedy} For a directory of this name, end it with a slash.",
        )  # fmt: skip


def _suffix_meant(suffix: str) -> str:
    """The suffix of a file of weights that this one is close to; empty if none is."""
    if suffix.lower() in FILES:
        return suffix.lower()
    if re.fullmatch(r"\.(sft|safetensor|safe_tensors?|safe-tensors?)", suffix, re.IGNORECASE):
        return ".safetensors"
    if len(suffix) < 8:
        return ""
    import difflib

    return next(iter(difflib.get_close_matches(suffix.lower(), [".safetensors"], cutoff=0.8)), "")
