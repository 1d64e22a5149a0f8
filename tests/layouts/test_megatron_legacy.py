"""Megatron-LM's legacy saves, as Megatron-LM wrote them: what they hold, where they are found, what is wrong with them."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.checks.verify import verify
from zckpt.jobs.groups import Form, Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.options import Options
from zckpt.upkeep.keep_rules import KeepRules
from zckpt.upkeep.prune import prune

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron_legacy"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))
ITERATION = "iter_0000002"


def how(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FIXTURES / name / "how.json").read_text())
    return facts


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    catalog = open_catalog(str(path)).catalog
    return {name: read_tensor(entry, "pt") for name, entry in catalog.tensors.items()}


def copy_of(name: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", to / "run"))


class Stub:
    """Stands for a class of Megatron's, in a file that is read and written again."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class StubModule(types.ModuleType):
    """A module that has every class."""

    def __getattr__(self, name: str) -> type:
        made = type(name, (Stub,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def edited(path: Path, edit: Callable[[Any], object]) -> None:
    """Writes a file again with other contents, without Megatron."""
    named = {
        "megatron",
        "megatron.core",
        "megatron.core.enums",
        "megatron.core.transformer",
        "megatron.core.transformer.enums",
    }
    named |= {"megatron.core.rerun_state_machine", "megatron.training", "megatron.training.tokenizer"}
    with pytest.MonkeyPatch.context() as patch:
        for name in named:
            patch.setitem(sys.modules, name, StubModule(name))
        root = torch.load(path, weights_only=False)
        edit(root)
        torch.save(root, path)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit(name: str) -> None:
    """Those of the live masters where the save holds them; those of the weights where it does not."""
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    truth = load_file(FIXTURES / name / "truth.safetensors")
    facts = how(name)
    half = "--bf16" in facts["flags"] and not facts["masters"]
    found = {n: read_tensor(entry, "pt") for n, entry in opened.catalog.tensors.items()}
    assert found.keys() == truth.keys()
    assert [n for n in truth if not same_bits(found[n], truth[n].bfloat16() if half else truth[n])] == []
    assert not any("no names" in note for note in opened.catalog.source.notes)
    topology = opened.catalog.topology
    assert (topology.tp, topology.pp, topology.ep) == (facts["tp"], facts["pp"], facts["ep"])
    copies = {n for n, entry in opened.catalog.tensors.items() if any(copy.rank for copy in entry.replicas)}
    if facts["pp"] > 1 and "--untie" not in facts["flags"]:
        assert any(n.endswith("word_embeddings.weight") for n in copies)


@pytest.mark.parametrize("name", NAMES)
def test_sound(name: str) -> None:
    verdict = verify(FIXTURES / name / "checkpoint", deep=True)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("hf_")])
