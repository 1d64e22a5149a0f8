"""Outputs at addresses, with every request failing in turn: a reader finds the old output, the new one, or plainly none.

A request is refused, or carried out with its answer lost, or the last one of a process that was killed. After each of these a
fresh reader looks; then the same command must end well, and in another branch a command that fails must lose nothing.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import proofs
import pytest
from address_models import SHAPES, Killed, Model, fails, look, source, three_models
from address_requests import Requests
from addresses import RECORD, tree
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hangs import HANG_S
from s3_server import S3Server

import zckpt
from zckpt.base.errors import CorruptError, InconsistentError, OutputError, UnsafeError, ZckptError
from zckpt.storage import uploads

pytestmark = pytest.mark.usefixtures("impatient")


MODES = ("killed", "refused", "lost", "down")


def failures(count: int) -> Iterator[tuple[int, str]]:
    """Which requests fail, and how: all in all modes in `make proofs`; otherwise the modes take turns."""
    for nth in range(1, count + 1):
        for mode in MODES if proofs.IS_WHOLE else [MODES[nth % 4]]:
            yield nth, mode


@proofs.MORE
@pytest.mark.parametrize("shape", SHAPES)
def test_every_request_of_a_run(shape: str, requests: Requests, tmp_path: Path) -> None:
    old, new, bad = three_models(tmp_path, shape)
    store, out = MemoryFileSystem.store, "memory://m/out"
    if old is not None:
        old.write(out)
    before, beginning = tree(out), dict(store)
    requests.begin(0, "")
    new.write(out)
    count, after = requests.count, tree(out)
    assert count > 15 and look(after, new) is new
    known = [model for model in (old, new) if model is not None]
    outcomes: set[Model | None] = set()

    def begin(state: dict[str, Any]) -> None:
        requests.begin(0, "")
        store.clear()
        store.update(state)

    for nth, mode in failures(count):
        begin(beginning)
        requests.begin(nth, mode)
        try:
            new.write(out)
            failed = False
        except (ZckptError, Killed):
            failed = True
        finally:
            requests.begin(0, "")
        state = dict(store)
        files = tree(out)
        found = look(files, *known)
        outcomes.add(found)
        if not failed:
            assert files == after
        elif mode == "refused" and found is not new:
            assert files == before and (f"/m/out/.{RECORD}" in store) == (old is not None), "something was left"

        assert new.write(out).tensors == 4
        assert tree(out) == after, "the same command does not end with the new output"

        begin(state)
        fails(bad, out)
        assert look(tree(out), *known) in known or (old is None and tree(out) == {}), "a run that failed lost something"
        if nth % 5 == 0:
            begin(state)
            assert bad.write(out).tensors == 4
            assert look(tree(out), bad) is bad and len(tree(out)) <= len(after), "something was left"
    assert outcomes >= {new} and (old is None or old in outcomes)


# ---- one file --------------------------------------------------------------------------------------------------------


@proofs.MORE
@pytest.mark.parametrize("there", [False, True])
def test_every_request_of_one_file(there: bool, requests: Requests, tmp_path: Path) -> None:
    """A file and its manifest beside it, which must not vouch for another file."""
    old, new = Model(source(tmp_path / "a", 1)), Model(source(tmp_path / "b", 2))
    store, home, out = MemoryFileSystem.store, "memory://m/out", "memory://m/out/w.safetensors"
    if there:
        old.write(out)
    beginning, before = dict(store), tree(home)
    requests.begin(0, "")
    new.write(out)
    count, after = requests.count, tree(home)
    outcomes: set[str] = set()
    for nth, mode in failures(count):
        store.clear()
        store.update(beginning)
        requests.begin(nth, mode)
        with contextlib.suppress(ZckptError, Killed):
            new.write(out)
        requests.begin(0, "")
        state, now = dict(store), tree(home)
        found = now.get("w.safetensors")
        assert found in (before.get("w.safetensors"), after["w.safetensors"])
        if "w.safetensors.zckpt.json" in now:
            assert now in (after, before), "a manifest of another file"
        outcomes.add("new" if found == after["w.safetensors"] else "old")
        assert new.write(out).tensors == 4 and tree(home) == after
        store.clear()
        store.update(state)
        fails(Model(source(tmp_path / f"c{nth}{mode}", 3, 1e6)), out)
        assert tree(home) in (before, after), "a run that failed lost something"
    assert outcomes == {"old", "new"}


# ---- the real loader -------------------------------------------------------------------------------------------------

LOADS = """
import sys
from pathlib import Path
import torch, zckpt
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from zckpt.jobs.options import Options

work, models = Path(sys.argv[1]), {}
for seed, hidden in ((1, 8), (2, 16)):
    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=hidden, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
    models[seed] = LlamaForCausalLM(config)
    models[seed].save_pretrained(work / str(seed))

number = 0
def found():
    global number
    number += 1
    place = work / f"state{number}"
    place.mkdir()
    for name, file in MemoryFileSystem.store.items():
        (place / name.rpartition("/")[2]).write_bytes(file.getvalue())
    try:
        model, told = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    except (OSError, ValueError) as error:
        assert "config.json" not in {f.name for f in place.iterdir()}, error
        return 0
    assert not any(told.values()), told
    have = dict(model.named_parameters())
    (seed,) = (seed for seed, it in models.items() if it.config.hidden_size == model.config.hidden_size)
    assert all(torch.equal(have[name], value) for name, value in models[seed].named_parameters())
    return seed

