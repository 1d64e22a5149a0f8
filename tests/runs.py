"""What a save holds of a run, opened and compared: weights, states, settings and all else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from bits import same_bits

from zckpt import layouts
from zckpt.containers import Placeholder
from zckpt.jobs.open import Opened, open_catalog, read_tensor
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.module_states import whole

FIXTURES = Path(__file__).parent.parent / "fixtures"
SHARDED = sorted(p.parent for p in FIXTURES.glob("*/*/how.json") if json.loads(p.read_text()).get("stage"))
NAMES = [f"{p.parent.name}/{p.name}" for p in SHARDED]


def opened(path: Path) -> tuple[Opened, Training]:
    found = open_catalog(str(path))
    return found, layouts.read_training(found.place.listing)


def plain(value: Any) -> Any:
    """Inert values as Python compares them."""
    if isinstance(value, Placeholder):
        return [str(value), plain(value.args), plain(value.state), plain(value.kwargs), plain(value.items)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "fragments"):
        return read_tensor(whole("", value, "buffer"), "pt").tolist()
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def assert_same_run(a: tuple[Opened, Training], b: tuple[Opened, Training]) -> None:
    (one, before), (two, after) = a, b
    assert dict(one.catalog.aliases) == dict(two.catalog.aliases)
    assert one.catalog.tensors.keys() == two.catalog.tensors.keys()
    for name, entry in one.catalog.tensors.items():
        assert two.catalog.tensors[name].role == entry.role
        assert same_bits(read_tensor(entry, "pt"), read_tensor(two.catalog.tensors[name], "pt")), name
    assert before.states.keys() == after.states.keys()
    for name, states in before.states.items():
        assert states.keys() == after.states[name].keys()
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(after.states[name][state], "pt")), (name, state)
    assert [g.names for g in before.groups] == [g.names for g in after.groups]
    for old, new in zip(before.groups, after.groups, strict=True):
        assert plain(dict(old.settings)) == plain(dict(new.settings))
        assert plain(dict(old.scalars)) == plain(dict(new.scalars))
    kept = [{key: plain(value) for key, value in t.model.items() if key != "ds_config"} for t in (before, after)]
    assert kept[0] == kept[1]
