"""Tensor- and pipeline-parallel checkpoints: what joins, what is refused, and the geometry against torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from zckpt.base.errors import IncompleteError, InconsistentError, UnsafeError, UnsupportedError, UsageError, ZckptError
from zckpt.checks.verify import verify
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.engine import replicas
from zckpt.jobs.convert import convert, prepare
from zckpt.jobs.declarations import CONVERT
from zckpt.jobs.diff import diff
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.options import Options
from zckpt.jobs.reshard import reshard
from zckpt.layouts.joining import rules, slices
from zckpt.layouts.joining.patterns import Patterns
from zckpt.layouts.save.listing import ReadOptions
from zckpt.output.order import fingerprint

FIXTURES = Path(__file__).parents[2] / "fixtures"

RULES = {
    "rules": [
        {"match": "embed", "join": 0, "keep": 11},
        {"match": r"norm|down\.bias", "join": "replicated"},
        {"match": "up", "join": 0},
        {"match": r"down\.weight", "join": 1},
        {"match": "scale", "join": "mean"},
        {"match": "gated", "join": 0, "parts": 2},
        {"match": "qkv", "join": 0, "widths": [[3, 3], [2, 1], [2, 1]]},
    ]
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint that says nothing of its slices."""
    return Path(shutil.copytree(FIXTURES / "tensor" / "plain_tp2" / "checkpoint", tmp_path / "plain"))


@pytest.fixture
def rule_file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(RULES))
    return path


def opened(path: Path, **read_options: Any) -> Catalog:
    return open_catalog(str(path), Reading(read_options=ReadOptions(**read_options))).catalog


def edit(path: Path, change: Any) -> None:
    loaded = torch.load(path, weights_only=False)
    change(loaded)
    torch.save(loaded, path)


def test_a_rule_file_joins_what_says_nothing_itself(plain: Path, rule_file: Path, tmp_path: Path) -> None:
    truth = load_file(FIXTURES / "tensor" / "plain_tp2" / "truth.safetensors")
    convert(plain, tmp_path / "out.safetensors", options=Options(read_options=ReadOptions(tp_rules=str(rule_file))))
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert same_bits(found[name], tensor), name
    joined = opened(plain, tp_rules=str(rule_file))
    assert sum(len(entry.replicas) for entry in joined.tensors.values()) > 8
    replicas.check(joined)


def test_the_command_takes_rules(plain: Path, rule_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zckpt"]
    refused = subprocess.run([*command, "inspect", str(plain)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "--tp-rules" in refused.stdout
    told = subprocess.run(
        [*command, "inspect", str(plain), "--tp-rules", str(rule_file), "--json"], capture_output=True, check=True
    )
    assert json.loads(told.stdout)["topology"] == {"dp": 1, "tp": 2, "pp": 1, "ep": 1}
    for job in (["to-bf16"], ["reshard", "--world-size", "2"]):
        out = str(tmp_path / job[0])
        subprocess.run([*command, *job, str(plain), out, "--tp-rules", str(rule_file)], check=True, capture_output=True)


def test_a_pipeline_without_zero_has_names_of_its_layers() -> None:
    home = FIXTURES / "pipeline" / "zero0_pp2"
    catalog, truth = opened(home / "checkpoint"), load_file(home / "truth.safetensors")
    for name, tensor in truth.items():
        own = "0.weight" if name.startswith("tied_modules") else name
        assert same_bits(read_tensor(catalog[own], "pt"), tensor)
    assert catalog["1.gain"].role == "buffer"


@pytest.mark.parametrize("name", ["neox", "megatron", "megatron-swiglu", "bloom"])
def test_built_in_rules_cover_their_models(name: str) -> None:
    layer = {
        "attention.query_key_value.weight": [(6, 4), 0], "attention.query_key_value.bias": [(6,), 0],
        "self_attention.dense.weight": [(4, 2), 1], "attention.dense.weight": [(4, 2), 1],
        "mlp.dense_h_to_4h.weight": [(8, 4), 0], "mlp.dense_h_to_4h.bias": [(8,), 0],
        "mlp.dense_4h_to_h.weight": [(4, 8), 1], "mlp.dense_4h_to_h.bias": [(4,), None],
        "input_layernorm.weight": [(4,), None], "post_attention_layernorm.bias": [(4,), None],
    }  # fmt: skip
    found = rules.rules_of_file(name)
    for prefix in ("3.", "sequential.5.", "language_model.encoder.layers.2."):
        for local, (shape, dim) in layer.items():
            if name in ("neox", "bloom") and local.startswith("self_" if name == "neox" else "attention.dense"):
                continue
            joint = found.joint(prefix + local, [shape, shape])
            assert joint is not None, local
            wanted = shape if dim is None else (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
            assert joint.shape == wanted, local
    assert found.joint("0.word_embeddings.weight", [(5, 4), (5, 4)]).shape == (10, 4)
    assert found.joint("something.else", [(1,), (1,)]) is None
    if name == "megatron-swiglu":
        assert len(found.joint("1.mlp.dense_h_to_4h.weight", [(4, 2), (4, 2)]).pieces) == 4


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), dim=st.integers(0, 2))
def test_stacked_parts_of_any_width_are_where_torch_puts_them(data: st.DataObject, shape: list[int], dim: int) -> None:
    dim %= len(shape)
    ranks = data.draw(st.integers(1, 3))
    widths = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3))
    shapes = [(*shape[:dim], sum(width[rank] for width in widths), *shape[dim + 1 :]) for rank in range(ranks)]
    tensors = [torch.rand(own) for own in shapes]
    held = [list(tensor.split([width[rank] for width in widths], dim)) for rank, tensor in enumerate(tensors)]
    wanted = torch.cat([torch.cat([pieces[part] for pieces in held], dim) for part in range(len(widths))], dim)
    entries = []
    for tensor in tensors:
        store = MemoryStore(tensor.data_ptr(), tensor.numel() * 4, tensor)
        fragments = (Fragment(store, 0, 0, tensor.numel()),) if tensor.numel() else ()
        entries.append(TensorEntry("x", tuple(tensor.shape), F32, "parameter", fragments))
    joined = slices.join("x", entries, slices.parts(shapes, dim, widths))
    assert joined.shape == tuple(wanted.shape) and torch.equal(read_tensor(joined, "pt"), wanted)


