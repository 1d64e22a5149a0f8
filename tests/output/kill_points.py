"""Runs that are killed at every call that changes the file system, in a process of their own, forked from a warm one.

    python kill_points.py [CHECKPOINT WORK SCENARIO EXCHANGE END EVERY [ONLY]]

SCENARIO is one of those below; EXCHANGE is "exchange" where two names may change places, "none" where the file system refuses
that; END is "kill" or "error": the process ends at the point, or the call fails; ONLY is one point to look at. Every call that
renames, links, removes, makes, opens for writing, truncates, writes a journal's line, syncs or marks something is a point;
before one of them a run is killed. (After one is before the next: nothing else changes what is on the disk.) What lies there
then is judged, a run that fails is judged, and the same run must end well. So it is at one of EVERY points, the first and the
last; at the others nothing is done, since `test_power.py` has them all in memory, or, for proofs, what lies there is judged.
Prints what happened as JSON. Without words, each line of stdin is those of a fork, as JSON, and each line of stdout how it
ended: its exit status, and what it said at stdout and at stderr.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from computed import COMPUTED, ComputedJob
from ending import run_to_the_end
from proofs import IS_WHOLE

import zckpt
from zckpt import _core
from zckpt.engine import batches
from zckpt.jobs.options import Options
from zckpt.output import commit, files, journal
from zckpt.storage import output_places

Contents = dict[str, bytes]
SMALL: dict[str, Any] = {"max_shard_size": 60_000, "threads": 1}
CALLS = (
    "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir", "truncate", "ftruncate", "fsync", "fdatasync",
    "chmod", "fchmod", "chown", "setxattr", "write", "pwrite",
)  # fmt: skip


def contents(place: Path) -> Contents:
    """Everything below a directory but zckpt's own work, or a file and its manifest."""
    if place.is_dir():
        found = {p.relative_to(place).as_posix(): p for p in place.rglob("*") if p.is_file()}
        return {name: path.read_bytes() for name, path in sorted(found.items()) if not name.startswith(".zckpt")}
    both = (place, place.with_name(f"{place.name}.zckpt.json"), place.with_name(f"{place.name}.sig"))
    return {path.name: path.read_bytes() for path in both if path.is_file()}


class Points:
    """Counts the calls that change something in a place, and ends the process before one of them."""

    def __init__(self, place: Path, fatal: int, *, kill: bool) -> None:
        self.place = str(place)
        self.fatal = fatal
        self.kill = kill
        self.seen = 0
        self.synced: dict[int, tuple[int, int]] = {}
        self.complaints: list[str] = []

    def point(self, where: object, dir_fd: int | None = None) -> None:
        if self.place not in self._path(where, dir_fd):
            return
        self.seen += 1
        if self.seen == self.fatal and self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.seen == self.fatal:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _path(self, where: object, dir_fd: int | None) -> str:
        if isinstance(where, int):
            where = self._linked(where)
        if dir_fd is not None:
            where = os.path.join(self._linked(dir_fd), os.fspath(where))  # type: ignore[call-overload]
        return os.path.abspath(os.fspath(where))  # type: ignore[call-overload]

    def _linked(self, fd: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    def install(self, *, exchange: bool) -> None:
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        real_open, real_io_open, real_exchange = os.open, io.open, _core.exchange

        def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC):
                self.point(path, dir_fd)
            return real_open(path, flags, mode, dir_fd=dir_fd)

        def io_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            if set(mode) & set("wxa+"):
                self.point(file)
            return real_io_open(file, mode, *more, **options)

        def swapped(a: str, b: str) -> int:
            self.point(a)
            self.published(a, b)
            return int(real_exchange(a, b)) if exchange else 22

        os.open, builtins.open, _core.exchange = os_open, io_open, swapped  # type: ignore[assignment]

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *more: Any, **options: Any) -> Any:
            self.point(where, options.get("dir_fd") or options.get("src_dir_fd"))
            if name in ("rename", "replace"):
                self.published(os.fspath(where), os.fspath(more[0]))
            if name in ("fsync", "fdatasync"):
                self.sealed(self._path(where, None))
            result = real(where, *more, **options)
            if name in ("fsync", "fdatasync"):
                stat = os.stat(where)
                self.synced[stat.st_ino] = (stat.st_size, stat.st_mtime_ns)
            return result

        return call

    # ---- what must be durable before a name is given ---------------------------------------------------------------------

    def published(self, source: str, target: str) -> None:
        """A name is about to be given: the seal, and all that gets the name, must be on the disk."""
        work, _, below = source.partition("/files")
        if not work.startswith(self.place) or not work.endswith(".zckpt") or target.startswith(f"{work}/"):
            return
        if below and not below.startswith("/"):
            return
        moved = [source, *(os.path.join(r, n) for r, ds, ns in os.walk(source) for n in (*ds, *ns))]
        for path in [f"{work}/journal", *moved]:
            stat = os.stat(path)
            if stat.st_nlink > 1 and not os.path.isdir(path):
                continue  # a file that stays: it was there before
            if self.synced.get(stat.st_ino) != (stat.st_size, stat.st_mtime_ns):
                self.complaints.append(f"{path} was not synced before {target} was named")
        if journal.read(f"{work}/journal").seal is None:
            self.complaints.append(f"{target} was named without a seal")

    def sealed(self, path: str) -> None:
        """A journal is about to be on the disk: what it seals must be there before."""
        work, _, name = path.rpartition("/")
        if name != "journal" or not work.startswith(self.place) or (seal := journal.read(path).seal) is None:
            return
        staged = [os.path.join(root, n) for root, _, names in os.walk(f"{work}/files") for n in names]
        if seal.how == "swap":
            staged += [work, *(root for root, _, _ in os.walk(f"{work}/files"))]
        for one in staged:
            stat = os.stat(one)
            if (stat.st_nlink == 1 or os.path.isdir(one)) and self.synced.get(stat.st_ino) != (
                stat.st_size,
                stat.st_mtime_ns,
            ):
                self.complaints.append(f"{one} was not synced before the seal")


