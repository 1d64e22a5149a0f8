"""The optimizers that torch does not have, against their formulas; and how names and arguments are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.runtime.optimizers.build import Lamb, Lion, build_optimizer, check_elementwise

CPU = torch.device("cpu")


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), ())]


def gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def test_lion() -> None:
    params = parameters()
    optimizer = Lion(params, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    wanted = [p.detach().double() for p in params]
    averages = [torch.zeros_like(p) for p in wanted]
    for step in range(5):
        gradients(params, step)
        for i, p in enumerate(params):
            grad = p.grad.double()  # type: ignore[union-attr]
            update = (0.8 * averages[i] + 0.2 * grad).sign()
            wanted[i] = wanted[i] * (1 - 0.01 * 0.1) - 0.01 * update
            averages[i] = 0.9 * averages[i] + 0.1 * grad
        optimizer.step()
    assert all(torch.allclose(p.double(), w, atol=1e-6) for p, w in zip(params, wanted, strict=True))
    assert optimizer.state[params[0]].keys() == {"step", "exp_avg"}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("correction", [False, True])
def test_lamb(inside: bool, correction: bool) -> None:
    params = parameters()
    optimizer = Lamb(
        params, lr=0.1, weight_decay=0.01, eps_inside_sqrt=inside, bias_correction=correction, max_coeff=1.5
    )
    wanted = [p.detach().double() for p in params]
    first, second = ([torch.zeros_like(p) for p in wanted] for _ in range(2))
    for step in range(1, 6):
        gradients(params, step)
        rate = 0.1 * ((1 - 0.999**step) ** 0.5 / (1 - 0.9**step) if correction else 1)
        for i, p in enumerate(params):
            grad = p.grad.double()  # type: ignore[union-attr]
            first[i] = 0.9 * first[i] + 0.1 * grad
            second[i] = 0.999 * second[i] + 0.001 * grad**2
            root = (second[i] + 1e-8).sqrt() if inside else second[i].sqrt() + 1e-8
            update = first[i] / root + 0.01 * wanted[i]
            ratio = min(max((wanted[i].norm() / update.norm()).item(), 0.01), 1.5)
            wanted[i] = wanted[i] - rate * ratio * update
        optimizer.step()
    assert all(torch.allclose(p.double(), w, atol=2e-5) for p, w in zip(params, wanted, strict=True))


def test_lamb_of_nothing_but_zeros() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros(3)
    Lamb([p]).step()
    assert torch.equal(p, torch.zeros(3))


@pytest.mark.parametrize(
    ("kind", "params", "cls", "decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, 0.1),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("AdamW", {"betas": [0.9, 0.95], "bias_correction": True}, torch.optim.AdamW, 0.0),
        ("Adagrad", {}, torch.optim.Adagrad, 0),
        ("SGD", {"lr": 0.1}, torch.optim.SGD, 0),
        ("RMSprop", {}, torch.optim.RMSprop, 0),
        ("lion", {}, Lion, 0.0),
        ("LAMB", {}, Lamb, 0.0),
    ],
)
def test_names_and_arguments(kind: str, params: dict[str, Any], cls: type, decay: float) -> None:
    optimizer = build_optimizer(kind, params, [{"params": parameters()}], CPU)
    [group] = optimizer.param_groups
    assert type(optimizer) is cls and group["weight_decay"] == decay
    assert group.get("betas") in (None, (0.9, 0.999), (0.9, 0.95), (0.9, 0.99))
    assert group.get("fused", True) is True  # torch's fused kernel wherever it has one
    check_elementwise(optimizer, allowed=False)


def test_what_is_refused() -> None:
    groups = [{"params": parameters()}]
    with pytest.raises(UsageError, match="'adma'"):
        build_optimizer("adma", {}, groups, CPU)
    with pytest.raises(UnsupportedError, match="OneBitAdam"):
        build_optimizer("OneBitAdam", {}, groups, CPU)
    with pytest.raises(UsageError, match="'learning_rate'"):
        build_optimizer("AdamW", {"learning_rate": 1}, groups, CPU)
    with pytest.raises(UnsupportedError, match="bias_correction"):
        build_optimizer("Adam", {"bias_correction": False}, groups, CPU)
    with pytest.raises(UsageError, match="LBFGS"):
        check_elementwise(torch.optim.LBFGS(parameters()), allowed=False)
    check_elementwise(torch.optim.LBFGS(parameters()), allowed=True)


@pytest.mark.parametrize(("kind", "params"), [("AdamW", {"lr": "fast"}), ("SGD", {"lr": -1.0}), ("Lion", {"lr": None})])
def test_arguments_of_a_kind_that_the_optimizer_does_not_take(kind: str, params: dict[str, object]) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]}]
    with pytest.raises(UsageError, match=f"optimizer.params.*{next(iter(params.values()))}"):
        build_optimizer(kind, params, groups, torch.device("cpu"))
