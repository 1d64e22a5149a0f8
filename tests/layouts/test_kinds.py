"""A name that is a tensor in one rank's file and something else in another's is a contradiction, and no command drops it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.base.errors import ZckptError
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog

sys.path.insert(0, str(Path(__file__).parent))
from test_megatron_legacy import edited

FIXTURES = Path(__file__).parents[2] / "fixtures"
VALUES: tuple[Any, ...] = (None, 3, "text", {"inner": 1}, [])

SAVES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "ranks/fsdp2_w2": ("**/model_world_size_2_rank_1.pt", lambda root: root),
    "ranks/hsdp_w4": ("**/model_world_size_4_rank_3.pt", lambda root: root),
    "torch_checkpointing/torch_files_w2": ("model_1.pt", lambda root: root),
    "fairscale/unflattened_w2": ("shard1.pt", lambda root: root.get("model", root)),
    "megatron_legacy/moe_ep2": ("*/mp_rank_00_001/model_optim_rng.pt", lambda root: root["model"]),
    "tensor/zero1_tp2_dp2": ("*/mp_rank_01_model_states.pt", lambda root: root["module"]),
    "pipeline/zero1_pp2_tp2_dp2": ("*/layer_01-model_01-model_states.pt", lambda root: root),
    "autotp/zero0_tp2": ("*/mp_rank_01_model_states.pt", lambda root: root["module"]),
}


def tensors_in(state: dict[str, Any]) -> list[str]:
    return [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel()]


@pytest.mark.parametrize("name", list(SAVES))
def test_a_name_of_two_kinds_is_refused(name: str, tmp_path: Path) -> None:
    pattern, state_of = SAVES[name]
    if name.startswith(("ranks", "torch_checkpointing")):
        import torch.distributed.tensor  # noqa: F401
    for number, value in enumerate(VALUES):
        run = Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / str(number)))
        (file,) = run.glob(pattern)
        names: list[str] = []

        def edit(root: Any, value: Any = value, names: list[str] = names, at: int = number % 2) -> None:
            state = state_of(root)
            names.append(tensors_in(state)[at])
            state[names[0]] = value

        edited(file, edit)
        with pytest.raises(ZckptError) as error:
            open_catalog(str(run))
        assert names[0].split(".")[-1] in str(error.value), value
        assert not inspect_checkpoint(run).exportable.ok
