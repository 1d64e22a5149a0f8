"""One value of a sound file is another than a trainer writes: every command reads the save, or refuses it with an error of ours.

One save of each family. What is changed, and into what, is the same in every run; `make proofs` tries ten times as many.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch

import zckpt

pytest.importorskip("deepspeed")  # its classes are in its files

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = (
    "zero1/bf16_w3", "zero2/tied_frozen_w2", "zero3/mics_w4", "zero0/fp32", "moe/zero2_w2", "autotp/fused_tp2",
    "pipeline/zero1_pp2_dp2", "nvme/bf16_w2", "dcp/boxes_w4", "mcore/stages_tp2_pp2", "megatron_legacy/moe_ep2",
    "fairscale/unflattened_w2", "fairscale_parts/experts_w2", "ranks/hsdp_w4", "torch_checkpointing/safetensors_w4",
    "optimizers/oss_ranks_w3", "torch_xla/flat_w3",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, [], {}, (), -1, 3, 2.5, True, float("inf"), 1 << 70, "x", b"x", "../../x", {"a": 1}, {0: []}, [1, 2], [[]],
    torch.zeros(3), torch.zeros(0, 2), torch.zeros((), dtype=torch.int64), torch.Size([5]),
)  # fmt: skip
NUMBER = 40 if proofs.IS_WHOLE else 4

Step = tuple[str, Any]


def steps_into(value: object) -> Iterator[Step]:
    """The ways from an object to what it holds."""
    if isinstance(value, dict):
        yield from (("key", key) for key in list(value)[:40])
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield from (("place", number) for number in range(min(len(value), 12)))
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        yield from (("attribute", name) for name in list(vars(value))[:20])


def held(value: Any, step: Step) -> Any:
    return getattr(value, step[1]) if step[0] == "attribute" else value[step[1]]


def all_ways(value: object, way: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    yield way
    for step in steps_into(value) if len(way) < 10 else ():
        yield from all_ways(held(value, step), (*way, step))


def exchange(value: Any, way: tuple[Step, ...], new: Any) -> Any:
    """The object with another value at the end of a way."""
    if not way:
        return new
    (kind, where), *_ = way
    inner = exchange(held(value, way[0]), way[1:], new)
    if kind == "attribute":
        setattr(value, where, inner)
    elif kind == "key":
        value[where] = inner
    else:
        listed = [*value[:where], inner, *value[where + 1 :]]
        return (
            listed if isinstance(value, list) else type(value)(*listed) if hasattr(value, "_fields") else tuple(listed)
        )
    return value


def change_file(path: Path, number: random.Random) -> str:
    """Changes one value of a file; returns which, in words."""
    is_bare = path.name == ".metadata" or path.suffix == ".pkl"
    root = pickle.loads(path.read_bytes()) if is_bare else torch.load(path, weights_only=False)
    way, new = number.choice(list(all_ways(root))), number.choice(VALUES)
    root = exchange(root, way, new)
    path.write_bytes(pickle.dumps(root)) if is_bare else torch.save(root, path)
    return f"{path.name}: {'.'.join(str(where) for _, where in way)} = {new!r}"


def commands(home: Path, out: Path) -> dict[str, Callable[[], object]]:
    return {
        "inspect": lambda: zckpt.inspect_checkpoint(home),
        "convert": lambda: zckpt.convert(home, out / "weights", progress=False),
        "verify": lambda: zckpt.verify(home, progress=False),
        "map": lambda: zckpt.map(home),
        "to-universal": lambda: zckpt.to_universal(home, out / "universal", progress=False),
        "reshard": lambda: zckpt.reshard(home, out / "resharded", world_size=2, progress=False),
        "to-states": lambda: zckpt.to_states(home, out / "states", progress=False),
    }


@pytest.mark.filterwarnings("ignore")
@proofs.MORE
@pytest.mark.parametrize("save", SAVES)
def test_a_value_that_no_trainer_writes(save: str, tmp_path: Path) -> None:
    home, number = tmp_path / "save", random.Random(save)
    shutil.copytree(FIXTURES / save / "checkpoint", home)
    files = sorted(
        path for path in home.rglob("*") if path.suffix in (".pt", ".pth", ".pkl", ".bin") or path.name == ".metadata"
    )
    tried = 0
    for _ in range(NUMBER):
        path = number.choice(files)
        sound = path.read_bytes()
        try:
            what = change_file(path, number)
        except (
            TypeError,
            AttributeError,
            ValueError,
            RuntimeError,
        ):  # an object that does not let itself be changed so
            path.write_bytes(sound)
            continue
        tried += 1
        for command, run in commands(home, tmp_path / "out").items():
            try:
                run()
            except zckpt.ZckptError as error:
                assert str(error)
            except Exception as error:  # the fault that is looked for
                pytest.fail(f"{command} of {what}: {type(error).__name__}: {error}")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        path.write_bytes(sound)
    assert 2 * tried >= NUMBER
