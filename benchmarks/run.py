"""Measures everything that is claimed, and writes `docs/benchmarks.md` with its chart.

    python benchmarks/run.py [--only SECTION]... [--layers 48] [--rounds 3] [--work DIR]

Everything runs in turn with its rival, on one machine, in one run; medians, spreads and ratios are what is written. What is
measured anew replaces what `benchmarks/results.json` held of that section. All of it takes two hours and 70 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import averaging
import checking
import cold
import consolidation
import dcp
import deltas
import growth
import hub
import loading
import looking
import merging
import page
import quantising
import ranks
import reshaping
import torch_dist
import transposing
import tuning
import wire
from limits import limits
from measure import ROOT, WORK, machine

SECTIONS = {
    "consolidation": consolidation.measure,
    "loading": loading.measure,
    "reshaping": reshaping.measure,
    "reshaping in memory": reshaping.in_memory,
    "transposing": transposing.measure,
    "cold": cold.measure,
    "checking": checking.measure,
    "looking": looking.measure,
    "push": hub.measure,
    "wire": wire.measure,
    "dcp": dcp.measure,
    "rank files": ranks.measure,
    "megatron": torch_dist.measure,
    "averages": averaging.measure,
    "deltas": deltas.measure,
    "merged adapters": merging.measure,
    "fp8 and GGUF": quantising.measure,
    "tuning": tuning.measure,
    "growth": growth.measure,
}
RESULTS = ROOT / "benchmarks" / "results.json"


def main() -> None:
    """Runs what was asked for; what was measured before a section fails is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section; may be repeated")
    parser.add_argument("--layers", type=int, default=48, help="of a GPT-2 of width 1,600; 48 are 1.56 B parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["DS_ACCELERATOR"] = "cpu"
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in options.only or SECTIONS:
        before = os.getloadavg()[0]
        able = limits(options.work.absolute())
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            rows = SECTIONS[name](Path(work).absolute(), options.layers, options.rounds)
        results[name] = {
            "machine": machine(), "when": time.strftime("%Y-%m"), "layers": options.layers, "rounds": options.rounds,
            "load_before": round(before, 1), "limits": asdict(able), "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        options.results.write_text(json.dumps(results, indent=1) + "\n")
        page.write(results, options.page)
        if name == "growth":
            page.chart(results[name]["rows"], options.page.with_suffix(".svg"))
        print(page.table(results[name]), file=sys.stderr)


if __name__ == "__main__":
    main()
