"""Models of transformers, written by to-mcore, in Megatron-Core's own models: loaded, asked, saved, and read back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from bits import same_bits
from ranks import MEGATRON, run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import zckpt
from zckpt import layouts
from zckpt.base.errors import UnsupportedError, UsageError, ZckptError
from zckpt.jobs.open import open_catalog, read_tensor

WORKER = Path(__file__).parent / "megatron_worker.py"
STATES_WORKER = Path(__file__).parent / "megatron_states_worker.py"

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 131, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "head_dim": 8,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DENSE_FIRST = {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**ROUTED, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", {**ROUTED, "norm_topk_prob": True}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "glm4-moe": (
        "Glm4Moe",
        {**DENSE_FIRST, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
}

TP2, PP2, EP2 = (2, 1, 1), (1, 2, 1), (1, 1, 2)
FEW = [
    ("llama", TP2, "stacked"),
    ("qwen2", PP2, "stacked"),
    ("qwen3", TP2, "numbered"),
    ("mixtral", EP2, "stacked"),
    ("deepseek-v3", EP2, "numbered"),
    ("gpt-oss", EP2, "stacked"),
]  # fmt: skip
ALL = [
    (name, sizes, layers)
    for name in MODELS
    for sizes in (TP2, PP2, EP2)
    for layers in ("stacked", "numbered")
    if ("first_k_dense_replace" in MODELS[name][1]) <= (layers == "numbered")
    and (sizes != EP2 or "-" in name or name == "mixtral")
    and (name, sizes) != ("gpt-oss", TP2)  # Megatron-Core has no biases of experts that tensor parallelism slices
]

TOLERANCE = 1e-5
"""How far logits may be apart, of models whose logits are of the order of 1: both compute in fp32, in another order."""


def made(name: str, directory: Path) -> Any:
    """A random model, saved."""
    kind, own = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **own})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for own_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in own_name:
                tensor.normal_(1.0 if "norm" in own_name else 0.0, 0.1)
    model.save_pretrained(directory)
    return model


def jobs(tmp_path: Path, cases: list[tuple[str, tuple[int, int, int], str]]) -> list[dict[str, Any]]:
    """The jobs of a worker, with all that they need."""
    found = []
    for number, (name, sizes, layers) in enumerate(cases):
        home = tmp_path / name.replace(" ", "_")
        if not home.exists():
            model = made(name, home / "hf")
            words = torch.randint(0, SMALL["vocab_size"], (2, 12))
            with torch.no_grad():
                save_file({"words": words, "logits": model(words).logits.contiguous()}, home / "logits.safetensors")
        out = home / f"mcore-{number}"
        zckpt.to_mcore(home / "hf", out, tensor_parallel=sizes[0], numbered_layers=layers == "numbered", progress=False)
        found.append({
            "config": str(home / "hf"), "checkpoint": str(out), "sizes": sizes, "layers": layers,
            "logits": str(home / "logits.safetensors"), "again": str(home / f"again-{number}"),
        })  # fmt: skip
    return found


MORE = proofs.covering_of(ALL, FEW)
"""With the few, every model at every size of a grid, and with every kind of layers that it has."""


@pytest.mark.parametrize("cases", [FEW, *proofs.cases([[MORE]])], ids=["few", "more"][: 1 + proofs.IS_WHOLE])
def test_megatron_core_loads_asks_and_saves(tmp_path: Path, cases: list[Any]) -> None:
    """Logits are those of transformers; what Megatron-Core then saves is, exported, the same model bit for bit.

    So it is with a config that is made of the run's arguments, in which rows of padding count as words.
    """
    work = jobs(tmp_path, cases)
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(work))
    run_ranks(2, path, WORKER, MEGATRON)
    told = json.loads(Path(f"{path}.told").read_text())
    for number, (job, case) in enumerate(zip(work, cases, strict=True)):
        of_ranks = [rank[number] for rank in told]
        assert any(rank["computed"] for rank in of_ranks)
        assert max(rank["apart"] for rank in of_ranks) < TOLERANCE, (case, of_ranks)
        out = Path(job["again"]) / "hf"
        config = Path(job["config"]) / "config.json"
        zckpt.convert(
            job["again"], out, options=zckpt.Options(form=zckpt.Form(to="hf", config=str(config))), progress=False
        )
        found = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
        truth = {k: v for file in Path(job["config"]).glob("*.safetensors") for k, v in load_file(file).items()}
        assert found.keys() == truth.keys()
        assert all(same_bits(found[key], truth[key]) for key in truth), case
        if case[0] in {name for name, *_ in cases[:number]}:
            continue
        plain = Path(job["again"]) / "plain"
        zckpt.convert(job["again"], plain, options=zckpt.Options(form=zckpt.Form(to="hf")), progress=False)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(plain, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], case
        held = load_file(job["logits"])
        with torch.no_grad():
            said = model(held["words"]).logits[..., : SMALL["vocab_size"]]
        assert torch.equal(said, held["logits"]), case


def trained(name: str, home: Path) -> None:
    """A run of a random model: saved by torch after two steps of AdamW, whose biases and norms do not decay."""
    model = made(name, home)
    (home / "model.safetensors").unlink()
    parameters = dict(model.named_parameters())
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.25, betas=(0.8, 0.9), eps=1e-6)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    state, states = get_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):  # it is one process
        dcp.save({"model": state, "optim": states}, checkpoint_id=home, no_dist=True)


STATES = [
    ("llama tied", TP2, "numbered"),
    ("mixtral", EP2, "stacked"),
    *[
        ("qwen3", PP2, "stacked"),
        ("mixtral", TP2, "numbered"),
        ("llama", TP2, "stacked"),
        ("deepseek-v3", EP2, "numbered"),
    ]
    * proofs.IS_WHOLE,
]
"""No tied embeddings on two pipeline stages: Megatron-Core 0.16.1 loads their states, and saves them at the wrong place."""


@proofs.MORE
def test_the_distributed_optimizer_of_megatron_core_loads_states(tmp_path: Path) -> None:
    """Masters and moments that it saves again are those of the run bit for bit, and step and settings are the run's."""
    work = []
    for number, (name, sizes, layers) in enumerate(STATES):
        home, out = tmp_path / name, tmp_path / f"mcore-{number}"
        if not home.exists():
            trained(name, home)
        zckpt.to_mcore(
            home, out, dtype="bf16", tensor_parallel=sizes[0], numbered_layers=layers == "numbered", optimizer=True,
            expert_parallel=sizes[2], progress=False,
        )  # fmt: skip
        assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert zckpt.verify(home, out, progress=False).ok
        work.append({"config": str(home), "checkpoint": str(out / "iter_0000002"), "sizes": sizes, "layers": layers,
                     "again": str(tmp_path / f"again-{number}")})  # fmt: skip
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(work))
    run_ranks(2, path, STATES_WORKER, MEGATRON)
    for rank in json.loads(Path(f"{path}.told").read_text()):
        assert all((set(job["steps"]), set(job["rates"]), set(job["decays"])) == ({2}, {0.25}, {0.1}) for job in rank)
    for job in work:
        ours, theirs = (open_catalog(place) for place in (job["checkpoint"], job["again"]))
        states, found = (layouts.read_training(opened.place.listing).states for opened in (ours, theirs))
        names = {**{name: name for name in ours.catalog.tensors}, **ours.catalog.aliases}
        biases = {name for name in ours.catalog.tensors if name.endswith(".expert_bias")}  # a buffer in Megatron-Core
        assert {names[name] for name in found} == set(states) - biases == set(ours.catalog.tensors) - biases
        for name in theirs.catalog.tensors:
            own = ours.catalog.tensors[names[name]]
            assert same_bits(read_tensor(theirs.catalog.tensors[name], "pt"), read_tensor(own, "pt")), name
            for moment in ("exp_avg", "exp_avg_sq") if names[name] not in biases else ():
                a, b = (read_tensor(held[moment], "pt") for held in (found[name], states[names[name]]))
                assert same_bits(a, b), (moment, name)


def test_states_that_megatron_core_cannot_have(tmp_path: Path) -> None:
    home = tmp_path / "run"
    trained("llama", home)
    with pytest.raises(UsageError, match="would not fit the weights"):
        zckpt.to_mcore(home, tmp_path / "out", optimizer=True, options=zckpt.Options(exclude=["lm_head.*"]))
    fixtures = Path(__file__).parents[2] / "fixtures"
    with pytest.raises(UnsupportedError, match="optimizer states"):
        made("llama", tmp_path / "hf")
        zckpt.to_mcore(tmp_path / "hf", tmp_path / "out", optimizer=True)
    config = {"model_type": "llama", "num_attention_heads": 2}
    with pytest.raises(ZckptError):
        zckpt.to_mcore(fixtures / "zero2/sgd_w2/checkpoint", tmp_path / "out", optimizer=True, config=config)
    assert not (tmp_path / "out").exists()