def test_becomes_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    zckpt.convert(FIXTURES / name / "checkpoint", tmp_path / "out", options=Options(form=Form(to="hf")), progress=False)
    wanted = load_file(FIXTURES / name / "hf" / "model.safetensors")
    found = {n: t for path in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(path).items()}
    padded = [n for n in wanted if n in found and found[n].shape[0] > wanted[n].shape[0]]
    assert all(n.endswith(("wte.weight", "embed_tokens.weight", "lm_head.weight")) for n in padded)
    found |= {n: found[n][: wanted[n].shape[0]] for n in padded}
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not same_bits(found[n], wanted[n].float())] == []
    own = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((FIXTURES / name / "hf" / "config.json").read_text())
    sizes = {"model_type", "num_hidden_layers", "n_layer", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"}
    sizes |= {
        "num_local_experts",
        "num_experts_per_tok",
        "intermediate_size",
        "n_head",
        "hidden_size",
        "tie_word_embeddings",
    }
    assert {key: own[key] for key in sizes & own.keys() & theirs.keys()} == {
        key: theirs[key] for key in sizes & own.keys() & theirs.keys()
    }


def test_what_a_path_means(tmp_path: Path) -> None:
    run = copy_of("llama_tp2_pp2", tmp_path)
    step = run / ITERATION
    for path in (run, step, step / "mp_rank_01_001", step / "mp_rank_00_000" / "distrib_optim.pt"):
        assert open_catalog(str(path)).place.listing.directory.path == str(step)
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert open_catalog(str(run)).place.listing.directory.path == str(step)
    step.rename(run / "iter_0000010")
    shutil.copytree(FIXTURES / "fp32" / "checkpoint" / ITERATION, step)
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    assert open_catalog(str(run)).place.listing.directory.name == "iter_0000010"
    assert open_catalog(str(run), Reading(tag=ITERATION)).place.listing.directory.name == ITERATION
    release = FIXTURES / "hf_llama_tp2" / "checkpoint"
    assert open_catalog(str(release)).place.listing.directory.name == "release"


def test_parts_on_other_disks(tmp_path: Path) -> None:
    run = copy_of("llama_tp2_pp2", tmp_path)
    other = tmp_path / "other" / ITERATION
    other.mkdir(parents=True)
    (run / ITERATION / "mp_rank_01_001").rename(other / "mp_rank_01_001")
    with pytest.raises(IncompleteError, match="mp_rank_01_001"):
        open_catalog(str(run))
    assert len(open_catalog(str(run), Reading(also=(str(other),))).catalog) == 15
    assert "mp_rank_01_001" in inspect_checkpoint(str(run)).exportable.reason


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("moe_ep2", "mp_rank_00_001"),
        ("moe_tp2_ep2_etp1", "mp_rank_01_001"),
        ("moe_tp2_ep2", "mp_rank_01_000"),
        ("hf_mixtral_pp2_ep2", "mp_rank_00_001_001"),
        ("groups_tp2", "mp_rank_00"),
    ],
)
def test_missing_directories_are_named(name: str, missing: str, tmp_path: Path) -> None:
    run = copy_of(name, tmp_path)
    shutil.rmtree(run / ITERATION / missing)
    with pytest.raises(IncompleteError, match=f"'{missing}'"):
        open_catalog(str(run))


def test_directories_of_other_saves(tmp_path: Path) -> None:
    run = copy_of("moe_ep2", tmp_path)
    shutil.copytree(run / ITERATION / "mp_rank_00_001", run / ITERATION / "mp_rank_00_002")
    with pytest.raises(InconsistentError, match="of no rank"):
        open_catalog(str(run))
    shutil.rmtree(run / ITERATION / "mp_rank_00_002")
    edited(run / ITERATION / "mp_rank_00_001" / "model_optim_rng.pt", lambda root: root.update(iteration=4))
    with pytest.raises(InconsistentError, match="iteration"):
        open_catalog(str(run))


def test_the_second_number_is_told_by_args(tmp_path: Path) -> None:
    """Without them it is taken for the pipeline stage, and experts would have the wrong numbers: they must not be there."""
    run = copy_of("moe_ep2", tmp_path)
    for rank in (0, 1):
        edited(run / ITERATION / f"mp_rank_00_00{rank}" / "model_optim_rng.pt", lambda root: root.pop("args"))
    with pytest.raises(UnsupportedError, match="numbers of its directories"):
        open_catalog(str(run))


@pytest.mark.parametrize("size", [10**8, 10**18])
def test_counts_of_ranks_are_not_counted_up_to(size: int, tmp_path: Path) -> None:
    run = copy_of("fp32", tmp_path)
    file = run / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    edited(file, lambda root: vars(root["args"]).update(tensor_model_parallel_size=size))
    with pytest.raises(UnsupportedError, match="number of ranks"):
        open_catalog(str(run))


def test_layers_that_are_missing(tmp_path: Path) -> None:
    run = copy_of("virtual_pp2", tmp_path)
    for rank in (0, 1):
        edited(run / ITERATION / f"mp_rank_00_00{rank}" / "model_optim_rng.pt", lambda root: root.pop("model1"))
    with pytest.raises(InconsistentError, match="as many layers"):
        open_catalog(str(run))
    edited(run / ITERATION / "mp_rank_00_000" / "model_optim_rng.pt", lambda root: root.pop("model0"))
    with pytest.raises(CorruptError, match="no model"):
        open_catalog(str(run))


