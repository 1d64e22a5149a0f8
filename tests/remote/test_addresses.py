"""Checkpoints read from, and weights written to, a real S3 server and fsspec's memory: the same bytes as on the disk."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import proofs
import pytest
import synth
import torch
from addresses import FIXTURES, ROOTS, SMALL, local_tree, model, put, tree
from s3_server import S3Server

import zckpt
from zckpt.base.errors import (
    AccessError,
    CastError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    OutputError,
    RemoteError,
    UnsupportedError,
    UsageError,
)
from zckpt.cli import app
from zckpt.core import plan
from zckpt.engine import batches
from zckpt.jobs.convert import prepare
from zckpt.jobs.declarations import CONVERT
from zckpt.jobs.groups import Form
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.options import Options
from zckpt.jobs.planned import execute
from zckpt.jobs.to_dcp import to_dcp
from zckpt.jobs.to_peft import to_peft
from zckpt.layouts.save.listing import ReadOptions
from zckpt.storage import fsspec_io, uploads
from zckpt.storage.location import locate

SOME = (
    "zero3/bf16_w2",
    "zero2/tied_w2",
    "zero0/bf16_groups",
    "bf16_optimizer/w2",
    "zero3/hpz_w4",
    "tensor/zero2_tp2_dp2",
    "pipeline/zero1_pp2_tp2_dp2",
    "moe/zero2_w2",
    "dcp/fsdp2_tp_w4",
)


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "name", "out"),
    proofs.covering(ROOTS, SOME, ("one.safetensors", "one.bin", "directory")),
    indirect=["root"],
)
def test_a_checkpoint_behind_an_address(root: str, name: str, out: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / name / "checkpoint"
    address = put(checkpoint, f"{root}/ckpt")
    ours, theirs = tmp_path / "ours" / out, tmp_path / "theirs" / out
    report = zckpt.convert(address, ours, dtype="bf16")
    assert report.tensors == zckpt.convert(checkpoint, theirs, dtype="bf16").tensors
    assert local_tree(tmp_path / "ours") == local_tree(tmp_path / "theirs")


JOBS = {
    "weights": lambda source, out: zckpt.convert(source, out / "out.safetensors"),
    "reshard": lambda source, out: zckpt.reshard(source, out / "out", world_size=3, stage=3),
    "to-universal": lambda source, out: zckpt.to_universal(source, out / "out"),
    "to-dcp": lambda source, out: to_dcp(source, out / "out", optimizer="optim"),
}


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("tensor/zero3_tp2_dp2", ""),
        ("autotp/zero1_tp2_dp2", ""),
        ("pipeline/bf16_pp2_dp2", ""),
        ("moe/tensor_w4", ""),
        ("autoep/zero3_w4", ""),
        ("dcp/accelerate_fsdp2_w2", ""),
        ("dcp/boxes_w4", "no optimizer states"),
        ("megatron_legacy/tied_pp2_dp2", ""),
        ("fairscale/fairseq_w3", ""),
        ("fairscale/metaseq_w4", ""),
    ],
)
def test_split_models_behind_an_address(name: str, refused: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / name / "checkpoint"
    address = put(checkpoint, "memory://m/ckpt")
    for job, run in JOBS.items():
        told: list[str] = []
        for source, place in ((checkpoint, "here"), (address, "there")):
            (tmp_path / place).mkdir(exist_ok=True)
            try:
                run(source, tmp_path / place)
            except UnsupportedError as error:
                told.append(error.what)
        assert len(set(told)) <= 1 and len(told) in (0, 2), job
        assert not told or (refused and refused in told[0]) or "experts" in told[0], job
        assert local_tree(tmp_path / "here") == local_tree(tmp_path / "there"), job
        for place in ("here", "there"):
            shutil.rmtree(tmp_path / place)


@pytest.mark.parametrize(("name", "shapes"), [("llama_w2", "config.json"), ("local_uneven_w3", "shapes.json")])
def test_flat_parameters(name: str, shapes: str, tmp_path: Path) -> None:
    home = FIXTURES / "flat" / name
    address = put(home / "checkpoint", "memory://m/ckpt")
    options = Options(read_options=ReadOptions(shapes=str(home / shapes)))
    for source, out in ((home / "checkpoint", "want"), (address, "out")):
        zckpt.convert(source, tmp_path / f"{out}.safetensors", options=options)
    assert (tmp_path / "want.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "to", "rules"),
    [("llama_zero2_tp2_dp2", "llama", "megatron-swiglu"), ("neox_pp2_tp2_dp2", "gpt-neox", "neox")],
)
def test_megatrons_names_and_slices(name: str, to: str, rules: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "megatron" / name / "checkpoint"
    address = put(checkpoint, "memory://m/ckpt")
    options = Options(form=Form(f"hf:{to}"), read_options=ReadOptions(tp_rules=rules))
    for source, out in ((checkpoint, "want"), (address, "out")):
        zckpt.convert(source, tmp_path / out, dtype="bf16", options=options)
    assert local_tree(tmp_path / "want") == local_tree(tmp_path / "out")
    found = zckpt.verify(address, tmp_path / "out", read_options=options.read_options)
    assert found.ok, list(found.lines())


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_adapters(adapter: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "peft/several_zero3/checkpoint"
    address = put(checkpoint, "memory://m/ckpt")
    for source, out in ((checkpoint, "want"), (address, "out")):
        to_peft(source, tmp_path / out, adapter=adapter)
    assert local_tree(tmp_path / "want") == local_tree(tmp_path / "out")
    assert zckpt.verify(address, tmp_path / "out").ok


def test_shards_at_several_addresses(root: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "zero3/groups_w3/checkpoint"
    (home,) = checkpoint.glob("global_step*")
    put(checkpoint / "latest", f"{root}/0/latest")
    for file in home.iterdir():
        put(file, f"{root}/{int('rank_2' in file.name)}/{home.name}/{file.name}")
    with pytest.raises(IncompleteError, match="files are missing"):
        zckpt.convert(f"{root}/0", tmp_path / "out.bin")
    prepared = prepare(f"{root}/0", str(tmp_path / "out.bin"), CONVERT.ask(also=[f"{root}/1"]))
    execute(prepared)
    zckpt.convert(checkpoint, tmp_path / "want.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "want.bin").read_bytes()
    assert zckpt.verify(f"{root}/0", tmp_path / "out.bin", also=[f"{root}/1"]).ok


def test_a_universal_checkpoint_behind_an_address(root: str, tmp_path: Path) -> None:
    zckpt.to_universal(FIXTURES / SMALL / "checkpoint", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "want.safetensors")
    zckpt.convert(put(tmp_path / "universal", f"{root}/u"), tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "want.safetensors").read_bytes()


def test_other_jobs(root: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    address = put(checkpoint, f"{root}/ckpt")
    for source, name in ((checkpoint, "want"), (address, "out")):
        zckpt.reshard(source, tmp_path / name / "resharded", world_size=3)
        zckpt.to_universal(source, tmp_path / name / "universal")
    assert local_tree(tmp_path / "want") == local_tree(tmp_path / "out")
    with pytest.raises(UnsupportedError, match="an address cannot be OUT"):
        zckpt.reshard(checkpoint, f"{root}/r", world_size=3)


def test_lazily_too(root: str) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    address = put(checkpoint, f"{root}/ckpt")
    with zckpt.open_checkpoint(address) as ours, zckpt.open_checkpoint(str(checkpoint)) as theirs:
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_trainers_directory_and_a_tag_and_plain_weights(root: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "transformers/gpt2_zero3/checkpoint"
    put(checkpoint, f"{root}/out/checkpoint-2")
    put(FIXTURES / SMALL / "checkpoint", f"{root}/out/checkpoint-1")
    zckpt.convert(checkpoint, tmp_path / "want", dtype="fp16")
    want = local_tree(tmp_path / "want")
    assert "config.json" in want and "generation_config.json" in want
    for name, address in {"trainer": f"{root}/out", "tag": f"{root}/out/checkpoint-2/global_step2/"}.items():
        zckpt.convert(address, tmp_path / name, dtype="fp16")
        assert local_tree(tmp_path / name) == want
    plain = put(tmp_path / "want", f"{root}/plain")
    zckpt.convert(plain, tmp_path / "again", dtype="fp16")
    again = local_tree(tmp_path / "again")
    assert again.pop("zckpt.json") != want.pop("zckpt.json")  # it says what was converted
    assert again == want


def test_only_what_is_needed_is_fetched(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synth.zero12(tmp_path / "ckpt", model(), 4)
    address = put(tmp_path / "ckpt", "s3://bkt/ckpt")
    total = sum(map(len, local_tree(tmp_path / "ckpt").values()))
    needed = 3 * 900_000 * 4
    s3.requests.clear()
    s3.sent = 0
    zckpt.convert(address, tmp_path / "out.safetensors", dtype="bf16")
    assert needed <= s3.sent < needed + 2_000_000 < total / 2
    assert all(range_ for method, path, query, range_ in s3.requests if method == "GET" and path.endswith(".pt"))
    s3.sent = 0
    assert inspect_checkpoint(address).exportable.ok
    assert s3.sent < 1_500_000


def test_a_store_is_not_asked_for_what_a_listing_said(s3: S3Server, root: str) -> None:
    place = f"{root}/listed"
    for name in ("a", "inner/b"):
        uploads.upload_small(f"{place}/{name}", b"1")
    assert fsspec_io.entries(place) == {"a": "file", "inner": "directory"}
    s3.requests.clear()
    assert [fsspec_io.kind(f"{place}/{name}") for name in ("a", "inner", "inner/")] == [
        "file",
        "directory",
        "directory",
    ]
    assert [fsspec_io.kind(f"{place}/{name}") for name in ("c", "c/d", "c/d/e", "a/b")] == [None] * 4
    assert s3.requests == []
    assert fsspec_io.kind(f"{place}/inner/b") == "file" and bool(s3.requests) == root.startswith("s3")
    uploads.upload_small(f"{place}/c/d", b"1")
    assert fsspec_io.kind(f"{place}/c/d") == "file" and fsspec_io.kind(f"{place}/c") == "directory"
    assert fsspec_io.entries(place).keys() == {"a", "inner", "c"}
    uploads.remove(f"{place}/c/d")
    assert fsspec_io.kind(f"{place}/c/d") is None
    assert fsspec_io.entries(place).keys() >= {"a", "inner"}
    fsspec.filesystem(root.partition("://")[0]).pipe_file(f"{place}/z", b"1")  # by somebody else
    fsspec_io.refresh(place)
    assert fsspec_io.kind(f"{place}/z") == "file"


def test_what_is_missing_is_asked_for_once(s3: S3Server, tmp_path: Path) -> None:
    address = put(FIXTURES / SMALL / "checkpoint", "s3://bkt/ckpt")
    s3.requests.clear()
    zckpt.convert(address, tmp_path / "out")
    asked = [path for method, path, _, _ in s3.requests if method == "HEAD" and not path.endswith(".pt")]
    missing = [p for p in asked if p != "/bkt/ckpt" and p.removeprefix("/bkt/") not in s3.files("bkt")]
    assert sorted(missing) == sorted(set(missing)), missing


@pytest.mark.parametrize("most", [1 << 20, 1 << 10])
def test_in_parts_of_any_size(root: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_DISTANT_BYTES", most)
    monkeypatch.setattr(plan, "SLAB_BYTES", most // 3)
    monkeypatch.setattr(fsspec_io, "GAP_BYTES", 100)
    synth.zero3(tmp_path / "ckpt", model(9_100), 3, sub_group=9_100)
    address = put(tmp_path / "ckpt", f"{root}/ckpt")
    zckpt.convert(tmp_path / "ckpt", tmp_path / "want.bin")
    zckpt.convert(address, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "want.bin").read_bytes()
    zckpt.convert(address, f"{root}/out.bin")
    assert tree(f"{root}/out.bin")[""] == (tmp_path / "want.bin").read_bytes()


def test_files_of_ranks_are_opened_several_at_a_time(s3: S3Server, tmp_path: Path) -> None:
    """And each is asked for once: its facts, and its first bytes."""
    generator = torch.Generator().manual_seed(0)
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"w": torch.randn(90_000, generator=generator)}], 12)
    address = put(checkpoint, "s3://bkt/ranks")
    under_way, most = 0, 0
    lock = threading.Lock()

    def slow(method: str, path: str, query: str) -> bool:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.02)
        with lock:
            under_way -= 1
        return False

    before = len(s3.requests)
    s3.failing = slow
    zckpt.open_checkpoint(address)
    s3.failing = lambda method, path, query: False
    asked = [(method, path) for method, path, _, _ in s3.requests[before:] if path.endswith("optim_states.pt")]
    assert most >= 4
    assert sorted(set(asked)) == sorted(asked) and len(asked) == 2 * 12
    zckpt.convert(address, tmp_path / "a.bin")
    zckpt.convert(checkpoint, tmp_path / "b.bin")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    address = put(FIXTURES / SMALL / "checkpoint", "s3://bkt/ckpt")
    prepared = prepare(address, str(tmp_path / "out.bin"), CONVERT.ask())
    fs = fsspec.filesystem("s3")
    name = next(name for name in fs.find("bkt/ckpt") if name.endswith("rank_1_mp_rank_00_optim_states.pt"))
    data = bytearray(fs.cat_file(name))
    data[-1] ^= 1
    fs.pipe_file(name, bytes(data))
    with pytest.raises(InconsistentError, match="changed while it was read"):
        execute(prepared)
    assert list(tmp_path.iterdir()) == []


def test_near_ranges_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file("/m/f", bytes(range(256)) * 4096)
    asked: list[tuple[int, int]] = []
    one = fsspec_io._one
    monkeypatch.setattr(fsspec_io, "_one", lambda fs, p, a, b: (asked.append((a, b)), one(fs, p, a, b))[1])
    gap = fsspec_io.GAP_BYTES
    wanted = [
        fsspec_io.Range("memory://m/f", a, b) for a, b in [(500_000, 500_010), (0, 10), (10 + gap, 20 + gap), (5, 30)]
    ]
    for (block, at), r in zip(fsspec_io.fetch(wanted), wanted, strict=True):
        assert block[r.start - at : r.stop - at] == bytes(n % 256 for n in range(r.start, r.stop))
    assert sorted(asked) == [(0, 20 + gap), (500_000, 500_010)]


def test_a_reader_is_exact_at_every_place() -> None:
    data = os.urandom(300_000)
    fsspec.filesystem("memory").pipe_file("/m/f", data)
    reader = fsspec_io.RemoteFile("memory://m/f", len(data))
    for offset, nbytes in [(299_990, 100), (0, 8), (8, 70_000), (65_535, 2), (140_000, 160_000), (300_000, 5), (7, 0)]:
        assert reader.read(offset, nbytes) == data[offset : offset + nbytes]


def test_a_reader_keeps_the_blocks_that_a_request_still_needs() -> None:
    data = os.urandom(72 << 16)
    fsspec.filesystem("memory").pipe_file("/m/f", data)
    reader = fsspec_io.RemoteFile("memory://m/f", len(data))
    for block in range(65):
        assert reader.read(block << 16, 1) == data[block << 16 : (block << 16) + 1]
    assert reader.read(64 << 16, 2 << 16) == data[64 << 16 : 66 << 16]  # one block is known, one is not


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["one.safetensors", "one.bin", "directory"])
def test_an_output_behind_an_address(root: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)
    synth.zero3(tmp_path / "ckpt", model(1_400_000), 2)
    (tmp_path / "ckpt" / "tokenizer.json").write_text("{}")
    (tmp_path / "ckpt" / "config.json").write_text('{"model_type": "x"}')
    options = Options(max_shard_size="13MB")
    told: list[int] = []
    want = zckpt.convert(tmp_path / "ckpt", tmp_path / "want" / out, options=options)
    report = zckpt.convert(tmp_path / "ckpt", f"{root}/w/{out}", options=options, progress=told.append)
    assert tree(f"{root}/w") == local_tree(tmp_path / "want")
    assert sorted(report.files) == sorted(want.files) and report.bytes_written == want.bytes_written
    assert told == sorted(told) and told[-1] <= report.bytes_written


def test_large_files_go_up_in_parts(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)
    synth.zero3(tmp_path / "ckpt", model(1_400_000), 2)
    s3.requests.clear()
    zckpt.convert(tmp_path / "ckpt", "s3://bkt/out.safetensors")
    assert len([query for method, _, query, _ in s3.requests if method == "PUT" and "partNumber" in query]) in (3, 4)


def test_from_address_to_address(root: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    zckpt.convert(checkpoint, tmp_path / "want")
    zckpt.convert(put(checkpoint, f"{root}/ckpt"), f"{root}/out")
    assert tree(f"{root}/out") == local_tree(tmp_path / "want")


def test_nothing_of_the_weights_lies_on_this_machine_meanwhile(s3: S3Server, tmp_path: Path) -> None:
    """A source that is larger than the free disk goes from one address to another: no file here may have 128 KiB."""
    synth.zero3(tmp_path / "ckpt", model(500_000), 2)
    zckpt.convert(tmp_path / "ckpt", tmp_path / "want", dtype="bf16", progress=False)
    put(tmp_path / "ckpt", "s3://bkt/ckpt")
    limited = "ulimit -f 128; exec " + shlex.join(
        [sys.executable, "-m", "zckpt", "to-bf16", "s3://bkt/ckpt", "s3://bkt/out"]
    )
    done = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert tree("s3://bkt/out") == local_tree(tmp_path / "want")


def test_a_store_that_fails_keeps_nothing(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    synth.zero3(tmp_path / "ckpt", model(1_400_000), 2)
    options = Options(max_shard_size="6MB")
    s3.failing = lambda method, path, query: method == "PUT" and "model-00003" in path and "partNumber" in query
    with pytest.raises(RemoteError, match="model-00003"):
        zckpt.convert(tmp_path / "ckpt", "s3://bkt/out", options=options)
    assert tree("s3://bkt/out") == {}
    assert not fsspec.filesystem("s3").list_multipart_uploads("bkt")


def test_an_overflow_keeps_nothing(root: str, tmp_path: Path) -> None:
    synth.zero3(tmp_path / "ckpt", [{"a": torch.ones(10), "b": torch.full((10,), 1e6)}], 2)
    with pytest.raises(CastError, match="too large for float16"):
        zckpt.convert(tmp_path / "ckpt", f"{root}/out", dtype="fp16", options=Options(max_shard_size=20))
    assert tree(f"{root}/out") == {}
    told = zckpt.convert(tmp_path / "ckpt", f"{root}/out", dtype="fp16", options=Options(overflow="inf"))
    assert told.overflows == {"b": (10, 1e6)}


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("memory://m/ck", "memory://m/ck"),
        ("memory://m/ck", "memory:///m/ck/"),
        ("memory://m/ck", "MEMORY://m//ck/global_step2"),
        ("memory://m/ck/", "memory://m/ck/global_step2/"),
        ("memory://m/ck/global_step2", "memory://m/ck/global_step2/weights"),
        ("memory://m/ck", "memory://m/x/../ck"),
        ("memory://m/ck", "memory://m"),
        ("memory://m/ck", "memory://m/ck/one.bin"),
        ("s3://bkt/ck", "s3://bkt/ck/"),
        ("s3://bkt/ck", "s3a://bkt/ck/global_step2"),
        ("s3a://bkt/ck", "s3://bkt/./ck/global_step2"),
        ("s3://bkt/ck", "s3://bkt/ck/../out"),  # to S3 a name like others
    ],
)
def test_no_output_touches_its_input(source: str, out: str) -> None:
    put(FIXTURES / SMALL / "checkpoint", source)
    before = tree(source)
    with pytest.raises(OutputError, match="the input in "):
        zckpt.convert(source, out, options=Options(overwrite=True))
    assert tree(source) == before and before


@pytest.mark.parametrize("out", ["{}/global_step2", "file://{}/global_step2/", "FILE://{}/x/..", "local://{}"])
def test_no_local_output_touches_its_input_by_another_spelling(out: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / SMALL / "checkpoint", tmp_path / "ck")
    before = local_tree(tmp_path)
    jobs = [
        lambda: zckpt.convert(f"file://{tmp_path}/ck", place, options=Options(overwrite=True)),
        lambda: zckpt.reshard(f"file://{tmp_path}/ck", place, world_size=3, overwrite=True),
        lambda: zckpt.to_universal(f"File://{tmp_path}/ck", place, overwrite=True),
        lambda: to_dcp(f"file://{tmp_path}/ck", place, options=Options(overwrite=True)),
    ]
    place = out.format(tmp_path / "ck")
    for job in jobs:
        with pytest.raises(OutputError, match="the input in "):
            job()
    assert local_tree(tmp_path) == before


def test_an_output_among_the_shards_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    there = put(FIXTURES / SMALL / "checkpoint", "memory://m/ck")
    zckpt.convert(there, tmp_path / "one.bin")
    for path in tmp_path.iterdir():
        put(path, f"memory://m/ck/global_step2/{path.name}")
    found = zckpt.verify(there, "memory:///m/ck/global_step2/one.bin")
    assert found.deletable == (False, "the output's 'one.bin' would be deleted with them")


@pytest.mark.parametrize(
    ("path", "directory", "inside"),
    [
        ("s3://bkt/a", "s3://bkt/a", True),
        ("s3://bkt/ab", "s3://bkt/a", False),
        ("s3://other/a", "s3://bkt/a", False),
        ("gcs://bkt/a/b", "gs://bkt/a/", True),
        ("sftp://me@Host/a/b", "ssh://host/a", True),
        ("abfs://c@account.dfs.core.windows.net/a", "az://c/a", True),
        ("simplecache::s3://bkt/a", "s3://bkt", True),
        ("memory://a", "/a", False),
        ("file:///a/b", "/a", True),
    ],
)
def test_what_lies_within_what(path: str, directory: str, inside: bool) -> None:
    assert locate(path).is_within(locate(directory)) == inside


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_file_addresses_are_local_paths(tmp_path: Path) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    code = (
        "import sys, zckpt\n"
        "zckpt.convert(sys.argv[1], sys.argv[2]); zckpt.convert('file://' + sys.argv[1], 'file://' + sys.argv[3])\n"
        "print(sorted({'fsspec', 's3fs'} & set(sys.modules)))"
    )
    out, again = tmp_path / "out.bin", tmp_path / "again.bin"
    command = [sys.executable, "-c", code, str(checkpoint), str(out), str(again)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    assert out.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("s3://bkt/nothing", NotACheckpointError, "no such file"),
        ("s3://no-such-bucket/x", NotACheckpointError, "no such file"),
        ("memory://nothing", NotACheckpointError, "no such file"),
        ("gs://b/x", UsageError, "gcsfs"),
        ("qqq://b/x", UsageError, "kind of address is unknown"),
    ],
)
def test_addresses_of_nothing(address: str, kind: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        zckpt.convert(address, tmp_path / "out.bin")


def test_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(FIXTURES / SMALL / "checkpoint", "s3://bkt/ckpt")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(AccessError, match="Credentials"):
        zckpt.convert("s3://bkt/ckpt", tmp_path / "out.bin")
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    ("path", "above"),
    [
        ("s3://bkt/a/c", "s3://bkt/a"),
        ("s3://bkt/a/", "s3://bkt"),
        ("s3://bkt", "s3://bkt"),
        ("/x/y", "/x"),
        ("hf://u/r/d", "hf://u/r"),
    ],
)
def test_parents(path: str, above: str) -> None:
    assert str(locate(path).parent) == above


def test_the_command_line(root: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    put(FIXTURES / SMALL / "checkpoint", f"{root}/ckpt")

    def run(*args: str) -> str:
        if root.startswith("memory"):  # only this process sees it
            return CliRunner().invoke(app, [*args]).output
        command = [sys.executable, "-m", "zckpt", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "zero3" in run("inspect", f"{root}/ckpt")
    assert "would hold" in run("to-bf16", f"{root}/ckpt", f"{root}/out", "--dry-run")
    assert tree(f"{root}/out") == {}
    assert "load it with" in run("to-bf16", f"{root}/ckpt", f"{root}/out")
    assert set(tree(f"{root}/out")) >= {"model.safetensors"}
