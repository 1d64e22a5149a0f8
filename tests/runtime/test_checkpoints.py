"""Saves and loads of an engine in one process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from descriptors import FILES, open_below
from hangs import HANG_S
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import Dataset, IterableDataset
from typer.testing import CliRunner

from zckpt import runtime, verify
from zckpt.base.errors import InconsistentError, UsageError
from zckpt.cli import app


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one for each test, which `initialize` makes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config(stage: int = 2, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


class Only(nn.Module):
    """A model whose only child is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def compiled() -> nn.Module:
    return torch.compile(Net(), backend="eager")


def in_blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = Net()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = wrap(block)
    return net


FORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "compiled": compiled,
    "compiled blocks": lambda: in_blocks(lambda block: torch.compile(block, backend="eager")),
    "checkpointed blocks": lambda: in_blocks(checkpoint_wrapper),
    "only child": Only,
}


def start(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> runtime.Engine:
    return runtime.initialize(model=model, config=settings, **arguments)[0]


def train(engine: runtime.Engine, steps: int, first: int = 0) -> list[float]:
    """Losses of micro batches from that number on."""
    losses = []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        loss = engine(torch.rand(2, 4, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("before", FORMS)
def test_a_wrapped_model_is_loaded(before: str, stage: int, tmp_path: Path) -> None:
    """Into itself and into the plain model, and the plain one's save into it: to the last bit."""
    for saved, loaded in {(before, before), (before, "plain"), ("plain", before)}:
        engine = start(FORMS[saved](), config(stage))
        train(engine, 2)
        engine.save_checkpoint(tmp_path / saved)
        wanted = train(engine, 2, 2)
        again = start(FORMS[loaded](), config(stage))
        again.load_checkpoint(tmp_path / saved)
        assert train(again, 2, 2) == wanted
        for options in ({"load_module_only": True}, {"load_module_strict": False}):
            other = start(FORMS[loaded](), config(stage))
            other.load_checkpoint(tmp_path / saved, **options)
            assert train(other, 1, 2) == wanted[:1]


FIRST_LOADS = """
import sys
from torch import nn
from zckpt import runtime
for stage in (2, 3):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"}}
    engine = runtime.initialize(model=nn.Linear(4, 4), config=config)[0]
    before = set(sys.modules)
    engine.load_checkpoint(f"{sys.argv[1]}/{stage}")
    more = sorted(name for name in set(sys.modules) - before if name.startswith("zckpt"))
    assert not more, more
"""


def test_a_first_load_imports_nothing(tmp_path: Path) -> None:
    for stage in (2, 3):
        engine = start(nn.Linear(4, 4), config(stage, optimizer={"type": "SGD"}))
        engine.save_checkpoint(tmp_path / str(stage))
    subprocess.run([sys.executable, "-c", FIRST_LOADS, tmp_path], check=True, timeout=HANG_S)


@pytest.mark.parametrize("stage", range(4))
def test_random_generators_of_one_process(stage: int, tmp_path: Path) -> None:
    engine = start(Net(), config(stage))
    train(engine, 1)
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)
    engine.save_checkpoint(tmp_path)

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()]

    wanted = draw()
    again = start(Net(), config(stage))
    again.load_checkpoint(tmp_path)
    assert draw() == wanted


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        return number + torch.rand(())


class Samples(Items):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), number / 7)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            yield number + torch.rand(())