@pytest.mark.parametrize("name", ["tied_pp2_dp2", "llama_tp2_pp2", "groups_tp2"])
def test_masters_are_proved(name: str, tmp_path: Path) -> None:
    """Where a rank's vector cannot be this model's masters, that is refused; by the user's wish all weights are taken."""
    run = copy_of(name, tmp_path)
    ranks = sorted(path.parent for path in run.glob("*/*/model_optim_rng.pt"))
    last = ranks[-1]

    def swapped(root: Any) -> None:
        if "optimizer" in root:
            masters = root["optimizer"]["fp32_from_fp16_params"][1]
            masters[0], masters[1] = masters[1], masters[0]
        else:
            vector = next(iter(root[0].values()))["param"]
            vector.copy_(vector.roll(1))

    vectors = last / "distrib_optim.pt"
    edited(vectors if vectors.exists() else last / "model_optim_rng.pt", swapped)
    with pytest.raises(InconsistentError, match=r"the fp32 masters of .* cannot be found"):
        open_catalog(str(run))
    opened = open_catalog(str(run), Reading(allow_unknown_layout=True))
    assert any("no names" in note and last.name in note for note in opened.catalog.source.notes)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    for n, entry in opened.catalog.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), truth[n].bfloat16()), n


def test_a_copy_that_differs_is_found(tmp_path: Path) -> None:
    for name, tied in (("tied_pp2_dp2", "output_layer.weight"), ("old_tp2_pp2", "word_embeddings_for_head")):
        run = copy_of(name, tmp_path / name)
        last = sorted(run.glob("*/*/model_optim_rng.pt"))[-1]
        # masters would not fit: weights are compared
        for file in run.glob("*/*/distrib_optim.pt"):
            edited(file, lambda root: root.clear())

        def changed(root: Any, tied: str = tied) -> None:
            held = root["model"][tied]
            (held["weight"] if isinstance(held, dict) else held)[3, 3] += 1

        edited(last, changed)
        verdict = verify(run, deep=True)
        assert not verdict.ok and "word_embeddings.weight" in str(verdict)


def test_transformer_engine_states_and_buffers_are_no_weights(tmp_path: Path) -> None:
    run = copy_of("fp32", tmp_path)
    file = run / ITERATION / "mp_rank_00" / "model_optim_rng.pt"

    def with_more(root: Any) -> None:
        layer = "decoder.layers.0.self_attention."
        root["model"][f"{layer}linear_qkv._extra_state"] = torch.zeros(8, dtype=torch.uint8)
        root["model"]["decoder.layers.0.mlp.router.expert_bias"] = torch.ones(4)

    edited(file, with_more)
    catalog = open_catalog(str(run)).catalog
    assert not any("_extra_state" in name for name in catalog)
    assert catalog["decoder.layers.0.mlp.router.expert_bias"].role == "buffer"


def test_grouped_experts_are_cut_inside_each_expert(tmp_path: Path) -> None:
    """`GroupedMLP` keeps all of a rank's experts in one matrix, of which each rank has rows or columns of each expert."""
    experts, hidden, wide, tp, ep = 4, 6, 8, 2, 2
    first = torch.randn(experts, hidden, 2 * wide)  # gate and up
    second = torch.randn(experts, wide, hidden)
    run = copy_of("moe_tp2_ep2", tmp_path)
    for tensor_rank in range(tp):
        for expert_rank in range(ep):
            file = run / ITERATION / f"mp_rank_0{tensor_rank}_00{expert_rank}" / "model_optim_rng.pt"
            own = slice(expert_rank * 2, expert_rank * 2 + 2)
            gate, up = (part.chunk(tp, 2)[tensor_rank] for part in first[own].chunk(2, 2))

            def grouped(
                root: Any, gate: Any = gate, up: Any = up, own: Any = own, tensor_rank: int = tensor_rank
            ) -> None:
                model = root["model"]
                for name in [name for name in model if ".local_experts." in name]:
                    del model[name]
                head = "decoder.layers.0.mlp.experts."
                model[f"{head}weight1"] = torch.cat([gate, up], 2).contiguous().view(hidden, -1)
                model[f"{head}weight2"] = second[own].chunk(tp, 1)[tensor_rank].contiguous().view(-1, hidden)
                del root["optimizer"]

            edited(file, grouped)
    found = tensors_of(run)
    assert same_bits(found["decoder.layers.0.mlp.experts.weight1"], first.view(hidden, -1))
    assert same_bits(found["decoder.layers.0.mlp.experts.weight2"], second.view(-1, hidden))


