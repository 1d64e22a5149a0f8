"""What a save proves of its own completeness, and what the answers say where it proves nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.core.evidence import Evidence, weakest
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import Options
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 12, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 23,
    "tie_word_embeddings": False,
}  # fmt: skip
KNOWN = known_shapes(CONFIG)
assert KNOWN is not None
SHAPES = KNOWN.shapes


def evidence_of(path: Path) -> Evidence:
    return open_catalog(locate(path), Reading()).catalog.evidence


def write_shards(home: Path, ranks: int, files: int = 1, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    """What torch's HuggingFaceStorageWriter leaves of a model that `ranks` ranks share by rows, in `files` files a rank."""
    shapes = dict(SHAPES) if shapes is None else shapes
    home.mkdir(parents=True)
    torch.manual_seed(0)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    for rank in range(ranks):
        for file in range(files):
            own, places = {}, {}
            for name in list(whole)[file::files]:
                rows = whole[name].shape[0]
                step = math.ceil(rows / ranks)
                first = min(step * rank, rows)
                own[name] = whole[name][first : first + step].clone()
                places[name] = {"saved_offsets": [first] + [0] * (whole[name].dim() - 1)}
            name = f"shard-{rank + 1:05d}-model-{file + 1:05d}-of-{files:05d}.safetensors"
            save_file(own, home / name, {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"})


def test_the_weakest_proof_counts() -> None:
    metadata, shapes, unknown = Evidence("metadata", "a"), Evidence("shapes", "b"), Evidence("unknown", "c", "d")
    assert weakest([metadata, shapes]) is shapes
    assert weakest([shapes, unknown, metadata]) is unknown
    assert (metadata.complete, shapes.complete, unknown.complete) == (True, True, None)
    assert str(unknown) == "it cannot be told whether this is the whole model: c; d would tell"


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("zero3/bf16_w2", "metadata"), ("zero2/bf16_w2", "metadata"), ("zero0/fp32", "metadata"),
        ("dcp/fsdp2_nested_w2", "metadata"), ("dcp/huggingface_w2", "shapes"), ("dcp/alone_w2", "unknown"),
        ("ranks/tp_w4", "metadata"), ("verl/critic_w2", "metadata"), ("fairscale_parts/metaseq_w4", "metadata"),
        ("fairscale/fairseq_w3", "metadata"), ("megatron_legacy/hf_gpt2_tp2", "metadata"),
        ("torch_checkpointing/safetensors_w4", "metadata"), ("mcore/stages_tp2_pp2", "metadata"),
    ],
)  # fmt: skip
def test_each_family_says_what_proves_a_save_whole(path: str, level: str) -> None:
    assert evidence_of(FIXTURES / path / "checkpoint").level == level


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_of_the_last_rank_are_missed_where_anything_tells(tmp_path: Path, ranks: int) -> None:
    write_shards(tmp_path / "all", ranks, 2)
    assert evidence_of(tmp_path / "all").level == "shapes"  # 23 rows do not fill the last chunk
    for name in (tmp_path / "all").glob(f"shard-{ranks:05d}-*"):
        shutil.copytree(tmp_path / "all", tmp_path / name.stem)
        (tmp_path / name.stem / name.name).unlink()
        with pytest.raises(zckpt.IncompleteError):
            open_catalog(locate(tmp_path / name.stem), Reading())
    for name in (tmp_path / "all").glob(f"shard-{ranks:05d}-*"):
        name.unlink()
    found = evidence_of(tmp_path / "all")
    assert found.level == "unknown" and "config.json" in found.missing
    (tmp_path / "all" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(zckpt.IncompleteError, match="missing"):
        open_catalog(locate(tmp_path / "all"), Reading())


def test_the_optimizer_beside_the_shards_knows_the_shapes(tmp_path: Path) -> None:
    home = tmp_path / "policy" / "weights"
    write_shards(home, 2)
    states = {name: {"exp_avg": torch.zeros(shape), "step": torch.tensor(2.0)} for name, shape in SHAPES.items()}
    with pytest.warns(UserWarning):
        dcp.save({"optim": {"state": states}}, checkpoint_id=tmp_path / "policy" / "optim", no_dist=True)
    assert evidence_of(home).complete
    next(home.glob("shard-00002-*")).unlink()
    with pytest.raises(zckpt.IncompleteError, match="elements of tensor"):
        open_catalog(locate(home), Reading())


def test_even_chunks_prove_nothing(tmp_path: Path) -> None:
    """With 8 rows on two ranks, or on four of which two are lost, the shards are the same."""
    write_shards(tmp_path / "even", 2, shapes={"a.weight": (8, 3), "b.weight": (16,)})
    found = zckpt.inspect_checkpoint(tmp_path / "even")
    assert found.exportable.ok and found.complete is None and found.as_json()["complete"] is None
    assert "cannot be told" in found.exportable.reason
    zckpt.convert(tmp_path / "even", tmp_path / "out", progress=False)
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())
    assert facts["source"]["evidence"]["level"] == "unknown"
    assert zckpt.inspect_checkpoint(tmp_path / "out").complete is None  # the doubt goes on with the weights


