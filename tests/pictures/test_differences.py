"""The page of `zckpt diff --html` says what `diff` found: the largest first, histograms, and hostile names as text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from html_pages import HOSTILE, Reader, policy_of
from safetensors.torch import save_file

import zckpt
from zckpt.engine.tensor_statistics import Spread
from zckpt.pictures.differences import differences_page
from zckpt.pictures.histogram import Axis, large, small


class Page(Reader):
    """The texts of what has a class, an id or a tag that tests ask for."""

    def __init__(self, text: str) -> None:
        self.depth: list[tuple[str, str]] = []
        self.names: list[str] = []
        self.rows: list[list[str]] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag == "bdi":
            self.names.append("")
        self.within = tag

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if self.elements and self.elements[-1][0] == "bdi" and self.names and not self.names[-1]:
            self.names[-1] = data
        if self.rows and self.rows[-1] and self.elements[-1][0] not in ("title", "script"):
            self.rows[-1][-1] += data


def made(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], root: Path, **options: float) -> str:
    torch.save(a, root / "a.bin")
    torch.save(b, root / "b.bin")
    found = zckpt.diff(root / "a.bin", root / "b.bin", spreads=True, **options)
    return differences_page(found, "a.bin", "b.bin")


def test_largest_differences_come_first(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    a = {name: torch.randn(100, generator=generator) for name in ("small", "same", "huge", "medium", "lost")}
    b = {name: tensor.clone() for name, tensor in a.items() if name != "lost"}
    b["small"][7] += 1e-3
    b["medium"] += 0.25
    b["huge"][3] = math.nan
    a["shape"], b["shape"], b["gained"] = torch.ones(2), torch.ones(3), torch.ones(1)
    page = Page(made(a, b, tmp_path))
    rows = [row for row in page.rows if len(row) == 7][1:]
    assert [row[0].split("[")[0].split("F32")[0] for row in rows] == ["shape", "huge", "medium", "small"]
    assert rows[0][1] == "not compared" and "[2] in A, [3] in B" in rows[0][0]
    assert rows[1][3] == "infinite" and "0 NaN and 0 infinite in A, 1 NaN and 0 infinite in B" in rows[1][0]
    assert (rows[2][1], rows[2][3]) == ("100100 %", "0.25") and rows[3][1:3] == ["11 %", "7"]
    assert [name for name in page.names if name in ("lost", "gained", "same")] == ["lost", "gained", "same"]
    data = json.loads(next(text for tag, text in page.texts if tag == "script" and text.startswith("{")))
    assert data["keys"][0][0] is None and data["keys"][2][0] == pytest.approx(0.25)
    assert {key for _, own in page.elements for key in own if key.startswith("on")} == set()


def test_what_is_the_same_has_a_page_too(tmp_path: Path) -> None:
    a = {"x": torch.ones(4)}
    page = Page(made(a, a, tmp_path))
    assert "No tensor differs." in [text for _, text in page.texts] and page.names[2:] == ["x"]
    close = Page(made(a, {"x": torch.full((4,), 1.0 + 2**-10)}, tmp_path, rtol=0.01))
    assert any("within the tolerance" in text for _, text in close.texts)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    names = [name for name in HOSTILE if name.isprintable() or name.startswith("\u2028")]
    a = {name: torch.ones(2) for name in names}
    b = {name: torch.zeros(2) for name in names} | {f"only {name}": torch.ones(1) for name in names}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    found = zckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", spreads=True)
    made = differences_page(found, HOSTILE[0], HOSTILE[3])
    page = Page(made)
    plain = Page(differences_page(zckpt.diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors"), "a", "b"))
    scripts = [[tag for tag, _ in one.elements if tag in ("script", "style", "img", "meta")] for one in (page, plain)]
    assert scripts[0] == scripts[1]
    assert set(names) | {f"only {name}" for name in names} <= set(page.names)
    assert "unsafe" not in policy_of(page)
    for _, own in page.elements:  # the policy allows no style of an element's own, and no handler
        assert not any(key == "style" or key.startswith("on") for key in own)


def test_histograms_have_one_axis() -> None:
    spreads = [Spread({-30: 5, -29: 10, -2: 1}), Spread({-10: 1000}), Spread()]
    axis = Axis.of(spreads)
    assert axis == Axis(-30, 1, 29) and Axis.of([Spread()]) is None
    bars = axis.bars_of(spreads[0])
    assert [(low, pairs) for low, pairs in bars.items() if pairs] == [(-30, 5), (-29, 10), (-2, 1)]
    drawn = small(axis, spreads[0])
    assert len(re.findall("M", drawn.split("<path d=")[1])) == 3
    assert 'aria-label="distances from 9.3e-10 to 0.5, most of them 1.9e-09 to 3.7e-09"' in drawn
    heights = [float(h) for h in re.findall(r'class="bar"[^>]* height="([\d.]+)"', large(axis, spreads[0]))]
    assert len(heights) == 29 and heights.index(max(heights)) == 1 and heights[2] == 0
    wide = Axis.of([Spread({-128: 1, 127: 3})])
    assert wide is not None and wide.bars <= 40 and sum(wide.bars_of(Spread({-128: 1, 127: 3})).values()) == 4
