"""Finds the tensors of GGUF files a second time: each part's own index names what is in it, whole.

Source: gguf-py 0.19.0, gguf_reader.py; llama.cpp, src/llama-model-loader.cpp (`split.*`).
"""

from __future__ import annotations

from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import HeldRun, SecondLook, Shape, fields_of, hold_whole


def find_again(listing: Listing) -> SecondLook:
    """The tensors of all parts; of blocks, their bytes."""
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for file in listing.files:
        if file.endswith(".gguf"):
            for name, ref in fields_of(listing.open(file).root).items():
                if isinstance(ref, TensorRef):
                    names[name] = None if ref.attributes else ref.shape
                    runs += hold_whole(name, "", ref)
    return SecondLook(names, runs)
