"""Any shapes, groups, world size and padding: what comes out is what went in, to the bit."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synth
import torch
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import zckpt
from zckpt.containers import torch_zip
from zckpt.layouts.zero import zero3
from zckpt.layouts.zero.partition import SubGroups, flat_offsets, flat_pieces, partition_of

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
models = st.lists(st.lists(shapes, min_size=1, max_size=5), min_size=1, max_size=4)


def tensors(model: list[list[tuple[int, ...]]]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {f"g{g}.p{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(group)}
        for g, group in enumerate(model)
    ]


def check(checkpoint: Path, wanted: dict[str, torch.Tensor], aliases: dict[str, str]) -> None:
    for name in ("o.safetensors", "o.bin"):
        out = checkpoint / name
        zckpt.convert(checkpoint, checkpoint.parent / f"{checkpoint.name}-{name}")
        out = checkpoint.parent / f"{checkpoint.name}-{name}"
        found = load_file(out) if name.endswith("safetensors") else torch.load(out, weights_only=True, mmap=True)
        extra = aliases if name.endswith("bin") else {}
        assert found.keys() == wanted.keys() | extra.keys()
        assert all(same_bits(found[n], wanted[aliases.get(n, n)]) for n in found)


@settings(max_examples=40, deadline=None)
@given(model=models, world_size=st.integers(1, 9), alignment=st.sampled_from([1, 4, 8]), cut=st.booleans())
def test_zero12(
    model: Any, world_size: int, alignment: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    groups = tensors(model)
    buffers = {"steps": torch.arange(3), "mean": torch.ones(2)}
    frozen = {"f.weight": torch.randn(3, 2)}
    shared = {"tied": "f.weight"}
    checkpoint = synth.zero12(
        tmp_path_factory.mktemp("z") / "c", groups, world_size, alignment=alignment, cut_padding=cut,
        buffers=buffers, frozen=frozen, shared=shared,
    )  # fmt: skip
    check(checkpoint, {**{n: t for g in groups for n, t in g.items()}, **buffers, **frozen}, shared)


@settings(max_examples=40, deadline=None)
@given(model=models, world_size=st.integers(1, 9), sub_group=st.sampled_from([1, 7, 30, 10**9]))
def test_zero3(model: Any, world_size: int, sub_group: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    groups = tensors(model)
    buffers, frozen = {"steps": torch.arange(3)}, {"f.weight": torch.randn(3, 2), "f.one": torch.randn(1)}
    shared = {"tied": "g0.p0"}
    checkpoint = synth.zero3(
        tmp_path_factory.mktemp("z") / "c", groups, world_size, sub_group=sub_group, buffers=buffers, frozen=frozen,
        shared=shared,
    )  # fmt: skip
    check(checkpoint, {**{n: t for g in groups for n, t in g.items()}, **buffers, **frozen}, shared)


def test_twelve_ranks_are_ordered_as_numbers(tmp_path: Path) -> None:
    groups = [{"w": torch.randn(1001)}]
    for make in (synth.zero12, synth.zero3):
        check(make(tmp_path / make.__name__, groups, 12), groups[0], {})


def test_mics_reads_the_first_group_and_checks_the_others(tmp_path: Path) -> None:
    groups = tensors([[(7, 5), (11,)], [(3,)]])
    checkpoint = synth.zero3(tmp_path / "c", groups, 2)
    save = checkpoint / "global_step5"
    for rank in range(4):
        for kind in ("model", "optim"):
            source = save / f"zero_pp_rank_{rank % 2}_mp_rank_00_{kind}_states.pt"
            root = torch.load(source, weights_only=False)
            if kind == "model":
                root["dp_world_size"] = 4
                root["ds_config"] = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
            else:
                root["optimizer_state_dict"]["partition_count"] = 4
            torch.save(root, save / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    check(checkpoint, {n: t for g in groups for n, t in g.items()}, {})
    path = save / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    root = torch.load(path, weights_only=False)
    root["optimizer_state_dict"]["fp32_flat_groups"][0] += 1
    torch.save(root, path)
    with pytest.raises(zckpt.InconsistentError):
        zckpt.convert(checkpoint, tmp_path / "bad.bin")


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("split", [1, 2])
def test_masters_without_names(flat: bool, frozen: bool, split: int, tmp_path: Path) -> None:
    names = {f"p{i}": torch.randn(shape) for i, shape in enumerate([(4, 3), (3,), (4, 3), (3,), (2, 2)])}
    trained = {n: t for n, t in names.items() if not (frozen and n == "p1")}
    groups = [list(trained.values())[i::split] for i in range(split)]
    module = OrderedDict((n, t.bfloat16()) for n, t in names.items())
    module["steps"] = torch.tensor(4)
    masters = (
        {"fp32_groups_flat": [torch.cat([t.flatten() for t in g]) for g in groups]} if flat else {"fp32_groups": groups}
    )
    save = tmp_path / "c" / "global_step1"
    save.mkdir(parents=True)
    (tmp_path / "c" / "latest").write_text("global_step1")
    model = {
        "module": module,
        "buffer_names": ["steps"],
        "optimizer": masters,
        "param_shapes": None,
        "dp_world_size": 2,
    }
    torch.save(model, save / "mp_rank_00_model_states.pt")
    wanted = {**names, "steps": torch.tensor(4)} | ({"p1": names["p1"].bfloat16().float()} if frozen else {})
    check(tmp_path / "c", wanted, {})


# ---- the arithmetic --------------------------------------------------------------------------------------------------


@given(numels=st.lists(st.integers(0, 50), min_size=1, max_size=8), size=st.integers(1, 40), paddings=st.booleans())
def test_flat_pieces_cover_every_parameter_once(numels: list[int], size: int, paddings: bool) -> None:
    gaps = [i % 3 for i in range(len(numels))] if paddings else None
    offsets, total = flat_offsets(numels, gaps)
    flat = [(i, k) for i, n in enumerate(numels) for k in [*range(n), *([None] * (gaps[i] if gaps else 0))]]
    assert total == len(flat)
    for number, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        seen = []
        for rank, local, start, count in flat_pieces(offset, numel, size):
            assert local + count <= size and count
            assert [flat[rank * size + local + i] for i in range(count)] == [(number, start + i) for i in range(count)]
            seen += range(start, start + count)
        assert seen == list(range(numel))


@given(numel=st.integers(0, 200), world_size=st.integers(1, 20))
def test_partitions_cover_a_parameter_once(numel: int, world_size: int) -> None:
    pieces = [partition_of(numel, world_size, rank) for rank in range(world_size)]
    assert [k for piece in pieces for k in piece] == list(range(numel))
    assert all(len(piece) <= math.ceil(numel / world_size) for piece in pieces)
    with pytest.raises(ValueError, match="rank"):
        partition_of(numel, world_size, world_size)


@given(lengths=st.lists(st.integers(0, 9), max_size=8), offset=st.integers(0, 40), count=st.integers(0, 40))
def test_sub_groups_find_every_element(lengths: list[int], offset: int, count: int) -> None:
    places = [(i, k) for i, n in enumerate(lengths) for k in range(n)]
    found = [(p.index, p.offset + k) for p in SubGroups(lengths).pieces(offset, count) for k in range(p.count)]
    assert found == places[offset : offset + count]


@given(
    lengths=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), max_size=20),
)
def test_ranks_that_are_cut_alike_share_what_they_find(
    lengths: list[list[int]], asked: list[tuple[int, int, int]]
) -> None:
    shards = [SimpleNamespace(vectors=[SimpleNamespace(numel=numel) for numel in own]) for own in lengths]
    ranks = zero3._sub_groups(shards)  # type: ignore[arg-type]
    assert len({*map(id, ranks)}) == len({*map(tuple, lengths)})
    for rank, offset, count in asked:
        if rank < len(lengths):
            assert ranks[rank].pieces(offset, count) == SubGroups(lengths[rank]).pieces(offset, count)


def test_files_of_ranks_that_are_alike_are_opened_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickle of eight ranks is carried out by itself, and their tensors are their own."""
    wanted = {"w": torch.arange(40.0).reshape(8, 5), "b": torch.arange(9.0)}
    checkpoint = synth.zero3(tmp_path / "ckpt", [wanted], 8)
    read: list[str] = []
    load = torch_zip.load_pickle
    monkeypatch.setattr(torch_zip, "load_pickle", lambda data, **how: read.append(how["file"]) or load(data, **how))
    zckpt.convert(checkpoint, tmp_path / "out")
    assert not read
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bits(found[name], tensor) for name, tensor in wanted.items())
