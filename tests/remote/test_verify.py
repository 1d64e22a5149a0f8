"""`verify` and `diff` of what lies behind addresses: the same answers as of the same files on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import synth
import torch
from addresses import FIXTURES, SMALL, model, put
from s3_server import S3Server

import zckpt
from zckpt.base.errors import InconsistentError, NotACheckpointError
from zckpt.checks.verdict import Verification
from zckpt.engine import scan_requests
from zckpt.engine.prefetch import Bring
from zckpt.jobs.to_dcp import to_dcp

SOME = [
    SMALL,
    "zero2/groups_w3",
    "tensor/zero2_tp2_dp2",
    "pipeline/zero1_pp2_tp2_dp2",
    "moe/zero2_w2",
    "dcp/fsdp2_tp_w4",
]


def answer(found: Verification, *homes: tuple[str, str]) -> Any:
    """Without where it lies."""
    told = json.dumps(found.as_json())
    for place, name in homes:
        told = told.replace(place, name)
    return json.loads(told)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_the_same_answer_as_on_the_disk(name: str, deep: bool, tmp_path: Path) -> None:
    here = FIXTURES / name / "checkpoint"
    there = put(here, "memory://m/ckpt")
    want, found = zckpt.verify(here, deep=deep), zckpt.verify(there, deep=deep)
    assert want.ok and answer(found, (there, "ckpt")) == answer(want, (str(here), "ckpt"))


@pytest.mark.parametrize("root", ["memory://m", "s3://bkt"])
def test_an_output_behind_an_address(root: str, tmp_path: Path) -> None:
    here = FIXTURES / SMALL / "checkpoint"
    there = put(here, f"{root}/ckpt")
    for name, make in {
        "weights": lambda out: zckpt.convert(here, out, dtype="bf16"),
        "one.bin": lambda out: zckpt.convert(here, out),
        "universal": lambda out: zckpt.to_universal(here, out),
        "resharded": lambda out: zckpt.reshard(here, out, world_size=3, stage=2),
        "dcp": lambda out: to_dcp(here, out, optimizer="optim"),
    }.items():
        local = tmp_path / name
        make(local)
        remote = f"{root}/{name}"
        for path in tmp_path.glob(f"{name}*"):  # a single file has its zckpt.json beside it
            put(path, f"{root}/{path.name}")
        for checkpoint in (here, there):
            want = zckpt.verify(here, local)
            found = zckpt.verify(checkpoint, remote)
            assert found.ok and found.deletable == want.deletable, name
        assert zckpt.verify(remote).ok
    inside = f"{there}/global_step2/one.bin"
    put(tmp_path / "one.bin", inside)
    assert zckpt.verify(there, inside).deletable == (False, "the output's 'one.bin' would be deleted with them")


@pytest.mark.parametrize("most", [1 << 20, 4096])
def test_damage_is_found_in_parts_of_any_size(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_requests, "SLAB_BYTES", most // 3)
    monkeypatch.setattr(scan_requests, "MOST_DISTANT_BYTES", most)
    synth.zero12(tmp_path / "ckpt", model(40_000), 3)
    file = next((tmp_path / "ckpt").glob("*/*rank_1_*optim*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    there = put(tmp_path / "ckpt", "memory://m/ckpt")
    want, found = (zckpt.verify(place, deep=True) for place in (tmp_path / "ckpt", there))
    assert not found.ok
    assert answer(found, (there, "ckpt")) == answer(want, (str(tmp_path / "ckpt"), "ckpt"))


@pytest.mark.parametrize("root", ["memory://m", "s3://bkt"])
def test_diff_of_either_side(root: str, tmp_path: Path) -> None:
    here = FIXTURES / SMALL / "checkpoint"
    there = put(here, f"{root}/ckpt")
    zckpt.convert(here, tmp_path / "weights.safetensors", dtype="bf16")
    for name in ("weights.safetensors", "weights.safetensors.zckpt.json"):  # which says what proves it whole
        put(tmp_path / name, f"{root}/{name}")
    for rtol in (None, 2**-8):
        want = zckpt.diff(here, tmp_path / "weights.safetensors", rtol=rtol).as_json(tensors=True)
        for a in (here, there):
            for b in (tmp_path / "weights.safetensors", f"{root}/weights.safetensors"):
                assert zckpt.diff(a, b, rtol=rtol).as_json(tensors=True) == want
    assert want["same"]
    assert zckpt.diff(here, f"file://{here}").same


def test_transposed_tensors_behind_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_requests, "SLAB_BYTES", 1000)
    weight = torch.randn(300, 70)
    torch.save({"a": weight.T, "b": weight[:, 10:20]}, tmp_path / "a.bin")
    torch.save({"a": weight.T.contiguous(), "b": weight[:, 10:20].contiguous()}, tmp_path / "b.bin")
    for name in ("a.bin", "b.bin"):
        put(tmp_path / name, f"memory://m/{name}")
    assert zckpt.diff("memory://m/a.bin", "memory://m/b.bin").same
    assert zckpt.verify("memory://m/a.bin", "memory://m/b.bin", deep=True).ok


def test_metadata_only_unless_deep(s3: S3Server, tmp_path: Path) -> None:
    synth.zero12(tmp_path / "ckpt", model(), 4)
    there = put(tmp_path / "ckpt", "s3://bkt/ckpt")
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.pt"))
    s3.sent = 0
    assert zckpt.verify(there).ok
    assert s3.sent < size / 8
    s3.sent = 0
    assert zckpt.verify(there, deep=True).ok
    assert size <= s3.sent < size * 1.15


def test_a_file_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = FIXTURES / SMALL / "checkpoint"
    there = put(here, "memory://m/ckpt")
    zckpt.convert(here, tmp_path / "out.bin")
    real = scan_requests.near

    def slow(batch: scan_requests.ScanBatch, bring: Bring) -> scan_requests.ScanBatch:
        shutil.copytree(here, tmp_path / "again", dirs_exist_ok=True)
        for file in (tmp_path / "again").glob("*/*optim*"):
            file.write_bytes(file.read_bytes() + b"more")
        put(tmp_path / "again", there)
        return real(batch, bring)

    monkeypatch.setattr("zckpt.engine.scan.near", slow)
    with pytest.raises(InconsistentError, match="changed while it was read"):
        zckpt.diff(there, tmp_path / "out.bin")


def test_addresses_of_nothing() -> None:
    for call in (lambda: zckpt.verify("memory://nothing"), lambda: zckpt.diff("memory://a", "memory://b")):
        with pytest.raises(NotACheckpointError, match="no such file"):
            call()