def test_grouped_experts_become_those_of_transformers(tmp_path: Path) -> None:
    """The same Mixtral with its experts one by one, and with them as `GroupedMLP` keeps them: one model of transformers."""
    run = copy_of("hf_mixtral_pp2_ep2", tmp_path)

    def grouped(root: Any) -> None:
        model = root["model"]
        for first in [name for name in model if name.endswith("local_experts.0.linear_fc1.weight")]:
            head = first.partition("local_experts.")[0]
            for number, kind in ((1, "linear_fc1"), (2, "linear_fc2")):
                own = sorted(
                    name for name in model if name.startswith(f"{head}local_experts.") and f"{kind}.weight" in name
                )
                experts = torch.stack([model[name].t() for name in own]).contiguous()  # expert, in, out
                shape = (experts.shape[1], -1) if number == 1 else (-1, experts.shape[2])
                model[f"{head}weight{number}"] = experts.view(shape)
        for name in [name for name in model if ".local_experts." in name]:
            del model[name]

    form = zckpt.Options(form=zckpt.Form(to="hf"))
    zckpt.convert(run, tmp_path / "single", options=form, progress=False)
    for file in run.glob("*/mp_rank_*/model_optim_rng.pt"):
        edited(file, grouped)
    assert any(name.endswith("experts.weight1") for name in open_catalog(str(run)).catalog)
    zckpt.convert(run, tmp_path / "grouped", options=form, progress=False)
    found = zckpt.diff(tmp_path / "single", tmp_path / "grouped", progress=False)
    assert found.same and any(".experts.1.w2" in tensor.name for tensor in found.tensors)
    assert zckpt.verify(run, tmp_path / "grouped", progress=False).ok


def test_down_projections_are_cut_by_some_versions_only(tmp_path: Path) -> None:
    """Of latent attention: the arguments of the run say how many rows there are."""
    query, key_value = torch.randn(6, 16), torch.randn(8, 16)
    run = copy_of("groups_tp2", tmp_path)
    for rank in (0, 1):

        def latent(root: Any, rank: int = rank) -> None:
            layer = "decoder.layers.0.self_attention."
            root["model"][f"{layer}linear_q_down_proj.weight"] = query.chunk(2)[rank].clone()
            root["model"][f"{layer}linear_kv_down_proj.weight"] = key_value.clone()
            vars(root["args"]).update(q_lora_rank=6, kv_lora_rank=5, qk_pos_emb_head_dim=3)
            del root["optimizer"]

        edited(run / ITERATION / f"mp_rank_0{rank}" / "model_optim_rng.pt", latent)
    found = tensors_of(run)
    assert same_bits(found["decoder.layers.0.self_attention.linear_q_down_proj.weight"], query)
    assert same_bits(found["decoder.layers.0.self_attention.linear_kv_down_proj.weight"], key_value)


def test_the_table_of_ranks() -> None:
    text = "\n".join(inspect_checkpoint(str(FIXTURES / "moe_tp2_ep2_etp1" / "checkpoint")).lines())
    assert "tensor 2, expert 2" in text and "model" in text
    found = inspect_checkpoint(str(FIXTURES / "hf_mixtral_pp2_ep2" / "checkpoint"))
    assert {mp: sorted(rows) for mp, rows in found.grid.items()} == {0: [0, 1], 1: [0, 1]}
    assert found.exportable.ok and not found.resumable.ok  # it has weights alone