seen = []
def watched(real):
    def call(*args, **more):
        answer = real(*args, **more)
        seen.append(found())
        return answer
    return call

def write(seed, size):
    options = Options(max_shard_size=size, overwrite=True)
    zckpt.convert(work / str(seed), "memory://m/out", options=options)

pipe, remove = MemoryFileSystem.pipe_file, MemoryFileSystem.rm_file
for first, second in ((4000, 4000), ("5GB", 4000), (4000, "5GB"), ("5GB", "5GB")):
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pipe_file, MemoryFileSystem.rm_file = pipe, remove
    write(1, first)
    seen.clear()
    MemoryFileSystem.pipe_file, MemoryFileSystem.rm_file = watched(pipe), watched(remove)
    write(2, second)
    MemoryFileSystem.pipe_file, MemoryFileSystem.rm_file = pipe, remove
    assert set(seen) == {0, 1, 2} and sorted(seen, key=(1, 0, 2).index) == seen, seen
    print(seen)
"""


def test_transformers_loads_the_old_model_then_none_then_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOADS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[1, 1") == 4


# ---- done already, refused, two at a time ----------------------------------------------------------------------------


def test_the_note_of_what_was_done_is_no_stranger(root: str, tmp_path: Path) -> None:
    model = Model(source(tmp_path / "a", 1), max_shard_size=900)
    model.write(f"{root}/out")
    found = zckpt.verify(model.path, f"{root}/out")
    assert found.ok and not any("manifest" in note for note in found.notes)


def test_of_two_runs_at_one_address_the_first_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Model(source(tmp_path / name, seed), max_shard_size=900) for name, seed in (("a", 1), ("b", 2)))
    out, real, turns = "memory://m/out", uploads.Upload.complete, []

    def meanwhile(self: uploads.Upload) -> None:
        real(self)
        if self.address.endswith(".safetensors") and not turns:
            turns.append(second)
            second.write(out)

    monkeypatch.setattr(uploads.Upload, "complete", meanwhile)
    with pytest.raises(InconsistentError, match="another run"):
        first.write(out)
    assert look(tree(out), second) is second and len(tree(out)) == 6


def test_a_large_tokenizer_is_put_in_place_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted run has sealed is read as any file of strangers is, and tokenizers have tens of megabytes."""
    model, out = Model(source(tmp_path / "a", 1), max_shard_size=900), "memory://m/out"
    text = json.dumps({"seed": 1, "vocab": {f"{{[{i}]}},": i for i in range(300_000)}})
    (tmp_path / "a" / "tokenizer.json").write_text(text)
    real = uploads.upload_small

    def killed(address: str, data: bytes) -> None:
        if address.endswith(".index.json"):
            raise Killed
        real(address, data)

    monkeypatch.setattr(uploads, "upload_small", killed)
    with pytest.raises(Killed):
        model.write(out)
    monkeypatch.setattr(uploads, "upload_small", real)
    assert look(tree(out)) is None
    assert model.write(out).already_done and look(tree(out), model) is model


@pytest.mark.parametrize(
    "text", [b"{}", b"nonsense", b'{"job": "", "run": "", "state": "sealed", "last": null, "names": ["../x"]}']
)
def test_a_record_of_somebody_else(text: bytes, tmp_path: Path) -> None:
    fs, model = fsspec.filesystem("memory"), Model(source(tmp_path / "a", 1))
    fs.pipe_file(f"/m/out/.{RECORD}", text)
    fs.pipe_file("/m/x", b"mine")
    with pytest.raises((OutputError, UnsafeError, CorruptError)):
        model.write("memory://m/out")
    assert tree("memory://m") == {"x": b"mine"}


# ---- single files ----------------------------------------------------------------------------------------------------


def test_the_first_error_is_the_one_that_is_told(once: S3Server) -> None:
    def lose() -> None:
        with uploads.Upload("s3://bkt/x", 100) as upload:
            upload.write(b"x")
            once.failing = lambda method, path, query: True
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lose()


def test_a_kind_of_store_with_renames(tmp_path: Path) -> None:
    """The local file system in the guise of one on another machine, which shows files while they are written."""

    class Renaming(LocalFileSystem):
        protocol = "dbfs"

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(str(path).removeprefix("dbfs://"))

    fsspec.register_implementation("dbfs", Renaming, clobber=True)
    (tmp_path / "there").mkdir()
    place = f"dbfs://{tmp_path}/there/file"
    uploads.upload_small(place, b"old")
    with pytest.raises(ZeroDivisionError), uploads.Upload(place, 3) as upload:
        upload.write(b"new")
        raise ZeroDivisionError
    assert [file.read_bytes() for file in (tmp_path / "there").iterdir()] == [b"old"]
    with uploads.Upload(place, 3) as upload:
        upload.write(b"new")
        assert (tmp_path / "there/file").read_bytes() == b"old"
    assert [file.read_bytes() for file in (tmp_path / "there").iterdir()] == [b"new"]
