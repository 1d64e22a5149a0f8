"""A LoRA run with transformers' Trainer and PEFT: the adapter alone, and the whole model with the adapter merged.

zckpt run lora.py
"""

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import zckpt

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
base = AutoModelForCausalLM.from_config(config)
base.save_pretrained("base")  # yours is a model on the hub or on the disk
model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained("base"), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
rows = torch.randint(0, 64, (64, 16))
deepspeed = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
arguments = TrainingArguments(
    "out",
    deepspeed=deepspeed,
    learning_rate=1e-2,
    use_cpu=not torch.cuda.is_available(),
    max_steps=4,
    save_steps=4,
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
trainer.accelerator.wait_for_everyone()
if trainer.is_world_process_zero():
    zckpt.to_peft("out/checkpoint-4", "adapter", progress=False)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")
    zckpt.convert(
        "out/checkpoint-4", "merged", options=zckpt.Options(lora=zckpt.LoraMerge(base="base")), progress=False
    )
    merged = AutoModelForCausalLM.from_pretrained("merged")
    with torch.no_grad():
        gap = (loaded(rows[:4]).logits - merged(rows[:4]).logits).abs().max()
    print(f"adapter/ and merged/ are written; their logits differ by {gap:.1e}")
