"""Plain weights: safetensors and torch files, single or in shards with an index."""

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later

PATTERNS = {"safetensors": "model{suffix}.safetensors", "bin": "pytorch_model{suffix}.bin"}
OPTIMIZER = "optimizer_states"
"""The stem of files of optimizer states, which no loader takes for weights: `to-states` writes them."""

_NAMES = compile_late(
    r"(?:model|pytorch_model|adapter_model|optimizer_states)(?:\.safetensors|\.bin)(?:\.index\.json)?"
)

FAMILY = Family(
    name="plain weights",
    files=(FileKind("", _NAMES, of_rank=False),),
    match=later("plain.files", "match"),
    read=later("plain.read", "read"),
    second=later("plain.second", "find_again"),
    fallback=True,
    has_keys=True,
    reads_absent=True,
    named_data=later("plain.files", "named_data"),
    unread_states=later("plain.read", "unread_states"),
    left_out=later("plain.read", "left_out"),
    beside=later("plain.read", "left_out"),
)
