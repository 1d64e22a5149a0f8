"""Saves of torch.distributed.checkpoint of up to 16,384 ranks and a million chunks or tensors: opened, inspected, planned.

    python benchmarks/many_chunks.py [--work DIR] [--results FILE] [--quick]

`.metadata` is a pickle of torch's own classes, and every chunk is a torch file that torch wrote, of eight numbers, so that a
million of them take 1.8 GB. What is measured, from outside, is `zckpt inspect --json` and `zckpt to-bf16 --dry-run`: CPU
seconds and peak memory. The exponent is that of the CPU seconds over chunks, fitted in logarithms. One tensor of the largest
save is converted, from all ranks' files, and compared with what was written.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, ZCKPT, apart, watched

SIZES = {
    "cut over all ranks": ((160, 64), (1600, 64), (16_384, 64)),
    "each on one rank": ((16, 10_000), (160, 100_000), (160, 1_000_000)),
}
"""Of each kind of save: ranks, and tensors."""
WIDTH = 8
ABOUT = """Saves of `torch.distributed.checkpoint` that torch's own classes describe: opened, inspected and planned by
`benchmarks/many_chunks.py`. CPU seconds (user and system) and peak memory of each command, from outside, on 2 cores that others
used too. Chunk by chunk, in Python, 102,400 chunks had taken 9.8 s and 138 MiB to inspect, and 6.8 s and 123 MiB to plan.
With an object for each, a million tensors on one rank each had taken 35.9 s and 915 MiB to inspect, and 48.6 s and 1,196 MiB
to plan, with the code before that of these rows, an hour before. Plans are for shards of 4 MB, since the header of one file of
safetensors has at most 100 MB.
"""


def write(kind: str, dest: Path, ranks: int, tensors: int) -> None:
    """A save. A chunk's numbers are its rank, as far as bf16 has it."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    dest.mkdir(parents=True)
    is_cut = kind == "cut over all ranks"
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    length = len(_torch_file(0))
    held = [0] * ranks
    for tensor in range(tensors):
        name = f"model.layers.{tensor // 768}.mlp.experts.{tensor % 768}.weight"
        owners = range(ranks) if is_cut else (tensor % ranks,)
        rows = [(row, owner) for row, owner in enumerate(owners)]
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16),
            torch.Size([len(rows), WIDTH]),
            [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, WIDTH])) for row, _ in rows],
        )
        for row, owner in rows:
            place = _StorageInfo(f"__{owner}_0.distcp", held[owner], length)
            stored[MetadataIndex(name, torch.Size([row, 0]))] = place
            held[owner] += length
    for rank, nbytes in enumerate(held):
        (dest / f"__{rank}_0.distcp").write_bytes(_torch_file(rank) * (nbytes // length))
    with (dest / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, {name: ("model", name[6:]) for name in described}, stored), file)


def _torch_file(rank: int) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(torch.full((1, WIDTH), float(rank), dtype=torch.bfloat16), buffer)
    return buffer.getvalue()


def check(home: Path, work: Path, ranks: int) -> None:
    """Converts one tensor, and compares it with what was written."""
    import torch
    from safetensors.torch import load_file

    name = "layers.0.mlp.experts.7.weight"
    out = work / "one.safetensors"
    watched([*ZCKPT, "to-bf16", str(home), str(out), "--include", name, "--quiet"])
    wanted = torch.arange(ranks, dtype=torch.float32).to(torch.bfloat16).view(-1, 1).expand(-1, WIDTH)
    assert torch.equal(load_file(out)[name], wanted)


def main() -> None:
    """Writes, measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_many_chunks.md")
    parser.add_argument("--quick", action="store_true", help="without the largest of each")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = [
        "| tensors | ranks | chunks | `.metadata`, MB | `inspect`, CPU s | MiB | plan of `to-bf16`, CPU s | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    told = []
    for kind, sizes in SIZES.items():
        points: dict[str, list[tuple[int, float]]] = {"inspect": [], "plan": []}
        for ranks, tensors in sizes[: len(sizes) - options.quick]:
            chunks = tensors * (ranks if kind == "cut over all ranks" else 1)
            with tempfile.TemporaryDirectory(dir=options.work) as work:
                home = Path(work) / "ckpt"
                apart("many_chunks", "write", kind, home, ranks, tensors)
                cells = []
                shards = ["--max-shard-size", "4MB"]  # a header of safetensors has at most 100 MB
                plan = ["to-bf16", str(home), f"{work}/o", "--dry-run", *shards]
                commands = {"inspect": ["inspect", str(home)], "plan": plan}
                for what, command in commands.items():
                    _, usage, _ = watched([*ZCKPT, *command, "--json"])
                    seconds = usage.ru_utime + usage.ru_stime
                    points[what].append((chunks, seconds))
                    cells += [f"{seconds:.1f}", f"{usage.ru_maxrss / 1024:,.0f}"]
                nbytes = os.path.getsize(home / ".metadata")
                rows.append(
                    f"| {tensors:,}, {kind} | {ranks:,} | {chunks:,} | {nbytes / 1e6:.0f} | {' | '.join(cells)} |"
                )
                print(rows[-1], file=sys.stderr)
                if kind == "cut over all ranks" and (ranks, tensors) == sizes[-1 - options.quick]:
                    apart("many_chunks", "check", home, Path(work), ranks)
                    told.append(f"One tensor of {ranks:,} ranks was converted, and is what they wrote.")
        for what, found in points.items() if len(sizes) - options.quick > 1 else ():
            exponent = statistics.linear_regression(*([math.log(p[axis]) for p in found] for axis in (0, 1))).slope
            told.append(f"Tensors {kind}: CPU seconds of `{what}` grow with the chunks to the power {exponent:.2f}.")
    table = "\n".join([ABOUT, *rows, "", *told])
    print(table)
    options.results.write_text(table + "\n")


if __name__ == "__main__":
    main()
