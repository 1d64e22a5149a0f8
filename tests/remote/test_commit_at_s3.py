"""The commit protocol on an S3 server: in `make proofs` every request of every kind of run fails in turn, in two modes.

Runs: all those of `address_models.SHAPES`, two of which also by multi-part upload, and outputs of one file, new and over another.
Requests: all that the client sends, HEAD, GET and LIST as well as PUT, POST and DELETE. Modes: `killed` (it is the last thing of
a process, and does not arrive), `refused` (500), `lost` (carried out, and answered 500; not GET and HEAD, which change nothing),
`down` (it and all later ones: 500). Of two requests in a row, and of one request in two runs, one fails as `killed` and `lost`,
the other as `refused` and `down`.
After each of these the bucket is looked at as loaders do; then the same command must end with the new output, and in other
branches a command that fails must lose nothing, and a third model must take the place. What follows depends on nothing but what
the bucket holds, so each state of it is gone on from once, however many failures lead to it; for this, random names and the
server's clock stand still.

In `make test` every sixth request of each run fails, and the last three, in one mode; the modes take turns, and so do the
requests that runs begin with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import moto.s3.models
import proofs
import pytest
import s3fs
from address_models import SHAPES, Killed, Model, Tree, fails, look, three_models
from addresses import RECORD
from s3_server import S3Server

from zckpt.base.errors import ZckptError

MODES = ("killed", "refused", "lost", "down")
RUNS = [(shape, kind) for shape in SHAPES for kind in ("directory", "parts")
        if kind == "directory" or shape in ("shards to as many", "one to one")]  # fmt: skip
RUNS += [("nothing to one", "file"), ("one to one", "file")]


class Bucket:
    """A server's bucket, and a client that fails at one of its requests."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.begin({})

    def begin(self, files: Tree, nth: int = 0, mode: str = "") -> None:
        """Makes the bucket hold these files, for a new process."""
        self.count, self.is_dead, self._nth, self._mode = 0, False, nth, mode
        self.changing: set[int] = set()
        """The numbers of requests that change something, if they are carried out."""
        self._ids = 0
        self._server.restore("bkt", files)
        fsspec.filesystem("s3").invalidate_cache()

    def fails(self, method: str, *_: str) -> bool:
        """Whether a request fails that has just arrived."""
        self.count += 1
        if method not in ("GET", "HEAD"):
            self.changing.add(self.count)
        self.is_dead = self.is_dead or (self._mode == "killed" and self.count == self._nth)
        is_here = self.count == self._nth and self._mode == "refused"
        return self.is_dead or is_here or (self._mode == "down" and self.count >= self._nth)

    def loses(self, *_: str) -> bool:
        """Whether its answer is lost."""
        return self._mode == "lost" and self.count == self._nth

    def unique(self, nbytes: int = 8) -> str:
        """What stands for a random name: the same in the same run."""
        self._ids += 1
        return f"{self._nth and 1}{self._mode and 1}{self._ids:0{2 * nbytes - 2}}"

    def files(self) -> Tree:
        """What is there."""
        return self._server.files("bkt")


