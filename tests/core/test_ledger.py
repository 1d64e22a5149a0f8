"""No tensor of a source is dropped without a word: what an output does not read is found by its bytes, whatever its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zckpt
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import Fragment
from zckpt.core.ledger import Fate, check_closed, names_unread
from zckpt.core.recipes import derive_entry, mean_of
from zckpt.core.stores import FileStore
from zckpt.jobs.opened import WorkingModel

STORE = FileStore("weights", 4000)


def entry(name: str, first: int, numel: int, rows: int = 1, pitch: int = 0) -> TensorEntry:
    """`rows` rows of `numel` elements from element `first` of the file, `pitch` apart."""
    fragment = Fragment(STORE, 4 * first, 0, numel, rows, numel, pitch or numel)
    return TensorEntry(name, (rows, numel) if rows > 1 else (numel,), F32, "parameter", (fragment,))


def catalog(*entries: TensorEntry) -> Catalog:
    return Catalog({one.name: one for one in entries}, Source("test", "weights"), LIVE)


def test_a_tensor_is_known_by_its_bytes_and_not_by_its_name() -> None:
    source = catalog(entry("a", 0, 10), entry("b", 10, 10), entry("c", 20, 10))
    assert names_unread(source, source.rename(lambda name: f"other.{name}").tensors) == []
    impostor = {"c": replace(source["a"], name="c"), "b": source["b"]}
    assert names_unread(source, impostor) == ["c"]


def test_parts_of_fused_and_cut_tensors_are_read() -> None:
    source = catalog(entry("qkv", 0, 4, rows=6), entry("table", 100, 4, rows=8))
    query, key = entry("q", 0, 4, rows=2), entry("k", 8, 4, rows=2)
    cut = entry("short", 100, 4, rows=7)
    assert names_unread(source, {"q": query, "k": key, "short": cut}) == []
    assert names_unread(source, {"q": query, "k": key}) == ["table"]


def test_interleaved_columns_are_told_apart() -> None:
    source = catalog(entry("left", 0, 3, rows=4, pitch=6), entry("right", 3, 3, rows=4, pitch=6))
    assert names_unread(source, {"x": replace(source["left"], fragments=(*source["left"].fragments,))}) == ["right"]


def test_what_a_tensor_is_computed_from_is_read() -> None:
    source = catalog(entry("a", 0, 10), entry("b", 10, 10), entry("c", 20, 10))
    mean = derive_entry("m", (10,), F32, mean_of((source["a"], source["b"])))
    twice = derive_entry("n", (10,), F32, mean_of((mean, source["b"])))
    assert names_unread(source, {"n": twice}) == ["c"]


def test_tensors_without_elements_count_by_their_names() -> None:
    source = catalog(entry("a", 0, 10), replace(entry("none", 0, 0), fragments=()))
    assert names_unread(source, {"a": source["a"]}) == ["none"]
    assert names_unread(source, source.tensors) == []


def test_a_tensor_without_a_fate_is_an_error() -> None:
    source = catalog(entry("a", 0, 10), entry("b", 10, 10))
    check_closed(source, ["b"], [Fate("b", "option", "--exclude")])
    with pytest.raises(zckpt.InconsistentError, match="would be lost") as raised:
        check_closed(source, ["a", "b"], [Fate("b", "option", "--exclude")])
    assert raised.value.found == "'a'"


def test_the_manifest_and_the_plan_name_what_is_left_out(tmp_path: Path) -> None:
    import json

    checkpoint = Path(__file__).parents[2] / "fixtures" / "zero2" / "frozen_w2" / "checkpoint"
    if not checkpoint.exists():
        checkpoint = checkpoint.parents[1] / "bf16_w2" / "checkpoint"
    names = list(zckpt.open_checkpoint(checkpoint))
    options = zckpt.Options(exclude=[names[0]])
    zckpt.convert(checkpoint, tmp_path / "out", options=options, progress=False)
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())
    assert facts["left_out"] == [{"name": names[0], "kind": "option", "why": "--exclude"}]
    found = zckpt.verify(checkpoint, tmp_path / "out", progress=False)
    assert found.ok and found.deletable == (False, f"1 tensor was left out of the output: {names[0]!r}")
    zckpt.convert(checkpoint, tmp_path / "one", options=zckpt.Options(include=[names[1]]), progress=False)
    facts = json.loads((tmp_path / "one" / "zckpt.json").read_text())
    assert [fate["name"] for fate in facts["left_out"]] == [name for name in names if name != names[1]]
    assert {fate["why"] for fate in facts["left_out"]} == {"--include"}


def test_a_step_that_drops_a_tensor_is_caught_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And verify, which does not ask that step, misses the tensor in an output that was made all the same."""
    from zckpt.jobs import convert

    checkpoint = Path(__file__).parents[2] / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"
    right = convert.steps_of

    def lose(model: WorkingModel) -> WorkingModel:
        lost = list(model.catalog.tensors)[2]
        return replace(model, catalog=model.catalog.select(lambda entry: entry.name != lost))

    monkeypatch.setattr(convert, "steps_of", lambda asked, **how: (*right(asked, **how), lose))
    with pytest.raises(zckpt.InconsistentError, match="would be lost"):
        zckpt.convert(checkpoint, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(convert, "find_left_out", lambda *values, **options: ())
    options = zckpt.Options(rename=[("^x$", "y")])
    zckpt.convert(checkpoint, tmp_path / "out", options=options, progress=False)
    found = zckpt.verify(checkpoint, tmp_path / "out", progress=False)
    assert not found.ok and found.deletable is not None and not found.deletable[0]
