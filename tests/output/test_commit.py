"""Killed at a call, or with one failing, an output is the old one or the new one, and the same command ends well.

Really killed at some of the calls here, at all in `make proofs`; `test_power.py` has all that a kill or a power failure leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import proofs
import pytest
import synth
import torch
from computed import COMPUTED

SCRIPT = str(Path(__file__).with_name("kill_points.py"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is such a place, with another beside it that no cast to fp16 can hold."""
    in_memory = os.access("/dev/shm", os.W_OK)
    place = Path(
        tempfile.mkdtemp(prefix="zckpt-test-", dir="/dev/shm" if in_memory else tmp_path_factory.mktemp("kills"))
    )
    generator = torch.Generator().manual_seed(0)
    group = {f"w{i}": torch.randn(20_000 + i, generator=generator) for i in range(2)}
    yield synth.zero12(place / "ckpt", [group], 2)
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def overflowing(checkpoint: Path) -> None:
    synth.zero12(
        checkpoint.with_name("ckpt-overflowing"), [{"w0": torch.full((20_000,), 1e30), "w1": torch.ones(20_001)}], 2
    )


@pytest.fixture(scope="module")
def trials() -> Iterator[subprocess.Popen[str]]:
    """A process that does what `kill_points` is asked, which has imported it."""
    with subprocess.Popen(
        [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


MORE = [
    ("Delta", "none", "error"),
    ("Apply", "none", "kill"),
    ("Apply", "none", "error"),
    ("SignedSingle", "none", "kill"),
    ("SignedSingle", "none", "error"),
]
"""For `make proofs`."""
EVERY = {"kill": 8, "error": 3} if proofs.IS_WHOLE else {"kill": 12, "error": 6}
"""At one of so many calls, a run that fails and the same run come after the one that ended there."""


@proofs.MORE
@pytest.mark.parametrize(
    ("scenario", "exchange", "end"),
    [
        ("Fresh", "exchange", "kill"),
        ("Directory", "exchange", "kill"),
        ("Directory", "none", "kill"),
        ("Directory", "none", "error"),
        ("Strangers", "exchange", "kill"),
        ("Strangers", "none", "kill"),
        ("Foreign", "none", "kill"),
        ("Foreign", "none", "error"),
        ("Mounted", "none", "kill"),
        ("Single", "none", "kill"),
        ("Single", "none", "error"),
        ("SingleFresh", "none", "kill"),
        ("Merged", "exchange", "kill"),
        ("MergedBesideTags", "none", "kill"),
        ("Reshard", "none", "kill"),
        ("ReshardForeign", "none", "kill"),
        ("Live", "exchange", "kill"),
        ("Delta", "exchange", "kill"),
        *proofs.cases(MORE),
        *proofs.cases((name, "exchange", "kill") for name in COMPUTED),
        *proofs.cases((name, "none", "error") for name in ("Quantised", "Gguf")),
    ],
)
def test_every_call_may_be_the_last(
    scenario: str, exchange: str, end: str, checkpoint: Path, trials: subprocess.Popen[str]
) -> None:
    work = checkpoint.with_name(f"{scenario}-{exchange}-{end}")
    words = [str(checkpoint), str(work), scenario, exchange, end, str(EVERY[end])]
    assert trials.stdin is not None and trials.stdout is not None
    print(json.dumps(words), file=trials.stdin, flush=True)
    code, out, err = json.loads(trials.stdout.readline())
    assert code == 0, err
    told = json.loads(out)
    assert told["points"] >= 30 and told["whole"] == told["failing"] > 3
    if end == "kill":
        assert told["old"] and told["new"]
        in_order = (exchange == "none" and scenario != "Fresh") or scenario == "Gguf"
        # moments at which a reader finds no index, or one file without its manifest
        assert bool(told["neither"]) == in_order if proofs.IS_WHOLE else in_order >= bool(told["neither"])
