"""Merged adapters are what PEFT merges, to the last bit where its order is known, and transformers loads them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
import torch
import torch.distributed.checkpoint
from bits import same_bits
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    OutputError,
    UnsupportedError,
    UsageError,
)
from zckpt.core import plan as plans
from zckpt.engine.kernels import ReferenceKernels
from zckpt.jobs.options import LoraMerge, Options

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FIXTURES = Path(__file__).parents[2] / "fixtures"
TOKENS = torch.arange(12).reshape(1, 12)


def llama(**more: Any) -> Any:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, max_position_embeddings=16, **{"tie_word_embeddings": False, **more}
        )
    )


def biased() -> Any:
    return llama(attention_bias=True)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def gpt2() -> Any:
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))


EXPERTS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, **SMALL))


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**EXPERTS, **SMALL, head_dim=16, layer_types=["full_attention"])
    )


QV = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 6}
EXPERT_WEIGHTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2}
VERSION = tuple(map(int, peft.__version__.split(".")[:2]))
OLD = VERSION < (0, 19)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (llama, QV),
    "rslora with patterns": (
        llama,
        {**QV, "use_rslora": True, "rank_pattern": {"layers.0.*q_proj": 7}, "alpha_pattern": {"v_proj": 3, "^never$": 1}},
    ),
    "a head, an embedding, a module trained whole": (
        llama, {**QV, "target_modules": ["embed_tokens", "lm_head", "down_proj"], "modules_to_save": ["norm"]},
    ),
    "biases": (biased, {**QV, "bias": "lora_only", "lora_bias": True}),
    "all biases": (biased, {**QV, "bias": "all"}),
    "tokens": (llama, {**QV, "trainable_token_indices": [5, 1, 77]}),
    "tokens of tied weights": (tied, {**QV, "trainable_token_indices": {"embed_tokens": [5, 1]}}),
    "all of a tied model": (tied, {**QV, "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc", "lm_head"], "r": 4}),
    "dora": (llama, {**QV, "target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True}),
    "dora of conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj"], "r": 4, "use_dora": True}),
    "experts": (mixtral, EXPERT_WEIGHTS),
    "experts that lie the other way": (gpt_oss, EXPERT_WEIGHTS),
}  # fmt: skip


RARE = ("all biases", "tokens", "all of a tied model", "dora of conv1d", "experts")
"""Cases that `make proofs` runs; each has a neighbour that is always run."""


def randomized(model: Any, seed: int = 7) -> Any:
    """The model, with other numbers in every part of its adapters."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if any(word in name for word in ("lora_", "modules_to_save", "trainable_tokens_delta")) or (
            name.endswith("bias") and tensor.requires_grad
        ):
            scale = 1.0 if "magnitude" in name else 0.1
            tensor.data = torch.randn(tensor.shape, generator=generator) * scale
    return model


def saved(tmp_path: Path, make: Any, config: dict[str, Any]) -> tuple[Path, Path, Any]:
    """A base model and a PEFT adapter on disk, and the live PEFT model."""
    torch.manual_seed(0)
    base = make()
    base.save_pretrained(tmp_path / "base")
    model = randomized(peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config)))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "base", tmp_path / "adapter", model.eval()


