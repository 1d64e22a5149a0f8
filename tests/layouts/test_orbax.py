"""What Orbax saves: real saves in each of its forms, and forms of Zarr and OCDBT that it does not write by itself."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.containers import ocdbt
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog
from zckpt.layouts.weights_alone import unpacking
from zckpt.layouts.weights_alone.orbax import is_state
from zckpt.storage.location import locate

HOME = Path(__file__).parents[2] / "fixtures" / "orbax"
TRUTH = load_file(HOME / "truth.safetensors")
KERNEL = "params.params.decoder.layers.wi.kernel"


def check(path: Path, wanted: dict[str, torch.Tensor] = TRUTH) -> None:
    with zckpt.open_checkpoint(path, framework="pt") as found:
        assert {*found} == {*wanted}
        assert all(same_bits(found[name], tensor) for name, tensor in wanted.items())


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(HOME / getattr(request, "param", "zarr2"), tmp_path / "run"))


@pytest.mark.parametrize("form", ["zarr2", "zarr3", "ocdbt", "ocdbt3", "parts", "bare", "bare_ocdbt", "steps", "two"])
def test_every_element(form: str) -> None:
    check(HOME / form)


def test_what_a_path_means() -> None:
    """A manager's directory is its newest step; of several items the weights; a file deep inside is its save."""
    facts = inspect_checkpoint(HOME / "steps")
    assert facts.catalog is not None and facts.catalog.source.global_steps == 10
    assert "opt_state.count" in "".join(facts.lines())
    assert open_catalog(locate(HOME / "steps"), Reading(tag="9")).catalog.source.global_steps == 9
    check(HOME / "items", {name.removeprefix("params."): tensor for name, tensor in TRUTH.items()})
    for path in ("items/3/state", "ocdbt/d", "ocdbt/manifest.ocdbt", f"zarr2/{KERNEL}", f"zarr3/{KERNEL}/c/0/0/0"):
        check(HOME / path)


@pytest.mark.parametrize("form", ["zarr2", "zarr3", "ocdbt", "bare"])
def test_where_the_bytes_are(form: str) -> None:
    (save,) = zckpt.du(HOME / form).saves
    whole = sum(tensor.nbytes for tensor in TRUTH.values())
    assert whole / 4 < save.classes["weights"] and save.classes["masters"] == 0
    assert save.classes["moments"] > 0 or "ocdbt" in form  # small values lie in nodes of the tree
    assert sum(save.classes.values()) == save.nbytes


def test_a_module_may_be_called_optimizer() -> None:
    states = ("opt_state.0.mu.w", "optimizer.opt_state.0.nu.w", "optimizer.0.mu.w", "state.optimizer.count", "optimizer.step",
              "optimizer.state.param_states.w", "params.opt_state.w")  # fmt: skip
    weights = (
        "optimizer.dense.kernel",
        "params.optimizer.layers_0.kernel",
        "params.decoder.optimizer.mu",
        "optimizers.mu",
    )
    assert [*map(is_state, (*states, *weights))] == [True] * len(states) + [False] * len(weights)


@pytest.mark.parametrize("form", ["zarr2", "ocdbt3"])
def test_outputs_are_verified(form: str, tmp_path: Path) -> None:
    zckpt.convert(HOME / form, tmp_path / "out")
    assert all(
        same_bits(tensor, TRUTH[name].float()) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    )
    verified = zckpt.verify(HOME / form, tmp_path / "out")
    assert verified.ok and verified.deletable and verified.deletable[0], verified


