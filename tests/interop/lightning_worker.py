"""On each of two ranks: lightning's Trainer with LightningWeights, under the strategy that the environment names.

Writes `rank_R.json`: what failed, and whether the weights beside the last checkpoint are the model's.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import nn

from zckpt.integrations import LightningWeights

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo


class Module(pl.LightningModule):
    """Two layers, each a unit of `fully_shard` where the strategy is ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def configure_model(self) -> None:
        """Called by lightning before training."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for part in (self.model[0], self.model[2], self.model):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """A loss."""
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main(home: Path, way: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    weights = LightningWeights(dtype=None, part="model")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=sharded if way == "fsdp2" else "ddp", max_steps=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(home),
        callbacks=[ModelCheckpoint(home, filename="{step}", every_n_train_steps=2, save_top_k=1), weights],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 6), batch_size=2))
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in module.model.state_dict().items()}
    found = load_file(home / "step=4.weights" / "model.safetensors")
    said = {
        "failed": [str(error) for error in weights.failures.values()],
        "equal": found.keys() == whole.keys() and all(torch.equal(found[n], t.detach()) for n, t in whole.items()),
    }
    (home / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(said))
    gloo.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["WAY"])