@pytest.mark.parametrize("data", [Items, Stream])
@pytest.mark.parametrize("seen", [0, 2, 6, 8])  # batches, of epochs of six
def test_samples_after_a_resume(data: type, seen: int, tmp_path: Path) -> None:
    """Inside an epoch, at its end and in the next one: the same samples, though they are drawn at random."""

    def begin() -> tuple[runtime.Engine, Iterator[torch.Tensor]]:
        torch.manual_seed(3)
        engine, _, loader, _ = runtime.initialize(model=Net(), config=config(), training_data=data())
        assert loader is not None
        return engine, itertools.chain.from_iterable(itertools.repeat(loader))

    engine, batches = begin()
    for _ in range(seen):
        next(batches)
    engine.save_checkpoint(tmp_path)
    wanted = [next(batches).tolist() for _ in range(9)]
    again, batches = begin()
    torch.manual_seed(4)
    again.load_checkpoint(tmp_path)
    assert [next(batches).tolist() for _ in wanted] == wanted


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_forgets_the_micro_batches_before(stage: int) -> None:
    found = []
    for forgets in (True, False):
        engine = start(Net(), config(stage, accumulation=2))
        train(engine, 2)
        if forgets:
            engine.backward(engine(torch.full((2, 4), 3.0)))
            engine.step()
            engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.full((2, 4), 0.1)))
        engine.step()
        found.append([value.clone() for value in whole(engine).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("stage", range(4))
def test_a_load_forgets_gradients(stage: int, tmp_path: Path) -> None:
    engine = start(Net(), config(stage, accumulation=2))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    wanted = train(engine, 4, 2)
    engine.backward(engine(torch.full((2, 4), 3.0)))
    engine.step()
    engine.load_checkpoint(tmp_path)
    assert train(engine, 4, 2) == wanted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_save_between_micro_batches(
    stage: int, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients so far are saved: a run of the same shape goes on to the last bit."""
    settings = config(stage, accumulation=3, bf16={"enabled": precision == "bf16"})
    engine = start(Net(), settings)
    train(engine, 5)
    with caplog.at_level(logging.WARNING, "zckpt.runtime"):
        engine.save_checkpoint(tmp_path)
    assert "after 2 of the 3 micro batches" in caplog.text
    wanted = train(engine, 5, 5)
    again = start(Net(), settings)
    train(again, 4, 11)
    again.load_checkpoint(tmp_path)
    assert (again.micro_steps, again.pending_micro_steps) == (5, 2)
    assert train(again, 5, 5) == wanted
    assert all(torch.equal(a, b) for a, b in zip(whole(engine).values(), whole(again).values(), strict=True))


@pytest.mark.parametrize("other", [{"stage": 3}, {"stage": 2, "accumulation": 6}, {"stage": 2, "file": "gone"}])
def test_a_save_between_micro_batches_elsewhere(
    other: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In another shape the step begins anew, with a whole batch and the samples that it began with."""
    engine, _, loader, _ = runtime.initialize(model=Net(), config=config(2, accumulation=3), training_data=Samples())
    batches = iter(loader)
    for _ in range(3):
        engine.backward(engine(next(batches)))
        engine.step()
    step = whole(engine)
    seen = [next(batches) for _ in range(2)]
    for batch in seen:
        engine.backward(engine(batch))
        engine.step()
    engine.save_checkpoint(tmp_path)
    if other.pop("file", None):
        (tmp_path / "global_step1" / "zckpt_rank_0_states.pt").unlink()
    settings = config(**{"accumulation": 3, **other})
    again, _, rest, _ = runtime.initialize(model=Net(), config=settings, training_data=Samples())
    with caplog.at_level(logging.WARNING, "zckpt.runtime"):
        again.load_checkpoint(tmp_path)
    assert "the step begins again, with a whole batch" in caplog.text
    assert again.micro_steps == settings["gradient_accumulation_steps"] and again.pending_micro_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(step.values(), whole(again).values(), strict=True))
    assert torch.equal(next(iter(rest)), seen[0])


def test_a_save_after_a_step_has_no_file_of_a_rank(tmp_path: Path) -> None:
    engine = start(Net(), config(2, accumulation=2))
    train(engine, 2)
    engine.save_checkpoint(tmp_path, "whole")
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path, "part")
    names = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    assert {path.name for path in (tmp_path / "whole").iterdir()} == names
    assert {path.name for path in (tmp_path / "part").iterdir()} == {*names, "zckpt_rank_0_states.pt"}


def test_verify_reads_the_file_of_a_rank(tmp_path: Path) -> None:
    engine = start(Net(), config(2, accumulation=2))
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    assert verify(tmp_path, deep=True).ok
    file = tmp_path / "global_step1" / "zckpt_rank_0_states.pt"
    [gradient] = torch.load(file, weights_only=True)["gradients"]["rows"]["head.bias"].tolist()
    assert gradient
    data = bytearray(file.read_bytes())
    data[data.index(struct.pack("<f", gradient))] ^= 1
    file.write_bytes(data)
    problems = [problem for check in verify(tmp_path, deep=True).checks for problem in check.problems]
    assert len(problems) == 1 and "zckpt_rank_0_states.pt" in problems[0]


def test_gradients_of_another_save_are_refused(tmp_path: Path) -> None:
    engine = start(Net(), config(2, accumulation=2))
    for steps, tag in ((3, "a"), (2, "b")):
        train(engine, steps)
        engine.save_checkpoint(tmp_path, tag)
    (tmp_path / "a" / "zckpt_rank_0_states.pt").replace(tmp_path / "b" / "zckpt_rank_0_states.pt")
    before = whole(engine)
    with pytest.raises(
        InconsistentError, match=r"found global_steps 1, .*expected global_steps 2, .*Copy all files of one save"
    ):
        engine.load_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), whole(engine).values(), strict=True))


