"""A training loop in plain torch with the bundled trainer: a save, and consolidated weights written while the model trains.

zckpt run --nproc 2 torch_loop.py
"""

import torch

import zckpt.live
import zckpt.runtime

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
engine, *_ = zckpt.runtime.initialize(model=model, config=config)
inputs = torch.randn(8, 16, device=engine.device, dtype=torch.bfloat16)
for step in range(1, 9):
    loss = (engine(inputs) - inputs).square().mean()
    engine.backward(loss)
    engine.step()
    if step % 4 == 0:
        engine.save_checkpoint("run")
zckpt.live.save_pretrained(engine, "weights", dtype="bf16")  # every rank writes its part; nothing is gathered
if engine.global_rank == 0:
    print(f"step {engine.global_steps}, loss {loss.item():.4f}")
    print(f"run/ and weights/ hold the same: {zckpt.verify('run', 'weights', progress=False).ok}")
