"""Outputs at addresses, with every request failing in turn: a reader finds the old output, the new one, or plainly none.

A request is refused, or carried out with its answer lost, or the last one of a process that was killed. After each of these a
fresh reader looks; then the same command must end well, and in another branch a command that fails must lose nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from addresses import RECORD, tree
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import S3Server
from safetensors.torch import load, save_file

import zckpt
from zckpt.base.errors import CastError, CorruptError, InconsistentError, OutputError, UnsafeError, ZckptError
from zckpt.jobs.options import Options
from zckpt.storage import fsspec_io, uploads

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""

INDEX_FIRST = (FILES[1], FILES[0], FILES[3], FILES[2])
"""As vLLM does, which loads no file that an index does not name."""

Tree = dict[str, bytes]


class Killed(BaseException):
    """What nobody may handle."""


class Requests:
    """Of fsspec's memory: counts them, and does something at one of them."""

    def __init__(self) -> None:
        self.begin(0, "")

    def begin(self, nth: int, mode: str) -> None:
        self.nth, self.mode, self.count = nth, mode, 0

    def __call__(self, real: Callable[[], Any]) -> Any:
        self.count += 1
        if self.mode == "killed" and self.count >= self.nth:
            raise Killed
        if self.mode == "down" and self.count >= self.nth:
            raise ConnectionError("down")
        if self.mode == "refused" and self.count == self.nth:
            raise ConnectionError("refused")
        answer = real()
        if self.mode == "lost" and self.count == self.nth:
            raise ConnectionError("the answer was lost")
        return answer


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    asked = Requests()
    for name in ("info", "ls", "find", "pipe_file", "rm_file", "cat_file", "_open"):
        real = getattr(MemoryFileSystem, name)

        def call(self: Any, *args: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            if asked.mode == "inside":
                return real(self, *args, **more)
            mode = asked.mode

            def whole() -> Any:
                asked.mode = "inside"  # what fsspec makes of one request is not another one
                try:
                    return real(self, *args, **more)
                finally:
                    asked.mode = mode

            return asked(whole)

        monkeypatch.setattr(MemoryFileSystem, name, call)
    return asked


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_io, "_TRIES", 1)


