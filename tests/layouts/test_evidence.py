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
from small_llama import CONFIG, SHAPES, weights

import zckpt
from zckpt.core.evidence import Evidence, weakest
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import Options
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"


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
    found = evidence_of(home)
    assert found.level == "metadata" and found.doubt and found.complete is None


def write_model(home: Path, state: dict[str, torch.Tensor], name: str = "model.safetensors", **config: object) -> Path:
    home.mkdir(parents=True)
    save_file(state, home / name) if name.endswith(".safetensors") else torch.save(state, home / name)
    (home / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return home


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "anything.pt"])
@pytest.mark.parametrize("lost", ["lm_head.weight", "model.norm.weight", "model.layers.1."])
def test_a_file_alone_lacks_what_its_config_has(name: str, lost: str, tmp_path: Path) -> None:
    home = write_model(tmp_path / "all", weights(), name)
    for path in (home, home / name):
        assert evidence_of(path).level == "shapes"
    state = {key: tensor for key, tensor in weights().items() if not key.startswith(lost)}
    part = write_model(tmp_path / "part", state, name)
    for path in (part, part / name):
        with pytest.raises(zckpt.IncompleteError, match="missing"):
            open_catalog(locate(path), Reading())
        found = zckpt.inspect_checkpoint(path)
        assert not found.exportable.ok and found.complete is False
        taken = open_catalog(locate(path), Reading(as_part=True)).catalog.evidence
        assert taken.complete is False and all(one.startswith(lost) for one in taken.lacks)
    zckpt.convert(part, tmp_path / "out", options=Options(as_part=True), progress=False)
    verdict = zckpt.verify(part, tmp_path / "out", as_part=True, progress=False)
    assert verdict.ok and verdict.complete is False and verdict.deletable is not None and not verdict.deletable[0]
    assert zckpt.inspect_checkpoint(tmp_path / "out").complete is False  # which zckpt.json knows


def test_a_fifth_of_a_model_and_an_index_of_a_part(tmp_path: Path) -> None:
    few = dict(list(weights().items())[:4])
    with pytest.raises(zckpt.IncompleteError, match="17 tensors are missing"):
        open_catalog(locate(write_model(tmp_path / "few", few)), Reading())
    name = "model-00001-of-00001.safetensors"
    home = write_model(tmp_path / "index", few, name)
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(few, name)}))
    for path in (home, home / "model.safetensors.index.json"):  # all that was saved, and no whole model
        found = evidence_of(path)
        assert found.complete is False and set(found.lacks) == weights().keys() - few.keys()
    zckpt.convert(home, tmp_path / "out", progress=False)
    verdict = zckpt.verify(home, tmp_path / "out", progress=False)
    assert verdict.complete is False and verdict.deletable is not None and not verdict.deletable[0]
    assert (
        evidence_of(write_model(tmp_path / "cut", {**weights(), "lm_head.weight": torch.randn(11, 12)})).complete
        is None
    )
    cut = {**weights(), "model.layers.0.mlp.up_proj.weight": torch.randn(10, 12)}
    with pytest.raises(zckpt.IncompleteError, match="elements of tensor"):
        open_catalog(locate(write_model(tmp_path / "slice", cut)), Reading())


def test_where_no_config_tells_nothing_is_called_complete(tmp_path: Path) -> None:
    state = weights()
    body = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    others: dict[str, tuple[dict[str, torch.Tensor], dict[str, object]]] = {
        "another kind": (state, {"model_type": "gemma"}),
        "another class": (state, {"architectures": ["LlamaForQuestionAnswering"]}),
        "a critic": ({**body, "score.weight": torch.randn(1, 12), "score.bias": torch.randn(1)}, {}),
        "a value head": ({**body, "v_head.summary.weight": torch.randn(1, 12)}, {}),
        "packed": ({**state, "model.layers.0.mlp.up_proj.weight": torch.zeros(20, 6, dtype=torch.uint8)}, {}),
        "a longer vocabulary": ({**state, "model.embed_tokens.weight": torch.randn(24, 12)}, {}),
        "names of its own": ({f"net.{name}": tensor for name, tensor in state.items()}, {}),
    }
    for why, (tensors, config) in others.items():
        found = evidence_of(write_model(tmp_path / why, tensors, **config))
        assert (found.level, found.complete) == ("unknown", None), why
    home = tmp_path / "another kind"
    zckpt.convert(home, tmp_path / "out", progress=False)
    verdict = zckpt.verify(home, tmp_path / "out", progress=False)
    assert verdict.ok and verdict.deletable is not None and not verdict.deletable[0] and verdict.not_proved
    assert zckpt.inspect_checkpoint(tmp_path / "out").complete is None


