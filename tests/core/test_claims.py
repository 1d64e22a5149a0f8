"""No two tensors read the same bytes: every way in which they may, and may not."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.core.catalog import Catalog, Padding, Replica, Source, TensorEntry, replace_name
from zckpt.core.claims import ByteSpan, Claim, Claims
from zckpt.core.dtypes import F32
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.core.stores import FileStore

STORE = FileStore("f", 1 << 20)


def entry(name: str, byte_offset: int, numel: int = 4, store: FileStore = STORE) -> TensorEntry:
    return TensorEntry(name, (numel,), F32, "parameter", (Fragment(store, byte_offset, 0, numel),))


def catalog(*entries: TensorEntry, **more: object) -> Catalog:
    return Catalog({e.name: e for e in entries}, Source("test", "f"), LIVE, **more)  # type: ignore[arg-type]


def test_neighbours_are_apart_in_any_order() -> None:
    catalog(entry("a", 0), entry("b", 16), entry("c", 32))
    catalog(entry("c", 32), entry("a", 0), entry("b", 16))


def test_two_tensors_of_the_same_bytes_are_no_catalog() -> None:
    with pytest.raises(InconsistentError, match=r"bytes 12-15 for 'a' and 'b'"):
        catalog(entry("a", 0), entry("b", 12))


def test_stores_of_one_path_are_one_file() -> None:
    with pytest.raises(InconsistentError, match="two tensors"):
        catalog(entry("a", 0), entry("b", 12, store=FileStore("f", 1 << 20)))
    catalog(entry("a", 0), entry("b", 12, store=FileStore("g", 1 << 20)))


def test_a_tensor_reads_no_byte_twice() -> None:
    twice = TensorEntry("a", (8,), F32, "parameter", (Fragment(STORE, 0, 0, 4), Fragment(STORE, 0, 4, 4)))
    with pytest.raises(InconsistentError, match="one tensor would read the same bytes twice"):
        catalog(twice)
    repeated = TensorEntry("a", (3, 4), F32, "parameter", (Fragment(STORE, 0, 0, 4, 3, 4, 0),))
    with pytest.raises(InconsistentError, match="one tensor would read the same bytes twice"):
        catalog(repeated)


def test_views_that_the_file_itself_has_may_share() -> None:
    shared = (ByteSpan(STORE, 0, 28),)
    catalog(entry("a", 0), entry("b", 12), views=shared)
    with pytest.raises(InconsistentError):
        catalog(entry("a", 0), entry("b", 12), entry("c", 40), entry("d", 44), views=shared)


def test_replicas_share_with_their_own_tensor_alone() -> None:
    own = TensorEntry(
        "a", (4,), F32, "parameter", (Fragment(STORE, 0, 0, 4),), (Replica(F32, (Fragment(STORE, 0, 0, 4),)),)
    )
    catalog(own)
    other = TensorEntry(
        "b", (4,), F32, "parameter", (Fragment(STORE, 64, 0, 4),), (Replica(F32, (Fragment(STORE, 8, 0, 4),)),)
    )
    with pytest.raises(InconsistentError, match="'a' and 'b'"):
        catalog(own, other)


def test_padding_is_nobodys() -> None:
    with pytest.raises(InconsistentError, match=r"padding \(alignment\)"):
        catalog(entry("a", 0), padding=(Padding(F32, (Fragment(STORE, 12, 0, 2),)),))


def test_what_is_computed_reads_what_it_is_computed_of() -> None:
    store = ComputedStore(16, lambda: bytearray(16), [((Fragment(STORE, 0, 0, 4),), 4)])
    mean = TensorEntry("mean", (4,), F32, "parameter", (Fragment(store, 0, 0, 4),))
    with pytest.raises(InconsistentError):
        catalog(entry("a", 12), mean)


def test_a_catalog_made_of_a_checked_one_is_not_checked_again() -> None:
    found = catalog(entry("a", 0), entry("b", 16))
    assert found.rename(lambda name: f"x.{name}").claims is found.claims
    assert found.select(lambda entry: entry.name == "a").claims is found.claims


def test_the_same_elements_are_known_in_any_order_and_no_others() -> None:
    held = [Claim(name, 0, 4, (Fragment(STORE, at, 0, 1),)) for at, name in ((0, "a"), (4, "b"), (8, "c"))]
    claims = Claims(iter(held))
    assert claims.include(iter(held)) and claims.include(held[::-1]) and claims.include(held[1:])
    assert not claims.include([held[0], held[1]._replace(itemsize=2)])
    assert not claims.include([*held, Claim("d", 0, 4, (Fragment(STORE, 12, 0, 1),))])


def test_a_tensor_under_another_name_is_the_same_and_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TensorEntry(
        "a", (2, 2), F32, "buffer", (Fragment(STORE, 0, 0, 1, 2, 2, 1), Fragment(STORE, 8, 1, 1, 2, 2, 1))
    )
    again = TensorEntry("b", one.shape, one.dtype, one.role, one.fragments)
    monkeypatch.setattr(TensorEntry, "__post_init__", None)
    named = replace_name(one, "b")
    assert named == again and named.flat is again.flat is False and named.fragments is one.fragments
    assert replace_name(one, "a") is one


def test_a_catalog_of_which_everything_is_kept_is_itself() -> None:
    found = catalog(entry("a", 0), entry("b", 16))
    assert found.rename(str) is found
    assert found.select(lambda _: True) is found


pitched = st.builds(
    lambda start, count, rows, gap: Fragment(STORE, 4 * start, 0, count, rows, count if rows > 1 else 0, count + gap),
    st.integers(0, 30), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6),
)  # fmt: skip


def bytes_of(fragment: Fragment) -> list[int]:
    rows = ((fragment.byte_offset + row * fragment.store_pitch * 4) for row in range(fragment.rows))
    return [at + i for at in rows for i in range(fragment.count * 4)]


@given(st.lists(pitched, max_size=5))
def test_interleaved_rows_meet_only_where_they_do(fragments: list[Fragment]) -> None:
    read = list(itertools.chain.from_iterable(map(bytes_of, fragments)))
    held = [Claim(str(number), 0, 4, (fragment,)) for number, fragment in enumerate(fragments)]
    if len(set(read)) < len(read):
        with pytest.raises(InconsistentError):
            Claims(held)
        return
    claims = Claims(held)
    end = max(read, default=0) + 8
    gap = next((at for at in range(end) if at not in read), None)
    found = next(claims.unused([ByteSpan(STORE, 0, end)]), None)
    assert (found.start if found else None) == gap
    if found:
        assert not set(range(found.start, found.stop)) & set(read)


def test_columns_of_one_matrix_cost_little() -> None:
    rows = columns = 3000
    held = [
        Claim(str(c), 0, 4, (Fragment(FileStore("m", 4 * rows * columns), 4 * c, 0, 1, rows, 1, columns),))
        for c in range(columns)
    ]
    began = time.process_time()
    Claims(held)
    assert time.process_time() - began < 5


def test_what_is_too_scattered_is_said_to_be() -> None:
    """Rows of unlike pitch whose ranges all meet: comparing all pairs would take hours."""
    held = [Claim(str(n), 0, 1, (Fragment(STORE, n, 0, 1, 500, 1, 997 + 2 * n),)) for n in range(500)]
    with pytest.raises((UnsupportedError, InconsistentError)):
        Claims(held)


# ---- real files ------------------------------------------------------------------------------------------------------


def test_views_of_one_storage_are_converted(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "whole": whole, "flat": whole.view(-1), "turned": whole.T, "rows": whole[1:3], "columns": whole[:, 2:5],
        "repeated": torch.ones(1, 3).expand(4, 3), "own": torch.full((2,), 7.0),
    }  # fmt: skip
    torch.save(state, tmp_path / "m.bin")
    zckpt.convert(tmp_path / "m.bin", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in state.items())


def test_slices_of_one_storage_side_by_side_are_not_taken_for_shared(tmp_path: Path) -> None:
    packed = torch.arange(24.0).reshape(4, 6)
    torch.save({"q": packed[:, :2], "k": packed[:, 2:4], "v": packed[:, 4:]}, tmp_path / "m.bin")
    zckpt.convert(tmp_path / "m.bin", tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["k"].equal(packed[:, 2:4])
