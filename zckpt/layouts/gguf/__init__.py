"""GGUF, the files of llama.cpp: a model in one file, or in parts as `gguf-split` makes them."""

from zckpt.layouts.gguf.files import NAME, match
from zckpt.layouts.save.family import Family, FileKind, later

FAMILY = Family(
    name="GGUF",
    files=(FileKind("", NAME, of_rank=False),),
    match=match,
    read=later("gguf.read", "read"),
    second=later("gguf.second", "find_again"),
    fallback=True,
    apart="save",
    alone=True,
    every_rank=False,
)
