"""Deltas: what changed between two versions, read by a reader of our own making, by zckpt, and refused where they do not fit."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import blake3
import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
import zstandard
from bits import same_bits
from safetensors.torch import load_file, save_file
from schemas import check
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import zckpt
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.cli import app
from zckpt.deltas import pieces as delta_pieces
from zckpt.deltas.encode import Encoder
from zckpt.deltas.form import INDEX, UNCHANGED
from zckpt.output.journal import Journal

RUN = Path(__file__).parents[2] / "fixtures" / "fused" / "qwen3_moe_zero2" / "checkpoint"
DIGESTS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
LARGE = 5_000_000
"""Elements of a tensor of three pieces."""

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def versions() -> tuple[State, State]:
    """Two versions: of the large tensor, the ends and both sides of a piece's border change; some change not at all."""
    random = torch.Generator().manual_seed(3)
    old: State = {
        "large": torch.randn(5000, 1000, generator=random).bfloat16(),
        "same": torch.randn(33, 7, generator=random).bfloat16(),
        "half": torch.randn(300, generator=random).half(),
        "gate.bias": torch.randn(9, generator=random),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 4).bfloat16(),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    border = delta_pieces.PIECE_BYTES // 2
    new["large"].view(-1)[[0, border - 1, border, LARGE - 1]] = float("nan")
    new["large"][2] *= 1.5
    new["half"][5:9] += 1
    new["gate.bias"][3] = -0.0
    new["count"] += 1
    return old, new


@pytest.fixture
def places(versions: tuple[State, State], tmp_path: Path) -> tuple[Path, Path]:
    return tuple(saved(state, tmp_path / name) for state, name in zip(versions, ("old", "new")))  # type: ignore[return-value]


