"""transformers' Trainer with a DeepSpeed config; afterwards the model is on a page of the hub, without a second copy on the disk.

zckpt run trainer_to_hub.py me/my-model          # on the bundled trainer
deepspeed trainer_to_hub.py me/my-model          # on DeepSpeed: the same script, the same checkpoint
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import zckpt

page = sys.argv[1]
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
rows = torch.randint(0, 64, (64, 16))
deepspeed = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
arguments = TrainingArguments(
    "out",
    deepspeed=deepspeed,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    max_steps=4,
    save_steps=2,
    report_to=[],
)
trainer = Trainer(
    AutoModelForCausalLM.from_config(config),
    arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
trainer.accelerator.wait_for_everyone()
if trainer.is_world_process_zero():
    report = zckpt.push_to_hub("out/checkpoint-4", page, dtype="bf16")
    print(f"{report.url}: {len(report.files)} files")