def test_a_refused_tag_leaves_the_saves_as_they_are(tmp_path: Path) -> None:
    """Each of these names once made later saves or loads fail."""
    engine = start(Net(), config())
    engine.save_checkpoint(tmp_path, "first")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UsageError, match="needs a directory"):
        engine.save_checkpoint("")
    for tag in ("zero", "mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py", " x", "x "):
        with pytest.raises(UsageError):
            engine.save_checkpoint(tmp_path, tag)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "first" / "mp_rank_00_model_states.pt")
    engine.save_checkpoint(tmp_path, "x" * 240)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / ("x" * 240) / "mp_rank_00_model_states.pt")


@pytest.mark.skipif(not FILES.is_dir(), reason="this system does not list descriptors")
def test_a_save_leaves_no_file_open(tmp_path: Path) -> None:
    engine = start(Net(), config())
    for tag in ("first", "second"):
        engine.save_checkpoint(str(tmp_path), tag=tag)
        assert open_below(tmp_path) == []


def whole(engine: runtime.Engine) -> dict[str, torch.Tensor]:
    with runtime.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_what_the_readme_beside_the_saves_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command in it works there, and the file named in it has the weights as they were trained."""
    engine = start(nn.Linear(4, 3), config(2))
    for tag in ("one", "two"):
        engine.save_checkpoint(str(tmp_path / "saves"), tag=tag)
    monkeypatch.chdir(tmp_path / "saves")
    words = Path("README.txt").read_text()
    assert Path("latest").read_text() == "two" and {"one", "two"} == {
        path.name for path in Path().iterdir() if path.is_dir()
    }
    commands = [line.strip().partition("  ")[0] for line in words.splitlines() if line.startswith("    zckpt ")]
    for command in commands:
        done = CliRunner().invoke(app, command.replace("OUT", "../resharded").replace(" N", " 2").split()[1:])
        assert done.exit_code == 0, (command, done.output)
    weights = torch.load("pytorch_model.bin")
    assert len(commands) == 5 and weights["weight"].dtype == torch.float32
    monkeypatch.setattr("sys.argv", ["zero_to_fp32.py", ".", "../script"])
    with contextlib.suppress(SystemExit):
        runpy.run_path("zero_to_fp32.py", run_name="__main__")
    assert any(Path("../script").iterdir()) and "python zero_to_fp32.py . OUT" in words
    again = start(nn.Linear(4, 3), config(2))
    again.load_checkpoint(str(Path.cwd()))
    assert torch.equal(again.module.weight, engine.module.weight) and torch.equal(
        weights["weight"], again.module.weight
    )