def torch_sums_in_order(rank: int) -> bool:
    """Whether torch's matrix product is, on this machine, the sum of fused products in order that the kernel computes."""
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(64, rank, generator=generator), torch.randn(rank, 64, generator=generator)
    total = np.zeros(64 * 64, np.float32)
    ReferenceKernels().add_low_rank(total, left.numpy().reshape(-1), right.numpy().reshape(-1), rank, 1.0)
    return bool((total.reshape(64, 64) == (left @ right).numpy()).all())


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, exact: bool) -> None:
    """Equal in every bit, where `exact`; else within the rounding of sums of fp32 numbers of about 1."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if exact:
            assert same_bits(found[name], tensor), name
        else:
            assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name


def merged_of(out: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in RARE), *proofs.cases(zip(RARE, strict=True))])
def test_peft_merges_the_same(case: str, tmp_path: Path) -> None:
    if case == "biases" and OLD:
        pytest.skip("PEFT 0.18 does not save these biases")
    base, source, model = saved(tmp_path, *CASES[case])
    before, lora = logits_of(model), LoraMerge(base=base)
    if "experts" in case:  # the base in the same checkpoint, as it is in memory
        source = shutil.copytree(source, tmp_path / "live")
        (source / "adapter_model.safetensors").unlink()
        torch.save(model.state_dict(), source / "pytorch_model.bin")
        shutil.copy(base / "config.json", source)
        lora = LoraMerge()
    zckpt.convert(source, tmp_path / "out", options=Options(lora=lora))
    loaded = merged_of(tmp_path / "out")
    assert torch.allclose(logits_of(loaded), before, atol=1e-4)
    wanted = model.merge_and_unload().state_dict()
    exact = "dora" not in case and torch_sums_in_order(CASES[case][1]["r"])
    assert_close(loaded.state_dict(), wanted, exact=exact)


def test_a_head_that_was_tied_gets_its_own_weight(tmp_path: Path) -> None:
    """PEFT merges into both; the unmerged model, which is what was trained, changes the head alone."""
    base, adapter, model = saved(tmp_path, tied, {**QV, "target_modules": ["lm_head"]})
    report = zckpt.convert(adapter, tmp_path / "out", options=Options(lora=LoraMerge(base=base)))
    assert any("lm_head" in note and "tied" in note for note in report.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.allclose(logits_of(merged_of(tmp_path / "out")), logits_of(model), atol=1e-5)


BOTH = {**QV, "target_modules": ["q_proj", "embed_tokens", "lm_head"], "ensure_weight_tying": True}
TIES: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": (BOTH, True),
    "dora": ({**BOTH, "use_dora": True}, False),
    "whole": ({**QV, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "tokens": ({**QV, "trainable_token_indices": [5, 1]}, True),
    "other tokens": ({**QV, "trainable_token_indices": {"embed_tokens": [5, 1], "lm_head": [7, 2]}}, False),
    "tokens of the head": ({**QV, "trainable_token_indices": {"lm_head": [7, 2]}}, False),
}


@pytest.mark.parametrize("case", TIES)
def test_adapters_of_tied_weights_with_all_copies_of_embeddings(case: str, tmp_path: Path) -> None:
    """PEFT saves such matrices up to three times; a copy with other numbers is an error."""
    if case in ("lora", "whole") and OLD:
        pytest.skip("PEFT 0.18 does not keep them tied")
    config, stays_tied = TIES[case]
    torch.manual_seed(0)
    base = tied()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape) * 0.1)  # in place, so that what is tied stays so
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=Options(lora=lora))
    assert torch.allclose(logits_of(merged_of(tmp_path / "out")), logits_of(model), atol=1e-4)
    assert ("lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")) is stays_tied
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())
    assert {one["why"] for one in facts["left_out"]} <= {"copy", "base", "original"}
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    if case in ("lora", "whole", "tokens"):
        tensors = load_file(file)
        changed = next(
            name
            for name in tensors
            if "lm_head" in name and name.endswith(("lora_B.weight", "_delta", "modules_to_save.weight"))
        )
        tensors[changed][1, 1] += 1
        save_file(tensors, file)
        refused(InconsistentError, tmp_path / "adapter", tmp_path / "other", lora, changed, "differs")


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters_with_weights(dora: bool, tmp_path: Path) -> None:
    """A DoRA has the lengths of the base's weight with its own update, as in the unmerged model. Before 0.21, PEFT's merge
    took those of the weight with the adapters before it.
    """
    torch.manual_seed(0)
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**QV), "one")
    model.add_adapter("two", peft.LoraConfig(target_modules=["v_proj", "o_proj"], r=2, use_dora=dora))
    randomized(model).save_pretrained(tmp_path)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("one", 0.25)
            module.set_scale("two", -2.0)
    lora = LoraMerge(adapters=[f"{tmp_path / 'one'}:0.25", (tmp_path / "two", -2.0)])
    zckpt.convert(tmp_path / "base", tmp_path / "out", options=Options(lora=lora))
    model.eval().base_model.set_adapter(["one", "two"])
    assert torch.allclose(logits_of(merged_of(tmp_path / "out")), logits_of(model), atol=1e-4)
    if not dora or VERSION >= (0, 21):
        wanted = model.merge_and_unload(adapter_names=["one", "two"]).state_dict()
        assert_close(
            load_file(tmp_path / "out" / "model.safetensors"), wanted, exact=not dora and torch_sums_in_order(4)
        )
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())["options"]["form"]["lora"]["adapters"]
    assert [(one["name"], one["weight"], len(one["sha256"])) for one in facts] == [("one", 0.25, 64), ("two", -2.0, 64)]


@pytest.mark.parametrize(("make", "target"), [(llama, "o_proj"), (biased, "o_proj"), (gpt2, r".*attn\.c_proj")])
@pytest.mark.parametrize("said", [False, True])
def test_square_weights_lie_as_their_class_has_them(make: Any, target: str, said: bool, tmp_path: Path) -> None:
    """Whatever `fan_in_fan_out` says: PEFT sets it right when it makes the module."""
    base, adapter, model = saved(tmp_path, make, {**QV, "target_modules": target if "." in target else [target]})
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": said}))
    zckpt.convert(adapter, tmp_path / "out", options=Options(lora=LoraMerge(base=base)))
    wanted = model.merge_and_unload().state_dict()
    assert_close(merged_of(tmp_path / "out").state_dict(), wanted, exact=torch_sums_in_order(4))


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    """PEFT rounds the update of a bf16 adapter before it adds it; an fp32 adapter is added as here."""
    base, adapter, _model = saved(tmp_path, llama, QV)
    half = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    lora = Options(lora=LoraMerge(base=tmp_path / "half"))
    zckpt.convert(adapter, tmp_path / "fp32", options=lora)
    zckpt.convert(adapter, tmp_path / "bf16", dtype="bf16", options=lora)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    exact = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "fp32" / "model.safetensors").items()}
    assert_close(found, exact, exact=True)
    with_fp32_adapter = peft.PeftModel.from_pretrained(half, adapter)
    wanted = with_fp32_adapter.merge_and_unload().state_dict()
    assert_close(found, wanted, exact=torch_sums_in_order(4))


DEEPSPEED = [
    ("lora_zero2", "default", False),
    ("lora_zero3", "default", True),
    ("several_zero3", "default", False),
    ("dora_zero1", "style", True),
]


@pytest.mark.parametrize(("name", "adapter", "beside"), DEEPSPEED)
def test_checkpoints_of_deepspeed(name: str, adapter: str, beside: bool, tmp_path: Path) -> None:
    """The logits are those of the live engine; the base is in the checkpoint, or beside it."""
    home = FIXTURES / "peft" / name
    lora = LoraMerge(base=home / "base" if beside else None, adapters=[adapter])
    report = zckpt.convert(home / "checkpoint", tmp_path / "out", options=Options(lora=lora))
    if not beside:
        shutil.copy(home / "base" / "config.json", tmp_path / "out")
    stored = load_file(home / "logits.safetensors")
    with torch.no_grad():
        logits = merged_of(tmp_path / "out")(input_ids=stored["input_ids"]).logits
    assert torch.allclose(logits, stored[adapter], atol=3e-2 if name == "lora_zero3" else 1e-5)
    assert any("several" not in name or "not merged" in note for note in report.notes)
    verified = zckpt.verify(home / "checkpoint", tmp_path / "out", lora=LoraMerge(base=lora.base))
    assert verified.ok or not beside  # the config was put there by this test
    assert verified.deletable is not None and not verified.deletable[0], "the adapter is only in the shards"


CONVOLUTIONS: dict[str, Any] = {
    "rank 1": {"r": 1, "lora_alpha": 9, "use_rslora": True},
    "patterns": {"r": 6, "rank_pattern": {"1": 2}, "alpha_pattern": {"^[02]": 5}},
    "biases": {"r": 3, "lora_bias": True, "bias": "all"},
    "dora": {"r": 5, "use_dora": True, "rank_pattern": {"0": 1}},
    "loha": {"r": 3, "alpha": 4},
    "lokr": {"r": 4, "alpha": 2, "decompose_both": True},
    "lokr of thin factors": {"r": 1, "alpha": 2, "decompose_factor": 2},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind: str, tmp_path: Path) -> None:
    """Of kernels of any size, 1 too, with a weight that is no multiple of a vector; beside a Linear. Without a config.json."""
    torch.manual_seed(0)
    two = (torch.nn.Conv2d(6, 8, (3, 2)), torch.nn.Conv2d(8, 6, 1), torch.nn.Linear(7, 9, bias=kind == "biases"))
    other = (
        ()
        if "lo" in kind[:2]
        else (torch.nn.Conv1d(5, 7, 3), torch.nn.Conv1d(4, 6, 1), torch.nn.Conv3d(4, 6, (1, 2, 2)))
    )
    base = torch.nn.Sequential(*two, *other)
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors")
    config = {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}.get(kind[:4], peft.LoraConfig)
    model = peft.get_peft_model(base, config(target_modules=[*map(str, range(len(base)))], **CONVOLUTIONS[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.3
    model.save_pretrained(tmp_path / "adapter")
    wanted = model.merge_and_unload().state_dict()
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(tmp_path / "adapter", tmp_path / "out", options=Options(lora=lora))
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), wanted, exact=False)


def test_a_lokr_of_conv1d_is_refused(tmp_path: Path) -> None:
    """PEFT takes the Kronecker product of a matrix and a block of three dimensions, so elements mix."""
    base = torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3))
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors")
    config = peft.LoKrConfig(target_modules=["0"], r=4, init_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    refused(UnsupportedError, tmp_path / "adapter", tmp_path / "out", LoraMerge(base=tmp_path / "base"), "0.lokr_w2")


@pytest.mark.parametrize("dora", [False, True])
def test_a_save_of_torch_distributed_checkpoint(dora: bool, tmp_path: Path) -> None:
    """With the base in it, convolutions of one to three dimensions and an embedding: merged without any config of a model."""
    torch.manual_seed(0)
    convolutions = (
        torch.nn.Conv2d(4, 8, 3),
        torch.nn.Conv2d(8, 4, 1),
        torch.nn.Conv1d(4, 4, 2),
        torch.nn.Conv3d(4, 6, 2),
    )
    base = torch.nn.Sequential(*convolutions, torch.nn.Embedding(10, 6))
    config = peft.LoraConfig(r=2, target_modules=["0", "1", "2", "3", "4"], use_dora=dora)
    model = randomized(peft.get_peft_model(base, config))
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run")
    model.peft_config["default"].save_pretrained(tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "out", options=Options(lora=LoraMerge()))
    wanted = model.merge_and_unload().state_dict()
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), wanted, exact=False)


def test_rank_files_of_verl(tmp_path: Path) -> None:
    home = FIXTURES / "ranks" / "lora_w2"
    truth = load_file(home / "truth.safetensors")
    zckpt.convert(home / "checkpoint", tmp_path / "out", options=Options(lora=LoraMerge()))
    meta = json.loads((home / "checkpoint" / "lora_train_meta.json").read_text())
    found = next((tmp_path / "out").glob("*.safetensors"))
    merged = load_file(found)
    changed = 0
    for name, tensor in truth.items():
        if ".lora_A." in name:
            module = name.partition(".lora_A.")[0]
            update = truth[name.replace("lora_A", "lora_B")].float() @ tensor.float() * (meta["lora_alpha"] / meta["r"])
            own = module.removeprefix("base_model.model.") + ".weight"
            assert torch.allclose(merged[own], truth[f"{module}.base_layer.weight"].float() + update, atol=1e-5)
            changed += 1
    assert changed and not [name for name in merged if "lora" in name or "base_layer" in name]


def test_verify_finds_another_number(tmp_path: Path) -> None:
    home = FIXTURES / "peft" / "dora_zero1"
    lora = LoraMerge(base=home / "base")
    zckpt.convert(home / "checkpoint", tmp_path / "out", dtype="bf16", options=Options(lora=lora))
    assert zckpt.verify(home / "checkpoint", tmp_path / "out", lora=lora).ok
    with pytest.raises(UsageError, match="more than the checkpoint"):
        zckpt.verify(home / "checkpoint", tmp_path / "out")
    (tmp_path / "out" / "zckpt.json").rename(tmp_path / "kept")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][3, 3] += 1
    save_file(weights, tmp_path / "out" / "model.safetensors")
    facts = json.loads((tmp_path / "kept").read_text())
    facts["files"] = []
    for file in sorted((tmp_path / "out").iterdir()):
        data = file.read_bytes()
        facts["files"].append({"path": file.name, "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"})
    (tmp_path / "out" / "zckpt.json").write_text(json.dumps(facts))
    found = zckpt.verify(home / "checkpoint", tmp_path / "out", lora=lora)
    assert not found.ok and "1 element differs" in "\n".join(found.lines())


def test_any_threads_engine_and_interruption_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter, _ = saved(tmp_path, *CASES["dora of conv1d"])
    lora = LoraMerge(base=base)
    zckpt.convert(adapter, tmp_path / "a", options=Options(lora=lora, threads=1))
    monkeypatch.setattr(plans, "SLAB_BYTES", 1 << 10)
    zckpt.convert(adapter, tmp_path / "b", options=Options(lora=lora, threads=4, max_shard_size="20kB"))
    one, many = load_file(tmp_path / "a" / "model.safetensors"), {}
    for file in (tmp_path / "b").glob("*.safetensors"):
        many |= load_file(file)
    assert_close(many, one, exact=True)
    again = zckpt.convert(adapter, tmp_path / "b", options=Options(lora=lora, max_shard_size="20kB"))
    assert again.already_done
    other = Options(lora=LoraMerge(base=base, adapters=[]), overwrite=True, max_shard_size="20kB")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    assert not zckpt.convert(adapter, tmp_path / "b", options=other).already_done, "another scale is another job"


def broken(
    tmp_path: Path, make: Any = llama, config: dict[str, Any] = QV
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    base, adapter, _ = saved(tmp_path, make, config)
    return base, adapter, load_file(adapter / "adapter_model.safetensors")


def refused(kind: type[Exception], source: Path, out: Path, lora: LoraMerge, *words: str) -> None:
    with pytest.raises(kind) as caught:
        zckpt.convert(source, out, options=Options(lora=lora))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not out.exists()


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base, adapter, good = broken(tmp_path)
    out, lora = tmp_path / "out", LoraMerge(base=base)
    config = json.loads((adapter / "adapter_config.json").read_text())

    def attempt(kind: type[Exception], *words: str, tensors: Any = (), **said: Any) -> None:
        state = {name: tensor for name, tensor in {**good, **dict(tensors)}.items() if tensor is not None}
        save_file(state, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **said}))
        refused(kind, adapter, out, lora, *words)

    attempt(InconsistentError, f"{Q}.lora_A.weight", "rank 4", r=5)
    attempt(InconsistentError, "do not fit each other", tensors={f"{Q}.lora_A.weight": torch.ones(3, 64)})
    attempt(InconsistentError, "[64, 63]", "shape [64, 64]", tensors={f"{Q}.lora_A.weight": torch.ones(4, 63)})
    attempt(IncompleteError, "has no B", tensors={f"{Q}.lora_B.weight": None})
    attempt(IncompleteError, "no magnitude", "use_dora true", use_dora=True)
    attempt(InconsistentError, "a magnitude", tensors={f"{Q}.lora_magnitude_vector": torch.ones(64)})
    attempt(IncompleteError, "layers.9", tensors={f"{Q.replace('0', '9')}.lora_A.weight": torch.ones(4, 64),
                                                  f"{Q.replace('0', '9')}.lora_B.weight": torch.ones(64, 4)})  # fmt: skip
    attempt(IncompleteError, "no elements", tensors={f"{Q}.lora_A.weight": torch.ones(0)})
    attempt(InconsistentError, "lm_head.weight", tensors={"base_model.model.lm_head.weight": torch.ones(97, 64)})
    for said, word in (
        ({"peft_type": "LOHA"}, "LOHA"), ({"use_qalora": True}, "QALoRA"), ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"layer_replication": [[0, 2]]}, "layer replication"), ({"init_lora_weights": "pissa"}, "pissa"),
    ):  # fmt: skip
        attempt(UnsupportedError, word, "lora_A.weight", **said)
    attempt(CorruptError, "lora_alpha", lora_alpha="much")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in good.items() if "lora_B" in name}
    attempt(IncompleteError, "changes nothing", "--allow-untrained", tensors=zeros)
    zckpt.convert(adapter, out, options=Options(lora=LoraMerge(base=base, allow_untrained=True)))
    assert_close(load_file(out / "model.safetensors"), load_file(base / "model.safetensors"), exact=True)


def test_biases_that_were_trained_and_not_saved(tmp_path: Path) -> None:
    """As PEFT 0.18 leaves out those of "lora_only"; a run that trained none says so in its config."""
    base, adapter, _ = saved(tmp_path, biased, {**QV, "bias": "lora_only"})
    file, lora = adapter / "adapter_model.safetensors", LoraMerge(base=base)
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.endswith(".bias")}, file)
    refused(IncompleteError, adapter, tmp_path / "out", lora, "biases that were trained", "q_proj.bias")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": "none"}))
    zckpt.convert(adapter, tmp_path / "out", options=Options(lora=lora))


def test_a_block_that_an_adapter_lacks_is_said(tmp_path: Path) -> None:
    """As of a file that was cut; a config that chooses layers leaves the others out on purpose."""
    base, adapter, good = broken(tmp_path)
    lora = LoraMerge(base=base)
    whole = zckpt.convert(adapter, tmp_path / "whole", options=Options(lora=lora))
    save_file(
        {n: t for n, t in good.items() if "layers.1.self_attn.v_proj" not in n}, adapter / "adapter_model.safetensors"
    )
    lost = zckpt.convert(adapter, tmp_path / "lost", options=Options(lora=lora))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "layers_to_transform": [0]}))
    chosen = zckpt.convert(adapter, tmp_path / "chosen", options=Options(lora=lora))
    said = [[note for note in done.notes if "a part of the adapter is lost" in note] for done in (whole, lost, chosen)]
    assert not said[0] and not said[2] and len(said[1]) == 1
    assert "1 weight" in said[1][0] and "'model.layers.1.self_attn.v_proj.weight'" in said[1][0]


def test_a_base_of_another_name_is_said(tmp_path: Path) -> None:
    """Where shapes are equal nothing else can tell it. Names count by their ends, and in the hub's cache after two dashes."""
    base, adapter, _ = broken(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    cached = tmp_path / "models--org--Other-7B" / "snapshots" / "0a1b"
    shutil.copytree(base, cached)
    for said, where, is_told in (
        (str(base), base, False), (f"elsewhere/{base.name}/", base, False), ("org/Other-7B", base, True),
        ("org/other-7b", cached, False), (None, base, False),
    ):  # fmt: skip
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": said}))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        report = zckpt.convert(adapter, tmp_path / "out", options=Options(lora=LoraMerge(base=where)))
        assert any("was trained on 'org/Other-7B'" in note for note in report.notes) == is_told, (said, where)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    base, adapter, good = broken(tmp_path)
    out = tmp_path / "out"
    refused(IncompleteError, adapter, out, LoraMerge(), "base model's weights are missing", "q_proj.weight", "--base")
    refused(UsageError, adapter, out, LoraMerge(base="nobody/nothing"), "not here", "hf download")
    refused(UsageError, adapter, out, LoraMerge(base=adapter), "has adapters itself", "lora_A")
    refused(UsageError, base, out, LoraMerge(), "no adapter")
    refused(UsageError, base, out, LoraMerge(adapters=["nowhere"]), "no such adapter")
    refused(UsageError, FIXTURES / "peft" / "several_zero3" / "checkpoint", out, LoraMerge(), "'default', 'other'")
    with pytest.raises(OutputError):
        zckpt.convert(base, adapter, options=Options(lora=LoraMerge(adapters=[adapter]), overwrite=True))
    assert_close(load_file(adapter / "adapter_model.safetensors"), good, exact=True)
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in weights.items()}, base / "model.safetensors")
    refused(UnsupportedError, adapter, out, LoraMerge(base=base), "quantised", "q_proj.weight")
    (adapter / "adapter_config.json").unlink()
    refused(IncompleteError, adapter, out, LoraMerge(base=base), "adapter_config.json", "lora_alpha")


