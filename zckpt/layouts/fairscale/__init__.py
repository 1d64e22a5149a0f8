"""FairScale's FullyShardedDataParallel: each rank's part of a model in a file, as fairseq, metaseq and others save it."""

from zckpt.layouts.fairscale import read as _read
from zckpt.layouts.fairscale import states as _states
from zckpt.layouts.save.family import Family, FileKind

FAMILY = Family(
    name="FairScale",
    files=(FileKind("shard", _read.NAME),),
    match=_read.match,
    read=_states.read,
    read_training=_states.read_training,
    fallback=True,
    apart="save",
    holds_run=False,
    resumes="by FairScale's load_local_state_dict, at this world size (for others, run zckpt to-dcp, or reshard for DeepSpeed)",
    facts=_read.facts,
    unread_states=_states.unread_states,
)