def test_masters_that_are_missing_are_said(tmp_path: Path) -> None:
    run = copy_of("llama_tp2_pp2", tmp_path)
    (run / ITERATION / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    with pytest.raises(IncompleteError, match="'mp_rank_01_001'"):
        open_catalog(str(run))
    opened = open_catalog(str(run), Reading(allow_unknown_layout=True))
    assert any("'mp_rank_01_001'" in note and "masters" in note for note in opened.catalog.source.notes)
    assert {entry.dtype.name for entry in opened.catalog.tensors.values()} == {"BF16"}


@pytest.mark.parametrize("name", ["old_tp2_pp2", "groups_tp2", "moe_ep2"])
def test_a_state_that_is_cut_costs_no_masters(name: str, tmp_path: Path) -> None:
    """A problem for `verify`, and the older save stays; the weights are the masters of all ranks."""
    run = copy_of(name, tmp_path)
    older = run / "iter_0000001"
    shutil.copytree(run / ITERATION, older)

    def cut(root: Any) -> None:
        if "optimizer" in root:
            state = next(iter(root["optimizer"]["optimizer"]["state"].values()))
        else:
            buckets = root[-1] if isinstance(root, list) else root
            state = next(iter(next(each for each in buckets.values() if isinstance(each, dict)).values()))
        state["exp_avg"] = state["exp_avg"].flatten()[: state["exp_avg"].numel() // 20].clone()

    last = sorted((run / ITERATION).glob("*/model_optim_rng.pt"))[-1].parent
    vectors = last / "distrib_optim.pt"
    edited(vectors if vectors.exists() else last / "model_optim_rng.pt", cut)
    whole, found = open_catalog(str(older)).catalog, open_catalog(str(run / ITERATION)).catalog
    for n, entry in whole.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(found[n], "pt")), n
    assert any("exp_avg" in note and "cannot be read" in note for note in found.source.notes)
    verdict = verify(run / ITERATION)
    assert not verdict.ok and "exp_avg" in str([check.problems for check in verdict.checks])
    report = prune(run, KeepRules(last=1), delete=True)
    assert older.is_dir() and not report.going


def test_a_vector_of_masters_that_is_cut_is_refused(tmp_path: Path) -> None:
    """In every rank's file, so that no other rank's masters tell: its moments do."""
    run = copy_of("old_tp2_pp2", tmp_path)

    def cut(root: Any) -> None:
        vector = next(iter(root[0].values()))
        vector["param"] = vector["param"][:100].clone()

    for file in run.glob("*/*/distrib_optim.pt"):
        edited(file, cut)
    with pytest.raises(InconsistentError, match="masters"):
        open_catalog(str(run))


@pytest.mark.parametrize("name", ["groups_tp2", "moe_ep2", "tied_pp2_dp2"])
def test_moments_by_name(name: str) -> None:
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    training = layouts.read_training(opened.place.listing)
    truth = load_file(FIXTURES / name / "optimizer.safetensors")
    found = {f"{state}/{n}": entry for n, states in training.states.items() for state, entry in states.items()}
    assert found.keys() == truth.keys()
    assert [n for n, entry in found.items() if not same_bits(read_tensor(entry, "pt"), truth[n])] == []
    grouped = [n for group in training.groups for n in group.names]
    assert sorted(grouped) == sorted(opened.catalog.tensors)
    assert {group.settings["weight_decay"] for group in training.groups} == {0.1, 0.0}
    assert opened.catalog.source.optimizer_states == ("exp_avg", "exp_avg_sq")


def test_a_run_becomes_one_of_deepspeed(tmp_path: Path) -> None:
    """And its masters are those of the legacy save."""
    zckpt.reshard(FIXTURES / "llama_tp2_pp2" / "checkpoint", tmp_path / "out", world_size=3, stage=2)
    truth = load_file(FIXTURES / "llama_tp2_pp2" / "truth.safetensors")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == truth.keys() and all(same_bits(found[n], truth[n]) for n in truth)


def test_moments_of_fp32_runs_are_not_named() -> None:
    opened = open_catalog(str(FIXTURES / "fp32" / "checkpoint"))
    with pytest.raises(UnsupportedError, match="cannot be named"):
        layouts.read_training(opened.place.listing)
    assert not inspect_checkpoint(str(FIXTURES / "fp32" / "checkpoint")).resumable.ok


@pytest.mark.parametrize("change", ["one under another's name", "exchanged"])
@pytest.mark.parametrize("save", ["hf_gpt2_tp2", "moe_ep2", "llama_tp2_pp2"])
def test_a_file_under_another_ranks_name_is_refused(save: str, change: str, tmp_path: Path) -> None:
    """Megatron's args in each file say which rank wrote it."""
    home = tmp_path / "run"
    shutil.copytree(FIXTURES / save / "checkpoint", home)
    step = next(path for path in home.iterdir() if path.is_dir())
    first, *_, last = sorted(path for path in step.iterdir() if path.is_dir())
    if change == "exchanged":
        first.rename(step / "aside")
        last.rename(first)
        (step / "aside").rename(last)
    else:
        shutil.copy(last / "model_optim_rng.pt", first / "model_optim_rng.pt")
    with pytest.raises(zckpt.InconsistentError, match="was written by another rank"):
        zckpt.convert(home, tmp_path / "out", progress=False)
    assert not zckpt.verify(home, progress=False).ok