def test_large_chunks_are_unpacked_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chunks that are read in parts; a place in the temporary file is used again."""
    monkeypatch.setattr(unpacking, "_IN_MEMORY", 0)
    check(HOME / "zarr2")
    zckpt.convert(HOME / "ocdbt", tmp_path / "out")
    assert all(
        same_bits(tensor, TRUTH[name].float()) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    )
    space = unpacking.UnpackedChunks()
    first, second = space.take(100), space.take(50)
    space.give_back(first)
    assert second == (100, 50) and space.take(80) == first and space.take(1) == (150, 1)


def test_what_is_missing_is_named(run: Path) -> None:
    """A chunk, which Zarr takes for zeros; an array; what the save was written last with."""
    chunk = run / KERNEL / "1.0.1"
    data = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(IncompleteError, match=rf"{KERNEL}/1\.0\.1"):
        zckpt.open_checkpoint(run)
    with pytest.raises(IncompleteError, match=r"1\.0\.1"):
        open_catalog(locate(run), Reading(allow_unknown_layout=True))
    chunk.write_bytes(data)
    (run / "params.params.list.0" / ".zarray").rename(run / "saved")
    with pytest.raises(IncompleteError, match=r"list\.0"):
        zckpt.open_checkpoint(run)
    (run / "saved").rename(run / "params.params.list.0" / ".zarray")
    (run / "other").mkdir()
    shutil.copy(run / "params.params.list.0/.zarray", run / "other/.zarray")
    with pytest.raises(InconsistentError, match="other"):
        zckpt.open_checkpoint(run)


@pytest.mark.parametrize("run", ["ocdbt"], indirect=True)
def test_a_data_file_is_missing(run: Path) -> None:
    for file in sorted(run.glob("**/d/*")):
        data = file.read_bytes()
        file.unlink()
        try:
            check(run)
        except IncompleteError as error:
            assert file.name in str(error)
        file.write_bytes(data)
    (run / "manifest.ocdbt").unlink()
    with pytest.raises(IncompleteError):
        zckpt.open_checkpoint(run)


def test_saves_that_were_not_finished(run: Path) -> None:
    shutil.copytree(run, run.parent / "more/9.orbax-checkpoint-tmp-3")
    with pytest.raises(IncompleteError, match="not finished"):
        zckpt.open_checkpoint(run.parent / "more/9.orbax-checkpoint-tmp-3")
    with pytest.raises(ZckptError, match="not finished"):
        zckpt.open_checkpoint(run.parent / "more")
    shutil.copytree(HOME / "steps/9", run.parent / "more/9")
    check(run.parent / "more")
    (run / "commit_success.txt").unlink()
    check(run)
    said = json.loads((run / "_CHECKPOINT_METADATA").read_text())
    (run / "_CHECKPOINT_METADATA").write_text(json.dumps({**said, "commit_timestamp_nsecs": None}))
    with pytest.raises(IncompleteError, match="not finished"):
        zckpt.open_checkpoint(run)


def edit(file: Path, how: Callable[[dict[str, object]], object]) -> None:
    said = json.loads(file.read_text())
    how(said)
    file.write_text(json.dumps(said))


def test_zeros_that_were_not_stored(run: Path, tmp_path: Path) -> None:
    """Older saves leave out chunks of zeros; in directories nothing tells them from lost ones, so they are taken if asked for."""
    edit(run / "_METADATA", lambda said: said.pop("store_array_data_equal_to_fill_value"))
    (run / "params.params.decoder.zero/1.1").unlink()
    with pytest.raises(IncompleteError, match=r"zero/1\.1"):
        zckpt.open_checkpoint(run)
    catalog = open_catalog(locate(run), Reading(allow_unknown_layout=True)).catalog
    assert "zero/1.1" in "".join(catalog.source.notes)
    zckpt.convert(run, tmp_path / "out", allow_unknown_layout=True)
    assert load_file(tmp_path / "out/model.safetensors")["params.params.decoder.zero"].equal(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (lambda said: said.update(shape=[12, 3]), CorruptError),
        (lambda said: said.update(shape=[1 << 40, 3, 40]), IncompleteError),
        (lambda said: said.update(shape=[1 << 62, 1 << 62, 40]), CorruptError),
        (lambda said: said.update(shape=[-12, 3, 40]), CorruptError),
        (lambda said: said.update(chunks=[0, 3, 20]), CorruptError),
        (lambda said: said.update(chunks=[3, 3, 20]), ZckptError),
        (lambda said: said.update(chunks=[1 << 30, 3, 20]), ZckptError),
        (lambda said: said.update(dtype="<f8"), CorruptError),
        (lambda said: said.update(dtype=">f4"), UnsupportedError),
        (lambda said: said.update(dtype=[["a", "<f4"]]), UnsupportedError),
        (lambda said: said.update(order="F"), UnsupportedError),
        (lambda said: said.update(filters=[{"id": "delta"}]), UnsupportedError),
        (lambda said: said.update(compressor={"id": "blosc"}), UnsupportedError),
        (lambda said: said.update(compressor=None), CorruptError),
        (lambda said: said.update(dimension_separator="/../"), CorruptError),
        (lambda said: said.pop("shape"), CorruptError),
    ],
)  # fmt: skip
def test_metadata_that_do_not_fit(how: Callable[..., object], kind: type[ZckptError], run: Path) -> None:
    edit(run / KERNEL / ".zarray", how)
    with pytest.raises(kind):
        zckpt.open_checkpoint(run)[KERNEL]


@pytest.mark.parametrize("keys", [["..", "..", "etc"], ["/etc/passwd"], ["a/b"], [""], []])
def test_names_stay_inside(keys: list[str], run: Path) -> None:
    """A name of the metadata is looked for among the files that were listed."""
    leaf = {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array"},
    }
    edit(run / "_METADATA", lambda said: said["tree_metadata"].update(odd=leaf))  # type: ignore[attr-defined]
    if keys:
        with pytest.raises(CorruptError, match="a tree"):
            zckpt.open_checkpoint(run)


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.compress(bytes(1 << 26)),  # a bomb: it ends after what the chunk has
        zstandard.compress(bytes(12)),
        zstandard.compress(bytes(480))[:-5],
        zstandard.compress(bytes(720)) + b"more",
        b"",
        b"\x28\xb5\x2f\xfd" + bytes(40),
    ],
)
@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_frames_of_another_size(frame: bytes, in_memory: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_IN_MEMORY", in_memory)
    (run / KERNEL / "1.0.0").write_bytes(frame)
    with pytest.raises(CorruptError, match=r"1\.0\.0"):
        zckpt.open_checkpoint(run)[KERNEL]


def checksummed(data: bytes) -> bytes:
    return data + struct.pack("<I", ocdbt.crc32c(data))


def test_chunks_in_chunks(tmp_path: Path) -> None:
    """Zarr 3's shards with several chunks, some behind the edge and one that was not stored, as its specification has them."""
    run, name = Path(shutil.copytree(HOME / "zarr3", tmp_path / "run")), "params.params.list.0"
    whole = np.arange(35, dtype="<f4").reshape(5, 7)
    whole[0:2, 4:6] = 0
    said = json.loads((run / name / "zarr.json").read_text())
    said["shape"], said["chunk_grid"]["configuration"]["chunk_shape"] = [5, 7], [4, 4]
    said["codecs"][0]["configuration"]["chunk_shape"] = [2, 2]
    (run / name / "zarr.json").write_text(json.dumps(said))
    shutil.rmtree(run / name / "c")
    padded = np.pad(whole, ((0, 3), (0, 1)), constant_values=9)
    for row in range(2):
        (run / name / f"c/{row}").mkdir(parents=True)
        for column in range(2):
            shard, data, index = padded[4 * row :, 4 * column :], b"", b""
            for a in range(2):
                for b in range(2):
                    part = zstandard.compress(shard[2 * a : 2 * a + 2, 2 * b : 2 * b + 2].tobytes())
                    lost = (row, column, a, b) == (0, 1, 0, 0)
                    index += struct.pack("<QQ", *((2**64 - 1,) * 2 if lost else (len(data), len(part))))
                    data += b"" if lost else part
            (run / name / f"c/{row}/{column}").write_bytes(data + checksummed(index))
    with pytest.raises(InconsistentError, match="array_metadatas"):
        zckpt.open_checkpoint(run)
    shutil.rmtree(run / "array_metadatas")
    with pytest.raises(IncompleteError, match=r"c/0/1, part 0\.0"):
        zckpt.open_checkpoint(run)
    edit(run / "_METADATA", lambda said: said.update(store_array_data_equal_to_fill_value=False))
    zckpt.convert(run, tmp_path / "out", allow_unknown_layout=True)
    assert load_file(tmp_path / "out/model.safetensors")[name].numpy().tolist() == whole.tolist()
    file = run / name / "c/1/1"
    for damaged in (
        file.read_bytes()[:-1],
        file.read_bytes()[:-9] + bytes(9),
        checksummed(struct.pack("<8Q", *[999] * 8)),
    ):
        file.write_bytes(damaged)
        with pytest.raises(CorruptError):
            open_catalog(locate(run), Reading(allow_unknown_layout=True))