def test_of_two_tied_weights_that_are_not_trained_the_save_has_the_second_name(tmp_path: Path) -> None:
    """`exclude_frozen_parameters` leaves out what `named_parameters()` lists, which is the first of two names."""
    home = tmp_path / "save"
    shutil.copytree(FIXTURES / "zero2" / "tied_frozen_w2" / "checkpoint", home)
    path = home / "global_step2" / "mp_rank_00_model_states.pt"
    root = torch.load(path, weights_only=False)
    frozen = root["frozen_param_shapes"]
    table = root["module"]["embed.weight"]
    module = {"head.weight": table, **{name: ref for name, ref in root["module"].items() if name not in frozen}}
    torch.save({**root, "module": module, "frozen_param_shapes": None, "frozen_param_fragments": None}, path)
    catalog = open_catalog(locate(home), Reading()).catalog
    assert catalog.aliases["head.weight"] == "embed.weight" and catalog["embed.weight"].shape == tuple(table.shape)
    assert catalog.evidence.left_out and catalog.evidence.lacks == () and catalog.evidence.complete is None
    assert "second reader" in dict(zckpt.verify(home, progress=False).proved_by)["places"]
    base = load_file(FIXTURES / "zero2" / "tied_frozen_w2" / "truth.safetensors")
    save_file({**base, "embed.weight": table.float() + 1}, tmp_path / "base.safetensors")
    zckpt.convert(home, tmp_path / "out", options=Options(base=str(tmp_path / "base.safetensors")), progress=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert frozen.keys() <= written.keys() and torch.equal(written["embed.weight"], table.float())


def test_below_stage_2_the_config_tells_of_parameters_that_were_left_out(tmp_path: Path) -> None:
    source = FIXTURES / "zero0" / "fp32" / "checkpoint" / "global_step2" / "mp_rank_00_model_states.pt"
    root = torch.load(source, weights_only=False)
    for lost in ((), ("model.embed_tokens.weight",), tuple(name for name in SHAPES if "layers.0" in name)):
        home = tmp_path / f"{len(lost)}"
        (home / "global_step2").mkdir(parents=True)
        (home / "latest").write_text("global_step2")
        (home / "config.json").write_text(json.dumps(CONFIG))
        module = {name: torch.randn(shape) for name, shape in SHAPES.items() if name not in lost}
        more = {"module": module, "optimizer": None, "buffer_names": [], "shared_params": {}}
        torch.save({**root, **more}, home / "global_step2" / source.name)
        assert evidence_of(home).lacks == tuple(sorted(lost))
        assert zckpt.inspect_checkpoint(home).complete is not bool(lost)
    (home / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 24}))  # of another model
    assert evidence_of(home).complete