def saved(state: State, path: Path) -> Path:
    path.mkdir(parents=True)
    save_file(state, path / "model.safetensors")
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def by_hand(directory: Path, old: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The new bytes of every changed tensor, by a reader that has nothing of zckpt's; it proves their checksums."""
    index = json.loads((directory / INDEX).read_text())
    said = index["metadata"]
    assert said["compression_format"] == "zstd"
    found: dict[str, bytes] = {}
    for file in sorted(set(index["weight_map"].values())):
        blob = (directory / file).read_bytes()
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        digests = header.pop("__metadata__")
        assert header.keys() == {name for name, where in index["weight_map"].items() if where == file}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert (entry["dtype"], entry["shape"]) == ("U8", [end - begin])
            data = zstandard.ZstdDecompressor().decompress(blob[8 + length + begin : 8 + length + end])
            new = np.frombuffer(raw(old[name]), np.uint8).copy()
            if said["delta_encoding"] == "xor":
                new ^= np.frombuffer(data, np.uint8)
            else:
                count = int.from_bytes(data[:4], "little")
                new[np.frombuffer(data[4 : 4 + 4 * count], "<u4")] = np.frombuffer(data[4 + 4 * count :], np.uint8)
            found[name] = new.tobytes()
            assert DIGESTS[said["checksum_format"]](found[name]) == digests[name]
    return found


def loaded(directory: Path) -> State:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("encoding", "checksum"),
    [("xor", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32"), ("overwrite", "xxh3-128")],
)
def test_a_delta_holds_what_changed(
    encoding: str, checksum: str, versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = versions
    out = tmp_path / "updates" / "weight_v000012"
    options = zckpt.DeltaOptions(max_shard_size=10**6)
    report = zckpt.delta(*places, out, encoding=encoding, checksum=checksum, options=options)  # type: ignore[arg-type]
    changed = {"large", "half", "gate.bias", "count"}
    assert by_hand(out, old) == {name: raw(new[name]) for name in changed}
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["version"] == "000012" and index["metadata"]["base_version"] == "000011"
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert {path.name for path in out.iterdir()} == {*files, INDEX, UNCHANGED, "zckpt.json"}
    for file in files:  # as the library reads them
        assert all(array.dtype == np.uint8 for array in safetensors.numpy.load_file(out / file).values())
    counted = {
        name: int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in ("large", "half")
    }
    assert report.counts.changed == sum(counted.values()) + 2 and report.counts.changed_tensors == 4
    assert report.counts.nbytes == sum(len(raw(t)) for t in old.values()) and 0 < report.ratio < 0.05
    assert json.loads((out / UNCHANGED).read_text())["tensors"].keys() == {"same", "empty"}
    applied = zckpt.apply_delta(places[0], out, tmp_path / "applied")
    assert applied.tensors == len(old)
    assert {n: raw(t) for n, t in loaded(tmp_path / "applied").items()} == {n: raw(t) for n, t in new.items()}
    again = zckpt.delta(*places, out, encoding=encoding, checksum=checksum, options=options)  # type: ignore[arg-type]
    assert again.already_done and again.counts == report.counts


def test_a_delta_of_a_trainer_for_sglang_is_applied(
    versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Frames made at once, one file, and no checksums of what did not change; as slime writes them."""
    old, new = versions
    changed = {name: new[name] for name in ("large", "half", "gate.bias")}
    for encoding in ("xor", "overwrite"):
        out = tmp_path / encoding / "weight_v000001"
        out.mkdir(parents=True)
        arrays, digests = {}, {}
        for name, tensor in changed.items():
            before, after = (np.frombuffer(raw(t), np.uint8) for t in (old[name], tensor))
            data = before ^ after
            if encoding == "overwrite":
                where = np.flatnonzero(data).astype("<u4")
                data = np.concatenate(
                    [np.array([where.size], "<u4").view(np.uint8), where.view(np.uint8), after[where]]
                )
            arrays[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), np.uint8)
            digests[name] = DIGESTS["xxh3-128"](after.tobytes())
        safetensors.numpy.save_file(arrays, out / "model-00000-of-00001.safetensors", metadata=digests)
        index = {
            "metadata": {
                "version": "000001", "base_version": "000000", "delta_encoding": encoding, "compression_format": "zstd",
                "checksum_format": "xxh3-128",
            },
            "weight_map": dict.fromkeys(arrays, "model-00000-of-00001.safetensors"),
        }  # fmt: skip
        (out / INDEX).write_text(json.dumps(index))
        report = zckpt.apply_delta(places[0], out, tmp_path / f"applied-{encoding}")
        found = loaded(tmp_path / f"applied-{encoding}")
        assert all(raw(found[name]) == raw(tensor) for name, tensor in changed.items())
        assert any("only the changed ones were proved" in note for note in report.notes)


def test_a_run_is_compared_with_the_weights_that_are_served(tmp_path: Path) -> None:
    """The masters are cast once; what is applied is, file for file, what to-bf16 makes of the run, and transformers loads it."""
    served, whole, out = tmp_path / "served", tmp_path / "whole", tmp_path / "weight_v000001"
    zckpt.convert(RUN, served, dtype="bf16")
    zckpt.convert(RUN, whole, dtype="bf16")
    blob = bytearray((served / "model.safetensors").read_bytes())
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    trained = [name for name, entry in header.items() if entry.get("dtype") == "BF16"][:3]
    for name in trained:
        begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
        blob[begin:end:10] = bytes(byte ^ 5 for byte in blob[begin:end:10])
    (served / "model.safetensors").write_bytes(blob)
    (served / "zckpt.json").unlink()
    weights = load_file(served / "model.safetensors")
    report = zckpt.delta(served, RUN, out)
    assert report.counts.changed_tensors == len(trained)
    zckpt.apply_delta(served, out, tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(whole, dtype="auto").state_dict()
    assert all(same_bits(tensor, expected[name]) for name, tensor in model.state_dict().items())
    both = zckpt.delta(RUN, served, tmp_path / "back")  # a run may be OLD as well: what to-bf16 makes of it
    assert both.counts.changed == report.counts.changed
    zckpt.apply_delta(RUN, tmp_path / "back", tmp_path / "served-again")
    again = load_file(tmp_path / "served-again" / "model.safetensors")
    assert all(same_bits(tensor, again[name]) for name, tensor in weights.items())


def test_deltas_follow_each_other(versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path) -> None:
    _, new = versions
    last = {**new, "half": new["half"] * 2, "same": new["same"] + 1}
    third = saved(last, tmp_path / "third")
    one, two = tmp_path / "weight_v000001", tmp_path / "weight_v000002"
    zckpt.delta(*places, one)
    zckpt.delta(places[1], third, two, encoding="overwrite", checksum="adler32")
    report = zckpt.apply_delta(places[0], [one, two], tmp_path / "both")
    assert {n: raw(t) for n, t in loaded(tmp_path / "both").items()} == {n: raw(t) for n, t in last.items()}
    assert all("cannot be told" in note for note in report.notes)
    zckpt.apply_delta(places[0], one, tmp_path / "first")
    zckpt.apply_delta(tmp_path / "first", two, tmp_path / "second")
    for out, deltas, found in (("a", [two, one], "version 0"), ("b", [one, one], "version 0")):
        with pytest.raises(InconsistentError, match="for another version") as error:
            zckpt.apply_delta(places[0], deltas, tmp_path / out)
        assert found in error.value.found and not (tmp_path / out).exists()
    with pytest.raises(InconsistentError, match="for another version"):  # the output of apply knows its version
        zckpt.apply_delta(tmp_path / "second", two, tmp_path / "c")


@pytest.mark.parametrize("name", ["half", "same"])
def test_another_base_is_refused_and_the_tensor_named(
    name: str, versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also where it differs in a tensor that the delta does not change."""
    zckpt.delta(*places, tmp_path / "delta")
    other = {n: t.clone() for n, t in versions[0].items()}
    other[name].view(-1)[-1] += 1
    with pytest.raises(InconsistentError, match=repr(name)):
        zckpt.apply_delta(saved(other, tmp_path / "other"), tmp_path / "delta", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_models_are_refused(versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path) -> None:
    old, _ = versions
    zckpt.delta(*places, tmp_path / "delta")
    less = {name: tensor for name, tensor in old.items() if name != "half"}
    others = {
        "only the new version has": {**old, "extra.weight": torch.ones(2)},
        "the new version lacks": less,
        "another shape": {**old, "half": torch.ones(100, 3).half()},
        "cannot be cast": {**old, "count": torch.tensor(7, dtype=torch.int32)},
    }
    names = {
        "only the new version has": "extra.weight",
        "the new version lacks": "half",
        "another shape": "'half'",
        "cannot be cast": "'count'",
    }
    for number, (what, state) in enumerate(others.items()):
        with pytest.raises(ZckptError, match=what) as error:
            zckpt.delta(places[0], saved(state, tmp_path / str(number)), tmp_path / "out")
        assert names[what] in str(error.value)
    for number, (what, state) in enumerate([("lacks", less), ("has", {**old, "extra.weight": torch.ones(2)})]):
        with pytest.raises(InconsistentError, match=f"another model: OLD {what} 1 tensor"):
            zckpt.apply_delta(saved(state, tmp_path / f"base{number}"), tmp_path / "delta", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edited(directory: Path, change: Callable[[dict[str, object]], object], file: str = INDEX) -> None:
    facts = json.loads((directory / file).read_text())
    change(facts)
    (directory / file).write_text(json.dumps(facts))


def test_damaged_and_hostile_deltas(places: tuple[Path, Path], tmp_path: Path) -> None:
    for encoding in ("xor", "overwrite"):
        zckpt.delta(*places, tmp_path / encoding, encoding=encoding)
    data = "model-00001-of-00001.safetensors"

    def longer(directory: Path) -> None:  # as a bomb: far more than the tensor has
        bomb = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28)), np.uint8)
        with safetensors.safe_open(directory / data, "np") as opened:
            digests = opened.metadata()
        arrays = {**safetensors.numpy.load_file(directory / data), "half": bomb}
        safetensors.numpy.save_file(arrays, directory / data, metadata=digests)

    def flipped(directory: Path) -> None:
        blob = bytearray((directory / data).read_bytes())
        blob[-40] ^= 1
        (directory / data).write_bytes(bytes(blob))

    def cases() -> Iterator[tuple[Callable[[Path], object], type[ZckptError], str]]:
        yield flipped, ZckptError, "tensor"
        yield longer, CorruptError, "'half'"
        yield lambda d: (d / data).unlink(), IncompleteError, "missing"
        yield lambda d: (d / INDEX).unlink(), NotACheckpointError, "is not a delta"
        yield lambda d: edited(d, lambda i: i["metadata"].pop("delta_encoding")), NotACheckpointError, "is not a delta"
        yield (
            lambda d: edited(d, lambda i: i["metadata"].update(delta_encoding="sum")),
            UnsupportedError,
            "delta_encoding",
        )
        yield (
            lambda d: edited(d, lambda i: i["metadata"].update(compression_format="lz4")),
            UnsupportedError,
            "compression",
        )
        yield lambda d: edited(d, lambda i: i["metadata"].update(checksum_format="md5")), UnsupportedError, "checksum"
        yield lambda d: edited(d, lambda i: i["metadata"].update(version="000000")), CorruptError, "which versions"
        yield lambda d: edited(d, lambda i: i["metadata"].update(base_version=0)), CorruptError, "which versions"
        yield lambda d: edited(d, lambda i: i["weight_map"].update(half="../x.safetensors")), UnsafeError, "outside"
        yield lambda d: edited(d, lambda i: i["weight_map"].pop("half")), CorruptError, "does not hold"
        yield lambda d: edited(d, lambda i: i["tensors"].update(same="zz"), UNCHANGED), CorruptError, "checksums"
        yield lambda d: edited(d, lambda i: i["tensors"].update(same="0" * 32), UNCHANGED), InconsistentError, "'same'"

    for number, (change, kind, words) in enumerate(cases()):
        for encoding in ("xor", "overwrite"):
            bad = tmp_path / f"bad-{encoding}-{number}"
            shutil.copytree(tmp_path / encoding, bad)
            change(bad)
            with pytest.raises(kind, match=words):
                zckpt.apply_delta(places[0], bad, tmp_path / "out")
            assert not (tmp_path / "out").exists() and not (tmp_path / ".out.zckpt").exists()


def test_positions_that_do_not_rise_are_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    zckpt.delta(*places, tmp_path / "delta", encoding="overwrite")
    data = tmp_path / "delta" / "model-00001-of-00001.safetensors"
    with safetensors.safe_open(data, "np") as opened:
        digests = opened.metadata()
    arrays = safetensors.numpy.load_file(data)
    for positions in ([4, 4], [700, 4], [4, 600]):
        frame = np.array([len(positions), *positions], "<u4").tobytes() + bytes(len(positions))
        arrays["half"] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(frame), np.uint8)
        safetensors.numpy.save_file(arrays, data, metadata=digests)
        with pytest.raises(CorruptError, match="'half' cannot be read"):
            zckpt.apply_delta(places[0], tmp_path / "delta", tmp_path / "out")


def test_an_interrupted_run_is_resumed(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = zckpt.DeltaOptions(max_shard_size=10**6)
    zckpt.delta(*places, tmp_path / "whole", options=options)
    finish, calls = Encoder.finish, 0

    def failing(encoder: Encoder) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(28, "No space left on device")
        return finish(encoder)

    monkeypatch.setattr(Encoder, "finish", failing)
    with pytest.raises(zckpt.OutputError, match="cannot be written"):
        zckpt.delta(*places, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    report = zckpt.delta(*places, tmp_path / "out", options=options)
    assert report.kept and any("resuming" in note for note in report.notes)
    same = [path.name for path in sorted((tmp_path / "whole").iterdir())]
    assert same == [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert all((tmp_path / "whole" / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in same)


def test_an_interrupted_apply_is_resumed(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zckpt.delta(*places, tmp_path / "delta")
    options = zckpt.ApplyOptions(max_shard_size=10**6)
    add, calls = Journal.add, 0

    def failing(journal: Journal, file: object) -> None:
        nonlocal calls
        add(journal, file)  # type: ignore[arg-type]
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "add", failing)
    with pytest.raises(zckpt.OutputError, match="cannot be written"):
        zckpt.apply_delta(places[0], tmp_path / "delta", tmp_path / "out", options=options)
    monkeypatch.undo()
    report = zckpt.apply_delta(places[0], tmp_path / "delta", tmp_path / "out", options=options)
    assert report.kept == 2
    assert {n: raw(t) for n, t in loaded(tmp_path / "out").items()} == {n: raw(t) for n, t in loaded(places[1]).items()}
    assert zckpt.verify(tmp_path / "out").ok


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_verify(encoding: str, versions: tuple[State, State], places: tuple[Path, Path], tmp_path: Path) -> None:
    """The delta alone; and that it leads to a version of the weights, in whatever dtype and layout that is."""
    out = tmp_path / "delta"
    zckpt.delta(*places, out, encoding=encoding, options=zckpt.DeltaOptions(max_shard_size=10**6))  # type: ignore[arg-type]
    alone, led = zckpt.verify(out), zckpt.verify(places[1], out)
    assert alone.ok and alone.deletable is None and led.ok and led.deletable is not None and not led.deletable[0]
    wrong = zckpt.verify(places[0], out)
    assert not wrong.ok and "4 tensors differ" in "\n".join(wrong.lines()) and "'large'" in "\n".join(wrong.lines())
    saved({**versions[1], "more": torch.ones(3)}, tmp_path / "more")
    assert "does not know 1 tensor: 'more'" in "\n".join(zckpt.verify(tmp_path / "more", out).lines())
    file = next(path for path in sorted(out.glob("model-*")) if "large" in safetensors.numpy.load_file(path))
    data = file.read_bytes()
    file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert f"{file.name}: has other bytes" in "\n".join(zckpt.verify(out).lines())
    file.write_bytes(data)
    arrays = safetensors.numpy.load_file(file)
    digests = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    arrays["large"] = arrays["large"][:-20]  # the frame ends too early
    safetensors.numpy.save_file(arrays, file, metadata=digests)
    (out / "zckpt.json").unlink()
    found = zckpt.verify(out)
    assert [check.name for check in found.checks if not check.ok] == ["changes"]


def test_versions_by_name_and_by_number(places: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another version"):
        zckpt.delta(*places, tmp_path / "weight_v000004", version=5)
    with pytest.raises(UsageError, match="impossible"):
        zckpt.delta(*places, tmp_path / "out", version=10**6)
    assert zckpt.delta(*places, tmp_path / "out", version=5).form.base_version == 4
    nothing = zckpt.delta(places[0], places[0], tmp_path / "nothing")
    assert nothing.counts.changed == 0 and json.loads((tmp_path / "nothing" / INDEX).read_text())["weight_map"] == {}
    zckpt.apply_delta(places[0], tmp_path / "nothing", tmp_path / "same")
    with pytest.raises(UnsupportedError, match="is a delta"):
        zckpt.open_checkpoint(tmp_path / "out")


def test_the_commands(places: tuple[Path, Path], tmp_path: Path) -> None:
    def shown(*words: object, status: int = 0) -> str:
        result = CliRunner().invoke(app, list(map(str, words)))
        assert result.exit_code == status, result.output
        return result.stdout

    out = tmp_path / "weight_v000001"
    planned = check("delta-plan", shown("delta", *places, out, "--dry-run", "--json"))
    assert planned["tensors"] == 6 and planned["most_files"] == 1 and not out.exists()
    assert "would read" in shown("delta", *places, out, "--dry-run")
    facts = check("delta", shown("delta", *places, out, "--json"))
    assert facts["changed_tensors"] == 4 and facts["version"] == "000001" and not facts["already_done"]
    assert check("delta", shown("delta", *places, out, "--json"))["already_done"] is True
    check("manifest", (out / "zckpt.json").read_text())
    assert "4 of 6 tensors" in shown("delta", *places, out)
    planned = check("plan", shown("apply", places[0], out, tmp_path / "applied", "--dry-run", "--json"))
    assert not (tmp_path / "applied").exists() and planned["version"] == 1
    assert "would hold version 1" in shown("apply", places[0], out, tmp_path / "applied", "--dry-run")
    facts = check("written", shown("apply", places[0], out, tmp_path / "applied", "--json"))
    assert facts["files"] == planned["files"] and facts["bytes_written"] == planned["bytes_written"]
    assert facts["version"] == 1
    check("manifest", (tmp_path / "applied" / "zckpt.json").read_text())
    assert "each with its checksum" in shown("apply", places[0], out, tmp_path / "again")
    assert os.listdir(tmp_path / "again")