@pytest.mark.parametrize("run", ["ocdbt"], indirect=True)
def test_a_store_that_is_damaged(run: Path) -> None:
    """Each byte of the manifest and of the root has a checksum over it."""
    for file in (run / "manifest.ocdbt", next(iter((run / "d").iterdir()))):
        data = file.read_bytes()
        for at in [*range(0, len(data), max(1, len(data) // 40)), len(data) - 1]:
            file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with pytest.raises((CorruptError, UnsupportedError)):
                zckpt.open_checkpoint(run)
        file.write_bytes(data[:-1])
        with pytest.raises(CorruptError):
            zckpt.open_checkpoint(run)
        file.write_bytes(data)
    check(run)


def test_keys_of_deep_trees() -> None:
    """Written by tensorstore 0.1.86 with nodes of at most 400 bytes: three nodes above each other, values of both kinds."""
    found = ocdbt.read_keys(lambda name, offset, nbytes: (HOME / "tree" / name).read_bytes()[offset:][:nbytes])
    assert {*found} == {f"a.b{n % 7}.c{n}/{n}" for n in range(300)}
    for key, value in found.items():
        n = int(key.rpartition("/")[2])
        stored = (HOME / "tree" / value.file).read_bytes()[value.offset :][: value.nbytes]
        assert (stored if value.inline is None else value.inline) == bytes([n % 251]) * (n % 40)
    assert {value.inline is None for value in found.values()} == {True, False}


def node(body: bytes, magic: int) -> bytes:
    data = zstandard.compress(body)
    return checksummed(struct.pack(">I", magic) + struct.pack("<Q", len(data) + 18) + b"\0\1" + data)


def manifest(height: int, file: bytes, nbytes: int) -> bytes:
    """One version, with a root of a height in a file."""
    config = bytes(16) + b"\0\0\0\4\1" + bytes(4)
    place = bytes([1, 0, len(file), 0])[:1] + bytes([len(file), 0]) + file
    length = bytes([nbytes & 127 | 128, nbytes >> 7])
    return node(config + place + b"\1\1" + bytes([height]) + b"\0\0" + length + b"\1\1\0" + bytes(9), 0x0CDB3A2A)


def test_trees_that_no_store_has() -> None:
    """A node below itself, a file above the save, a bomb, a value behind the end of its node."""
    body = b"\1" + b"\1\1\0d" + b"\1" + b"\1" + b"\0" + b"k" + b"\0\0" + b"\x1f" + b"\1\1\0"
    files = {"d": node(body, 0x0CDB20DE)}
    files["manifest.ocdbt"] = manifest(1, b"d", len(files["d"]))

    def read(name: str, offset: int, nbytes: int | None) -> bytes:
        assert name in files
        return files[name][offset:][:nbytes]

    for _ in range(3):
        with pytest.raises(CorruptError):
            ocdbt.read_keys(read)
        files["d"] = node(b"\0\0\1\1\x7fk" + b"\x7f\0", 0x0CDB20DE)
        files["manifest.ocdbt"] = manifest(0, b"d", len(files["d"]))
    files["d"] = node(bytes(600 << 20), 0x0CDB20DE)
    files["manifest.ocdbt"] = node(bytes(600 << 20), 0x0CDB3A2A)
    with pytest.raises(UnsupportedError, match="too large"):
        ocdbt.read_keys(read)
