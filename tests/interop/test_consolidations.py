"""Trainers' own consolidation of the shards that they save for the hub, beside zckpt's of the same: the same tensors in the
same files. torchtitan calls torch's function; NeMo AutoModel has its own, which casts too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import _consolidate_hf_safetensors as of_torch

import zckpt

FIXTURE = Path(__file__).parents[2] / "fixtures" / "dcp" / "huggingface_w2" / "checkpoint"
AUTOMODEL = Path(__file__).parents[2] / ".make" / "automodel"
"""Where `make .make/automodel` puts it."""

WHOLE = {
    "model.embed.weight": torch.randn(11, 6),
    "model.up.weight": torch.randn(7, 6).bfloat16(),
    "model.down.weight": torch.randn(6, 7).bfloat16(),
    "model.norm.weight": torch.randn(6),
}
CUTS = {"model.embed.weight": 0, "model.up.weight": 0, "model.down.weight": 1, "model.norm.weight": 0}
"""Tensor -> the dimension that ranks share."""


def shards(home: Path, ranks: int) -> Path:
    """What torch's HuggingFaceStorageWriter and AutoModel's leave: each rank's slices, and where they begin."""
    home.mkdir()
    for rank in range(ranks):
        own, places = {}, {}
        for name, tensor in WHOLE.items():
            pieces, cut = tensor.chunk(ranks, CUTS[name]), CUTS[name]
            own[name] = pieces[rank].contiguous()
            first = sum(piece.shape[cut] for piece in pieces[:rank])
            places[name] = {"saved_offsets": [first if dim == cut else 0 for dim in range(tensor.dim())]}
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(own, home / file, {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"})
    return home


def assert_same_files(ours: Path, theirs: Path) -> None:
    index = "model.safetensors.index.json"
    own, other = (json.loads((home / index).read_text())["weight_map"] for home in (ours, theirs))
    assert own == other
    for file in set(other.values()):
        found, truth = load_file(ours / file), load_file(theirs / file)
        assert found.keys() == truth.keys() and all(same_bits(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("ranks", [0, 3])
def test_the_same_as_torchs_own(ranks: int, tmp_path: Path) -> None:
    """Of a real save of two ranks, and of one of three; `--like` gives its files and dtypes. torch 2.13 takes no whole numbers,
    and writes 0 for a scalar."""
    source = shards(tmp_path / "in", ranks) if ranks else FIXTURE
    held = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    names = sorted(name for name, tensor in held.items() if tensor.is_floating_point() and tensor.dim())
    (tmp_path / "theirs").mkdir()
    files = {name: 1 + number % 2 for number, name in enumerate(names)}
    of_torch.consolidate_safetensors_files(str(source), str(tmp_path / "theirs"), files)
    options = zckpt.Options(like=tmp_path / "theirs", exclude=sorted(held.keys() - {*names}))
    zckpt.convert(source, tmp_path / "ours", dtype="bf16", options=options, progress=False)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert zckpt.verify(source, tmp_path / "ours", progress=False).ok


@proofs.only
@pytest.mark.skipif(not AUTOMODEL.is_dir(), reason="`make .make/automodel` installs it")
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_the_same_as_automodels_own(cast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dtypes of the model that the run began with, or all cast to one."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(AUTOMODEL)])
    from nemo_automodel.components.checkpoint._backports import consolidate_hf_safetensors as of_automodel

    source = shards(tmp_path / "in", 3)
    base = {name: tensor.bfloat16() if "norm" not in name else tensor.float() for name, tensor in WHOLE.items()}
    files = {name: 1 + number % 2 for number, name in enumerate(base)}
    (tmp_path / "base").mkdir()
    for number in (1, 2):
        held = {name: tensor for name, tensor in base.items() if files[name] == number}
        save_file(held, tmp_path / "base" / f"model-{number:05d}-of-00002.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"model-{files[name]:05d}-of-00002.safetensors" for name in base}}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "theirs").mkdir()
    kinds = {name: "F32" if tensor.dtype == torch.float32 else "BF16" for name, tensor in base.items()}
    of_automodel.consolidate_safetensors_files_on_every_rank(
        str(source), str(tmp_path / "theirs"), files, cast_dtype=cast, fqn_to_dtype_mapping=kinds
    )
    options = zckpt.Options(like=tmp_path / "base")
    zckpt.convert(source, tmp_path / "ours", dtype="bf16", options=options, progress=False)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