def test_weights_that_lack_nothing_are_not_called_parts(tmp_path: Path) -> None:
    tied = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    assert evidence_of(write_model(tmp_path / "tied", tied, tie_word_embeddings=True)).complete
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in weights().items()}
    assert evidence_of(write_model(tmp_path / "wrapped", wrapped, "model.bin")).complete
    assert evidence_of(write_model(tmp_path / "more", {**weights(), "rope.inv_freq": torch.ones(4)})).complete
    home = write_model(tmp_path / "plain", weights())
    adapter = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.randn(2, 12)}
    save_file(adapter, home / "adapter_model.safetensors")
    assert evidence_of(home / "adapter_model.safetensors").complete is None
    zckpt.convert(home, tmp_path / "out", progress=False)
    assert evidence_of(tmp_path / "out").complete
    verdict = zckpt.verify(home, tmp_path / "out", progress=False)
    assert verdict.deletable is not None and verdict.deletable[0]


def test_an_output_of_chosen_tensors_is_not_the_model_and_no_fault(tmp_path: Path) -> None:
    home = write_model(tmp_path / "plain", weights())
    zckpt.convert(home, tmp_path / "out", options=Options(exclude=("*norm*",)), progress=False)
    found = zckpt.inspect_checkpoint(tmp_path / "out")
    assert found.exportable.ok and found.complete is False and "options left them out" in found.exportable.reason
    assert zckpt.verify(tmp_path / "out", progress=False).ok
    (tmp_path / "out" / "zckpt.json").unlink()
    assert not zckpt.inspect_checkpoint(tmp_path / "out").exportable.ok


def test_below_stage_2_a_verdict_says_what_the_save_cannot_show(tmp_path: Path) -> None:
    """A save without frozen parameters looks like one of a model that has none."""
    for kind, is_shown in (("zero1/bf16_w3", False), ("zero0/fp32", False), ("zero2/bf16_w2", True)):
        save = FIXTURES / kind / "checkpoint"
        out = tmp_path / kind
        zckpt.convert(save, out, progress=False)
        found = zckpt.verify(save, out, progress=False)
        assert found.deletable is not None and found.deletable[0]
        said = (" ".join(found.not_proved), found.deletable[1], str(found))
        assert [("without its frozen parameters" in one) for one in said] == [not is_shown] * 3
        assert found.complete is (True if is_shown else None) is zckpt.inspect_checkpoint(out).complete


def test_an_index_that_says_more_bytes_than_its_files_have(tmp_path: Path) -> None:
    """Its map was cut with the files, and the size stands: what is gone, nobody knows."""
    names = [f"layers.{n}.weight" for n in range(4)]
    save_file({name: torch.ones(8, 8) for name in names[:3]}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names[:3], "model-00001-of-00001.safetensors")
    for size, complete in ((3 * 256, True), (2 * 256, True), (4 * 256, None)):
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        found = zckpt.inspect_checkpoint(tmp_path)
        assert found.complete is complete, size
        assert (complete is True) != ("1,024 bytes" in " ".join(found.notes))


def test_an_optimizer_that_trains_more_than_the_state_dict_has(tmp_path: Path) -> None:
    home = shutil.copytree(FIXTURES / "zero0" / "fp32" / "checkpoint", tmp_path / "save")
    file = next(home.glob("*/mp_rank_00_model_states.pt"))
    root = torch.load(file, weights_only=False)
    del root["module"]["head.weight"]
    torch.save(root, file)
    found = evidence_of(home)
    assert found.complete is None and not found.is_counted
    assert "trains 1 parameter more" in found.by
