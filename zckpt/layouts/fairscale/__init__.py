"""FairScale's FullyShardedDataParallel: each rank's part of a model in a file, as fairseq, metaseq and others save it.

    checkpoint_last-shard3.pt                    a rank's part
    checkpoint_last-model_part-1-shard3.pt       metaseq: a rank's part of what tensor-parallel rank 1 has of the model
    checkpoint_last-rank-3-shard3.pt             fairseq: the rank's own experts, and
    checkpoint_last-shared-shard3.pt             its part of the rest
    checkpoint_last-model_part-1.pt              metaseq: what tensor-parallel rank 1 has, not sharded
    checkpoint_last-rank-3.pt                    fairseq: a rank's own experts, not sharded, and
    checkpoint_last-shared.pt                    the rest

Source: fairseq, branch moe, trainer.py (`checkpoint_suffix`, `state_dict`), distributed/utils.py; metaseq 0.0.1,
distributed/utils.py `distributed_init`, scripts/reshard_mp.py.
"""

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

_END = r"\.(?:pt|pth|bin|ckpt)"
EXPERTS = compile_late(rf"(?P<save>.+?)-rank-(?P<dp>\d+)-shard(?P=dp){_END}")
SHARED = compile_late(rf"(?P<save>.+?)-shared-shard(?P<dp>\d+){_END}")
SHARD = compile_late(rf"(?:(?P<save>.+?)[-_.])?(?:model_part-(?P<mp>\d+)[-_.])?shard[-_]?(?P<dp>\d+){_END}")
WHOLE_EXPERTS = compile_late(rf"(?P<save>.+?)-rank-(?P<dp>\d+){_END}")
WHOLE_SHARED = compile_late(rf"(?P<save>.+?)-shared{_END}")
WHOLE_PART = compile_late(rf"(?P<save>.+?)-model_part-(?P<mp>\d+){_END}")
NONE = "no *shard0.pt with FairScale's metadata"

_KINDS = (
    FileKind("experts", EXPERTS),
    FileKind("shared", SHARED),
    FileKind("shard", SHARD),
    FileKind("experts", WHOLE_EXPERTS),
    FileKind("shared", WHOLE_SHARED, of_rank=False),
    FileKind("model part", WHOLE_PART, of_rank=False),
)

FAMILY = Family(
    name="FairScale",
    files=_KINDS,
    match=where_there([kind.pattern for kind in _KINDS], later("fairscale.read", "match"), NONE),
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