def test_an_affine_map_says_the_same_as_the_categories() -> None:
    """The map that DeepSpeed itself makes of a fused, unevenly cut weight, and its own way of joining by it."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    maps = {
        "row": affine.contiguous_split_map((6, 10), [3, 7], 1),
        "column": affine.contiguous_split_map((7, 4), [4, 3], 0),
        "fused": affine.sub_param_map((12, 6), [6, 3, 3], [[3, 3], [2, 1], [2, 1]], 0),
        "same": affine.replicated_map((5,), 2),
        "kv": affine.segmented_map((10, 3), [(6, False), (4, True)], 0, 2, [[4, 2]]),
    }
    info = {"affine_map": {"version": 1, "params": {f"^{name}$": found.to_dict() for name, found in maps.items()}}}
    found = rules.CheckpointRules("file", info, Patterns("file"))
    for name, described in maps.items():
        whole = torch.rand(described.logical_shape)
        shards = [described.extract(whole, rank).contiguous() for rank in range(2)]
        entries = []
        for shard in shards:
            store = MemoryStore(shard.data_ptr(), shard.numel() * 4, shard)
            entries.append(
                TensorEntry(name, tuple(shard.shape), F32, "parameter", (Fragment(store, 0, 0, shard.numel()),))
            )
        joint = found.joint(name, [entry.shape for entry in entries])
        copies = [replica.fragments for replica in slices.join(name, entries, joint).replicas]
        for fragments in copies:
            copy = TensorEntry(name, tuple(whole.shape), F32, "parameter", fragments)
            assert torch.equal(read_tensor(copy, "pt"), whole)
        assert joint is not None and list(joint.copies) == ([1] if name in ("same", "kv") else [])
        assert torch.equal(read_tensor(slices.join(name, entries, joint), "pt"), whole), name


def refused(kind: type[ZckptError], checkpoint: Path, tmp_path: Path, **read_options: Any) -> ZckptError:
    with pytest.raises(kind) as caught:
        convert(checkpoint, tmp_path / "out", options=Options(read_options=ReadOptions(**read_options)))
    assert not (tmp_path / "out").exists()
    return caught.value


def test_what_no_rule_covers_is_named(plain: Path, rule_file: Path, tmp_path: Path) -> None:
    assert "--tp-rules" in refused(UnsupportedError, plain, tmp_path).remedy
    rule_file.write_text(json.dumps({"rules": RULES["rules"][:-1]}))
    assert "qkv.weight" in refused(UnsupportedError, plain, tmp_path, tp_rules=str(rule_file)).what


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSONDecodeError"),
        ('{"rules": [{"join": 0}]}', "KeyError"),
        ('{"rules": [{"match": "(", "join": 0}]}', "error"),
        ('{"rules": [{"match": "nothing here", "join": 0}]}', "names such as"),
    ],
)
def test_wrong_rule_files(plain: Path, rule_file: Path, tmp_path: Path, text: str, told: str) -> None:
    rule_file.write_text(text)
    assert told in refused(UsageError, plain, tmp_path, tp_rules=str(rule_file)).found


@pytest.mark.parametrize(
    "rule", [{"join": 7}, {"join": "sideways"}, {"join": 0, "parts": 5}, {"join": 0, "parts": [3, 9]}]
)
def test_rules_that_do_not_fit(plain: Path, rule_file: Path, tmp_path: Path, rule: dict[str, Any]) -> None:
    rule_file.write_text(json.dumps({"rules": [{"match": r"qkv\.weight", **rule}, *RULES["rules"]]}))
    error = refused(InconsistentError, plain, tmp_path, tp_rules=str(rule_file))
    assert "qkv.weight" in error.what and str(rule_file) in str(error)


def test_no_such_rules(plain: Path, tmp_path: Path) -> None:
    assert "megatron" in refused(UsageError, plain, tmp_path, tp_rules="no-such").expected


@pytest.fixture
def tensor(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "tensor" / "zero1_tp2_dp2" / "checkpoint", tmp_path / "tensor"))


def test_a_missing_slice(tensor: Path, tmp_path: Path) -> None:
    for path in tensor.glob("*/*mp_rank_01*"):
        path.unlink()
    error = refused(IncompleteError, tensor, tmp_path)
    assert "mp_rank 01" in error.remedy


def test_a_missing_rank_of_one_slice(tensor: Path, tmp_path: Path) -> None:
    next(tensor.glob("*/*zero_pp_rank_1_mp_rank_01*")).unlink()
    assert "(rank 1)" in refused(IncompleteError, tensor, tmp_path).what


@pytest.mark.parametrize("name", ["zero1_pp2_dp2", "zero1_pp2_tp2_dp2", "bf16_pp2_dp2", "zero1_pp3_dp2"])
def test_a_missing_layer_file(name: str, tmp_path: Path) -> None:
    """Its parameters' fp32 weights are in the optimizer's files; nothing else is."""
    whole = FIXTURES / "pipeline" / name / "checkpoint"
    files = [path for path in whole.glob("*/layer_*.pt") if torch.load(path, weights_only=False)]
    assert len(files) > 2
    for lost in files:
        left = Path(shutil.copytree(whole, tmp_path / lost.name))
        next(left.glob(f"*/{lost.name}")).unlink()
        error = refused(IncompleteError, left, tmp_path)
        assert error.what == "files of layers are missing"
        assert lost.name in error.found or "'tied_modules." in error.found


def test_slices_of_different_steps(tensor: Path, tmp_path: Path) -> None:
    edit(next(tensor.glob("*/mp_rank_01*")), lambda root: root.update(global_steps=9))
    assert "'mp_rank_01_model_states.pt' says 9" in refused(InconsistentError, tensor, tmp_path).found


def test_replicated_slices_that_disagree(tensor: Path, tmp_path: Path) -> None:
    """Not at an end of a fragment, where a quick look would find it."""
    catalog = opened(tensor)
    entry = catalog["norm.weight"]
    copy = next(replica for replica in entry.replicas if replica.rank)
    fragment = copy.fragments[0]
    with open(str(fragment.store), "r+b") as file:
        file.seek(fragment.byte_offset)
        file.write(b"\x01\x02\x03\x04")
    error = refused(InconsistentError, tensor, tmp_path)
    assert "norm.weight" in error.found and "tensor-parallel rank 1" in str(error)


def test_tied_stages_that_disagree(tmp_path: Path) -> None:
    home = Path(shutil.copytree(FIXTURES / "pipeline" / "zero1_pp2_dp2" / "checkpoint", tmp_path / "pipeline"))
    copy = next(replica for replica in opened(home)["tied_modules.embed.weight"].replicas if replica.rank)
    with open(str(copy.fragments[0].store), "r+b") as file:
        file.seek(copy.fragments[0].byte_offset + 80)
        file.write(b"\x01\x02\x03\x04")
    assert "pipeline stage 1" in str(refused(InconsistentError, home, tmp_path))


def test_information_for_names_of_a_later_stage_alone(tmp_path: Path) -> None:
    """As of a stage that holds the embedding only, where no pattern is for vocabularies."""
    source = FIXTURES / "pipeline" / "zero1_pp3_dp2" / "checkpoint"
    home = Path(shutil.copytree(source, tmp_path / "pipeline"))
    stages = sorted(home.glob("*/mp_rank_*_model_states.pt"))
    first, later = (torch.load(path, weights_only=False)["param_shapes"][0] for path in stages[:2])
    name = next(name for name in later if name not in first)
    for path in stages:
        edit(
            path,
            lambda root: root.update(universal_checkpoint_info={"tp_replicated_parameter_patterns": [f"^{name}$"]}),
        )
    before, after = opened(source), opened(home)
    assert after.tensors.keys() == before.tensors.keys()
    assert all(same_bits(read_tensor(after[key], "pt"), read_tensor(before[key], "pt")) for key in before.tensors)


def test_information_that_does_not_fit(tensor: Path, tmp_path: Path) -> None:
    def break_widths(root: dict[str, Any]) -> None:
        root["universal_checkpoint_info"]["sub_param_shard_widths"] = {r"^qkv\.weight$": [[3, 3], [2, 2], [2, 1]]}

    edit(next(tensor.glob("*/mp_rank_00*")), break_widths)
    assert "qkv.weight" in refused(InconsistentError, tensor, tmp_path).what


def test_information_that_says_it_cannot_be_joined(tensor: Path, tmp_path: Path) -> None:
    def forbid(root: dict[str, Any]) -> None:
        root["universal_checkpoint_info"]["autotp_unsupported_parameter_patterns"] = {"^up": "cut by heads"}

    edit(next(tensor.glob("*/mp_rank_00*")), forbid)
    assert "cut by heads" in refused(UnsupportedError, tensor, tmp_path).found


def test_information_with_a_pattern_that_never_ends(tensor: Path, tmp_path: Path) -> None:
    def attack(root: dict[str, Any]) -> None:
        root["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = ["^(([a-z.]+)+)+!"]

    edit(next(tensor.glob("*/mp_rank_00*")), attack)
    assert "([a-z.]+)+" in refused(UnsafeError, tensor, tmp_path).found


def test_a_topology_that_cannot_be(tensor: Path, tmp_path: Path) -> None:
    refused(UsageError, tensor, tmp_path, tp=1, pp=1)


@pytest.mark.parametrize(
    "name", ["tensor/zero0_tp2", "tensor/zero1_tp2_dp2", "tensor/zero3_tp2_dp2", "pipeline/zero1_pp2_tp2_dp2"]
)
def test_down_to_plain_data_parallelism(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    reshard(source, tmp_path / "out", world_size=3, stage=2)
    before, after = opened(source), opened(tmp_path / "out")
    assert (after.topology.tp, after.topology.pp, after.topology.dp) == (1, 1, 3)
    for key, entry in before.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(after[key], "pt"))


# ---- verify, diff, and going on ----------------------------------------------------------------------------------------


def test_verify_knows_rules_and_computed_tensors(plain: Path, rule_file: Path, tmp_path: Path) -> None:
    read_options, out = ReadOptions(tp_rules=str(rule_file)), tmp_path / "out"
    convert(plain, out, dtype="bf16", options=Options(read_options=read_options))
    assert json.loads((out / "zckpt.json").read_text())["options"] == {"wishes": {"tp_rules": str(rule_file)}}
    found = verify(plain, out, deep=True, read_options=read_options)
    assert found.ok and found.deletable is not None and found.deletable[0]
    assert diff(plain, out, read_options=read_options, rtol=2**-8).same
    with pytest.raises(UnsupportedError, match="no rule says"):
        verify(plain, out)


def test_another_mean_is_another_job(plain: Path, rule_file: Path) -> None:
    """Computed elements stand for no file: an interrupted conversion is gone on with only if they are the same."""
    jobs = set()
    for how in ("mean", "sum", "mean"):
        rule_file.write_text(json.dumps(RULES).replace("mean", how))
        prepared = prepare(
            str(plain), str(plain.parent / "out"), CONVERT.ask(read_options=ReadOptions(tp_rules=str(rule_file)))
        )
        jobs.add(fingerprint(prepared.plan, ()))
    assert len(jobs) == 2


@pytest.mark.parametrize("deep", [False, True])
def test_ranks_that_drifted_apart_are_told_of(plain: Path, rule_file: Path, deep: bool) -> None:
    path = plain / "global_step2" / "mp_rank_01_model_states.pt"
    held = torch.load(path, weights_only=False)
    held["module"]["norm.weight"][3] += 1
    torch.save(held, path)
    checks = verify(plain, deep=deep, read_options=ReadOptions(tp_rules=str(rule_file))).checks
    problems = [problem for check in checks for problem in check.problems]
    assert len(problems) == 1 and "'norm.weight'" in problems[0] and "element" in problems[0]
    assert [check.name for check in checks if check.problems] == ["copies"]


def test_every_copy_of_a_tied_weight_is_compared() -> None:
    """Two stages of two slices hold it: that of the second stage's second rank is looked at too."""
    fixture = Path(__file__).parents[2] / "fixtures" / "pipeline" / "zero1_pp2_tp2_dp2" / "checkpoint"
    catalog = open_catalog(str(fixture)).catalog
    (tied,) = (entry for name, entry in catalog.items() if name.startswith("tied_modules."))
    held = (*tied.fragments, *(fragment for copy in tied.replicas for fragment in copy.fragments))
    files = {Path(str(fragment.store)).name for fragment in held}
    assert {name.partition("mp_rank_")[2][:2] for name in files if "optim" in name} == {"00", "01", "02", "03"}
