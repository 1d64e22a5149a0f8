"""TRL's trainers, and a loop as PEFT's example on DeepSpeed has it, on zckpt's engine, on every rank: trl_worker.py HOME.

The tokenizer, the models and the data are made here.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import zckpt.runtime

zckpt.runtime.as_deepspeed()
warnings.simplefilter("ignore")

import datasets
import torch
import transformers as t
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from zckpt.runtime.engine import Engine

HOME = Path(sys.argv[1])
WORDS = ["<pad>", "</s>", "<unk>", *(str(number) for number in range(29))]
SIZE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def rows(*columns: str) -> Any:
    counted = {"prompt": "1 2 3", "chosen": "4 5 6 7", "rejected": "9 8 20 21", "text": "1 2 3 4 5 6 7"}
    return datasets.Dataset.from_list([{name: counted[name] for name in columns}] * 16)


def model(kind: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(t.LlamaConfig(**SIZE, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **more))


def options(kind: Any, stage: int, **more: Any) -> Any:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    config = {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}}
    return kind(
        str(HOME / kind.__name__), deepspeed=config, use_cpu=True, bf16=True, max_steps=3, logging_steps=1, learning_rate=0.03,
        lr_scheduler_type="constant", per_device_train_batch_size=2, save_steps=3, report_to=[], disable_tqdm=True,
        log_level="error", gradient_checkpointing=False, **more,
    )  # fmt: skip


def trained(trainer: Any) -> dict[str, Any]:
    trainer.train()
    engine = trainer.model_wrapped
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    saved = HOME / type(trainer.args).__name__ / "checkpoint-3"
    told = {"engine": type(engine) is Engine, "steps": engine.global_steps, "stage": engine.zero_optimization_stage()}
    AcceleratorState._reset_state(reset_partial_state=False)
    unset_hf_deepspeed_config()
    told |= {"latest": (saved / "latest").read_text(), "adapter": (saved / "adapter_config.json").exists()}
    return {**told, "losses": losses}


def with_accelerate() -> dict[str, Any]:
    """An encoder with a decoder and LoRA in a loop of accelerate's: ZeRO-3, optimizer and weights in host memory."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)  # accelerate counts the ranks of CPUs only when it is asked to
    host = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_save_16bit_model": True}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1, **host))
    torch.manual_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    adapter = LoraConfig(task_type="SEQ_2_SEQ_LM", r=8)
    net = get_peft_model(t.T5ForConditionalGeneration(t.T5Config(vocab_size=32, **size)), adapter)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
    data = torch.utils.data.DataLoader([torch.arange(3, 11)] * 16, batch_size=2)
    schedule = t.get_linear_schedule_with_warmup(optimizer, 0, 8)
    net, data, optimizer, schedule = accelerator.prepare(net, data, optimizer, schedule)
    losses = []
    for batch in data:
        loss = net(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = accelerator.get_state_dict(net)
    shapes = sorted(list(value.shape) for name, value in weights.items() if "lora_A" in name) if weights else None
    return {"engine": type(net) is Engine, "steps": net.global_steps, "losses": losses, "shapes": shapes}


told = {}
words = tokenizer()
causal, scored = t.LlamaForCausalLM, t.LlamaForSequenceClassification
usual = {"processing_class": words}
sft = SFTTrainer(model(causal), options(SFTConfig, 3, max_length=16), train_dataset=rows("text"), **usual)
told["SFT"] = trained(sft)
lora = LoraConfig(task_type="CAUSAL_LM", **ADAPTER)
dpo = DPOTrainer(
    model(causal),
    args=options(DPOConfig, 2),
    train_dataset=rows("prompt", "chosen", "rejected"),
    peft_config=lora,
    **usual,
)
told["DPO"] = trained(dpo)
rewards = options(RewardConfig, 3, max_length=16)
told["reward"] = trained(
    RewardTrainer(model(scored, num_labels=1), rewards, train_dataset=rows("chosen", "rejected"), **usual)
)
told["PEFT"] = with_accelerate()
(HOME / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
