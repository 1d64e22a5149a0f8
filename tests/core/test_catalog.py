"""Tensors that are wrong are an error where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore

RIGHT: dict[str, Any] = {
    "name": "w",
    "shape": (2, 3),
    "dtype": F32,
    "role": "parameter",
    "fragments": (Fragment(FileStore("a", 24), 0, 0, 6),),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "weight"), ("shape", [2, 3]), ("shape", (2.0, 3)), ("shape", 6), ("dtype", "F32"), ("fragments", [])],
)
def test_what_is_of_another_type_is_refused(field: str, value: object) -> None:
    TensorEntry(**RIGHT)
    with pytest.raises(TypeError, match=field):
        TensorEntry(**{**RIGHT, field: value})
