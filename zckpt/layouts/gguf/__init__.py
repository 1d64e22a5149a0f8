"""GGUF, the files of llama.cpp: a model in one file, or in parts as `gguf-split` makes them."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

NAME = compile_late(r"(?P<save>.+?)(?:-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.gguf")

METADATA = "gguf"
"""The entry of a catalog's extras with the metadata: key -> number, text or list; None for long arrays."""

FAMILY = Family(
    name="GGUF",
    files=(FileKind("", NAME, of_rank=False),),
    match=where_there((NAME,), later("gguf.read", "match"), "no .gguf file"),
    read=later("gguf.read", "read"),
    second=later("gguf.second", "find_again"),
    fallback=True,
    apart="save",
    alone=True,
    every_rank=False,
)
