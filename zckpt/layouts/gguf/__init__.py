"""GGUF, the files of llama.cpp: a model in one file, or in parts as `gguf-split` makes them."""

from zckpt.layouts.gguf import read as _read
from zckpt.layouts.save.family import Family, FileKind

FAMILY = Family(
    name="GGUF",
    files=(FileKind("", _read.NAME, of_rank=False),),
    match=_read.match,
    read=_read.read,
    fallback=True,
    apart="save",
    alone=True,
    every_rank=False,
)
