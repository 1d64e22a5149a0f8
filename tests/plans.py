"""A small plan with all that a file can be made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F32
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Checksum, OutputFile, Plan
from zckpt.core.stores import FileStore
from zckpt.storage.location import locate

NUMEL = 6_001


def plan_of(root: Path, names: tuple[str, ...] = ("a", "b"), checksums: tuple[Checksum, ...] = ()) -> Plan:
    """Two tensors a file, the first in interleaved halves, between literals at both ends and in the middle."""
    values = np.random.default_rng(0).standard_normal(2 * NUMEL).astype("<f4")
    (root / "s").write_bytes(values.tobytes())
    source = locate(root / "s").store()
    files, pairs = [], []
    for name in names:
        first, second, end = 40, 40 + 2 * NUMEL + 10, 50 + 4 * NUMEL
        literals = ((end, b"end"), (0, b"x" * 40), (first + 2 * NUMEL, b"m" * 10))
        store = FileStore(name, end + 3)
        files.append((OutputFile(name, end + 3, literals, checksums), store))
        odd = tuple(Fragment(source, 4 * k, k, 1, (NUMEL + 1 - k) // 2, 2, 2) for k in (0, 1))
        for label, fragments, offset in (
            ("odd", odd, first),
            ("whole", (Fragment(source, 4 * NUMEL, 0, NUMEL),), second),
        ):
            pairs.append(
                (
                    TensorEntry(label, (NUMEL,), F32, "parameter", fragments),
                    TensorEntry(label, (NUMEL,), BF16, "parameter", (Fragment(store, offset, 0, NUMEL),)),
                )
            )
    return Plan(tuple(files), pairs)
