"""FairScale's FullyShardedDataParallel: each rank's part of a model in a file, as fairseq, metaseq and others save it."""

from zckpt.layouts.fairscale import files as _files
from zckpt.layouts.save.family import Family, FileKind, later, where_there

_KINDS = (
    FileKind("experts", _files.EXPERTS),
    FileKind("shared", _files.SHARED),
    FileKind("shard", _files.SHARD),
    FileKind("experts", _files.WHOLE_EXPERTS),
    FileKind("shared", _files.WHOLE_SHARED, of_rank=False),
    FileKind("model part", _files.WHOLE_PART, of_rank=False),
)

FAMILY = Family(
    name="FairScale",
    files=_KINDS,
    match=where_there([kind.pattern for kind in _KINDS], later("fairscale.read", "match"), _files.NONE),
    read=later("fairscale.parts", "read"),
    second=later("fairscale.second", "find_again"),
    read_training=later("fairscale.parts", "read_training"),
    fallback=True,
    apart="save",
    holds_run=False,
    resumes="by FairScale's load_local_state_dict, at this world size (for others, run zckpt to-dcp, or reshard for DeepSpeed)",
    facts=later("fairscale.read", "facts"),
    unread_states=later("fairscale.parts", "unread_states"),
)