@pytest.fixture
def bucket(once: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    it, now = Bucket(once), moto.s3.models.utcnow()
    real = fsspec.asyn.sync

    def sync(*args: Any, **more: Any) -> Any:
        try:
            return real(*args, **more)
        finally:
            if it.is_dead:
                raise Killed

    monkeypatch.setattr(fsspec.asyn, "sync", sync)
    monkeypatch.setattr(secrets, "token_hex", it.unique)
    monkeypatch.setattr(moto.s3.models, "utcnow", lambda: now)
    once.failing, once.losing = it.fails, it.loses
    yield it
    it.begin({})


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go up in parts of 300 bytes."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    real = s3fs.S3FileSystem._open

    def opened(self: Any, path: str, mode: str = "rb", **more: Any) -> Any:
        file = real(self, path, mode, **more)
        if mode == "wb" and path.endswith((".safetensors", ".bin")):
            file.blocksize = file.part_max = 300
        return file

    monkeypatch.setattr(s3fs.S3FileSystem, "_open", opened)


def under(files: Tree, place: str) -> Tree:
    """The output's files, without zckpt's own note."""
    return {name[len(place) :]: data for name, data in files.items() if name.startswith(place) and RECORD not in name}


def one_file(before: Tree, after: Tree) -> Callable[[Tree], str]:
    """Looks at an output that is one file: "old" or "new". A manifest of another file fails."""

    def found(files: Tree) -> str:
        weights = files.get("w.safetensors")
        assert weights in (before.get("w.safetensors"), after["w.safetensors"])
        assert "w.safetensors.zckpt.json" not in files or files in (before, after), "a manifest of another file"
        return "new" if weights == after["w.safetensors"] else "old"

    return found


def directory(old: Model | None, new: Model) -> Callable[[Tree], str]:
    """Looks at a directory: "old", "new", or "none" where nothing loads."""
    models = [model for model in (old, new) if model is not None]

    def found(files: Tree) -> str:
        it = look(files, *models)
        return "none" if it is None else "new" if it is new else "old"

    return found


@proofs.MORE
@pytest.mark.parametrize(("shape", "kind"), RUNS)
def test_every_request_at_s3(
    shape: str, kind: str, bucket: Bucket, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "parts":
        request.getfixturevalue("in_parts")
    old, new, bad = three_models(tmp_path, shape)
    out = "s3://bkt/o/w.safetensors" if kind == "file" else "s3://bkt/o"
    if old is not None:
        old.write(out)
    beginning = bucket.files()
    bucket.begin(beginning, 0, "count")
    new.write(out)
    count, finished, changing = bucket.count, bucket.files(), bucket.changing
    before, after = under(beginning, "o/"), under(finished, "o/")
    found = one_file(before, after) if kind == "file" else directory(old, new)
    assert count > 20 and found(after) == "new"

    known: set[frozenset[tuple[str, bytes]]] = set()
    outcomes: set[str] = set()
    turn = RUNS.index((shape, kind))
    for nth in range(1, count + 1):
        if not proofs.IS_WHOLE and (nth + turn) % 9 and nth <= count - 3:
            continue
        for mode in MODES[(nth + turn) % 2 :: 2] if proofs.IS_WHOLE else [MODES[((nth + turn) // 3 + turn) % 4]]:
            if mode == "lost" and nth not in changing:  # the same as refused
                continue
            bucket.begin(beginning, nth, mode)
            try:
                new.write(out)
                has_failed = False
            except (ZckptError, Killed):
                has_failed = True
            state = bucket.files()
            bucket.begin(state)
            files = under(state, "o/")
            is_at = found(files)
            outcomes.add(is_at)
            if not has_failed:
                assert files == after
            elif mode == "refused" and is_at != "new":
                assert files == before and state.keys() == beginning.keys(), "something was left"
            if frozenset(state.items()) not in known:
                known.add(frozenset(state.items()))
                go_on(
                    bucket,
                    state,
                    out,
                    new,
                    bad,
                    (before, after),
                    found,
                    is_third=kind != "file" and len(known) % 5 == 1,
                )
    assert "new" in outcomes and (old is None or "old" in outcomes)


def go_on(
    bucket: Bucket, state: Tree, out: str, new: Model, bad: Model, ends: tuple[Tree, Tree],
    found: Callable[[Tree], str], *, is_third: bool,
) -> None:  # fmt: skip
    """What may be run after a failure that left this state."""
    before, after = ends
    bucket.begin(state)
    assert new.write(out).tensors == 4
    assert under(bucket.files(), "o/") == after, "the same command does not end with the new output"

    bucket.begin(state)
    fails(bad, out)
    files = under(bucket.files(), "o/")
    assert files in (before, after) or found(files) in ("old", "new"), "a run that failed lost something"
    if is_third:
        bucket.begin(state)
        assert bad.write(out).tensors == 4
        files = under(bucket.files(), "o/")
        assert look(files, bad) is bad and len(files) <= len(after), "something was left"