class Scenario:
    """One way to write an output, in a place that holds something already.

    Attributes:
        out: the output.
        staying: files that are nobody's but the user's, which no run may touch.
        late: the same, but they come while the run is at work.
    """

    single = False
    staying: Contents = {}
    late: Contents = {}
    needed: tuple[str, ...] = ()

    def __init__(self, checkpoint: str, work: str) -> None:
        self.checkpoint = checkpoint
        self.place = Path(work) / "place"
        self.out = self.place / "out"

    def prepare(self) -> None:
        """What is there before; made by zckpt itself."""
        self.convert(dtype="fp16")
        for name, data in self.staying.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(data)

    def run(self) -> None:
        """The run that is killed."""
        self.convert(dtype="bf16")

    def fail(self) -> None:
        """A run on the same output that fails, after it has looked at what is there."""
        self.convert(dtype="fp16", checkpoint=self.checkpoint + "-overflowing")

    def convert(self, *, dtype: str, checkpoint: str = "", **options: Any) -> None:
        chosen = Options(**{**SMALL, "overwrite": True, **options})
        zckpt.convert(checkpoint or self.checkpoint, self.out, dtype=dtype, options=chosen)


class Fresh(Scenario):
    """Nothing is there, not even the directories that OUT is to lie in."""

    def __init__(self, checkpoint: str, work: str) -> None:
        super().__init__(checkpoint, work)
        self.out = self.place / "a" / "b" / "out"

    def prepare(self) -> None:
        pass

    def convert(self, *, dtype: str, checkpoint: str = "", **options: Any) -> None:
        super().convert(dtype=dtype, checkpoint=checkpoint, **{"overwrite": False, **options})


class Directory(Scenario):
    """Shards of the same names as the new ones, and of other bytes."""


class Strangers(Scenario):
    """Files lie there that zckpt did not write: they are linked into the new directory."""

    staying = {"notes.md": b"a thesis", "trainer_state.json": b"{}"}


class Foreign(Scenario):
    """So does a directory: the output's directory must keep its place."""

    staying = {"notes.md": b"a thesis", "checkpoint-7/a/b": b"somebody's"}


