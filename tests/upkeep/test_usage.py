"""Bytes by class, on real saves and on files whose waste is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from zckpt.base.errors import NotACheckpointError
from zckpt.upkeep.usage import CLASSES, du

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
FAMILIES = (
    "autoep/zero2_w4", "autotp/zero3_tp2_dp2", "bf16_optimizer/w2", "dcp/fsdp2_nested_w2", "dcp/huggingface_w2",
    "fairscale/fairseq_w3", "mcore/stages_tp2_pp2", "megatron_legacy/hf_llama_tp2", "moe/zero2_pyramid_w4", "nvme/bf16_w2",
    "optimizers/oss_ranks_w3", "pipeline/zero1_pp2_dp2", "ranks/tp_w4", "torch_checkpointing/torch_files_w2",
    "torchtitan/llama3_0_3_0_w3", "trainers/composer_sharded_w2", "trainers/lightning_w1", "transformers/llama_zero3",
    "zero2/lora_w2",
)  # fmt: skip
HOW = [FIXTURES / name for name in FAMILIES]


def below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("fixture", HOW, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_classes_add_up_to_the_files(fixture: Path) -> None:
    checkpoint = fixture / "checkpoint"
    found = du(checkpoint)
    assert found.nbytes + found.beside_bytes == below(checkpoint)
    assert found.nbytes == sum(found.classes.values())
    assert all(save.classes.keys() == set(CLASSES) and min(save.classes.values()) >= 0 for save in found.saves)
    assert all(save.classes["weights"] + save.classes["masters"] > 0 and not save.note for save in found.saves)


@pytest.mark.parametrize(("name", "weights", "masters", "moments"), [
    ("zero2/bf16_w2", 2, 4, 8), ("zero3/bf16_w2", 0, 4, 8), ("zero0/fp32", 4, 0, 8), ("zero0/bf16", 2, 4, 8),
    ("zero2/sgd_w2", 2, 4, 0), ("bf16_optimizer/w2", 2, 4, 8), ("ranks/fsdp2_w2", 4, 0, 8),
])  # fmt: skip
def test_bytes_per_parameter(name: str, weights: int, masters: int, moments: int) -> None:
    """Of mixed precision 2 + 4 + 8 bytes with Adam; what is left over is small: buffers and step counters."""
    checkpoint = FIXTURES / name / "checkpoint"
    (save,) = du(checkpoint).saves
    import zckpt

    facts = zckpt.inspect_checkpoint(checkpoint).as_json()
    numel = facts["trainable_numel"]
    assert isinstance(numel, int)
    for each, factor in (("weights", weights), ("masters", masters), ("moments", moments)):
        assert factor * numel <= save.classes[each] <= factor * numel + 64, (each, numel)


def test_waste(tmp_path: Path) -> None:
    """A view pickled with its storage, and shards that each hold the whole flat vector."""
    flat = torch.randn(1000)
    for shard in (0, 1):
        torch.save(
            {f"w{shard}": flat[500 * shard : 500 * shard + 500]},
            tmp_path / f"pytorch_model-0000{shard + 1}-of-00002.bin",
        )
    index = {"metadata": {}, "weight_map": {f"w{s}": f"pytorch_model-0000{s + 1}-of-00002.bin" for s in (0, 1)}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (save,) = du(tmp_path).saves
    assert save.classes["waste"] == 4000 and save.classes["weights"] == 4000
    assert list(save.wasteful.values()) == [2000, 2000]
    lines = "\n".join(du(tmp_path).lines(100))
    assert "zckpt slim" in lines


def test_a_run(tmp_path: Path) -> None:
    source = FIXTURES / "zero2" / "bf16_w2" / "checkpoint" / "global_step2"
    for step in (10, 9):
        shutil.copytree(source, tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step10")
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 damaged")
    found = du(tmp_path)
    assert [(save.step, bool(save.note)) for save in found.saves] == [(9, False), (10, True)]
    assert found.beside_bytes == len("global_step10") and found.nbytes == sum(found.classes.values())
    assert found.saves[1].classes["moments"] == found.saves[0].classes["moments"]  # by their names
    assert len({len(line) for line in list(found.lines(200))[:4]}) == 1


def test_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        du(tmp_path)
