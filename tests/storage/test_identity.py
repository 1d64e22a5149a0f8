"""One place under several names: links, mounts of the whole, mounts of a part, mounts in it; and what only looks alike."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zckpt.storage import identity
from zckpt.storage.location import locate

Mounter = Callable[[Path, Path], Path]


@pytest.fixture
def mount() -> Iterator[Mounter]:
    """Mounts a directory or file in a further place."""
    mounted: list[Path] = []

    def mount(source: Path, point: Path) -> Path:
        if source.is_dir():
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.touch()
        how = ["mount", "--bind", str(source), str(point)]
        if os.geteuid() or subprocess.run(how, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root, and a kernel that lets it")
        mounted.append(point)
        return point

    yield mount
    for point in reversed(mounted):
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "run" / "tag").mkdir(parents=True)
    (tmp_path / "data" / "run" / "tag" / "file").write_text("bytes")
    (tmp_path / "data" / "other").mkdir()
    return tmp_path / "data"


def within(path: Path, directory: Path) -> bool:
    return locate(path).is_within(locate(directory))


def test_a_directory_that_is_mounted_twice(data: Path, tmp_path: Path, mount: Mounter) -> None:
    a, b = mount(data / "run", tmp_path / "in"), mount(data / "run", tmp_path / "out")
    for one, two in ((a, b), (b, a), (data / "run", b), (b, data / "run")):
        assert within(one, two) and within(one / "tag" / "file", two) and within(one / "new" / "deeper", two)
        assert within(one / "tag", two / "tag") and not within(one, two / "tag")
    assert within(a, data) and not within(data, a) and not within(data / "other", a) and not within(a, data / "other")


def test_a_part_that_is_mounted_alone(data: Path, tmp_path: Path, mount: Mounter) -> None:
    whole, part = mount(data, tmp_path / "out"), mount(data / "run" / "tag", tmp_path / "in")
    assert within(part, whole) and within(part / "file", whole / "run") and within(part / "new", whole / "run" / "tag")
    assert not within(whole, part) and not within(part, whole / "other")
    one = mount(data / "run" / "tag" / "file", tmp_path / "one")
    assert within(one, whole / "run") and within(one, part) and not within(one, whole / "other")


def test_what_is_mounted_in_a_directory_is_in_it(data: Path, tmp_path: Path, mount: Mounter) -> None:
    (tmp_path / "place").mkdir()
    mount(data / "run", tmp_path / "place" / "inner")
    assert within(data / "run", tmp_path / "place") and within(data / "run" / "tag" / "new", tmp_path / "place")
    assert not within(data / "other", tmp_path / "place") and not within(data, tmp_path / "place")


def test_the_table_of_mounts_alone_proves_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says of all its mounts that the top of the file system is mounted there."""
    table = {str(data / name): identity.Mount("0:50", "/") for name in ("run", "other")}
    monkeypatch.setattr(identity, "mounts", lambda: table)
    (data / "other" / "tag").mkdir()
    assert not within(data / "run", data / "other") and not within(data / "run" / "tag", data / "other")
    assert not within(data / "run" / "new", data / "other") and within(data / "run" / "new", data / "run")


def test_parts_that_lie_elsewhere(data: Path, tmp_path: Path, mount: Mounter) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "plain").write_text("mine")
    (home / "link").symlink_to(data / "run" / "tag" / "file")
    (home / "directory").symlink_to(data / "run")
    (home / "nowhere").symlink_to("missing")
    mounted = mount(data / "run" / "tag" / "file", home / "mounted")
    assert sorted(identity.parts_elsewhere(str(home))) == [str(home / "link"), str(mounted)]
    os.link(home / "plain", tmp_path / "hard")
    assert identity.other_name_of(str(tmp_path / "hard"), str(home)) == str(home / "plain")
    assert not identity.other_name_of(str(home / "mounted"), str(data))
    assert not identity.other_name_of(str(tmp_path / "missing"), str(home))
    assert not identity.other_name_of(str(home / "plain"), str(home / "plain"))
