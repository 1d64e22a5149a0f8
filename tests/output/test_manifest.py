"""`zckpt.json` says what an output is; the same input gives the same bytes of it, however the work was done."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import synth
import torch

import zckpt
from zckpt import Options
from zckpt.base.errors import CorruptError, IncompleteError, UnsafeError, UnsupportedError
from zckpt.core.plan import WrittenFile
from zckpt.output import manifest
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    group = {f"w{i}": torch.randn(20_000 + i) for i in range(5)}
    place = synth.zero12(tmp_path / "ckpt", [group], 3)
    (place / "config.json").write_text('{"model_type": "x"}')
    (place / "tokenizer.json").write_text("{}")
    return place


@pytest.mark.parametrize("name", ["out", "out.bin", "out.safetensors"])
def test_every_file_is_in_it_with_its_checksum(checkpoint: Path, tmp_path: Path, name: str) -> None:
    zckpt.convert(checkpoint, tmp_path / name, dtype="bf16", options=Options(max_shard_size=100_000))
    out = tmp_path / name
    place = out / "zckpt.json" if out.is_dir() else tmp_path / f"{name}.zckpt.json"
    assert manifest.find(locate(out)) == locate(place)
    facts = json.loads(place.read_text())
    home = out if out.is_dir() else tmp_path
    there = {p.name for p in out.iterdir()} - {"zckpt.json"} if out.is_dir() else {name}
    assert {file["path"] for file in facts["files"]} == there
    assert len(there) == (6 if out.is_dir() else 1)
    for file in facts["files"]:
        data = (home / file["path"]).read_bytes()
        assert (file["bytes"], file["crc32"]) == (len(data), f"{zlib.crc32(data):08x}")
    assert facts["source"] == {
        "layout": "zero2", "tag": "global_step5", "step": 5, "framework": "DeepSpeed 0.19.8",
        "topology": {"dp": 3, "tp": 1, "pp": 1, "ep": 1},
        "evidence": {"level": "metadata", "by": "param_shapes of the model file"},
    }  # fmt: skip
    assert (facts["zckpt"], facts["dtype"], facts["tensors"], facts["numel"]) == (zckpt.__version__, "bf16", 5, 100_010)


def test_the_same_input_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    wanted = None
    for number, options in enumerate([
        {}, {"threads": 1}, {"threads": 4, "buffer": 4096}, {"buffer": 1 << 20, "keep_cache": False},
        {"limit_rate": 10**9}, {"include": [], "rename": []},
    ]):  # fmt: skip
        place = tmp_path / f"place{number}"
        os.utime(checkpoint / "latest", ns=(number, number))
        zckpt.convert(checkpoint, place / "out", options=Options(max_shard_size=100_000, **options))
        zckpt.convert(checkpoint, place / "out.bin", options=Options(**options))
        found = {p.relative_to(place): p.read_bytes() for p in place.rglob("*") if p.is_file()}
        wanted = wanted or found
        assert found == wanted
        assert str(tmp_path).encode() not in found[Path("out/zckpt.json")]


def test_wishes_are_in_it(checkpoint: Path, tmp_path: Path) -> None:
    options = Options(exclude=["w0"], rename=[("^", "m.")], overflow="inf")
    zckpt.convert(checkpoint, tmp_path / "out", options=options)
    facts = manifest.read(str(tmp_path / "out" / "zckpt.json"))
    assert facts.options == {"exclude": ["w0"], "rename": [["^", "m."]], "overflow": "inf"}


def test_transformers_does_not_mind(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = FIXTURES / "transformers" / "llama_zero3" / "checkpoint"
    for name, options in (("a", Options()), ("b", Options(format="bin")), ("c", Options(max_shard_size=2000))):
        zckpt.convert(path, tmp_path / name, options=options)
        assert (tmp_path / name / "zckpt.json").exists()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and model is not None


def test_deepspeeds_names_write_it_too(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert_zero_checkpoint_to_fp32_state_dict(checkpoint, tmp_path / "out")
    assert zckpt.verify(tmp_path / "out").ok and (tmp_path / "out" / "zckpt.json").exists()


def test_odd_names(tmp_path: Path) -> None:
    place = synth.zero12(tmp_path / "ckpt", [{"w": torch.randn(3)}], 1, tag="t\u00e4g \u4e2d")
    zckpt.convert(place, tmp_path / "o\u00fct.bin")
    assert zckpt.verify(tmp_path / "o\u00fct.bin").ok


def sound() -> dict[str, Any]:
    files = (WrittenFile("a", 3, 0x0A), WrittenFile("b/c", 0, 0))
    facts = manifest.Manifest("0", {"layout": "x"}, "fp32", {}, 1, 2, files)
    return json.loads(facts.as_bytes())


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps(sound()))
    facts = manifest.read(str(tmp_path / "m"))
    assert facts.as_bytes() == (json.dumps(sound(), indent=2) + "\n").encode()
    assert facts.files[0] == WrittenFile("a", 3, 10)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"files": []}, IncompleteError),
        ({"files": 3}, CorruptError),
        ({"files": [3]}, CorruptError),
        ({"zckpt": 3}, CorruptError),
        ({"tensors": "x"}, CorruptError),
        ({"files": [{"path": "a", "bytes": -1, "crc32": "00000000"}]}, CorruptError),
        ({"files": [{"path": "a", "bytes": 1, "crc32": "xxxxxxxx"}]}, CorruptError),
        ({"files": [{"path": "a", "bytes": 1, "crc32": "0"}]}, CorruptError),
        *(
            ({"files": [{"path": path, "bytes": 1, "crc32": "00000000"}]}, UnsafeError)
            for path in ("../a", "/a", "a/../../b", "", "./a", "a//b", "a\0b")
        ),
    ],
)
def test_manifests_of_strangers(tmp_path: Path, change: dict[str, Any], kind: type[Exception]) -> None:
    (tmp_path / "m").write_text(json.dumps(sound() | change))
    with pytest.raises(kind):
        manifest.read(str(tmp_path / "m"))


def test_a_manifest_that_would_fill_the_memory(tmp_path: Path) -> None:
    for data in (b"[" + b"[]," * 5_000_000 + b"[]]", b"[" * 10_000_000):
        (tmp_path / "m").write_bytes(data)
        with pytest.raises((UnsupportedError, CorruptError)):
            manifest.read(str(tmp_path / "m"))
    with open(tmp_path / "m", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsupportedError, match="too large"):
        manifest.read(str(tmp_path / "m"))
