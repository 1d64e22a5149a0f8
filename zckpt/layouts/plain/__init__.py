"""Plain weights: safetensors and torch files, single or in shards with an index."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.plain import files as _files
from zckpt.layouts.plain import read as _read
from zckpt.layouts.save.family import Family, FileKind, later

_NAMES = compile_late(
    r"(?:model|pytorch_model|adapter_model|optimizer_states)(?:\.safetensors|\.bin)(?:\.index\.json)?"
)

FAMILY = Family(
    name="plain weights",
    files=(FileKind("", _NAMES, of_rank=False),),
    match=_files.match,
    read=_read.read,
    second=later("plain.second", "find_again"),
    fallback=True,
    has_keys=True,
    reads_absent=True,
    named_data=_files.named_data,
    unread_states=_read.unread_states,
    left_out=_read.left_out,
)