def source(place: Path, seed: int, scale: float = 1.0) -> Path:
    """Weights with a config and a tokenizer, all different for each seed."""
    place.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer{i}.weight": scale * torch.randn(10, 10, generator=generator) for i in range(4)}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}))
    (place / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    return place


class Model:
    """What a command writes: the shape of the output, and what loaders then find."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.tensors = load((path / "model.safetensors").read_bytes())
        self.seed = json.loads((path / "config.json").read_text())["seed"]

    def write(self, out: str, *, overwrite: bool = True) -> zckpt.Report:
        return zckpt.convert(self.path, out, options=Options(**self.options, overwrite=overwrite))

    def is_in(self, found: dict[str, torch.Tensor]) -> bool:
        return found.keys() == self.tensors.keys() and all(torch.equal(found[n], t) for n, t in self.tensors.items())


def loaded(files: Tree, order: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
    """The weights that a loader takes; None where there are none to take. What is named and missing fails."""
    name = next((name for name in order if name in files), None)
    if name is None:
        return None
    names = set(json.loads(files[name])["weight_map"].values()) if name.endswith(".json") else {name}
    tensors: dict[str, torch.Tensor] = {}
    for shard in names:
        tensors |= load(files[shard]) if shard.endswith(".safetensors") else torch.load(io.BytesIO(files[shard]))
    return tensors


def look(files: Tree, *models: Model) -> Model | None:
    """Which of the models a directory holds, for each kind of loader; None where none loads. A mix fails."""
    found: set[Model | None] = set()
    for order in (FILES, INDEX_FIRST):
        tensors = loaded(files, order)
        assert tensors is None or any(model.is_in(tensors) for model in models), "a mix of weights"
        if tensors is None or "config.json" not in files:
            found.add(None)
            continue
        (model,) = (model for model in models if model.is_in(tensors))
        found.add(model)
        for name in ("config.json", "tokenizer.json"):
            assert json.loads(files[name])["seed"] == model.seed, f"weights of one model with the {name} of another"
    manifest = json.loads(files.get("zckpt.json", b'{"files": []}'))["files"]
    if manifest and all(zlib.crc32(files.get(f["path"], b"")) == int(f["crc32"], 16) for f in manifest):
        (model,) = found  # what passes `verify` is what loaders take
        assert model is not None
        assert {f["path"] for f in manifest} <= set(files)
    return found.pop() if len(found) == 1 else None


SHAPES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "nothing to shards": (None, {"max_shard_size": 900}),
    "nothing to one": (None, {}),
    "shards to as many": ({"max_shard_size": 900}, {"max_shard_size": 900}),
    "shards to fewer": ({"max_shard_size": 500}, {"max_shard_size": 900}),
    "one to shards": ({}, {"max_shard_size": 900}),
    "shards to one": ({"max_shard_size": 900}, {}),
    "one to one": ({}, {}),
    "bin to safetensors": ({"format": "bin", "max_shard_size": 900}, {"max_shard_size": 900}),
    "safetensors to bin": ({"max_shard_size": 900}, {"format": "bin"}),
}


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model | None, Model, Model]:
    """The old one, the new one, and one that cannot be written as fp16."""
    old, new = SHAPES[request.param]
    a = None if old is None else Model(source(tmp_path / "a", 1), **old)
    return a, Model(source(tmp_path / "b", 2), **new), Model(source(tmp_path / "c", 3, 1e6), **new)


def fails(model: Model, out: str) -> None:
    with pytest.raises(CastError):
        zckpt.convert(model.path, out, dtype="fp16", options=Options(**model.options, overwrite=True))


@pytest.mark.parametrize("mode", ["killed", "refused", "lost", "down"])
@pytest.mark.parametrize("models", SHAPES, indirect=True)
def test_every_request_of_a_run(models: tuple[Model | None, Model, Model], mode: str, requests: Requests) -> None:
    old, new, bad = models
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

    for nth in range(1, count + 1):
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


@pytest.fixture
def once(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server whose client tries nothing a second time."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    fsspec.filesystem("s3").clear_instance_cache()
    yield s3
    s3.failing = s3.losing = lambda method, path, query: False
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    ("models", "mode"), [("shards to as many", "lost"), ("one to one", "down")], indirect=["models"]
)
def test_every_change_at_a_real_server(models: tuple[Model, Model, Model], mode: str, once: S3Server) -> None:
    """Requests that change something; of the others the test above knows."""
    old, new, bad = models
    nth, count, outcomes = 0, 0, set[Model | None]()

    def at(method: str, path: str, query: str) -> bool:
        nonlocal count
        count += method != "GET" and method != "HEAD"
        return (count == nth and method not in ("GET", "HEAD")) or (mode == "down" and count >= nth)

    while count >= nth:
        nth, count, out = nth + 1, 0, f"s3://bkt/{nth + 1}"
        old.write(out)
        setattr(once, "losing" if mode == "lost" else "failing", at)
        succeeded = False
        with contextlib.suppress(ZckptError):
            new.write(out)
            succeeded = True
        once.failing = once.losing = lambda method, path, query: False
        found = look(tree(out), old, new)
        outcomes.add(found)
        assert found is new or not succeeded
        if nth % 2:
            fails(bad, out)
            assert look(tree(out), old, new) in (old, new), "a run that failed lost something"
        else:
            assert new.write(out).tensors == 4 and look(tree(out), new) is new
    assert nth > 5 and outcomes >= {old, new}


# ---- one file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["killed", "refused", "lost", "down"])
@pytest.mark.parametrize("there", [False, True])
def test_every_request_of_one_file(there: bool, mode: str, requests: Requests, tmp_path: Path) -> None:
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
    for nth in range(1, count + 1):
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
        fails(Model(source(tmp_path / f"c{nth}", 3, 1e6)), out)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("[1, 1") == 4


# ---- done already, refused, two at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out", ["out", "w.safetensors"])
def test_what_this_job_made_is_not_made_again(out: str, overwrite: bool, root: str, tmp_path: Path) -> None:
    model, address = Model(source(tmp_path / "a", 1), max_shard_size=900), f"{root}/{out}"
    first = model.write(address, overwrite=overwrite)
    before = fsspec.filesystem(root[: root.index(":")]).info(f"{address}{'/config.json' if out == 'out' else ''}")
    again = model.write(address, overwrite=overwrite)
    assert sorted(again.files) == sorted(first.files) and again.kept == len(first.files)
    assert again.already_done and again.bytes_written == 0 and not first.already_done
    after = fsspec.filesystem(root[: root.index(":")]).info(f"{address}{'/config.json' if out == 'out' else ''}")
    assert before == after, "something was written"

    other = Model(source(tmp_path / "b", 2), max_shard_size=900)
    with pytest.raises(OutputError, match="is there already"):
        other.write(address, overwrite=False)
    name = next(name for name in tree(address) if name.endswith("safetensors") or not name)
    path = f"{address}/{name}".rstrip("/")
    fsspec.filesystem(root[: root.index(":")]).pipe_file(path, b"damage")
    with pytest.raises(OutputError, match="is there already"):
        model.write(address, overwrite=False)
    assert not model.write(address).already_done
    assert look({**tree(address), **({"model.safetensors": tree(address)[""], "config.json": b'{"seed": 1}',
        "tokenizer.json": b'{"seed": 1}'} if "" in tree(address) else {})}, model) is model  # fmt: skip


def test_what_zckpt_did_not_write_stays_or_is_a_refusal(root: str, tmp_path: Path) -> None:
    fs, model = fsspec.filesystem(root[: root.index(":")]), Model(source(tmp_path / "a", 1), max_shard_size=900)
    other, out = Model(source(tmp_path / "b", 2), max_shard_size=900), f"{root}/out"
    fs.pipe_file(f"{out}/thesis.tex", b"years")
    with pytest.raises(OutputError, match=r"did not write.*thesis\.tex"):
        model.write(out)
    assert tree(out) == {"thesis.tex": b"years"}
    fs.rm_file(f"{out}/thesis.tex")
    model.write(out)
    fs.pipe_file(f"{out}/notes.md", b"mine")
    fs.pipe_file(f"{out}/sub/model.safetensors", b"mine")
    other.write(out)
    now = tree(out)
    assert now.pop("notes.md") == now.pop("sub/model.safetensors") == b"mine" and look(now, other) is other
    for name in ("model.safetensors", "pytorch_model.bin.index.json", "merges.txt"):
        (tmp_path / "a" / "merges.txt").write_text("m")
        fs.pipe_file(f"{out}/{name}", b"mine")
        before = tree(out)
        with pytest.raises(OutputError, match="zckpt did not write") as error:
            model.write(out)
        assert name in str(error.value) and tree(out) == before
        fs.rm_file(f"{out}/{name}")


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
    real = uploads.put

    def killed(address: str, data: bytes) -> None:
        if address.endswith(".index.json"):
            raise Killed
        real(address, data)

    monkeypatch.setattr(uploads, "put", killed)
    with pytest.raises(Killed):
        model.write(out)
    monkeypatch.setattr(uploads, "put", real)
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
    uploads.put(place, b"old")
    with pytest.raises(ZeroDivisionError), uploads.Upload(place, 3) as upload:
        upload.write(b"new")
        raise ZeroDivisionError
    assert [file.read_bytes() for file in (tmp_path / "there").iterdir()] == [b"old"]
    with uploads.Upload(place, 3) as upload:
        upload.write(b"new")
        assert (tmp_path / "there/file").read_bytes() == b"old"
    assert [file.read_bytes() for file in (tmp_path / "there").iterdir()] == [b"new"]
