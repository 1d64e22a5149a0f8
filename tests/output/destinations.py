"""What every destination of an output does alike: one class of cases, and the places that they are run against.

A place is a path or an address; an output there is written whole from a checkpoint (`convert`), or file by file (`apply_delta`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from address_models import Killed, Model, look, source
from addresses import RECORD, tree
from outputs import contents
from safetensors.torch import load

import zckpt
from zckpt.base.errors import CastError, InconsistentError, OutputError, ZckptError
from zckpt.output import commit, journal
from zckpt.output.address import OutputAddress
from zckpt.storage import output_places, uploads

KINDS = (
    "exchange", "no exchange", "mount", "single", "merged", "memory", "memory single", "s3", "file by file",
    "file by file, memory",
)  # fmt: skip
SHARDS = {"max_shard_size": 500}
STRANGERS = {"notes.md": b"a thesis", "runs/events": b"tensorboard"}


class Place:
    """Where outputs are written.

    Args:
        kind: one of `KINDS`.
        home: a directory of this machine.
        monkeypatch: for what the kind, and failures, need.

    Attributes:
        out: the output's path or address.
        single: whether it is one file.
        remote: whether it is an address.
    """

    def __init__(self, kind: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._home, self._monkeypatch = home, monkeypatch
        self.single, self.merges, self.by_file = "single" in kind, kind == "merged", "file by file" in kind
        self.remote = "memory" in kind or kind == "s3"
        self.above = "s3://bkt" if kind == "s3" else "memory://m" if self.remote else str(home / "place")
        self.out = f"{self.above}/{'w.safetensors' if self.single else 'out'}"
        self._bases: dict[Path, tuple[Path, Path]] = {}
        if not self.remote:
            (home / "place").mkdir()
        if kind == "no exchange":
            monkeypatch.setattr(commit, "exchange", lambda a, b: False)
        elif kind == "mount":
            os.mkdir(self.out)
            how = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", self.out]
            self._is_mounted = not os.geteuid() and not subprocess.run(how, capture_output=True, check=False).returncode
            if not self._is_mounted:  # a mount point by all that zckpt can tell
                monkeypatch.setattr(output_places, "is_mount", lambda path: path == self.out)
        elif self.merges:
            self.put(STRANGERS)

    def close(self) -> None:
        """Takes away what was mounted."""
        if getattr(self, "_is_mounted", False):
            subprocess.run(["umount", self.out], check=True)

    def model(self, seed: int, **options: Any) -> Model:
        """A model that can be written here; another one for each seed."""
        path = self._home / f"model{seed}"
        found = Model(path if path.exists() else source(path, seed), **({} if self.single else {**SHARDS, **options}))
        if self.by_file:
            self.changes(found)
        return found

    def write(self, model: Model, *, overwrite: bool = False, dtype: str | None = None, **more: Any) -> zckpt.Report:
        """Writes a model; `more` of `sign` and `progress`."""
        progress, chosen = more.pop("progress", None), {**model.options, **more, "overwrite": overwrite, "threads": 1}
        if self.by_file:
            base, changes = self.changes(model)
            how = zckpt.ApplyOptions(**chosen)
            return zckpt.apply_delta(base, changes, self.out, dtype=dtype, options=how, progress=progress)
        options = zckpt.Options(**chosen, merge=self.merges)
        return zckpt.convert(model.path, self.out, dtype=dtype or "fp32", options=options, progress=progress)

    def changes(self, model: Model) -> tuple[Path, Path]:
        """Older weights, and the delta that leads from them to the model; its config and tokenizer are those of the older."""
        if model.path not in self._bases:
            base = source(self._home / f"base-{model.path.name}", model.seed + 50)
            for name in ("config.json", "tokenizer.json"):
                shutil.copy(model.path / name, base / name)
            changes = self._home / f"delta-{model.path.name}"
            zckpt.delta(base, model.path, changes, options=zckpt.DeltaOptions(max_shard_size=500))
            self._bases[model.path] = (base, changes)
        return self._bases[model.path]

    # ---- what is there ----------------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """All files, strangers' too; of one file, those that begin with its name."""
        if self.remote:
            found = tree(self.above)
            return {name.removeprefix("out/"): data for name, data in found.items()}
        at = Path(self.above if self.single else self.out)
        return {n: data for n, data in contents(at).items() if ".zckpt/" not in n} if at.exists() else {}

    def put(self, files: dict[str, bytes]) -> None:
        """Somebody else's files."""
        fs, path = fsspec.core.url_to_fs(self.above if self.single else self.out)
        for name, data in files.items():
            fs.makedirs(os.path.dirname(f"{path}/{name}"), exist_ok=True)
            fs.pipe_file(f"{path}/{name}", data)

    def holds(self, *models: Model) -> Model | None:
        """Which of the models a loader finds; None where it finds none."""
        files = {name: data for name, data in self.files().items() if name not in STRANGERS}
        if not self.single:
            return look(files, *models)
        data = files.get("w.safetensors")
        return None if data is None else next(model for model in models if model.is_in(load(data)))

    def is_clean(self) -> bool:
        """Whether nothing of a run is left that is not done."""
        if self.remote:
            fs, path = fsspec.core.url_to_fs(self.above)
            fs.invalidate_cache()
            records = [name for name in fs.find(path) if name.endswith(RECORD)]
            return all(json.loads(fs.cat_file(name))["state"] == "done" for name in records)
        return not list(Path(self.above).glob("**/.*zckpt*"))

    # ---- what goes wrong --------------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, at: str, *, dead: bool = False) -> Iterator[None]:
        """The disk, or the store, fails at the seal or at a step of the commit; `dead`: the process ends there."""
        with self._monkeypatch.context() as patch:
            self._fail(patch, at, Killed() if dead else None)
            yield

    def _fail(self, patch: pytest.MonkeyPatch, at: str, dead: BaseException | None) -> None:
        if not self.remote:
            error = dead or OSError(5, "Input/output error")
            if at == "seal":
                patch.setattr(journal, "_append", _raising(error))
            elif dead:
                patch.setattr(commit.Commit, "carry_out", _raising(error))
            else:
                rename = os.rename
                inside = os.path.join("zckpt", "files")

                def renamed(a: Any, b: Any, **more: Any) -> None:
                    if inside in os.fspath(a):
                        raise error
                    rename(a, b, **more)

                patch.setattr(os, "rename", renamed)
            return
        error = dead or zckpt.RemoteError("the store is gone", file=self.out)
        put, complete = uploads.upload_small, uploads.Upload.complete

        def sent(address: str, data: bytes) -> None:
            if (b'"state": "sealed"' in data) if at == "seal" else not address.endswith(RECORD):
                raise error
            put(address, data)

        patch.setattr(uploads, "upload_small", sent)
        if at == "commit" and self.single:
            patch.setattr(uploads.Upload, "complete", _raising(error))
        else:
            patch.setattr(uploads.Upload, "complete", complete)

    def interrupt(self, model: Model, *, after: int = 1200, **more: Any) -> None:
        """A run that ends in the middle, as if killed: what it had finished is not taken back."""
        with self._monkeypatch.context() as patch:

            def stop(written: int) -> None:
                if written > after:
                    if self.remote:  # it can do nothing more
                        patch.setattr(OutputAddress, "read_record", _raising(Killed()))
                    raise Killed

            with pytest.raises(Killed):
                self.write(model, progress=stop, **more)

    def damage(self, pattern: str = "*-0000?-of-*") -> None:
        """Another byte in the first file of those that an interrupted run had finished, or that are in the output."""
        fs, path = fsspec.core.url_to_fs(self.above)
        fs.invalidate_cache()
        victim = sorted(fs.glob(f"{path}/**/{pattern}"))[0]
        data = fs.cat_file(victim)
        fs.pipe_file(victim, data[:-1] + bytes([data[-1] ^ 1]))


