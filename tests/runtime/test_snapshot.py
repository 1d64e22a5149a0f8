"""Copies in memory, and whether weights are still what their masters round to: by the C++ engine and without it."""

from __future__ import annotations

import pytest
import torch

from zckpt.runtime.saves import snapshot
from zckpt.runtime.sharding import parameter


@pytest.fixture(params=["native", "torch"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(snapshot, "copy_aside", None)


@pytest.mark.usefixtures("without")
def test_copies_are_bitwise() -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, 256, (1 << 18,), dtype=torch.uint8)
    tensors: dict[object, torch.Tensor] = {("empty", ""): torch.empty(0)}
    for first in (0, 8, 24, 64):
        for count in (1, 2, 7, 8, 9, 15, 16, 17, 1000, 20_011):
            for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex64):
                part = numbers[first : first + count * dtype.itemsize].view(dtype)
                tensors[f"{first} {count} {dtype}", ""] = part
    turned = torch.arange(6, dtype=torch.float32).view(torch.complex64)
    tensors["conjugate", ""], tensors["negative", ""] = turned.conj(), turned.conj().imag
    pool: snapshot.Pool = {}
    for at_once in (True, False):
        made = snapshot.Snapshot(tensors, lambda key, at_once=at_once: at_once, pool)  # type: ignore[arg-type,misc]
        made.check()
        assert list(made.tensors) == list(tensors)
        for key, copied in made.tensors.items():
            given = tensors[key].resolve_conj().resolve_neg().contiguous()
            assert copied.dtype == given.dtype and torch.equal(copied.view(torch.uint8), given.view(torch.uint8)), key
            assert not given.numel() or copied.data_ptr() != tensors[key].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whether_weights_are_what_masters_round_to(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count in (1, 7, 1024, 70_001):
        exact = torch.randn(count)
        exact[-1] = -0.0
        rounded = exact.to(dtype, copy=True)
        assert parameter._is_certain(exact, rounded) and parameter._are_equal(exact, rounded)
        rounded[-1] = 0.0  # equal, but not the same bits
        assert not parameter._is_certain(exact, rounded) and parameter._are_equal(exact, rounded)
        for place in {0, count // 2, count - 1}:
            other = exact.to(dtype, copy=True)
            other[place] = torch.nextafter(other[place], torch.tensor(9.0, dtype=dtype))
            assert not parameter._is_certain(exact, other) and not parameter._are_equal(exact, other)
        if dtype != torch.float32:
            for large in (3.4028e38, float("inf"), float("nan")):  # which a save has to count
                exact[count // 2] = large
                assert not parameter._is_certain(exact, exact.to(dtype))
