"""Adapters that torchtune and Megatron Bridge write under names of their own are PEFT's, number for number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import LoraMerge, Options

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries among themselves

HEADS, GROUPS, SIZE, LAYERS = 4, 2, 4, 2
Tensors = dict[str, torch.Tensor]


def trained(home: Path, *, dora: bool = False, halves: bool = False) -> tuple[Any, Tensors]:
    """A base and an adapter of PEFT in `home`; the merged model, and the adapter's tensors."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "tie_word_embeddings": False,
    }  # fmt: skip
    kind = "Qwen2" if halves else "Llama"
    base = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    base.save_pretrained(home / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, use_dora=dora)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(home / "peft")
    return model, load_file(home / "peft" / "adapter_model.safetensors")


def same(found: Path, wanted: Tensors) -> None:
    got = load_file(found)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def merges(adapter: Path, model: Any, home: Path) -> None:
    """The adapter, merged into the base, has PEFT's weights."""
    lora = LoraMerge(base=home / "base")
    zckpt.convert(adapter, home / "out", dtype="fp32", options=Options(lora=lora), progress=False)
    assert zckpt.verify(adapter, home / "out", lora=lora, progress=False).ok
    want = model.merge_and_unload().state_dict()
    for name, tensor in load_file(home / "out" / "model.safetensors").items():
        assert torch.allclose(tensor, want[name], rtol=1e-6, atol=1e-7), name


TUNE = {
    "self_attn.o_proj": "attn.output_proj", "mlp.gate_proj": "mlp.w1", "mlp.down_proj": "mlp.w2", "mlp.up_proj": "mlp.w3",
    "self_attn.": "attn.", "lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude",
    "base_model.model.model.": "", "base_model.model.lm_head": "output",
}  # fmt: skip