def _raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


class Conformance:
    """The cases. A subclass gives the fixture `place`."""

    def test_fresh(self, place: Place) -> None:
        told: list[int] = []
        model = place.model(1)
        report = place.write(model, progress=told.append)
        assert place.holds(model) is model and place.is_clean()
        there = {name: len(data) for name, data in place.files().items() if name not in STRANGERS}
        assert {**dict(report.files), _manifest(place): there[_manifest(place)]} == there
        assert report.bytes_written == sum(dict(report.files).values()) and report.kept == 0 and not report.already_done
        assert told == sorted(told) and 1600 <= told[-1] <= report.bytes_written

    def test_what_exists_is_refused(self, place: Place) -> None:
        place.write(place.model(1))
        before = place.files()
        if not place.merges:
            with pytest.raises(OutputError, match="already exists"):
                place.write(place.model(2))
            assert place.files() == before and place.is_clean()

    def test_overwrite(self, place: Place) -> None:
        """As it would be in an empty place: nothing old is left."""
        old, new = place.model(1), place.model(2)
        place.write(new)
        wanted = place.files()
        place.write(old, overwrite=True)
        place.write(new, overwrite=True)
        assert _numberless(place.files()) == _numberless(wanted) and place.holds(old, new) is new and place.is_clean()

    def test_other_files_than_before(self, place: Place) -> None:
        """Many become fewer, and fewer become many."""
        old, few, many = place.model(1), place.model(2, max_shard_size=10**6), place.model(3, max_shard_size=900)
        for model in (old, few, many):
            place.write(model, overwrite=True)
            assert place.holds(old, few, many) is model and place.is_clean()

    def test_strangers_files_stay(self, place: Place) -> None:
        old, new = place.model(1), place.model(2)
        place.write(old)
        place.put(STRANGERS)
        place.write(new, overwrite=True)
        assert STRANGERS.items() <= place.files().items() and place.holds(old, new) is new and place.is_clean()

    def test_strangers_that_appear_meanwhile_stay(self, place: Place) -> None:
        old, new = place.model(1), place.model(2)
        place.write(old)
        place.write(new, overwrite=True, progress=lambda written: place.put(STRANGERS))
        assert STRANGERS.items() <= place.files().items() and place.holds(old, new) is new

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.index.json", "adapter_model.safetensors"])
    def test_weights_of_strangers_are_a_refusal(self, name: str, place: Place) -> None:
        """A loader might take them instead."""
        if place.single or place.merges:
            return
        place.write(place.model(1, max_shard_size=10**6))
        place.put({name: b"of another model"})
        before = place.files()
        with pytest.raises(OutputError, match="zckpt did not write") as caught:
            place.write(place.model(2, max_shard_size=10**6), overwrite=True)
        assert repr(name) in str(caught.value) and place.files() == before and place.is_clean()

    def test_a_file_of_a_new_file_s_name_is_a_refusal(self, place: Place) -> None:
        if place.single or place.merges:
            return
        place.write(place.model(1))
        model = place.model(2)
        if place.by_file:
            (place.changes(model)[0] / "merges.txt").write_text("new")
        (model.path / "merges.txt").write_text("new")
        place.put({"merges.txt": b"mine"})
        before = place.files()
        with pytest.raises(OutputError, match="zckpt did not write") as caught:
            place.write(model, overwrite=True)
        assert "merges.txt" in str(caught.value) and place.files() == before

    @pytest.mark.parametrize("name", ["thesis.tex", "zckpt.json"])
    def test_a_directory_that_zckpt_did_not_write_is_not_replaced(self, name: str, place: Place) -> None:
        if place.single or place.merges:
            return
        place.put({name: b"{}"})
        before = place.files()
        with pytest.raises(OutputError, match=r"did not write|cannot be read"):
            place.write(place.model(1), overwrite=True)
        assert place.files() == before and place.is_clean()

    # ---- interrupted ------------------------------------------------------------------------------------------------

    def test_the_same_command_resumes(self, place: Place) -> None:
        model = place.model(1)
        place.interrupt(model)
        assert place.holds(model) is None
        report = place.write(model)
        assert place.holds(model) is model and place.is_clean()
        assert place.single or (report.kept >= 1 and any("resuming an interrupted" in note for note in report.notes))

    def test_a_damaged_file_is_made_again(self, place: Place) -> None:
        model = place.model(1)
        if place.single:
            return
        place.interrupt(model, after=1500)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zckpt.storage.fsspec_io.mark", lambda path: "")
            place.damage("*-0000?-of-*.safetensors")
            report = place.write(model)
        assert place.holds(model) is model and place.is_clean() and report.kept <= 3

    def test_another_job_begins_anew(self, place: Place) -> None:
        old, given_up, new = place.model(1), place.model(2), place.model(3)
        place.write(old)
        place.interrupt(given_up, overwrite=True)
        assert place.holds(old, given_up) is old
        report = place.write(new, overwrite=True)
        assert report.kept == 0 and place.holds(old, given_up, new) is new and place.is_clean()

    def test_a_source_that_was_written_again_is_another_job(self, place: Place) -> None:
        model = place.model(1)
        place.interrupt(model)
        path = (place.changes(model)[0] if place.by_file else model.path) / "model.safetensors"
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        assert place.write(model).kept == 0 and place.holds(model) is model and place.is_clean()

    @pytest.mark.parametrize("other", [False, True])
    def test_a_sealed_run_is_brought_to_an_end(self, other: bool, place: Place) -> None:
        """By the same command, or before another one does its work."""
        old, sealed, new = place.model(1), place.model(2), place.model(3)
        place.write(old)
        with place.failing("commit", dead=True), pytest.raises(Killed):
            place.write(sealed, overwrite=True)
        assert place.holds(old, sealed) in (old, None)
        last = new if other else sealed
        place.write(last, overwrite=True)
        assert place.holds(old, sealed, new) is last and place.is_clean()

    def test_a_sealed_run_is_not_lost_by_a_command_that_fails(self, place: Place) -> None:
        old, sealed, bad = place.model(1), place.model(2), place.model(3)
        place.write(old)
        with place.failing("commit", dead=True), pytest.raises(Killed):
            place.write(sealed, overwrite=True)
        (bad.path / "model.safetensors").write_bytes(
            source(bad.path.with_name("large"), 3, 1e6).joinpath("model.safetensors").read_bytes()
        )
        with pytest.raises(CastError) if not place.by_file else suppress(ZckptError):
            place.write(bad, overwrite=True, dtype="fp16")
        assert place.by_file or place.holds(old, sealed) is (old if place.remote and place.single else sealed)

    # ---- done already -----------------------------------------------------------------------------------------------

    def test_what_this_job_made_is_not_made_again(self, place: Place) -> None:
        model = place.model(1)
        first = place.write(model)
        before = place.files()
        for overwrite in (False, True):
            again = place.write(model, overwrite=overwrite)
            assert again.already_done and again.bytes_written == 0 and again.kept == len(again.files)
            assert sorted(again.files) == sorted(first.files) and place.files() == before and place.is_clean()

    def test_a_damaged_output_is_not_done(self, place: Place) -> None:
        model = place.model(1)
        place.write(model)
        wanted = place.files()
        place.damage("w.safetensors" if place.single else "*-0000?-of-*.safetensors")
        damaged = place.files()
        if not place.merges:
            with pytest.raises(OutputError, match=r"already exists|it is damaged"):
                place.write(model)
            assert place.files() == damaged
        assert not place.write(model, overwrite=True).already_done
        assert _numberless(place.files()) == _numberless(wanted) and place.holds(model) is model and place.is_clean()

    # ---- what fails -------------------------------------------------------------------------------------------------

    def test_a_command_that_would_fail_again_leaves_nothing(self, place: Place) -> None:
        place.write(place.model(1))
        before = place.files()
        large = Model(source(place._home / "large", 3, 1e6), **place.model(1).options)
        if place.by_file:
            (place.changes(large)[0] / "model.safetensors").write_bytes((large.path / "model.safetensors").read_bytes())
        with pytest.raises(InconsistentError if place.by_file else CastError):
            place.write(large, overwrite=True, dtype=None if place.by_file else "fp16")
        assert place.files() == before and (place.is_clean() or place.by_file)

    def test_a_failure_while_files_are_made(self, place: Place) -> None:
        old, new = place.model(1), place.model(2)
        place.write(old)
        before = place.files()

        def full(written: int) -> None:
            if written > 500:
                raise OutputError("the disk is full")

        with pytest.raises(OutputError, match="is full"):
            place.write(new, overwrite=True, progress=full)
        assert place.files() == before
        place.write(new, overwrite=True)
        assert place.holds(old, new) is new and place.is_clean()

    @pytest.mark.parametrize("at", ["seal", "commit"])
    @pytest.mark.parametrize("there", [False, True])
    def test_a_failure_at_the_end(self, there: bool, at: str, place: Place) -> None:
        old, new = place.model(1), place.model(2)
        if there:
            place.write(old)
        before = place.files()
        with place.failing(at), pytest.raises((OutputError, zckpt.RemoteError)):
            place.write(new, overwrite=True)
        if at == "seal" or not place.remote or place.single:
            assert place.files() == before
        else:  # the next run finishes it
            assert place.holds(old, new) is None
        place.write(new, overwrite=True)
        assert place.holds(old, new) is new and place.is_clean()

    def test_of_two_writers_one_stops(self, place: Place) -> None:
        """The second, where there are locks; at an address the first."""
        first, second = place.model(1), place.model(2)
        told: list[ZckptError] = []

        def meanwhile(written: int) -> None:
            if written > 300 and not told:
                told.append(ZckptError("none yet"))
                try:
                    place.write(second, overwrite=True)
                except ZckptError as error:
                    told.append(error)

        with pytest.raises(InconsistentError, match="another run") if place.remote else nullcontext():
            place.write(first, overwrite=True, progress=meanwhile)
        assert place.remote or (
            "another run is writing" in str(told[1]) and f"process {os.getpid()} on" in str(told[1])
        )
        assert place.holds(first, second) is (second if place.remote else first) and place.is_clean()

    # ---- signatures -------------------------------------------------------------------------------------------------

    def test_signatures(self, place: Place, key: Path, accepts: Callable[[Path, Path], bool], tmp_path: Path) -> None:
        """A copy is accepted, also where files of an interrupted run were kept; without a key the old signature goes."""
        if place.merges:
            return
        model, other, name = place.model(1), place.model(2), "w.safetensors" if place.single else ""
        place.interrupt(model, sign=key)
        place.write(model, sign=key)
        assert place.write(model, sign=key).already_done and accepts(_copy(place, tmp_path / "a") / name, key)
        place.write(other, sign=key, overwrite=True)
        assert accepts(_copy(place, tmp_path / "b") / name, key)
        place.write(other, overwrite=True)
        assert not [n for n in place.files() if n.endswith(".sig")] and place.holds(model, other) is other


def _manifest(place: Place) -> str:
    return "w.safetensors.zckpt.json" if place.single else "zckpt.json"


def _copy(place: Place, copy: Path) -> Path:
    copy.mkdir()
    for name, data in place.files().items():
        (copy / name).write_bytes(data)
    return copy


def _numberless(files: dict[str, bytes]) -> list[bytes]:
    """The bytes of weights, which at an address have other names where their own are taken."""
    return sorted(data for name, data in files.items() if not name.endswith("json"))
