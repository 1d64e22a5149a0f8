"""Files as training loops write them with torch.save: the model under any key, beside optimizers, random states and counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import same_bits

import zckpt
from zckpt.base.errors import NotACheckpointError, UsageError


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))


def optimizer_of(trained: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


def write(path: Path, **entries: object) -> Path:
    torch.save(entries, path)
    return path


@pytest.mark.parametrize("key", ["net", "weights", "model_state", "params", "model_state_dict", "state_dict", ""])
def test_the_model_alone_is_taken(key: str, tmp_path: Path) -> None:
    trained = model()
    optimizer = optimizer_of(trained).state_dict()
    scaler = {"scale": 65536.0, "growth_tracker": 3}
    beside = {
        "optimizer": optimizer,
        "optimizers": {"first": optimizer},
        "rng_state": torch.get_rng_state(),
        "scaler": scaler,
    }
    entries = {key: trained.state_dict()} if key else dict(trained.state_dict())
    file = write(tmp_path / "last.pt", **entries, **beside, epoch=3)
    report = zckpt.convert(file, tmp_path / "o.safetensors")
    found = zckpt.open_checkpoint(tmp_path / "o.safetensors")
    assert set(found) == set(trained.state_dict())
    assert all(same_bits(found[name], value) for name, value in trained.state_dict().items())
    assert key in ("model_state_dict", "state_dict", "") or any(f"under {key!r}" in note for note in report.notes)
    assert zckpt.verify(file, tmp_path / "o.safetensors").ok


def test_what_lies_beside_the_model_is_named(tmp_path: Path) -> None:
    trained, head = model(), {"summary.weight": torch.ones(1, 3)}
    file = write(tmp_path / "last.pt", model=trained.state_dict(), v_head=head, model_ema=model().state_dict())
    notes = " ".join(zckpt.convert(file, tmp_path / "o.safetensors").notes)
    assert "v_head.summary.weight" in notes and "--key v_head" in notes and "--key model_ema" in notes
    verdict = str(zckpt.verify(file, tmp_path / "o.safetensors"))
    assert "v_head.summary.weight" in verdict.replace("\n", " ")
    zckpt.convert(
        file, tmp_path / "head.safetensors", options=zckpt.Options(read_options=zckpt.ReadOptions(key="v_head"))
    )
    assert list(zckpt.open_checkpoint(tmp_path / "head.safetensors")) == ["summary.weight"]


@pytest.mark.parametrize("key", ["model", "net"])
def test_a_loss_beside_the_model_is_not_a_weight(key: str, tmp_path: Path) -> None:
    """A number of the model's own, such as a scale, is one."""
    weights = {**model().state_dict(), "logit_scale": torch.tensor(2.0)}
    file = write(
        tmp_path / "last.pt", **{key: weights}, loss=torch.tensor(0.4), step=torch.tensor(7), rng=torch.get_rng_state()
    )
    zckpt.convert(file, tmp_path / "o.safetensors", progress=False)
    assert set(zckpt.open_checkpoint(tmp_path / "o.safetensors")) == set(weights)
    assert zckpt.verify(file, tmp_path / "o.safetensors").ok
    both = write(tmp_path / "both.pt", model=weights, model_ema=weights, loss=torch.tensor(0.4))
    assert any("--key model_ema" in note for note in zckpt.convert(both, tmp_path / "b.safetensors").notes)


def test_an_optimizer_is_no_model(tmp_path: Path) -> None:
    trained = model()
    file = write(
        tmp_path / "last.pt",
        actor=trained.state_dict(),
        critic=model().state_dict(),
        opt=optimizer_of(trained).state_dict(),
    )
    with pytest.raises(UsageError, match="several models") as error:
        zckpt.convert(file, tmp_path / "o.safetensors")
    assert "opt" not in str(error.value.found)


@pytest.mark.parametrize("name", ["optimizer", "optimizers", "random", "counters", "empty"])
def test_files_without_weights(name: str, tmp_path: Path) -> None:
    optimizer = optimizer_of(model()).state_dict()
    contents = {
        "optimizer": optimizer,
        "optimizers": {"optimizer": optimizer, "epoch": 1},
        "random": {"python": (3, 4), "cpu": torch.get_rng_state(), "cuda": [torch.get_rng_state()]},
        "counters": {"step": torch.tensor(4), "loss": torch.tensor(0.5)},
        "empty": {"epoch": 3, "args": {"lr": 0.1}},
    }[name]
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(NotACheckpointError, match="holds no"):
        zckpt.convert(tmp_path / "x.pt", tmp_path / "o.safetensors")
    assert not zckpt.inspect_checkpoint(tmp_path / "x.pt").exportable.ok


def test_many_other_entries_are_one_note(tmp_path: Path) -> None:
    file = write(tmp_path / "x.pt", **model().state_dict(), **{f"fact{n}": n for n in range(100)})
    report = zckpt.convert(file, tmp_path / "o.safetensors")
    assert len(report.notes) < 6 and any("97 more entries" in note for note in report.notes)
