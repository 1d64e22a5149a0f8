"""Checkpoints of other programs that zckpt does not read, known by the names of their files.

For `places`, which names the format and says what its own program writes instead.
Source: fairseq2, checkpoint.py; torchsnapshot, snapshot.py;
transformers 4.57, utils/__init__.py (TensorFlow's, Flax's, Rust's weights).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from zckpt.base.errors import NotACheckpointError
from zckpt.storage.location import Location


class ForeignFormat(NamedTuple):
    """A format that zckpt does not read.

    Attributes:
        name: as its users call it.
        mark: matches names of entries that no save has which zckpt reads; empty for none.
        hint: matches names that say it where there is nothing else to read.
        remedy: how its own program makes something that zckpt reads.
    """

    name: str
    mark: str
    hint: str
    remedy: str


_SAVE = "Load it there, and save the weights with safetensors or torch.save."
_OLDER = "Load it with a version of transformers before 5 that has {}, and save it with save_pretrained."

FORMATS = (
    ForeignFormat("fairseq2", r"sdp_\d+\.pt", "", "Load it with fairseq2, and save a Hugging Face model."),
    ForeignFormat("torchsnapshot", r"\.snapshot_metadata", "", _SAVE),
    ForeignFormat(
        "TensorFlow",
        "",
        r"tf_model.*\.h5(?:\.index\.json)?|saved_model\.pb|.*ckpt(?:-\d+)?\.(?:index|data-\d+-of-\d+|meta)"
        r"|.+\.(?:h5|keras|tflite)",
        _OLDER.format("TensorFlow's models"),
    ),
    ForeignFormat(
        "Flax (JAX)",
        "",
        r".+\.msgpack(?:\.index\.json)?|streaming_(?:params|train_state).*",
        _OLDER.format("Flax's models"),
    ),
    ForeignFormat("ONNX", "", r".+\.onnx(?:_data)?", "Use the checkpoint that it was exported from."),
    ForeignFormat("PaddlePaddle", "", r".+\.(?:pdparams|pdmodel|pdopt)", _SAVE),
    ForeignFormat("NumPy or MLX", "", r".+\.npz", "Save the arrays with safetensors.numpy.save_file."),
    ForeignFormat("rust-bert", "", r"rust_model\.ot", _SAVE),
    ForeignFormat("zarr", "", r"\.zarray|\.zgroup|zarr\.json", _SAVE),
)
"""The formats, in the order in which they are tried."""

_MARKS = "|".join(known.mark for known in FORMATS if known.mark)


def foreign_save(names: Iterable[str]) -> ForeignFormat | None:
    """The format of entries of these names, by marks that no save has which zckpt reads."""
    for name in names:
        if re.fullmatch(_MARKS, name):
            return next(f for f in FORMATS if f.mark and re.fullmatch(f.mark, name))
    return None


def foreign_format(names: Iterable[str]) -> ForeignFormat | None:
    """The format of entries of these names, by hints too; for a place without anything that zckpt reads."""
    every = list(names)
    hinted = (f for f in FORMATS if f.hint and any(re.fullmatch(f.hint, name) for name in every))
    return foreign_save(every) or next(hinted, None)


def foreign_error(path: Location, foreign: ForeignFormat) -> NotACheckpointError:
    """The error for a file or directory of a format that zckpt does not read."""
    return NotACheckpointError(
        f"is of {foreign.name}, which zckpt does not read", file=path,
        expected="a layout that docs/formats.md lists", remedy=foreign.remedy,
    )  # fmt: skip
