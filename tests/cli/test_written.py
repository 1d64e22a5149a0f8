"""What commands say of an output that they wrote."""

from __future__ import annotations

import pytest

from zckpt.base.words import duration, rate
from zckpt.cli.written import Words, _lines
from zckpt.jobs.planned import Report


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.061, "0.06 s"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (3725, "62 min 5 s")]
)
def test_times_for_a_person(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_rate_only_where_it_means_something() -> None:
    assert rate(5 * 10**9, 4.0) == ", 1.25 GB/s"
    assert rate(5059, 4.0) == rate(5 * 10**9, 0.5) == ""


def said(*, already_done: bool = False) -> list[str]:
    report = Report((("a", 2_000_000), ("b", 1)), "native", 0, {}, (), already_done)
    return list(_lines("out", Words("2 tensors as bf16", lambda files: f"use {sorted(files)}"), report, 0.5))


def test_what_was_written_and_what_was_there_already() -> None:
    assert said() == ["out: 2 tensors as bf16, 2 MB in 2 files, 0.50 s", "use ['a', 'b']"]
    assert said(already_done=True)[0] == "out: already done; every file matches its checksum, and nothing was written"
