"""`diff` says the same of what is the same, in whatever form, and names every difference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import synth
import torch
from safetensors.torch import save_file
from truths import kept_of

import zckpt
from zckpt.base.errors import NotACheckpointError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (70, 50), "b.bias": (11,), "c.weight": (30, 90), "d": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def one(found: zckpt.Diff, name: str):
    return next(tensor for tensor in found.tensors if tensor.name == name)


def test_every_layout_of_the_same_numbers_is_the_same(tmp_path: Path) -> None:
    state = tensors()
    places = [
        synth.zero12(tmp_path / "z2", [state], 3),
        synth.zero12(tmp_path / "z1", [dict(list(state.items())[:2]), dict(list(state.items())[2:])], 2, stage=1),
        synth.zero3(tmp_path / "z3", [state], 4),
        synth.zero3(tmp_path / "z3s", [state], 2, sub_group=1000),
        tmp_path / "w.bin",
        tmp_path / "w.safetensors",
        tmp_path / "sharded",
        tmp_path / "legacy.pt",
    ]
    torch.save(state, tmp_path / "w.bin")
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    zckpt.convert(places[0], tmp_path / "sharded", options=zckpt.Options(max_shard_size=8000))
    for a in places:
        for b in (places[0], places[-1]):
            found = zckpt.diff(a, b)
            assert found.same and len(found.tensors) == 4, (a, b)
            assert all(t.statistics is not None and t.statistics.cosine == 1.0 for t in found.tensors)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*/how.json")), ids=lambda p: f"{p.parts[-3]}/{p.parts[-2]}")
def test_real_checkpoints_against_their_truth(path: Path, tmp_path: Path) -> None:
    save_file(kept_of(path.parent), tmp_path / "truth.safetensors")
    found = zckpt.diff(path.parent / "checkpoint", tmp_path / "truth.safetensors")
    for tensor in found.tensors:
        assert tensor.statistics is not None and tensor.statistics.max_abs == 0, tensor


def test_each_figure(tmp_path: Path) -> None:
    a, b = tensors(), tensors()
    b["a.weight"][1, 7] += 0.5
    b["a.weight"][60, 1] *= 1.001
    b["b.bias"] = b["b.bias"].double()
    b["c.weight"] = b["c.weight"].reshape(90, 30)
    b["e"] = b.pop("d")
    torch.save(a, tmp_path / "a.bin")
    torch.save(b, tmp_path / "b.bin")
    found = zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin")
    assert not found.same and found.only_a == ("d",) and found.only_b == ("e",)
    weight = one(found, "a.weight")
    assert not weight.same and weight.statistics.differ == 2 and weight.statistics.first == 57
    x, y = a["a.weight"].double(), b["a.weight"].double()
    assert weight.statistics.max_abs == float((x - y).abs().max())
    assert weight.statistics.max_rel == float(((x - y).abs() / torch.maximum(x.abs(), y.abs())).max())
    cosine = torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)
    assert math.isclose(weight.statistics.cosine, float(cosine), rel_tol=1e-12)
    bias = one(found, "b.bias")
    # another dtype is a difference, though every number is the same
    assert not bias.same and bias.statistics.differ == 0
    assert one(found, "c.weight").statistics is None and not one(found, "c.weight").same
    text = "\n".join(found.lines())
    assert "b.bias (F32 in A, F64 in B)" in text and "c.weight (shape [30, 90] in A, [90, 30] in B)" in text
    assert text.startswith("only in A: 'd'\nonly in B: 'e'\ntensor\n")
    assert text.endswith("different: 3 of 3 tensors that both have, 1 name only in A, 1 name only in B")
    assert max(map(len, found.lines(width=60))) <= 80 and all(line in text for line in found.lines(width=80))


def test_tolerances(tmp_path: Path) -> None:
    a = tensors()
    torch.save(a, tmp_path / "a.bin")
    torch.save({name: tensor.bfloat16() for name, tensor in a.items()}, tmp_path / "b.bin")
    paths = tmp_path / "a.bin", tmp_path / "b.bin"
    assert not zckpt.diff(*paths).same
    assert zckpt.diff(*paths, rtol=2**-8).same
    assert not zckpt.diff(*paths, rtol=2**-12).same
    assert zckpt.diff(*paths, atol=0.1).same
    found = zckpt.diff(*paths, atol=1e-3)
    for name, tensor in a.items():
        far = (tensor - tensor.bfloat16().float()).abs().double() > 1e-3
        assert one(found, name).statistics.differ == int(far.sum())


def test_nan_zero_and_infinity(tmp_path: Path) -> None:
    a = {"x": torch.tensor([0.0, math.nan, math.inf, 1.0])}
    b = {"x": torch.tensor([-0.0, math.nan, -math.inf, math.nan])}
    torch.save(a, tmp_path / "a.bin")
    torch.save(b, tmp_path / "b.bin")
    x = one(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin"), "x")
    assert (x.statistics.differ, x.statistics.first, x.statistics.max_abs) == (3, 0, math.inf)
    assert (x.statistics.nan, x.statistics.other_nan, x.statistics.inf, x.statistics.other_inf) == (1, 2, 1, 1)
    assert list(x.rows())[2].strip() == "1 NaN and 1 infinite in A, 2 NaN and 1 infinite in B"
    facts = json.loads(json.dumps(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin").as_json(), allow_nan=False))
    assert facts["tensors"][0]["max_abs"] == "inf"
    assert zckpt.diff(tmp_path / "a.bin", tmp_path / "a.bin").same
    assert one(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin", atol=1.0), "x").statistics.differ == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([0.0, 1.0, 5.0, 1.0]).to(dtype)
    b = a.clone()
    b[-1] = 0
    for name, tensor in (("a", a), ("b", b)):
        torch.save({"x": tensor}, tmp_path / f"{name}.bin")
    assert zckpt.diff(tmp_path / "a.bin", tmp_path / "a.bin").same
    x = one(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin"), "x")
    assert (x.same, x.statistics.differ) == (False, 1)
    torch.save(
        {"x": torch.zeros(4, dtype=torch.int32 if dtype.is_floating_point else torch.float32)}, tmp_path / "c.bin"
    )
    assert one(zckpt.diff(tmp_path / "a.bin", tmp_path / "c.bin"), "x").statistics is None


def test_large_whole_numbers_are_told_apart(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([2**62, 5])}, tmp_path / "a.bin")
    torch.save({"x": torch.tensor([2**62 + 1, 5])}, tmp_path / "b.bin")
    assert one(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin"), "x").statistics.differ == 1
    assert one(zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin", rtol=1e-9), "x").same


def test_tied_names_and_wrappers(tmp_path: Path) -> None:
    state = {"embed.weight": torch.randn(20, 4), "other": torch.randn(3)}
    checkpoint = synth.zero12(tmp_path / "ckpt", [state], 2, shared={"head.weight": "embed.weight"})
    zckpt.convert(checkpoint, tmp_path / "w.safetensors")
    assert zckpt.diff(checkpoint, tmp_path / "w.safetensors").same
    untied = {**state, "head.weight": state["embed.weight"] + 1}
    torch.save({f"module.{name}": tensor for name, tensor in untied.items()}, tmp_path / "u.bin")
    found = zckpt.diff(checkpoint, tmp_path / "u.bin")
    assert [t.name for t in found.tensors if not t.same] == ["head.weight"]
    assert any("'module.'" in note and note.startswith("B: ") for note in found.notes)


def test_nothing_in_common(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "a.bin")
    torch.save({"y": torch.ones(1)}, tmp_path / "b.bin")
    found = zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin")
    assert not found.same and found.tensors == ()
    with pytest.raises(NotACheckpointError):
        zckpt.diff(tmp_path / "a.bin", tmp_path / "nothing")


def test_long_lists_are_cut(tmp_path: Path) -> None:
    torch.save({f"x{i}": torch.ones(1) for i in range(50)}, tmp_path / "a.bin")
    torch.save({f"x{i}": torch.zeros(1) for i in range(50)}, tmp_path / "b.bin")
    found = zckpt.diff(tmp_path / "a.bin", tmp_path / "b.bin")
    assert len(list(found.lines())) == 44 and "and 30 more tensors" in list(found.lines())[-2]
    assert len(list(found.lines(tensors=True))) == 103
    same = zckpt.diff(tmp_path / "a.bin", tmp_path / "a.bin")
    assert list(same.lines()) == ["the same: 50 tensors, bit for bit"] and len(list(same.lines(tensors=True))) == 51


def test_memory_does_not_grow_with_the_checkpoints(tmp_path: Path) -> None:
    code = """
    import os, sys, json
    import zckpt
    root, megabytes = sys.argv[1], int(sys.argv[2])
    for name in "ab":
        numel = (megabytes << 20) // 4
        header = json.dumps({"x": {"dtype": "F32", "shape": [numel], "data_offsets": [0, 4 * numel]}}).encode()
        with open(f"{root}/{name}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 4 * numel)
    os.pwrite(os.open(f"{root}/b.safetensors", os.O_WRONLY), b"1234", 1 << 20)
    found = zckpt.diff(f"{root}/a.safetensors", f"{root}/b.safetensors")
    assert 1 <= found.tensors[0].statistics.differ <= 2 and found.tensors[0].statistics.count == numel
    print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
    """
    peaks = []
    for megabytes in (10, 600):
        directory = tmp_path / str(megabytes)
        directory.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", textwrap.dedent(code), str(directory), str(megabytes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 16 << 10


def test_a_tolerance_of_nothing_is_not_bit_for_bit(tmp_path: Path) -> None:
    for name, values in (("a", [0.0, -0.0]), ("b", [-0.0, 0.0])):
        save_file({"w": torch.tensor(values)}, tmp_path / f"{name}.safetensors")
    found = zckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=0)
    assert found.same and "within the tolerance (max abs 0)" in str(found) and "bit for bit" not in str(found)
    assert not zckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").same
