"""Averages of checkpoints: held to torch's own AveragedModel bit for bit, from any layouts, and to what the literature says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import zckpt
from zckpt import InconsistentError, Options, OutputError, UnsupportedError, UsageError
from zckpt.cli import app
from zckpt.engine.move import run
from zckpt.jobs.average import prepare
from zckpt.jobs.declarations import AVERAGE
from zckpt.team.partition import part_of

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
LLAMA = FIXTURES / "transformers" / "llama_zero3" / "checkpoint"
NAMES = {"weight": (300, 70), "norm": (70,), "bias": (1,)}


def model(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A module of random parameters of very different sizes."""
    generator, module = torch.Generator().manual_seed(seed), torch.nn.Module()
    for name, shape in NAMES.items():
        numbers = torch.randn(shape, generator=generator) * torch.exp(8 * torch.randn(shape, generator=generator))
        module.register_parameter(name, torch.nn.Parameter(numbers.to(dtype)))
    return module


def saved(path: Path, module: torch.nn.Module, **more: torch.Tensor) -> Path:
    path.mkdir()
    save_file({**{n: p.detach() for n, p in module.named_parameters()}, **more}, path / "model.safetensors")
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def equal(found: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    wanted = dict(module.named_parameters())
    return found.keys() >= wanted.keys() and all(torch.equal(found[n], p) for n, p in wanted.items())


@pytest.mark.parametrize("ema", [None, 0.9, 0.999, 0.0])
def test_torch_gives_the_same_bits(ema: float | None, tmp_path: Path) -> None:
    models = [model(seed) for seed in range(5)]
    homes = [saved(tmp_path / str(number), module) for number, module in enumerate(models)]
    averaged = AveragedModel(models[0], avg_fn=get_swa_avg_fn() if ema is None else get_ema_avg_fn(ema))
    for module in models:
        averaged.update_parameters(module)
    zckpt.average(homes, tmp_path / "out", ema=ema)
    assert equal(read(tmp_path / "out"), averaged.module)
    if ema is None:
        zckpt.average([homes[1]] * 7, tmp_path / "same")
        assert equal(read(tmp_path / "same"), models[1]), "equal checkpoints give themselves"


def test_weights_task_vectors_and_arcs(tmp_path: Path) -> None:
    base, a, b = (model(seed) for seed in range(3))
    homes = [saved(tmp_path / name, module) for name, module in zip("xab", (base, a, b), strict=True)]
    zckpt.average(homes, tmp_path / "sum", weights=[0.5, 0.3, -2])
    zckpt.average(homes[1:], tmp_path / "moved", weights=[0.5, 0.3], task_vector=homes[0])
    zckpt.average(homes[1:2], tmp_path / "there", task_vector=homes[0])
    zckpt.average(homes[1:], tmp_path / "arc", slerp=0.25)
    with torch.no_grad():
        for name in NAMES:
            x, y, z = (module.get_parameter(name) for module in (base, a, b))
            assert torch.equal(read(tmp_path / "sum")[name], 0.5 * x + 0.3 * y + -2.0 * z)
            assert torch.equal(read(tmp_path / "moved")[name], x + 0.5 * (y - x) + 0.3 * (z - x))
            assert torch.equal(read(tmp_path / "there")[name], x + (y - x))
            p, q = y.double(), z.double()
            cosine = (p * q).sum() / p.norm() / q.norm()
            angle = torch.acos(cosine.clamp(-1, 1))
            arc = (torch.sin(0.75 * angle) * p + torch.sin(0.25 * angle) * q) / torch.sin(angle)
            if abs(cosine) > 0.9995:
                arc = 0.75 * p + 0.25 * q
            assert torch.allclose(
                read(tmp_path / "arc")[name].double(), arc, rtol=1e-5, atol=1e-6 * float(arc.abs().max())
            )


@pytest.mark.parametrize(
    "how",
    [{}, {"weights": [0.5, 0.5]}, {"ema": 0.9}, {"slerp": 0.5}, {"task_vector": "0"}],
    ids=lambda how: next(iter(how), "mean"),
)
def test_tensors_without_elements_are_kept(how: dict[str, Any], tmp_path: Path) -> None:
    modules = [model(seed) for seed in range(2)]
    homes = [saved(tmp_path / str(seed), one, none=torch.zeros(0, 4)) for seed, one in enumerate(modules)]
    if "task_vector" in how:
        how = {"task_vector": homes[0]}
    zckpt.average(homes, tmp_path / "out", **how)
    zckpt.average([home / "model.safetensors" for home in homes], tmp_path / "halves.safetensors", dtype="bf16", **how)
    assert read(tmp_path / "out")["none"].shape == (0, 4)
    assert load_file(tmp_path / "halves.safetensors")["none"].shape == (0, 4)
    assert read(tmp_path / "out").keys() == {*NAMES, "none"}
    assert zckpt.verify(tmp_path / "out").ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    models = [torch.nn.Linear(30, 40).to(dtype) for _ in range(3)]
    homes = [saved(tmp_path / str(number), module) for number, module in enumerate(models)]
    zckpt.average(homes, tmp_path / "out")
    zckpt.average(homes, tmp_path / "wide", dtype="fp32")
    wide = [{n: p.detach().float() for n, p in module.named_parameters()} for module in models]
    mean = {n: wide[0][n] + (wide[1][n] - wide[0][n]) / 2 for n in wide[0]}
    mean = {n: x + (wide[2][n] - x) / 3 for n, x in mean.items()}
    for name, numbers in mean.items():
        assert torch.equal(read(tmp_path / "wide")[name], numbers)
        assert torch.equal(read(tmp_path / "out")[name], numbers.to(dtype)), "the dtype of the checkpoints, by default"


def test_any_layouts_tags_and_processes(tmp_path: Path) -> None:
    """Saves of three layouts, one of them moved by a step of a trainer's; a tied head stays tied."""
    zckpt.reshard(LLAMA, tmp_path / "run", world_size=3, stage=2)
    zckpt.to_dcp(LLAMA, tmp_path / "dcp")
    shutil.copytree(tmp_path / "run" / "global_step2", tmp_path / "run" / "global_step4")
    run_of = tmp_path / "run"
    report = zckpt.average([LLAMA, f"{run_of}:global_step4", tmp_path / "dcp"], tmp_path / "out")
    zckpt.convert(LLAMA, tmp_path / "whole")
    assert zckpt.diff(tmp_path / "out", tmp_path / "whole").same
    assert report.files == zckpt.average([LLAMA, f"{run_of}:global_step4", tmp_path / "dcp"], tmp_path / "out").files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    zckpt.average([run_of], tmp_path / "two", last=2)
    facts = json.loads((tmp_path / "two" / "zckpt.json").read_text())["options"]["average"]
    assert [one["tag"] for one in facts["of"]] == ["global_step2", "global_step4"]
    planned = prepare([LLAMA, tmp_path / "dcp"], tmp_path / "parts", AVERAGE.ask(max_shard_size=1000))
    (tmp_path / "parts").mkdir()
    run(planned.plan, str(tmp_path / "parts"))
    assert sum(part_of(planned.plan, n, 3).bytes_read for n in range(3)) == pytest.approx(
        planned.plan.bytes_read, rel=0.01
    )
    assert zckpt.verify(tmp_path / "out").ok
    with pytest.raises(UnsupportedError, match="several checkpoints"):
        zckpt.verify(LLAMA, tmp_path / "out")


def test_the_newest_saves_of_a_trainers_run(tmp_path: Path) -> None:
    for step, seed in ((9, 0), (10, 1), (100, 2)):
        saved(tmp_path / f"checkpoint-{step}", model(seed))
    zckpt.average([tmp_path], tmp_path / "out", last=2, options=Options(beside=True))
    zckpt.average(
        [tmp_path / "checkpoint-10", tmp_path / "checkpoint-100"], tmp_path / "two", options=Options(beside=True)
    )
    assert read(tmp_path / "out").keys() == read(tmp_path / "two").keys()
    assert all(torch.equal(x, read(tmp_path / "two")[name]) for name, x in read(tmp_path / "out").items())


def test_whole_numbers_are_the_last_ones(tmp_path: Path) -> None:
    steps = [torch.tensor(3), torch.tensor(4)]
    same = torch.arange(5)
    homes = [saved(tmp_path / str(n), model(n), steps=step, same=same) for n, step in enumerate(steps)]
    report = zckpt.average(homes, tmp_path / "out")
    assert read(tmp_path / "out")["steps"] == 4 and torch.equal(read(tmp_path / "out")["same"], same)
    assert any("'steps'" in note and "'same'" not in note for note in report.notes)


def test_a_tie_that_not_all_have(tmp_path: Path) -> None:
    """A tensor that one checkpoint ties and another holds apart is written apart."""
    zckpt.convert(LLAMA, tmp_path / "tied")
    whole = read(tmp_path / "tied")
    apart = {**whole, "lm_head.weight": whole["model.embed_tokens.weight"] + 1}
    shutil.copytree(tmp_path / "tied", tmp_path / "apart")
    (tmp_path / "apart" / "zckpt.json").unlink()
    save_file(apart, tmp_path / "apart" / "model.safetensors")
    zckpt.average([tmp_path / "apart", LLAMA], tmp_path / "out")
    found = read(tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def changed(tmp_path: Path, name: str, change: Any) -> Path:
    home = saved(tmp_path / name, model(1))
    tensors = read(home)
    change(tensors)
    save_file(tensors, home / "model.safetensors")
    return home


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors.pop("norm"), "'norm' is missing"),
        (lambda tensors: tensors.update(other=torch.ones(2)), "'other' is missing"),
        (lambda tensors: tensors.update(norm=torch.ones(71)), "'norm' differs"),
        (lambda tensors: tensors.update(norm=torch.ones(70, dtype=torch.int32)), "'norm' differs"),
    ],
)
def test_other_models_are_refused(change: Any, what: str, tmp_path: Path) -> None:
    one = saved(tmp_path / "one", model(0))
    other = changed(tmp_path, "other", change)
    for order in ([one, other], [other, one]):
        with pytest.raises(InconsistentError, match=what):
            zckpt.average(order, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "how"),
    [
        (1, {}),
        (3, {"slerp": 0.5}),
        (2, {"slerp": 1.5}),
        (2, {"ema": -0.1}),
        (2, {"weights": [1]}),
        (2, {"weights": [1, float("nan")]}),
        (2, {"weights": [1, 1], "ema": 0.5}),
        (2, {"slerp": 0.5, "task_vector": "base"}),
        (2, {"last": 2}),
        (1, {"last": 5}),
    ],
)
def test_impossible_wishes(count: int, how: dict[str, Any], tmp_path: Path) -> None:
    home = saved(tmp_path / "one", model(0))
    with pytest.raises(UsageError):
        zckpt.average([home] * count, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_no_input_is_overwritten(tmp_path: Path) -> None:
    homes = [saved(tmp_path / name, model(0)) for name in "ab"]
    for home in homes:
        with pytest.raises(OutputError, match="would be inside the input"):
            zckpt.average(homes, home / "out")
        with pytest.raises(OutputError):
            zckpt.average(homes, home, options=Options(overwrite=True))


def test_the_command(tmp_path: Path) -> None:
    homes = [str(saved(tmp_path / name, model(seed))) for seed, name in enumerate("ab")]
    done = CliRunner().invoke(
        app, ["average", *homes, str(tmp_path / "out"), "--weights", "0.25,0.75", "--dtype", "bf16"]
    )
    assert done.exit_code == 0 and "of 2 checkpoints" in done.stdout
    zckpt.average(homes, tmp_path / "same", weights=[0.25, 0.75], dtype="bf16")
    assert all(torch.equal(x, read(tmp_path / "same")[name]) for name, x in read(tmp_path / "out").items())
    assert CliRunner().invoke(app, ["average", *homes, str(tmp_path / "x"), "--weights", "a,b"]).exit_code == 2


def test_tensors_that_lose_bits_without_being_asked_are_named(tmp_path: Path) -> None:
    """A router in fp32 among weights in bf16: one dtype is written, that of most weights."""
    state = {"router": torch.randn(4, 4), "w": torch.randn(8, 8).bfloat16()}
    save_file(state, tmp_path / "a.safetensors")
    whole = [tmp_path / "a.safetensors"] * 2
    report = zckpt.average(whole, tmp_path / "out.safetensors", progress=False)
    assert [note for note in report.notes if "'router', had more bits than bfloat16" in note]
    for dtype in ("bf16", "fp32"):
        report = zckpt.average(whole, tmp_path / f"{dtype}.safetensors", dtype=dtype, progress=False)
        assert not [note for note in report.notes if "bits" in note]
