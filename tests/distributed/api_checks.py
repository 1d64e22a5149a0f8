"""What scripts call of the API, on several ranks: run by torchrun through `harness`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import small
import torch
from harness import check, main, rank, world
from torch import nn
from zckpt.runtime.runtime.zero.offload_config import OffloadStateTypeEnum

import zckpt.runtime as deepspeed
from zckpt.runtime import utils

KEYS = ("exp_avg", "exp_avg_sq")


def engine_of(stage: int, precision: str = "fp32", micro: int = 4, accumulation: int = 1, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **more,
    }
    model = small.make()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def tokens(number: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank())
    return torch.randint(small.WORDS, (rows, 5), generator=generator)


@check(2)
def one_parameter() -> Any:
    """At each stage, all of two parameters after a step: weight, gradient and states; then what setting them does."""
    found = {}
    for stage in range(4):
        engine = engine_of(stage)
        engine.backward(engine(tokens(0)))
        engine.step()
        engine.backward(engine(tokens(1)))
        told: dict[str, Any] = {}
        for name, parameter in engine.module.named_parameters():
            if name not in ("embed.weight", "blocks.0.up.weight", "blocks.1.gain", "frozen.weight"):
                continue
            whole, grad = utils.safe_get_full_fp32_param(parameter), utils.safe_get_full_grad(parameter)
            states = [utils.safe_get_full_optimizer_state(parameter, key) for key in KEYS]
            if whole is None:
                assert grad is None and states == [None, None]
                told[name] = None
                continue
            told[name] = [list(whole.shape), *(t.double().sum().item() for t in (whole, grad, *states))]
            utils.safe_set_full_fp32_param(parameter, whole + 1)
            utils.safe_set_full_grad(parameter, torch.full_like(whole, 0.5))
            utils.safe_set_full_optimizer_state(parameter, torch.full_like(whole, 0.25), "exp_avg")
            assert torch.equal(utils.safe_get_full_fp32_param(parameter), whole + 1)
            assert torch.equal(utils.safe_get_full_grad(parameter), torch.full_like(whole, 0.5))
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, "exp_avg"), torch.full_like(whole, 0.25))
            local = utils.safe_get_local_fp32_param(parameter)
            assert local.ndim == 1 and utils.safe_get_local_grad(parameter).shape == local.shape
            utils.safe_set_local_fp32_param(parameter, local - 1)
            torch.testing.assert_close(utils.safe_get_full_fp32_param(parameter), whole)
            assert hasattr(parameter, "ds_id") == (stage == 3 and name != "blocks.1.gain")
            if hasattr(parameter, "ds_id"):
                assert (parameter.ds_shape, parameter.ds_numel) == (whole.shape, whole.numel())
                assert parameter.ds_tensor.numel() == local.numel() and parameter.ds_status.name == "NOT_AVAILABLE"
                with deepspeed.zero.GatheredParameters(parameter) as (gathered,):
                    assert parameter.ds_status.name == gathered.ds_status.name == "AVAILABLE"
                assert parameter.ds_status.name == "NOT_AVAILABLE"
        engine.step()
        found[str(stage)] = told
    return found


@check(2)
def batches_and_rates() -> Any:
    """`train_batch` is what its calls are; another batch size takes effect with the next step."""
    found = {}
    for stage in (0, 3):
        one, other = engine_of(stage, accumulation=2), engine_of(stage, accumulation=2)
        losses = []
        for step in range(2):
            both = [tokens(2 * step), tokens(2 * step + 1)]
            mean = 0.0
            for batch in both:
                loss = one(batch)
                one.backward(loss)
                one.step()
                mean += loss.item() / 2
            got = other.train_batch(iter(both))
            total = torch.tensor(mean)
            torch.distributed.all_reduce(total)
            losses.append([total.item() / world(), got.item()])
        other.set_train_batch_size(4 * world() * 3)
        assert (other.gradient_accumulation_steps(), other.get_batch_info()) == (3, (24, 4, 3))
        before, step = other.global_steps, []
        for number in range(3):
            other.backward(other(tokens(number)))
            other.step()
            step.append(other.global_steps - before)
        other.set_lr(0.5)
        evaluated = other.eval_batch(iter([tokens(7)] * 3), return_logits=True)
        again = other.eval_batch(iter([tokens(7)]), num_micro_batches=1)
        assert torch.allclose(evaluated[0], again) and len(evaluated[1]) == 3
        found[str(stage)] = [losses, step, other.get_lr()]
    return found


@check(2)
def weights_given_and_taken() -> Any:
    """Consolidated weights on rank 0, put into another engine, whole and by a function of the script's own."""
    found = {}
    for stage in (0, 2, 3):
        engine, other = engine_of(stage, "bf16"), engine_of(stage, "bf16")
        engine.backward(engine(tokens(0)))
        engine.step()
        state = engine._zero3_consolidated_16bit_state_dict()
        told = [state]
        torch.distributed.broadcast_object_list(told)
        other.load_module_state_dict({"module": told[0]})
        again = other._zero3_consolidated_16bit_state_dict()
        same = rank() > 0 or all(torch.equal(state[name], again[name]) for name in state)
        without = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if rank() == 0:
            assert {*state} - {*without} == {"frozen.weight", "frozen.bias"}
            assert state["embed.weight"].dtype == torch.bfloat16
        place = Path(sys.argv[1]) / f"saved_{stage}"
        engine.save_checkpoint(place)
        third = engine_of(stage, "bf16")

        def halved(src: Any, dst: nn.Module) -> None:
            for name, parameter in dst.named_parameters():
                parameter.data.copy_(src[name] / 2)

        third.load_checkpoint(place, load_module_only=True, custom_load_fn=halved)
        ours = utils.safe_get_full_fp32_param(third.module.embed.weight)
        theirs = utils.safe_get_full_fp32_param(engine.module.embed.weight)
        found[str(stage)] = [same, torch.equal(ours, theirs / 2)]
    return found


@check(2)
def states_that_leave() -> Any:
    """Losses with `offload_states` and `reload_states` after each step, and without."""
    found = []
    for moves in (False, True):
        engine = engine_of(3)
        losses = []
        for number in range(3):
            losses.append(engine(tokens(number)))
            engine.backward(losses[-1])
            if moves and number == 1:
                engine.offload_states(include=[OffloadStateTypeEnum.lp_grads])
                engine.reload_states()
            engine.step()
            if moves:
                engine.offload_states()
                engine.reload_states()
        found.append([loss.item() for loss in losses])
        engine.destroy()
    return found


class Shares(nn.Module):
    """Two blocks that are gathered by themselves; the model's forward uses a parameter of the first."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        if registers:
            deepspeed.zero.register_external_parameter(self, self.blocks[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.blocks[1](self.blocks[0](x)) @ self.blocks[0].weight).sum()


@check(2)
def parameters_used_elsewhere() -> Any:
    """A parameter, registered or not, is there in another module's forward, and its gradient is that of both uses."""
    config = {
        "train_batch_size": world(),
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    grads = []
    for registers in (True, False):
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=Shares(registers), config=config)[0]
        engine.backward(engine(torch.full((1, 4), 1.0 + rank())))
        grads.append(utils.safe_get_full_grad(engine.module.blocks[0].weight))
        torch.manual_seed(0)
        plain = Shares(registers)
        sum(plain(torch.full((1, 4), 1.0 + one)) / world() for one in range(world())).backward()
        torch.testing.assert_close(grads[-1], plain.blocks[0].weight.grad)
    return [grad.tolist() for grad in grads]


if __name__ == "__main__":
    main()
