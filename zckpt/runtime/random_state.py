"""The random generators of a process: Python's, torch's, the accelerator's by its kind, numpy's where it is in use.

For `run_state`, which saves and restores them, and for `loader`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from zckpt.live.device import generator_state, set_generator_state


def rng_state() -> dict[str, Any]:
    """The states of this process's random generators, copied."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    on_device = generator_state()
    if on_device is not None:
        state[on_device[0]] = on_device[1]
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; generators that it does not have, or that are missing here, stay as they are."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    set_generator_state(state)
    if "numpy" in state:
        import numpy

        inner = dict(state["numpy"]["state"])
        if "key" in inner:
            inner["key"] = numpy.asarray(inner["key"], dtype=numpy.uint32)
        numpy.random.set_state({**state["numpy"], "state": inner})