@pytest.mark.parametrize(("dora", "halves"), [(False, False), (True, False), (False, True)])
def test_torchtune(dora: bool, halves: bool, tmp_path: Path) -> None:
    """Rows of queries and keys are pairs in its Llama, and halves in its Qwen2."""
    model, wanted = trained(tmp_path, dora=dora, halves=halves)
    tensors: Tensors = {}
    for name, tensor in wanted.items():
        if not halves and ("q_proj" in name or "k_proj" in name) and "lora_A" not in name:
            tensor = tensor.reshape(-1, 2, SIZE // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).clone()
        for ours, theirs in TUNE.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    epoch = tmp_path / "epoch_0"
    epoch.mkdir()
    torch.save(tensors, epoch / "adapter_model.pt")
    (epoch / "adapter_config.json").write_bytes((tmp_path / "peft" / "adapter_config.json").read_bytes())
    with pytest.raises(zckpt.IncompleteError, match="how many heads"):
        zckpt.to_peft(epoch, tmp_path / "no", progress=False)
    (epoch / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    zckpt.to_peft(epoch, tmp_path / "found", progress=False)
    same(tmp_path / "found" / "adapter_model.safetensors", wanted)
    assert zckpt.verify(epoch, tmp_path / "found", progress=False).ok
    merges(epoch, model, tmp_path)


def save(tensors: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves sharded tensors with Megatron-Core."""
    from megatron.core import dist_checkpointing

    for name, stand_in in (("current_device", lambda: "cpu"), ("synchronize", lambda *_: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    directory.mkdir(parents=True)
    is_first = not torch.distributed.is_initialized()  # a test of this process before may have left its group
    if is_first:
        meeting = f"file://{directory.parent}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        dist_checkpointing.save({"model": tensors}, str(directory))
    finally:
        if is_first:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stacked", [True, False])
def test_megatron_bridge(stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One A for queries, keys and values, and one for gate and up; in PEFT each has its own."""
    yaml = pytest.importorskip("yaml")
    checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")
    model, wanted = trained(tmp_path)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_A." in name and any(part in name for part in ("k_proj", "v_proj", "up_proj")):
                other = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
                tensor.copy_(model.get_parameter(other))
    model.save_pretrained(tmp_path / "peft")
    wanted = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    layers: list[Tensors] = []
    for layer in range(LAYERS):
        own = {name.split(f".{layer}.")[1]: tensor for name, tensor in wanted.items() if f".{layer}." in name}
        q, k, v = (own[f"self_attn.{one}_proj.lora_B.weight"].reshape(GROUPS, -1, SIZE, 3) for one in "qkv")
        up = [own[f"mlp.{one}_proj.lora_B.weight"] for one in ("gate", "up")]
        layers.append({
            "self_attention.linear_qkv.adapter.linear_in.weight": own["self_attn.q_proj.lora_A.weight"],
            "self_attention.linear_qkv.adapter.linear_out.weight": torch.cat([q, k, v], dim=1).reshape(-1, 3),
            "self_attention.linear_proj.adapter.linear_in.weight": own["self_attn.o_proj.lora_A.weight"],
            "self_attention.linear_proj.adapter.linear_out.weight": own["self_attn.o_proj.lora_B.weight"],
            "mlp.linear_fc1.adapter.linear_in.weight": own["mlp.gate_proj.lora_A.weight"],
            "mlp.linear_fc1.adapter.linear_out.weight": torch.cat(up),
            "mlp.linear_fc2.adapter.linear_in.weight": own["mlp.down_proj.lora_A.weight"],
            "mlp.linear_fc2.adapter.linear_out.weight": own["mlp.down_proj.lora_B.weight"],
        })  # fmt: skip
    shard = checkpointing.ShardedTensor.from_rank_offsets
    if stacked:
        tensors = {
            f"{layer}.{name}": shard(
                f"decoder.layers.{name}", tensor.contiguous(), (0, layer, LAYERS), prepend_axis_num=1
            )
            for layer, own in enumerate(layers)
            for name, tensor in own.items()
        }
    else:
        tensors = {
            name: shard(name, tensor.contiguous())
            for layer, own in enumerate(layers)
            for name, tensor in ((f"decoder.layers.{layer}.{name}", tensor) for name, tensor in own.items())
        }
    run = tmp_path / "iter_0000002"
    save(tensors, run, monkeypatch)
    said = {
        "model": {"num_layers": LAYERS, "num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": SIZE},
        "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 3, "alpha": 6, "dropout": 0.0},
    }
    (run / "run_config.yaml").write_text(yaml.safe_dump(said))
    report = zckpt.to_peft(run, tmp_path / "found", progress=False)
    assert any("run_config.yaml" in note for note in report.notes)
    same(tmp_path / "found" / "adapter_model.safetensors", wanted)
    config = json.loads((tmp_path / "found" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6) and "q_proj" in config["target_modules"]
    assert zckpt.verify(run, tmp_path / "found", progress=False).ok
    merges(run, model, tmp_path)


def bridge(home: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, model: Any = (), peft: Any = ()) -> Path:
    """A save of Bridge with these whole tensors, by their names below the layers, which are stacked."""
    yaml = pytest.importorskip("yaml")
    core = pytest.importorskip("megatron.core.dist_checkpointing")
    shard = core.ShardedTensor.from_rank_offsets
    save({name: shard(f"decoder.layers.{name}", one) for name, one in tensors.items()}, home, monkeypatch)
    said = {
        "model": {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": SIZE, **dict(model)},
        "peft": {"dim": 4, "alpha": 6, **dict(peft)},
    }
    (home / "run_config.yaml").write_text(yaml.safe_dump(said))
    return home


@pytest.mark.parametrize("form", ["each", "outer", "shared", "normalized"])
def test_experts_of_megatron_bridge(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with matrices of its own, all with the same outer ones, or all with the same; perhaps of a lower rank."""
    experts, hidden, width, rank = 4, 16, 12, 2 if form == "normalized" else 4
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=SIZE, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=width,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    sizes = {"linear_fc1": (hidden, 2 * width), "linear_fc2": (width, hidden)}
    shared = {
        "outer": ("linear_fc1.in", "linear_fc2.out"),
        "shared": [f"{n}.{end}" for n in sizes for end in ("in", "out")],
    }
    tensors: Tensors = {}
    for name, (into, out) in sizes.items():
        for end, shape in (("in", (rank, into)), ("out", (out, rank))):
            lead = (LAYERS,) if f"{name}.{end}" in shared.get(form, ()) else (LAYERS, experts)
            tensors[f"mlp.experts.experts.{name}.adapter.linear_{end}.weight"] = torch.randn(*lead, *shape)
    peft = {"normalize_moe_lora": form == "normalized"}
    run = bridge(tmp_path / "run" / "iter_0000002", tensors, monkeypatch, {"num_moe_experts": experts}, peft)
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(run.parent, tmp_path / "out", dtype="fp32", options=Options(lora=lora), progress=False)
    found, before = (load_file(tmp_path / at / "model.safetensors") for at in ("out", "base"))
    for layer in range(LAYERS):
        for expert in range(experts):
            update = {}
            for name in sizes:
                a, b = (
                    tensors[f"mlp.experts.experts.{name}.adapter.linear_{end}.weight"][layer] for end in ("in", "out")
                )
                update[name] = 6 / rank * ((b[expert] if b.ndim > 2 else b) @ (a[expert] if a.ndim > 2 else a))
            gate, up = update["linear_fc1"].chunk(2)
            for module, own in (("gate", gate), ("up", up), ("down", update["linear_fc2"])):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{module}_proj.weight"
                assert torch.allclose(found.pop(name), before.pop(name) + own, rtol=1e-6, atol=1e-6), name
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert zckpt.verify(run.parent, tmp_path / "out", lora=lora, progress=False).ok
    zckpt.to_peft(run.parent, tmp_path / "alone", progress=False)
    made = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert made["r"] == 4 and bool(made.get("rank_pattern")) == (form == "normalized")


@pytest.mark.parametrize(
    ("part", "model", "why"),
    [
        ("self_attention.linear_qkv", {"add_qkv_bias": True}, r"scales the bias of linear_qkv too"),
        ("mlp.linear_fc2", {"tensor_model_parallel_size": 2}, r"2 tensor-parallel ranks.*own slices.*of linear_qkv"),
        ("mlp.linear_fc1", {}, r"between how many ranks.*run_config\.yaml"),
        ("self_attention.linear_proj", {}, r"between how many ranks.*run_config\.yaml"),
        ("self_attention.linear_qkv", {"add_qkv_bias": False}, r"whether linear_qkv has a bias.*run_config\.yaml"),
        (
            "mlp.experts.experts.linear_fc2",
            {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 2, "num_moe_experts": 4},
            r"2 tensor-parallel ranks.*own slices",
        ),
        ("mlp.linear_fc3", {}, r"no name in PEFT.*export_adapter_ckpt"),
    ],
)
def test_doras_of_megatron_bridge_that_no_weights_are(
    part: str, model: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bridge(tmp_path / "run", {f"{part}.adapter.weight_magnitude": torch.ones(LAYERS, 32)}, monkeypatch, model)
    with pytest.raises(zckpt.ZckptError, match=why):
        zckpt.to_peft(run, tmp_path / "no", progress=False)
