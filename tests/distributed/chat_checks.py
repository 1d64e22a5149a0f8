"""Scripts as DeepSpeed-Chat's three steps are written, on a small model: run on several ranks through `harness`."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import small
import torch
from harness import check, main, rank
from torch import nn
from torch.nn import functional
from zckpt.runtime.compression.helper import recursive_getattr, recursive_setattr
from zckpt.runtime.ops.adam import FusedAdam
from zckpt.runtime.runtime.zero.partition_parameters import ZeroParamStatus

import zckpt.runtime as deepspeed

WIDTH = 6


class Body(nn.Module):
    """Tokens to vectors: its embedding and its norm belong to the unit of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(small.WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, small.WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, more: int) -> torch.Tensor:
        for _ in range(more):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


class Judge(nn.Module):
    """Scores; its training forward compares two answers, and `values` is what the others call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.v_head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        chosen, rejected = self.v_head(self.body(both)).squeeze(-1).chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean()

    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.body(tokens)).squeeze(-1)


class Adapted(nn.Module):
    """A frozen linear layer and two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.fused = base.weight, base.bias, False
        rows, columns = getattr(base.weight, "ds_shape", base.weight.shape)
        self.lora_right = nn.Parameter(torch.randn(columns, 2) * 0.1)
        self.lora_left = nn.Parameter(torch.zeros(2, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.weight, self.bias)
        return out if self.fused else out + x @ self.lora_right @ self.lora_left

    def fuse(self) -> None:
        self.weight.data += (self.lora_right @ self.lora_left).t()
        self.fused = True


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }


def start(model: nn.Module, stage: int, *, trains: bool = True) -> Any:
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = FusedAdam(wanted, lr=0.02, betas=(0.9, 0.95)) if trains else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage if trains or stage == 3 else 0)
    )
    assert type(engine).__module__ == "zckpt.runtime.engine"
    return engine


def tokens(number: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(small.WORDS, (rows, 5), generator=torch.Generator().manual_seed(100 * number + rank()))


def language_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def apart(parameters: Any) -> list[Any]:
    return [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def saved(engine: Any, stage: int, file: Path) -> dict[str, torch.Tensor]:
    """Rank 0 alone saves the state dict; at stage 3 all ranks then gather one parameter after another, and it saves these."""
    model = engine.module
    if rank() == 0:
        torch.save({key: value for key, value in model.state_dict().items() if "lora" not in key}, file)
    if stage == 3:
        gathered = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(apart([parameter])):
                value = parameter.data.cpu()
            if "lora" not in name:
                gathered[name] = value
        if rank() == 0:
            torch.save(gathered, file)
    torch.distributed.barrier()
    return torch.load(file)


def adapted(model: nn.Module) -> nn.Module:
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "blocks" in name]:
        recursive_setattr(model, name, Adapted(recursive_getattr(model, name)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in name or "head" in name
    return model


def fuse(engine: Any) -> None:
    for module in engine.module.modules():
        if isinstance(module, Adapted):
            mine = [module.weight, module.lora_left, module.lora_right]
            with deepspeed.zero.GatheredParameters(
                apart(mine), modifier_rank=0, enabled=hasattr(module.weight, "ds_id")
            ):
                module.fuse()


@check(2)
def three_steps() -> dict[str, Any]:
    """Losses of each step and what is saved, at stages 2 and 3."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        file = Path(sys.argv[1]) / f"weights_{stage}.bin"
        torch.manual_seed(0)
        writer = start(adapted(Writer()), stage)
        told: dict[str, Any] = {"sft": [], "reward": [], "ppo": []}
        for number in range(3):
            loss = language_loss(writer(tokens(number)), tokens(number))
            writer.backward(loss)
            writer.step()
            told["sft"].append(loss.item())
        writer.tput_timer.update_epoch_count()
        with torch.no_grad():
            before = writer(tokens(7))
        fuse(writer)
        written = saved(writer, stage, file)
        plain = Writer()
        plain.load_state_dict(written)
        told["saved"] = [
            torch.allclose(plain(tokens(7)), before, atol=1e-5),
            sorted(written) == sorted(plain.state_dict()),
        ]

        judge = start(Judge(), stage)
        for _ in range(3):
            loss = judge(tokens(0, 4))
            judge.backward(loss)
            judge.step()
            told["reward"].append(loss.item())
        scored = Judge()
        scored.load_state_dict(saved(judge, stage, file))
        told["ppo"] = ppo(plain, scored, stage, file)
        out[str(stage)] = told
    return out


def ppo(plain: Writer, scored: Judge, stage: int, file: Path) -> list[Any]:
    """Steps of an actor and a critic beside a reference, a reward model and an average of the actor, none of which trains."""
    actor, critic = start(copy.deepcopy(plain), stage), start(copy.deepcopy(scored), stage)
    reference, average = (start(copy.deepcopy(plain), stage, trains=False) for _ in range(2))
    reward = start(copy.deepcopy(scored), stage, trains=False)
    losses: list[Any] = []
    for number in range(3):
        for engine in (actor, critic, reference, reward):
            engine.eval()
        words = actor.module.generate(tokens(number)[:, :2], 3)
        actor.train()
        critic.train()
        with torch.no_grad():
            drift = (actor(words).log_softmax(-1) - reference(words).log_softmax(-1)).square().mean()
            goal, old = reward.values(words)[:, -1:] - drift, critic.values(words)
        chosen = actor(words).log_softmax(-1)[:, :-1].gather(-1, words[:, 1:, None]).squeeze(-1)
        loss = -((goal - old[:, :-1]) * chosen).mean()
        actor.backward(loss)
        actor.step()
        miss = (critic.values(words) - goal).square().mean()
        critic.backward(miss)
        critic.step()
        with torch.no_grad():
            for one, other in zip(actor.parameters(), average.parameters(), strict=True):
                with deepspeed.zero.GatheredParameters(apart([one, other]), enabled=stage == 3):
                    other.data.copy_(torch.lerp(one.data, other.data, 0.9))
        losses.append([loss.item(), miss.item()])
    after = Judge()
    after.load_state_dict(saved(critic, stage, file))
    with torch.no_grad():
        return [losses, torch.allclose(after.values(words), critic.values(words), atol=1e-6)]


if __name__ == "__main__":
    main()