class Mounted(Scenario):
    """OUT is a mount point, by all that zckpt can tell."""

    def __init__(self, checkpoint: str, work: str) -> None:
        super().__init__(checkpoint, work)
        output_places.is_mount = lambda path: path == str(self.out)  # type: ignore[assignment]

    def prepare(self) -> None:
        self.out.mkdir(parents=True)
        super().prepare()


class Single(Scenario):
    """One file over another, each with its manifest."""

    single = True

    def __init__(self, checkpoint: str, work: str) -> None:
        super().__init__(checkpoint, work)
        self.out = self.place / "out.bin"


class SingleFresh(Single):
    """One file where none is."""

    def prepare(self) -> None:
        pass


class SignedSingle(Single):
    """The same, each with a signature too: of the same bytes the same one, as OpenSSL makes it here."""

    def prepare(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.key = self.place.with_name("key.pem")
        self.key.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem))
        super().prepare()

    def convert(self, *, dtype: str, checkpoint: str = "", **options: Any) -> None:
        super().convert(dtype=dtype, checkpoint=checkpoint, **{"sign": self.key, **options})


class Merged(Scenario):
    """The drop-in functions: files are put among others, in place of fewer and of more shards."""

    staying = {"notes.md": b"a thesis", "config.json": b"{}"}

    def prepare(self) -> None:
        super().prepare()
        (self.out / "zckpt.json").unlink()  # somebody else's weights, as DeepSpeed would have left them

    def convert(self, *, dtype: str, checkpoint: str = "", **options: Any) -> None:
        super().convert(dtype=dtype, checkpoint=checkpoint, **{"merge": True, "format": "bin", **options})


class MergedBesideTags(Merged):
    """The same in a directory that holds saves: it must keep its place."""

    staying = {"notes.md": b"a thesis", "global_step9/a": b"a save"}


class Reshard(Scenario):
    """Directories in the output, of the same names and with files of the same names."""

    source = Path(__file__).parents[2] / "fixtures" / "zero3" / "tied_w2" / "checkpoint"

    def prepare(self) -> None:
        zckpt.reshard(self.source, self.out, world_size=3, stage=1)

    def run(self) -> None:
        zckpt.reshard(self.source, self.out, world_size=2, stage=2, overwrite=True)


class ReshardForeign(Reshard):
    """And one that is not zckpt's, in a tag's directory too."""

    staying = {"runs/events": b"tensorboard", "global_step5/notes.md": b"a thesis"}

    def prepare(self) -> None:
        super().prepare()
        for name, data in self.staying.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(data)


