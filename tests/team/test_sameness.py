"""Facts that have to be the same on all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zckpt.base.errors import InconsistentError, ZckptError
from zckpt.team.meeting import Meetings
from zckpt.team.rendezvous import StoreRendezvous
from zckpt.team.sameness import check_same, place_of_directory


def told(*facts: dict[str, str]) -> list[str]:
    """What each rank is told; they compare twice, as two engines do."""
    store = HashStore()

    def rank(number: int) -> str:
        try:
            meetings = Meetings("start", number, len(facts), StoreRendezvous(store, "zckpt/"))
            check_same(meetings, "initialize", {"same": "1"}, within_s=120)
            check_same(meetings, "initialize", facts[number], within_s=120)
        except ZckptError as error:
            assert isinstance(error, InconsistentError)
            return error.found or ""
        return ""

    with ThreadPoolExecutor(len(facts)) as pool:
        return [*pool.map(rank, range(len(facts)))]


def test_every_rank_is_told_which_differs_in_what() -> None:
    assert told({"a": "1"}, {"a": "1"}) == ["", ""]
    assert (
        told({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"b": "2", "a": "1"})
        == ["b: 2 on ranks 0, 2 and 3 on rank 1"] * 3
    )
    assert told({"a": "1"}, {"c": "1"}) == ["a: 1 on rank 0 and none on rank 1; c: none on rank 0 and 1 on rank 1"] * 2
    many = told(*({f"k{n}": str(rank) for n in range(9)} for rank in range(6)))
    assert many == [many[0]] * 6 and "; and 3 more" in many[0] and "not compared on ranks 4-5" in many[0]


def test_one_directory_has_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "save")
    assert place_of_directory("save") == place_of_directory(f"{tmp_path}/x/../save/") == place_of_directory("link")
    assert place_of_directory("save")[1] is None and place_of_directory(".")[1] == tmp_path.stat().st_ino
