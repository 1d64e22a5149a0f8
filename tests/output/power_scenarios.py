"""What writes in place of something else, for the tests of power failures: what it does, and what must be there then."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_points
from durable import Moment, Numbers, Tree, record, trees
from kill_points import Scenario, contents, is_clean, judged
from power_of_more import Carried, MetricsFile, Push, PushThatEnds, WholeSave
from power_trial import Trial

import zckpt
from zckpt import _core
from zckpt.base.errors import ZckptError
from zckpt.jobs import slim
from zckpt.jobs.declarations import SLIM
from zckpt.layouts.save.listing import is_trainers_file
from zckpt.output import commit, durable, local_destination
from zckpt.output.saves import STAGED, SaveStaging, find_displaced
from zckpt.pictures.page import write_page
from zckpt.upkeep import removal

ZERO2 = Path(__file__).parents[2] / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"


class Companions(kill_points.Directory):
    """Small files beside the weights, over others."""

    def prepare(self) -> None:
        self.source = self.place.with_name("with-companions")
        if not self.source.exists():
            shutil.copytree(self.checkpoint, self.source)
            (self.source / "config.json").write_text('{"model_type": "x"}')
            (self.source / "tokenizer.json").write_text('{"version": "1.0"}')
        super().prepare()

    def run(self) -> None:
        self.convert(dtype="bf16", checkpoint=str(self.source))


class Slim(kill_points.Reshard):
    """A save without its optimizer, over one that has it."""

    def run(self) -> None:
        slim.execute(slim.prepare(str(self.source), str(self.out), SLIM.ask(drop=("optimizer",), overwrite=True)))


class ToDcp(kill_points.Scenario):
    """A DCP save over another."""

    def convert(self, *, dtype: str, checkpoint: str = "", **options: Any) -> None:
        chosen = zckpt.Options(**{"threads": 1, "overwrite": True, **options})
        zckpt.to_dcp(checkpoint or self.checkpoint, self.out, dtype=dtype, options=chosen)


class Latecomer(kill_points.Strangers):
    """Another program writes into the output just before it is exchanged, durably: zckpt moves the files into the new one."""

    late = {"late.md": b"just written", "logs/late.txt": b"and this"}
    came = False

    def run(self) -> None:
        own = commit.exchange

        def exchanged(a: str, b: str) -> bool:
            if not self.came:
                self.come()
            return own(a, b)

        commit.exchange = exchanged
        try:
            super().run()
        finally:
            commit.exchange = own

    def come(self) -> None:
        self.came = True
        for name, data in self.late.items():
            path = self.out / name
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            for directory in (path.parent, self.out):
                fd = os.open(directory, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)


class Resumed(kill_points.Directory):
    """An earlier run of the same job was interrupted: what it had finished is not lost."""

    kept: int = 0

    def prepare(self) -> None:
        super().prepare()
        begun = local_destination.LocalDestination.seal

        def ended(*_: Any) -> None:
            raise zckpt.OutputError("the disk is full")

        local_destination.LocalDestination.seal = ended  # type: ignore[method-assign]
        try:
            with contextlib.suppress(ZckptError):
                self.run()
        finally:
            local_destination.LocalDestination.seal = begun  # type: ignore[method-assign]
        journal = self.place / ".out.zckpt" / "journal"
        self.kept = journal.read_text().count('"path"')
        assert self.kept >= 2

    def run(self) -> None:
        chosen = zckpt.Options(**{**kill_points.SMALL, "overwrite": True})
        report = zckpt.convert(self.checkpoint, self.out, dtype="bf16", options=chosen)
        assert report.kept >= self.kept, (report.kept, "finished files were made again")


class Undone(kill_points.Foreign):
    """A step of the commit fails, and all steps are taken back: the output stays what it was."""

    def run(self) -> None:
        rename = os.rename

        def broken(source: Any, target: Any, **more: Any) -> None:
            if self.breaks(os.fspath(source), os.fspath(target)):
                raise OSError(5, "Input/output error")
            rename(source, target, **more)

        os.rename = broken  # type: ignore[assignment]
        try:
            super().run()
        except zckpt.OutputError:
            return
        finally:
            os.rename = rename
        raise AssertionError("nothing failed")

    def breaks(self, source: str, target: str) -> bool:
        return target.endswith("out/model.safetensors.index.json") and "/files/" in source

    def again(self) -> None:
        super().run()


class UndoneSwap(Undone):
    """The same where directories are renamed, one after the other."""

    staying = {"notes.md": b"a thesis"}

    def breaks(self, source: str, target: str) -> bool:
        return target == str(self.out) and source.endswith("/files") and not self.out.exists()


class Output(Trial):
    """A scenario of those that are killed at every call."""

    def __init__(self, it: Scenario, *, exchange: bool) -> None:
        self.it, self.place, self.exchange = it, it.place, exchange
        self.stays, self.fails = isinstance(it, Undone), not isinstance(it, Resumed)

    def prepare(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        self.it.prepare()
        self.old = contents(self.it.out)

    def run(self) -> None:
        with self.exchanging():
            self.it.run()
        self.new = contents(self.it.out)
        if self.stays:
            assert self.new == self.old
            with self.exchanging():
                self.again()
            self.new = contents(self.it.out)

    @contextlib.contextmanager
    def exchanging(self) -> Any:
        own = _core.exchange
        if not self.exchange:
            _core.exchange = lambda a, b: 22
        try:
            yield
        finally:
            _core.exchange = own

    def again(self) -> None:
        getattr(self.it, "again", self.it.run)()

    def judge(self, *, done: bool) -> None:
        found = judged(self.it, self.old, self.new, "a power failure")
        assert not done or found == "new", ("it was said to be done", found)
        everywhere = [path.read_bytes() for path in self.place.rglob("*") if path.is_file()]
        self.came = [name for name, data in self.it.late.items() if data in everywhere]
        assert found != "new" or len(self.came) == len(self.it.late), "what came meanwhile is lost"

    def finish(self, *, failing: bool) -> None:
        with self.exchanging():
            if failing and self.fails:
                try:
                    self.it.fail()
                except ZckptError:
                    pass
                else:
                    raise AssertionError("the other job did not fail")
                found = {name: data for name, data in contents(self.it.out).items() if name not in self.it.late}
                whole = [
                    {name: data for name, data in one.items() if name not in self.it.late}
                    for one in (self.old, self.new)
                ]
                assert found in whole, "a run that failed has left neither"
            self.again()
        found = contents(self.it.out)
        assert all(found.pop(name) == self.it.late[name] for name in self.came), (
            "what came meanwhile is lost",
            sorted(found),
        )
        found, wanted = ({n: d for n, d in one.items() if n not in self.it.late} for one in (found, self.new))
        assert found == wanted, ("not the new output", sorted(found))
        left = sorted(str(path) for path in self.place.rglob(".*"))
        assert is_clean(self.it, self.new), ("something is left", left)


class Saves(Trial):
    """The trainer's: a tag is saved again that `latest` names with another, and an older save is deleted.

    A save that was interrupted has the same tag or another one.
    """

    def __init__(self, work: Path, *, exchange: bool, removes: bool = True) -> None:
        self.place, self.exchange, self.removes = work / "place", exchange, removes

    def _save(self, tag: str, text: str, remove: tuple[str, ...] = ()) -> None:
        own = commit.exchange
        if not self.exchange:
            commit.exchange = lambda a, b: False
        try:
            durable.make_directories(str(self.place / "run"))
            saving = SaveStaging(str(self.place / "run"), tag, is_trainers_file)
            saving.begin()
            try:
                for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                    with open(self.place / "run" / saving.name / STAGED / name, "wb") as file:
                        file.write(text.encode() * 9)
                        file.flush()
                        os.fsync(file.fileno())  # as `engine.move` does
                saving.seal()
                saving.commit()
                saving.replace_file("zero_to_fp32.py", b"a script", 0o755)
                saving.replace_file("latest", tag.encode())
                saving.remove(remove)
            finally:
                saving.end()
        finally:
            commit.exchange = own

    def prepare(self) -> None:
        self.place.mkdir()
        self._save("older", "older")
        self._save("again", "old")
        (self.place / "run" / "again" / "notes.md").write_text("mine")
        self._save("other", "other")

    def run(self) -> None:
        self._save("again", "new", remove=("older",) if self.removes else ())

    def judge(self, *, done: bool) -> None:
        run = self.place / "run"
        kinds = {"again": ("old", "new"), "older": ("older",), "other": ("other",), "next": ("next",)}
        moved = find_displaced(str(run))
        found = {}
        for tag in {*(path.name for path in run.iterdir() if path.is_dir() and not path.name.startswith(".")), *moved}:
            whole = contents(Path(moved.get(tag, run / tag)))
            data = {text for name, text in whole.items() if name != "notes.md"}
            assert len(whole.keys() - {"notes.md"}) == 2 and len(data) == 1, (tag, "is half a save", whole)
            found[tag] = data.pop().decode()[: len(kinds[tag][-1])]
            assert any(
                data == text.encode() * 9 for text in kinds[tag] for data in [whole["mp_rank_00_model_states.pt"]]
            )
        latest = (run / "latest").read_text()
        assert latest in ("other", "again") and {"again", "other"} <= found.keys()
        notes = [path.read_text() for path in run.rglob("notes.md")]
        assert notes and set(notes) == {"mine"}, "a stranger's file is lost"
        if done:
            assert latest == "again" and found["again"] == "new" and ("older" in found) != self.removes, (latest, found)

    def finish(self, *, failing: bool) -> None:
        run = self.place / "run"
        self._save("next" if failing else "again", "next" if failing else "new")
        left = sorted(path.name for path in run.iterdir())
        known = {"again", "other", "older", "latest", "zero_to_fp32.py", *(["next"] if failing else [])}
        assert not set(left) - known, left
        self.judge_finished(run, "next" if failing else "again")

    def judge_finished(self, run: Path, tag: str) -> None:
        """The next save has ended well."""
        assert (run / "latest").read_text() == tag and (run / "again" / "notes.md").read_text() == "mine"
        (run / "latest").write_text("again")
        self.judge(done=False)


class Prune(Trial):
    """Saves are deleted."""

    def __init__(self, work: Path) -> None:
        self.place = work / "place"
        self.names = tuple(f"checkpoint-{n}" for n in (1, 2, 3))

    def prepare(self) -> None:
        for name in self.names:
            shutil.copytree(ZERO2 / "global_step2", self.place / "run" / name)
        self.whole = contents(self.place / "run" / self.names[0])

    def run(self) -> None:
        goes: Any = [
            type("Save", (), {"name": name}) for name in self.names[:2] if (self.place / "run" / name).exists()
        ]
        removal.remove(str(self.place / "run"), goes, needed=lambda going: (), done=lambda name: None)

    def judge(self, *, done: bool) -> None:
        there = [path for path in (self.place / "run").iterdir() if not path.name.startswith(".")]
        assert self.names[2] in {path.name for path in there}
        for path in there:
            assert contents(path) == self.whole, (path.name, "is half a save")
        assert not done or len(there) == 1, "what was said to be deleted is back"

    def finish(self, *, failing: bool) -> None:
        self.run()
        assert os.listdir(self.place / "run") == [self.names[2]]


class Page(Trial):
    """An HTML page over an older one."""

    def __init__(self, work: Path) -> None:
        self.place = work / "place"

    def write(self, text: str) -> None:
        write_page(str(self.place / "page.html"), f"<!doctype html>\n<meta name=generator content=zckpt>{text}")

    def prepare(self) -> None:
        self.place.mkdir()
        self.write("old" * 99)
        self.old = (self.place / "page.html").read_bytes()

    def run(self) -> None:
        self.write("new" * 99)
        self.new = (self.place / "page.html").read_bytes()

    def judge(self, *, done: bool) -> None:
        found = (self.place / "page.html").read_bytes()
        assert found == self.new or (found == self.old and not done), ("no page", found[:60])

    def finish(self, *, failing: bool) -> None:
        self.run()


class Recovered(Output):
    """A run is killed when it has sealed its output; another job's run finishes that first, and then does its own.

    Args:
        it: a scenario.
        exchange: whether names can be exchanged.
        numbers: keeps the inode numbers that the seal names.
        before: the call before which the run was killed, the last of this name: "open" is before its end is recorded.
    """

    def __init__(self, it: Scenario, *, exchange: bool, numbers: Numbers, before: str) -> None:
        super().__init__(it, exchange=exchange)
        self.numbers, self.before = numbers, before

    def prepare(self) -> None:
        super().prepare()
        older = self.old
        moments = record(self.place, super().run)
        at = max(n for n, moment in enumerate(moments) if moment.call == self.before and _is_sealed(moment))
        tree = next(tree for n, what, tree in trees(moments) if n == at and what.startswith("killed"))
        shutil.rmtree(self.place)
        self.place.mkdir()
        self.numbers.build(tree, self.place)
        self.old, self.between, self.earlier = older, self.new, moments[: at + 1]

    def run(self) -> None:
        with self.exchanging():
            self.again()
        self.new = contents(self.it.out)

    def again(self) -> None:
        self.it.convert(dtype="fp32")

    def judge(self, *, done: bool) -> None:
        older, newer = self.old, self.new
        try:
            super().judge(done=done)
        except AssertionError:
            for two in ((older, self.between), (self.between, newer)):
                self.old, self.new = two
                try:
                    super().judge(done=done)
                    break
                except AssertionError as error:
                    failed = error
            else:
                raise failed from None
        finally:
            self.old, self.new = older, newer

    def finish(self, *, failing: bool) -> None:
        self.came: list[str] = []
        older = self.old
        with self.exchanging(), contextlib.suppress(ZckptError):
            if failing:
                self.it.fail()
        found = contents(self.it.out)
        assert not failing or found in (older, self.between, self.new), "a run that failed has left none of the three"
        super().finish(failing=False)


def _is_sealed(moment: Moment) -> bool:
    return any(b'\n{"seal"' in content.data for content in moment.there.files.values())


TRIALS: dict[str, Callable[[str, Path, Numbers], Trial]] = {
    "push": lambda _, work, __: Push(work),
    "push-ends": lambda _, work, __: PushThatEnds(work),
    "carried": lambda _, work, __: Carried(work),
    "metrics": lambda _, work, __: MetricsFile(work),
    "whole-save": lambda _, work, __: WholeSave(work),
    "page": lambda _, work, __: Page(work),
    "prune": lambda _, work, __: Prune(work),
    "saves": lambda _, work, __: Saves(work, exchange=True),
    "saves-none": lambda _, work, __: Saves(work, exchange=False),
    "saves-keeping": lambda _, work, __: Saves(work, exchange=True, removes=False),
    **{
        name + ("" if exchange else "-none"): (
            lambda checkpoint, work, _, kind=kind, exchange=exchange: Output(kind(checkpoint, str(work)), exchange=exchange)
        )
        for kind, exchange, name in (
            (kill_points.Single, False, "single"),
            (kill_points.Fresh, True, "fresh"),
            (Companions, True, "companions"),
            (Resumed, True, "resumed"),
            (Latecomer, True, "latecomer"),
            (kill_points.Foreign, False, "foreign"),
            (Undone, False, "undone"),
            (UndoneSwap, False, "undone-swap"),
            (kill_points.Delta, True, "delta"),
            (kill_points.Apply, True, "apply"),
            (kill_points.Live, True, "live"),
            (Slim, True, "slim"),
            (Companions, False, "companions"),
        )
    },
    **{
        f"recovered-{before}-{'swap' if exchange else 'none'}": (
            lambda checkpoint, work, numbers, kind=kind, exchange=exchange, before=before: Recovered(
                kind(checkpoint, str(work)), exchange=exchange, numbers=numbers, before=before
            )
        )
        for kind, exchange, before in (
            (Companions, True, "rename"), (kill_points.Foreign, False, "rename"), (kill_points.Foreign, False, "unlink"),
        )
    },
}  # fmt: skip
"""Name -> what makes it, of a checkpoint, a directory to work in, and inode numbers; "-none": where names cannot be exchanged."""
MORE: dict[str, Callable[[str, Path, Numbers], Trial]] = {
    name: (
        lambda checkpoint, work, _, kind=kind, exchange=exchange: Output(kind(checkpoint, str(work)), exchange=exchange)
    )
    for kind, exchange, name in (
        (kill_points.Mounted, False, "mounted"),
        (kill_points.SignedSingle, False, "signed"),
        (kill_points.SingleFresh, False, "single-fresh"),
        (kill_points.Strangers, True, "strangers"),
        (kill_points.Strangers, False, "strangers-none"),
        (kill_points.Merged, True, "merged"),
        (kill_points.Merged, False, "merged-none"),
        (kill_points.MergedBesideTags, False, "merged-beside-tags"),
        (kill_points.Reshard, True, "reshard"),
        (kill_points.Reshard, False, "reshard-none"),
        (kill_points.ReshardForeign, False, "reshard-foreign"),
        (ToDcp, True, "to-dcp"),
    )
}
"""For `make proofs`."""


class Power:
    """The power failures of one trial."""

    def __init__(self, trial: Trial, numbers: Numbers, sites_of: Callable[..., Any]) -> None:
        self.trial, self.numbers = trial, numbers
        with numbers.told():
            trial.prepare()
            self.moments = [*trial.earlier, *record(trial.place, trial.run, sites_of, numbers.old)]
        self.sites = {site for moment in self.moments for site in moment.sites}
        self.known: dict[tuple[Tree, bool], int] = {}

    def distinct(self, without: object = None, *, pairs: bool = False) -> dict[tuple[Tree, bool], str]:
        """(tree, whether the run has said that it is done) -> where it comes from."""
        last = len(self.moments) - 1
        found: dict[tuple[Tree, bool], str] = {}
        for index, what, tree in trees(self.moments, without, pairs=pairs):
            found.setdefault((tree, index == last), f"moment {index}: {what}")
        return found

    def look(self, *, both: bool, pairs: bool) -> int:
        """Judges all trees, and what comes after them, or after every third one; returns how many there are."""
        found = self.distinct(pairs=pairs)
        for number, ((tree, done), what) in enumerate(found.items()):
            for failing in (False, True) if both else (number % 2 == 0,):
                self.one(tree, what, done=done, failing=failing, goes_on=both or number % 3 == 0)
        return len(found)

    def misses(self, site: object) -> str:
        """What goes wrong without the syncs of a site; "" if nothing does."""
        usual = self.distinct()
        new = [(key, what) for key, what in self.distinct(site).items() if key not in usual]
        for failing in (False, True):
            for (tree, done), what in new:
                try:
                    self.one(tree, what, done=done, failing=failing)
                except (AssertionError, OSError, ZckptError) as error:
                    return f"{what}: {error}"
        return ""

    def one(self, tree: Tree, what: str, *, done: bool, failing: bool, goes_on: bool = True) -> None:
        """Makes a tree, and judges it and, if a run `goes_on`, what comes after it."""
        shutil.rmtree(self.trial.place, ignore_errors=True)
        self.trial.place.mkdir()
        with self.numbers.told():
            self.numbers.build(tree, self.trial.place)
            try:
                self.trial.judge(done=done)
                if goes_on:
                    self.trial.finish(failing=failing)
            except (AssertionError, OSError, ZckptError) as error:
                error.add_note(f"{what}, then {'a run that fails, and ' if failing else ''}the same run")
                raise
