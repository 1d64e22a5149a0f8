"""The random generators of a process: Python's, torch's, the accelerator's by its kind, numpy's where it is in use.

For `run_state`, which saves and restores them, and for `loader`.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zckpt.live.device import generator_state, set_generator_state


def rng_state() -> dict[str, Any]:
    """The states of this process's random generators, copied, without any class of numpy."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, _text_of(words), gauss), "torch": torch.get_rng_state()}
    on_device = generator_state()
    if on_device is not None:
        state[on_device[0]] = on_device[1]
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        if "key" in (inner := state["numpy"]["state"]):
            inner["key"] = _text_of(inner["key"])
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; generators that it does not have, or that are missing here, stay as they are."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(_words_of(words)), gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    set_generator_state(state)
    if "numpy" in state:
        import numpy

        inner = dict(state["numpy"]["state"])
        if "key" in inner:
            inner["key"] = numpy.asarray(_words_of(inner["key"]), dtype=numpy.uint32)
        numpy.random.set_state({**state["numpy"], "state": inner})


def _text_of(words: Sequence[int]) -> str:
    """Hundreds of words of 32 bits as one text: a pickle that is read without running it takes a step for each number."""
    return struct.pack(f"<{len(words)}I", *words).hex()


def _words_of(words: str | Sequence[int]) -> Sequence[int]:
    """The words of a text; saves of older versions have the words themselves."""
    return struct.unpack(f"<{len(words) // 8}I", bytes.fromhex(words)) if isinstance(words, str) else words
