"""The callbacks that write whole weights at each save of other libraries' trainers, in these trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from hub_server import HubServer
from ranks import OURS, TRAINER, run_ranks
from torch import nn

import zckpt
from zckpt.integrations.weights import WeightsWriter

WORKER = Path(__file__).with_name("callbacks_worker.py")
GROUPS = ["ours3 fsdp2", *proofs.cases([["ours1 ours2"], ["theirs1 theirs2 theirs3"]])]


@pytest.mark.parametrize("ways", GROUPS)
def test_the_trainer_goes_on_with_whole_weights_beside_each_checkpoint(tmp_path: Path, ways: str) -> None:
    """Two saves of which one is left, with the weights of that moment; a callback that cannot write stops nothing."""
    run_ranks(2, tmp_path, WORKER, TRAINER, WAYS=ways)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert list(found) == ways.split()
        for way, said in found.items():
            assert isinstance(said, dict), said
            assert said["failed"] == [], way
            assert said["logged"] == 2, way
            if rank == 0:
                assert said["left"] == ["checkpoint-4"] and said["equal"] and said["dtype"] == "torch.bfloat16", way


@pytest.mark.parametrize("way", ["fsdp2", *proofs.cases([["ddp"]])])
def test_lightning_on_two_ranks(tmp_path: Path, way: str) -> None:
    run_ranks(2, tmp_path, WORKER.with_name("lightning_worker.py"), OURS, WAY=way)
    for rank in range(2):
        said = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert said == {"failed": [], "equal": True}
    assert [path.name for path in tmp_path.glob("*.weights")] == ["step=4.weights"]


def lightning_module() -> Any:
    import lightning.pytorch as pl

    class Lightning(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), lr=0.1)

    return Lightning()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # lightning's own, of torch
def test_lightning_keeps_and_deletes_weights_with_its_checkpoints(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from zckpt.integrations import LightningWeights

    module = lightning_module()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)
    weights, at_end = LightningWeights(part="model"), LightningWeights("fp32", when="end")
    pl.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path), callbacks=[saver, weights, at_end],
    ).fit(module, torch.utils.data.DataLoader(torch.randn(8, 4)))  # fmt: skip
    assert weights.failures == at_end.failures == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=4.ckpt", "step=4.weights", "weights"]
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=False)["state_dict"]
    found = zckpt.open_checkpoint(tmp_path / "step=4.weights")
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert all(torch.equal(found[name], saved[f"model.{name}"].bfloat16()) for name in found)
    whole = zckpt.open_checkpoint(tmp_path / "weights")
    assert all(torch.equal(whole[name], saved[name]) for name in saved) and len(whole) == 4


def test_weights_are_pushed_when_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(tmp_path / "server") as server:
        server.user("me", "hf_meWrites0123456789")
        options = {"endpoint": server.url, "token": "hf_meWrites0123456789", "progress": False}
        writer = WeightsWriter(push_to="me/my-model", push_options=options)
        assert writer.write(nn.Linear(3, 2), str(tmp_path / "weights")), writer.failures
        assert "model.safetensors" in server.files("me/my-model")


@pytest.mark.filterwarnings("ignore")  # torch's, of FSDP1
def test_what_cannot_be_read_from_memory_is_converted_from_the_checkpoint(tmp_path: Path) -> None:
    """FSDP1, whose parts zckpt does not know."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    is_first = not torch.distributed.is_initialized()  # a test of this process before may have left its group
    if is_first:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        plain = nn.Linear(3, 2)
        torch.save({name: value.clone() for name, value in plain.state_dict().items()}, tmp_path / "step.bin")
        model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
        writer = WeightsWriter()
        assert writer.write(model, str(tmp_path / "weights"), checkpoint=str(tmp_path / "step.bin")), writer.failures
        assert not writer.write(model, str(tmp_path / "other")) and "FSDP1" in str(writer.failures)
    finally:
        if is_first:
            torch.distributed.destroy_process_group()
    found = zckpt.open_checkpoint(tmp_path / "weights")
    saved = torch.load(tmp_path / "step.bin")
    assert all(torch.equal(found[name], saved[name].bfloat16()) for name in saved) and len(found) == 2


def test_an_error_is_raised_if_that_is_asked_for(tmp_path: Path) -> None:
    from zckpt.integrations import TrainerWeights

    (tmp_path / "file").write_text("")
    writer = WeightsWriter(on_error="raise")
    with pytest.raises(zckpt.OutputError):
        writer.write(nn.Linear(2, 2), str(tmp_path / "file"))
    with pytest.raises(zckpt.UsageError, match="on_error has a value"):
        TrainerWeights(on_error="ignore")  # type: ignore[arg-type]
