"""Parameters counted from a config.json, a checkpoint, an adapter or the hub's cache, against the models themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt.runtime
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.estimation.rehearsal import activations_of
from zckpt.estimation.sizes import ModelSize
from zckpt.estimation.sources import find_source, known_model, with_adapter
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.runtime.estimation import built_by_transformers, size_of

transformers = pytest.importorskip("transformers")

# PEFT and transformers warn of each other's coming changes.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_head": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", GROUPED),
    ("LlamaForCausalLM", {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("LlamaModel", SMALL),
    ("MistralForCausalLM", GROUPED),
    ("Qwen2ForCausalLM", GROUPED),
    ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    ("GPT2LMHeadModel", GPT2),
    ("GPT2Model", {**GPT2, "n_inner": 100}),
    ("BertForMaskedLM", SMALL),
    ("BertModel", SMALL),
    ("BertForSequenceClassification", {**SMALL, "num_labels": 5}),
    ("RobertaForMaskedLM", SMALL),
    ("RobertaForSequenceClassification", SMALL),
    ("RobertaModel", SMALL),
]  # fmt: skip


def test_grouped_queries_in_fp32_keep_their_scores_on_a_gpu() -> None:
    """Torch (seen with 2.11) has no kernel for them there; in bf16, and where each query has its own key, it has one."""
    size = {"model_type": "llama", **SMALL, "architectures": ["LlamaModel"]}
    length, grown = 128, {}
    for groups in (2, 4):
        for c in (2, 4):
            on_gpu, on_cpu = (
                activations_of(
                    {**size, "num_key_value_heads": groups},
                    compute_bytes=c,
                    micro_batch=3,
                    length=length,
                    accelerator=gpu,
                )
                for gpu in (True, False)
            )
            assert on_gpu is not None and on_cpu is not None
            grown[groups, c] = on_gpu.unit - on_cpu.unit
    scores, repeated, softmax = 4 * 4 * length * length * 3, 2 * 4 * 32 * length * 3, 4 * 4 * length * 3
    assert grown == {(2, 2): 0, (4, 2): 0, (4, 4): 0, (2, 4): scores + repeated - softmax}


def made(kind: str, *, layers: int = 3, **values: Any) -> tuple[Any, dict[str, Any]]:
    """A model on the meta device, and what its config.json holds."""
    cls = getattr(transformers, kind)
    key = "n_layer" if kind.startswith("GPT2") else "num_hidden_layers"
    config = cls.config_class(**values, **{key: layers})
    with torch.device("meta"):
        model = cls(config)
    model.tie_weights()
    config.architectures, config.use_cache = [kind], False
    return model, json.loads(config.to_json_string())


@pytest.mark.parametrize(("kind", "values"), CASES, ids=[kind for kind, _ in CASES])
def test_a_formula_gives_the_parameters_that_transformers_makes(kind: str, values: dict[str, Any]) -> None:
    model, config = made(kind, **values)
    found = known_model(config, "model")
    assert found is not None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {one.name: one.shape for one in found.parameters} == shapes
    known = known_shapes(config)
    assert known is not None and known.in_order == (list(known.shapes) == list(shapes)), "for --shapes"
    live = size_of(model)
    assert [sorted(one.name for one in unit) for unit in found.units] == [
        sorted(one.name for one in unit) for unit in live.units if "embed" not in unit[0].name
    ]
    assert (found.largest_layer, found.tied) == (live.largest_layer, live.tied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("LlamaForCausalLM", GROUPED),
        ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
        ("GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        ("GPT2LMHeadModel", GPT2),
        ("BertForMaskedLM", SMALL),
    ],
    ids=["llama", "qwen3", "gpt2", "gpt2 with dropout", "bert with dropout"],
)
def test_a_block_keeps_the_bytes_of_the_formula(kind: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    """What autograd keeps of a model with one block more, less what it keeps of the model."""
    batch, length = 2, 64
    kept = []
    for layers in (2, 3):
        model, config = made(kind, layers=layers, **values)
        model = getattr(transformers, kind)(model.config).to(dtype).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        alive: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, alive: dict[int, torch.Tensor] = alive) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                alive[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        ids = torch.randint(0, 320, (batch, length))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in alive.values()))
    formula = activations_of(config, compute_bytes=dtype.itemsize, micro_batch=batch, length=length, accelerator=False)
    assert formula is not None and formula.unit == kept[1] - kept[0]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"target_modules": ["q_proj", "down_proj"], "r": 5, "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear", "bias": "all"},
        {"target_modules": r".*\.1\..*(q|v)_proj", "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["v_proj"], "layers_to_transform": [0, 2]},
    ],
)
def test_an_adapter_has_the_parameters_that_peft_makes(more: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    asked = peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM", **more})
    model, config = made("LlamaForCausalLM", **GROUPED, attention_bias=True)
    base = known_model(config, "model")
    assert base is not None
    settings = json.loads(json.dumps(asked.to_dict(), default=list))
    found = with_adapter(base, settings, "adapter_config.json")
    wrapped = peft.get_peft_model(model, asked)
    counted = size_of(wrapped)
    assert (found.numel, found.trained) == (counted.numel, counted.trained)
    assert [sum(one.numel for one in unit if one.trained) for unit in found.units] == [
        sum(one.numel for one in unit if one.trained) for unit in counted.units
    ]


def test_an_adapter_of_another_kind_is_refused() -> None:
    _, config = made("LlamaForCausalLM", **GROUPED)
    base = known_model(config, "model")
    assert base is not None
    with pytest.raises(UnsupportedError, match="does not know"):
        with_adapter(base, {"peft_type": "LORA", "use_dora": True, "target_modules": ["q_proj"]}, "a.json")
    with pytest.raises(UsageError, match="names no module that the model has"):
        with_adapter(base, {"peft_type": "LORA", "target_modules": ["query"]}, "a.json")


def size_in(name: str | Path, adapter: str | None = None) -> ModelSize:
    return find_source(str(name), adapter, lambda unknown: pytest.fail(f"no formula knows {unknown}"))


def test_a_checkpoint_says_what_is_frozen() -> None:
    found = size_in(FIXTURES / "peft" / "lora_zero2" / "checkpoint")
    adapter = json.loads((FIXTURES / "peft" / "lora_zero2" / "adapter" / "adapter_config.json").read_text())
    base = size_in(FIXTURES / "peft" / "lora_zero2" / "base")
    assert found.trained == with_adapter(base, adapter, "").trained < found.numel
    assert found.numel - found.trained == base.numel
    assert len(found.units) == len(base.units)


def test_an_adapter_is_found_beside_its_base_and_by_name(tmp_path: Path) -> None:
    source = FIXTURES / "peft" / "lora_zero2"
    trained = size_in(source / "checkpoint").trained
    both = tmp_path / "both"
    both.mkdir()
    shutil.copy(source / "base" / "config.json", both)
    assert size_in(both).trained == size_in(both).numel
    assert size_in(both, str(source / "adapter")).trained == trained
    shutil.copy(source / "adapter" / "adapter_config.json", both)
    assert size_in(both).trained == size_in(both / "config.json").trained == trained
    alone = tmp_path / "alone"
    alone.mkdir()
    settings = json.loads((source / "adapter" / "adapter_config.json").read_text())
    (alone / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(source / "base")})
    )
    assert size_in(alone).trained == trained
    (alone / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="does not say which model"):
        size_in(alone)


def test_another_kind_of_model_is_built_without_memory(tmp_path: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "num_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[tuple[Any, ...]] = []
    built = find_source(str(tmp_path), None, lambda *given: built_by_transformers(*(asked.append(given) or given)))
    assert [given for given, _, _ in asked] == [config]
    kind = getattr(transformers, config["architectures"][0])
    model = kind(transformers.AutoConfig.from_pretrained(tmp_path))
    assert built.numel == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(UnsupportedError, match="cannot make a model"):
        built_by_transformers({"model_type": "no-such"}, "config.json", "model")


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--me--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    _, config = made("GPT2LMHeadModel", **GPT2)
    (snapshot / "config.json").write_text(json.dumps(config))
    assert size_in("me/small").numel == sum(p.numel() for p in made("GPT2LMHeadModel", **GPT2)[0].parameters())
    with pytest.raises(UsageError, match="the hub gives no model of this name"):
        size_in("me/another")
    with pytest.raises(UsageError, match="no such file or directory"):
        size_in("./nothing.json")


def test_frozen_parameters_and_tied_ones_of_a_live_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model[1].weight = model[0].weight
    found = size_of(model)
    assert (found.numel, found.trained) == (64 + 8 + 8, 8)
    needs = zckpt.runtime.estimate(model, gpus=2, memory="1kB").as_json()["choices"]
    assert isinstance(needs, list)
    [row] = [one for one in needs if (one["stage"], one["precision"], one["offload"]) == (3, "bf16", "none")]
    assert row["rank"]["weights"] == 4 * 4 + 2 * (32 + 4) and row["rank"]["optimizer"] == 8 * 4


def test_the_command_imports_no_torch_where_it_needs_none(tmp_path: Path) -> None:
    _, config = made("LlamaForCausalLM", **GROUPED)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}')
    code = (
        "import sys\nfrom zckpt.cli import app\n"
        f"app(['estimate', {str(tmp_path)!r}, '--config', {str(tmp_path / 'ds.json')!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_that_a_config_leaves_to_its_class(kind: str) -> None:
    """A config without `num_key_value_heads` and `head_dim` has the activations of one that says what transformers takes."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(kind).to_dict()
    lacks = {key: value for key, value in whole.items() if key not in ("num_key_value_heads", "head_dim")}
    found, wanted = (
        activations_of(config, compute_bytes=2, micro_batch=1, length=8, accelerator=True) for config in (lacks, whole)
    )
    assert found is not None and found == wanted