def test_adapters_of_other_methods(tmp_path: Path) -> None:
    """Named by themselves, and as the adapter of a base."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    for kind, own in (("HRA", {"r": 4}), ("C3A", {"block_size": 8}), ("OSF", {})):
        config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **own)
        peft.get_peft_model(llama(), config).save_pretrained(tmp_path / kind)
        for source, lora in (
            (tmp_path / kind, LoraMerge(base=tmp_path / "base")),
            (tmp_path / "base", LoraMerge(adapters=[tmp_path / kind])),
        ):
            refused(UnsupportedError, source, tmp_path / "out", lora, f"peft_type {kind.upper()}", "q_proj")
        with pytest.raises(UsageError, match="adapter of PEFT, and no model"):
            zckpt.convert(tmp_path / kind, tmp_path / "out")


def test_two_that_exclude_each_other(tmp_path: Path) -> None:
    base, adapter, _ = broken(tmp_path, config={**QV, "modules_to_save": ["lm_head"]})
    refused(UsageError, base, tmp_path / "out", LoraMerge(adapters=[f"{adapter}:0.5"]), "trained whole", "weight 0.5")
    twice = LoraMerge(adapters=[adapter, shutil.copytree(adapter, tmp_path / "other")])
    refused(UsageError, base, tmp_path / "out", twice, "trained whole", "'adapter'", "weight 1")


def zckpt_command(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zckpt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


def test_the_command(tmp_path: Path) -> None:
    home = FIXTURES / "peft" / "lora_zero3"
    bare = zckpt_command("to-bf16", home / "checkpoint", tmp_path / "bare")
    assert bare.returncode == 0 and "AutoModel" not in bare.stdout + bare.stderr
    assert all(word in bare.stderr for word in ("--merge-lora", "--base", "to-peft", "lora_A"))
    shown = zckpt_command("inspect", home / "checkpoint")
    assert "--merge-lora" in shown.stdout and "to-peft" in shown.stdout
    assert (
        "--merge-lora" in zckpt_command("to-bf16", home / "checkpoint", tmp_path / "x", "--base", home / "base").stderr
    )
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(home / "base", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    merge = ("to-bf16", home / "checkpoint", tmp_path / "out", "--merge-lora", "--base", "me/tiny")
    done = zckpt_command(*merge, "--json", HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "merged into 2 tensors" in json.loads(done.stdout)["notes"][0]
    assert {"config.json", "model.safetensors", "zckpt.json"} == {path.name for path in (tmp_path / "out").iterdir()}
    checked = zckpt_command("verify", home / "checkpoint", tmp_path / "out", "--base", home / "base")
    assert checked.returncode == 0 and "were left out" in checked.stdout
