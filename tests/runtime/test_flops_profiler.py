"""The profiler's numbers are those of formulas, and DeepSpeed's own."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zckpt.runtime.profiling.flops_profiler import FlopsProfiler, get_model_profile, number_to_string, params_to_string

from zckpt.base.errors import UsageError
from zckpt.runtime.train.models import TinyConfig, TinyGPT


class Slow(nn.Module):
    """A layer that takes at least 20 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.inner(x)


def test_a_linear_layer_and_a_convolution() -> None:
    flops, macs, params = get_model_profile(nn.Linear(64, 32), (5, 7, 64), print_profile=False, as_string=False)
    assert (flops, macs, params) == (2 * 5 * 7 * 64 * 32, 5 * 7 * 64 * 32, 64 * 32 + 32)
    conv = nn.Conv2d(3, 8, 3, padding=1)
    assert get_model_profile(conv, (2, 3, 16, 16), print_profile=False, as_string=False)[1] == 2 * 16 * 16 * 8 * 3 * 9


def test_a_transformer() -> None:
    config = TinyConfig()
    batch, length, width = 2, 96, config.n_embd
    tokens = torch.zeros(batch, length, dtype=torch.long)
    _, macs, params = get_model_profile(TinyGPT(), args=[tokens], print_profile=False, as_string=False)
    per_token = config.n_layer * (12 * width * width + 2 * length * width) + width * config.vocab_size
    assert macs == batch * length * per_token
    assert params == sum(p.numel() for p in TinyGPT().parameters())


def test_deepspeed_counts_the_same() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        from deepspeed.profiling.flops_profiler import profiler as theirs
    for model, given in (
        (TinyGPT(), {"args": [torch.zeros(2, 96, dtype=torch.long)]}),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), {"input_shape": (2, 10, 32)}),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)),
            {"input_shape": (4, 3, 8, 8)},
        ),
    ):
        model.train()
        ours = FlopsProfiler(model)
        ours.start_profile()
        forwards(model, given)
        ours.stop_profile()
        other = theirs.FlopsProfiler(model)
        other.start_profile()
        forwards(model, given)
        other.stop_profile()
        assert ours.get_total_macs() == other.get_total_macs(), type(model)
        assert ours.get_total_params() == other.get_total_params()
        assert ours.get_total_flops() <= other.get_total_flops() < 1.1 * ours.get_total_flops()
        other.end_profile()
    for value in (0, 0.0034, 5.5e-6, 12, 12_345, 999_999, 3.2e9, 4e12):
        assert number_to_string(value) == theirs.number_to_string(value)
        assert params_to_string(value) == theirs.params_to_string(value)


def forwards(model: nn.Module, given: dict[str, Any]) -> None:
    model(*given.get("args", [torch.ones(given["input_shape"])] if "input_shape" in given else []))


def test_modules_that_are_called_often_and_what_is_not_a_modules_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.list = Slow(), nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.list[0](self.slow(x) + self.slow(x)) @ torch.ones(4, 2)

    model = Twice()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(3, 8))
    profiler.stop_profile()
    model(torch.ones(3, 8))  # no longer measured
    costs = profiler.costs
    assert costs[model.slow].macs == costs[model.slow.inner].macs == 2 * 3 * 8 * 4
    assert costs[model].macs == 2 * 3 * 8 * 4 + 3 * 4 * 4 + 3 * 4 * 2
    assert costs[model.slow].duration_s >= 0.04 > costs[model.slow.inner].duration_s
    assert costs[model].duration_s >= costs[model.slow].duration_s
    profiler.end_profile()
    assert profiler.get_total_macs() == 0 and not model.slow._forward_hooks


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4))
    file = tmp_path / "deep" / "profile.txt"
    flops, macs, params = get_model_profile(model, (1000, 8), top_modules=2, output_file=str(file))
    assert (flops, macs, params) == ("384 K", "192 KMACs", "212")
    assert capsys.readouterr().out == ""
    text = file.read_text()
    assert re.search(r"^fwd MACs per GPU: +192 KMACs$", text, re.MULTILINE)
    assert rows_of(text) == {
        "all (Sequential)": ("212", "192,000"), "0 (Sequential)": ("144", "128,000"), "0.0 (Linear)": ("144", "128,000"),
        "0.1 (ReLU)": ("0", "0"), "1 (Linear)": ("68", "64,000"),
    }  # fmt: skip
    get_model_profile(model, (1000, 8), module_depth=1, detailed=False)
    assert list(rows_of(capsys.readouterr().out)) == ["all (Sequential)", "0 (Sequential)"]


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """The table's modules with their parameters and MACs."""
    found = re.findall(r"^(.+?\)) +([\d,]+) +([\d,]+) +[\d.]+ +[\d.]+%$", text, re.MULTILINE)
    return {name: (params, macs) for name, params, macs in found}


def test_a_failed_forward_leaves_nothing_behind() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        get_model_profile(model, (3, 5), warm_up=0)
    assert not model._forward_hooks and not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with pytest.raises(UsageError, match="needs an input"):
        get_model_profile(model)
    with pytest.raises(UsageError, match="'train'"):
        get_model_profile(model, (3, 4), mode="train")