class Live(Scenario):
    """`save_pretrained` over an earlier save with other shards."""

    staying = {"notes.md": b"a thesis"}

    def _save(self, value: float, max_shard_size: int) -> None:
        import torch

        from zckpt import live

        torch.set_num_threads(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        live.save_pretrained(model, self.out, "fp16" if value > 1e5 else "bf16", max_shard_size=max_shard_size)

    def prepare(self) -> None:
        self.out.mkdir(parents=True)
        (self.out / "notes.md").write_bytes(self.staying["notes.md"])
        self._save(1.0, 4000)

    def run(self) -> None:
        self._save(2.0, 8000)

    def fail(self) -> None:
        self._save(1e6, 8000)


class Delta(Scenario):
    """What changed between versions, over what changed between others, in more files."""

    def prepare(self) -> None:
        from safetensors.numpy import save_file

        self.versions = self.place.with_name("versions")
        for version, changed in enumerate(((), (0, 1, 2), (1,), (0,))):
            weights = {f"w{i}": np.arange(100, dtype=np.float16) + (version if i in changed else 0) for i in range(4)}
            if version == 3:
                weights["w0"] = weights["w0"].astype(np.float32) * 1e30
            (self.versions / str(version)).mkdir(parents=True)
            save_file(weights, self.versions / str(version) / "model.safetensors")
        self.make(1)

    def make(self, version: int) -> None:
        how = zckpt.DeltaOptions(version=9, max_shard_size=250 if version > 1 else 200, overwrite=True, threads=1)
        zckpt.delta(self.versions / "0", self.versions / str(version), self.out, options=how)

    def run(self) -> None:
        self.make(2)

    def fail(self) -> None:
        self.make(3)


class Apply(Delta):
    """A new version over an older one, in other shards; the base of another delta is refused when it is read."""

    def prepare(self) -> None:
        out, self.out = self.out, self.place.with_name("delta")
        super().prepare()
        self.wrong = self.place.with_name("wrong")
        zckpt.delta(self.versions / "1", self.versions / "2", self.wrong, version=9)
        self.delta, self.out = self.out, out
        self.make(0)

    def make(self, version: int) -> None:
        if self.out.name == "delta":
            super().make(version)
            return
        how = zckpt.ApplyOptions(max_shard_size=450 if version else 300, overwrite=True, threads=1)
        zckpt.apply_delta(self.versions / "0", self.wrong if version == 3 else self.delta, self.out, options=how)


class Computed(Scenario):
    """Elements are computed on their way, over an output of the same job that was made in another manner."""

    job: ComputedJob

    def __init__(self, checkpoint: str, work: str) -> None:
        super().__init__(checkpoint, work)
        self.single = self.job.single
        self.out = self.place / self.job.out

    def prepare(self) -> None:
        self.job.make(self.out, "before")

    def run(self) -> None:
        self.job.make(self.out, "after")

    def fail(self) -> None:
        def full(*_: Any, **__: Any) -> Any:
            raise zckpt.OutputError("there is no room left")

        files.run = full  # type: ignore[assignment]
        self.job.make(self.out, "before")


SCENARIOS: dict[str, type[Scenario]] = {
    kind.__name__: kind
    for kind in (
        Fresh, Directory, Strangers, Foreign, Mounted, Single, SingleFresh, SignedSingle, Merged, MergedBesideTags, Reshard,
        ReshardForeign, Live, Delta, Apply,
    )
}  # fmt: skip
SCENARIOS |= {name: type(name, (Computed,), {"job": job}) for name, job in COMPUTED.items()}


def judged(it: Scenario, old: Contents, new: Contents, nth: object) -> str:
    """OUT is the "old" or the "new"; or "neither": there is nothing that a reader would begin with, and all of one is there."""
    found, old, new = ({n: d for n, d in one.items() if n not in it.late} for one in (contents(it.out), old, new))
    if found == new:
        return "new"
    if found == old:
        return "old"
    name = it.out.name
    if it.single:
        beside = {n: data for n, data in found.items() if n != name}
        whole = [{n: data for n, data in one.items() if n != name} for one in (old, new)]
        assert found.get(name) in (old.get(name), new[name]), (nth, "neither", sorted(found))
        assert f"{name}.zckpt.json" not in beside, (nth, "a manifest of another file", sorted(found))
        assert any(beside.items() <= one.items() for one in whole), (nth, "a mix", sorted(found))
        return "neither"
    own = {name: data for name, data in found.items() if name not in it.staying}
    of_old = all(old.get(name) == data for name, data in own.items())
    of_new = all(new.get(name) == data for name, data in own.items())
    assert of_old or of_new, (nth, "a mix of old and new", sorted(own))
    begins = [name for name in own if commit.turn_of(name) == 1]
    missing = [name for name in (old if of_old and not of_new else new) if name not in found]
    without = [name for name in missing if name != "zckpt.json"]
    assert not (begins and without), (nth, "an index without its files", begins, without)
    everywhere = [p.read_bytes() for p in it.place.rglob("*") if p.is_file()]
    assert all(data in everywhere for data in old.values()), (nth, "something old is lost before the new stands")
    for name, data in it.staying.items():
        assert data in everywhere, (nth, name, "is gone")
    return "neither"


def is_clean(it: Scenario, new: Contents) -> bool:
    """Whether nothing but the output is there."""
    home = it.out.parent
    names = {p.name for p in home.iterdir()}
    own = {it.out.name}
    if it.single:
        own = {name for name in new if name.startswith(it.out.name)}
    return names == own and not [p for p in it.place.rglob("*") if p.name.startswith(".zckpt")]


class Trials:
    def __init__(self, scenario: Scenario, *, exchange: bool, kill: bool) -> None:
        self.it = scenario
        self.exchange = exchange
        self.kill = kill
        scenario.place.mkdir(parents=True)
        scenario.prepare()  # here, so that all that it imports is there before the forks
        self.old = contents(scenario.out)
        assert self.forked(scenario.run) == 0
        self.new = contents(scenario.out)
        assert self.new != self.old and scenario.staying.items() <= self.new.items()
        self.told = {"points": 0, "whole": 0, "old": 0, "new": 0, "neither": 0, "failing": 0}

    def fresh(self) -> None:
        """The place as it is before every run."""
        shutil.rmtree(self.it.place, ignore_errors=True)
        self.it.place.mkdir(parents=True)
        home = self.it.place if self.it.single else self.it.out
        for name, data in self.old.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)

    def watched(self) -> int:
        """One run to its end, with an eye on what is durable when; how many points it has."""
        reader, writer = os.pipe()
        assert self.forked(self.it.run, report=writer) == 0, "something got its name before it was durable"
        os.close(writer)
        with os.fdopen(reader) as text:
            return int(text.read())

    def forked(self, work: Callable[[], None], fatal: int = 0, *, report: int = -1, fails: bool = False) -> int:
        """Does it in a child; its exit status, negative for a signal."""
        child = os.fork()
        if not child:
            status = 3
            try:
                points = Points(self.it.place, fatal, kill=self.kill)
                if fatal or report >= 0 or not self.exchange:
                    points.install(exchange=self.exchange)
                work()
                if report >= 0:
                    os.write(report, str(points.seen).encode())
                status = 4 if points.complaints and report >= 0 else 0
                if status:
                    print("\n".join(points.complaints), file=sys.stderr)
            except zckpt.ZckptError as error:
                status = 5
                if not fails:
                    print(f"{type(error).__name__}: {error}", file=sys.stderr)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def end_at(self, nth: int) -> bool:
        """A run that ends before one point, and a look at what lies there then; whether it came so far."""
        self.fresh()
        code = self.forked(self.it.run, nth, fails=True)
        assert code in (0, -signal.SIGKILL if self.kill else 5), (nth, code)
        if self.kill:
            self.told[judged(self.it, self.old, self.new, nth)] += 1
        else:
            name, found = self.it.out.name, contents(self.it.out)
            without = [
                {n: data for n, data in self.new.items() if n in (name, f"{name}.sig")},
                {name: self.new.get(name)},
            ]
            whole = [self.old, self.new, *(without if self.it.single else [])]
            assert found in whole, (nth, sorted(found))
        if code == 0 and self.kill:
            assert contents(self.it.out) == self.new and is_clean(self.it, self.new), nth
        return code != 0 or not self.kill

    def trial(self, nth: int) -> None:
        """An end before one point: then a run that fails, or none, and the same run again."""
        for failing in (True, False):
            if not self.end_at(nth):
                return
            if failing:
                code = self.forked(self.it.fail, fails=True)
                assert code == 5, (nth, code)
                found = contents(self.it.out)
                assert found in (self.old, self.new), (nth, "a run that failed has left", sorted(found))
                self.told["failing"] += 1
            code = self.forked(self.it.run)
            assert code == 0, (nth, code)
            assert contents(self.it.out) == self.new, (nth, "not the new output", sorted(contents(self.it.out)))
            assert is_clean(self.it, self.new), (nth, sorted(str(p) for p in self.it.place.rglob("*")))
        self.told["whole"] += 1


def serve() -> None:
    """Does what lines of stdin say, each in a fork, which need not import all anew."""
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                run_to_the_end(functools.partial(main, json.loads(line)))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = [file.read().decode() for file in (out, err) if not file.seek(0)]
        print(json.dumps([code, *said]), flush=True)


def main(words: list[str]) -> None:
    checkpoint, work, name, exchange, end, every, *only = words
    batches.LEAST_BYTES = 0
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the test
    trials = Trials(SCENARIOS[name](checkpoint, work), exchange=exchange == "exchange", kill=end == "kill")
    trials.fresh()
    last = trials.told["points"] = trials.watched()
    for nth in map(int, only) if only else range(1, last + 2):  # after the last one, a run ends
        if only or nth in (1, last, last + 1) or (nth - len(name)) % int(every) == 0:
            trials.trial(nth)
        elif IS_WHOLE:
            trials.end_at(nth)
    print(json.dumps(trials.told))


if __name__ == "__main__":
    main(sys.argv[1:]) if sys.argv[1:] else serve()
