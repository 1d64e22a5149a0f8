"""What threads, buffers and the page cache make of a conversion: the defaults beside their neighbours.

python benchmarks/tuning.py [--layers 12] [--rounds 3] [--work DIR]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path

from run import ROOT, ZCKPT, remove, timed, write

SETTINGS: dict[str, list[str]] = {
    "the defaults": [],
    "1 thread": ["--threads", "1"],
    "2 threads": ["--threads", "2"],
    "4 threads": ["--threads", "4"],
    "8 threads": ["--threads", "8"],
    "buffers of 1 MiB": ["--buffer", "1MiB"],
    "buffers of 16 MiB": ["--buffer", "16MiB"],
    "keeping the page cache": ["--keep-cache"],
    "giving the page cache back": ["--no-cache-pollution"],
}


def main() -> None:
    """Each setting in turn, round after round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_tuning.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[tuple[float, int]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        checkpoint, out = write(Path(work) / "ckpt", 3, options.layers), Path(work) / "out"
        for _ in range(options.rounds):
            for name, setting in SETTINGS.items():
                subprocess.run(["sync"], check=True)
                rows[name].append(timed([*ZCKPT, "to-fp32", str(checkpoint), str(out), *setting]))
                remove(out)
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; GPT-2 shape, {options.layers} layers "
        f"of 1,600, ZeRO-3, world size 8, `to-fp32`; medians of {options.rounds} rounds.",
        "",
        "| setting | seconds | peak memory |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(s for s, _ in found):.2f} | {max(peak for _, peak in found) / 1024:.0f} MiB |"
            for name, found in rows.items()
        ),
    ]
    print("\n".join(lines))
    options.results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
