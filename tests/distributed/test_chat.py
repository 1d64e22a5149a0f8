"""Fine-tuning with adapters, a reward model and a step of PPO, as DeepSpeed-Chat's scripts do them: what `chat_checks` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_three_steps_of_a_chat_model(outcome: Callable[..., list[Any]]) -> None:
    for told in outcome("chat_checks.py", 2, "three_steps"):
        for stage in "23":
            assert told[stage]["saved"] == [True, True] and told[stage]["ppo"][1]
            assert told[stage]["reward"][-1] < told[stage]["reward"][0]
        for step in ("sft", "reward"):
            assert told["3"][step] == pytest.approx(told["2"][step], rel=1e-5)
        for one, other in zip(told["3"]["ppo"][0], told["2"]["ppo"][0], strict=True):
            assert one == pytest.approx(other, rel=1e-4)
