"""Saves that zckpt reads the weights of, and no optimizer states: the families, each with a module of its own."""

import re

from zckpt.base.patterns import compile_late
from zckpt.layouts.save.family import Family, FileKind, later, where_there

SHARD = re.compile(r"(?P<save>.+?)_rank-(?P<dp>\d{8})-of-\d{8}\.pth")
OF_TRAINER = re.compile(r"rank(?P<dp>\d+)-of-\d+-pytorch_model\.bin")
"""The names of files in torch_xla's own examples and in transformers' Trainer."""

NANOTRON = "checkpoint_metadata.json"
SLICE = compile_late(
    r"model/(?P<modules>(?:[^/]+/)*)model_(?P<last>\w+?)(?P<rank>_pp-rank-(?P<pp>\d+)-of-\d+_tp-rank-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?:_exp-rank-(?P<ep>\d+)-of-(?P<eps>\d+))?)?\.safetensors"
)
OPTIMIZER = compile_late(
    r"optimizer/optimizer_pp-(?P<pp>\d+)-of-(?P<pps>\d+)(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?_tp-(?P<tp>\d+)-of-\d+"
    r"(?:_exp-(?P<ep>\d+)-of-\d+)?\.pt"
)
"""The pattern of nanotron's optimizer files; every save of it has the first."""

LLAMA = compile_late(r"consolidated\.(\d+)\.pth")
NEMO = compile_late(r"(?:(?:mp|tp)_rank_(?P<tp>\d+)(?:_(?:pp_rank_)?(?P<pp>\d+))?/)?model_weights\.ckpt")
NXD = compile_late(r"dp_rank_(?P<dp>\d+)_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(?P<ep>_ep_rank_\d+)?\.pt")

ORBAX = "_METADATA"
"""The file that every tree of Orbax has: the names of its arrays."""
_OF_ORBAX = compile_late(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt|array_metadatas/[^/]+"
    r"|(?:ocdbt\.process_\d+/)?(?:manifest\.ocdbt|d/[0-9a-f]+)|[^/]+/(?:\.zarray|zarr\.json|c(?:[/.]\d+)*|\d+(?:[/.]\d+)*)"
)

FAMILIES = (
    Family(
        name="torch_xla",
        about="torch_xla's FullyShardedDataParallel: each rank's part of a model in a file, with how it was cut.",
        files=(FileKind("shard", SHARD), FileKind("shard", OF_TRAINER)),
        match=where_there(
            [SHARD, OF_TRAINER], later("weights_alone.xla", "match"), "no *_rank-*-of-*.pth of torch_xla"
        ),
        read=later("weights_alone.xla", "read"),
        second=later("weights_alone.second", "find_xla"),
        holds_run=False,
        facts=later("weights_alone.xla", "facts"),
        unread_states=later("weights_alone.xla", "unread_states"),
    ),
    Family(
        name="nanotron",
        about="nanotron: each parameter in files of its own, which say what slices of it they hold.",
        files=(FileKind("", SLICE, of_rank=False), FileKind("", OPTIMIZER, of_rank=False)),
        match=lambda listing: None if listing.matching(SLICE) else "no model/**/model_*.safetensors of nanotron",
        read=later("weights_alone.nanotron", "read"),
        second=later("weights_alone.second", "find_nanotron"),
        directories=compile_late(r"model|optimizer"),
        mark=NANOTRON,
        every_rank=False,
        holds_run=False,
        unread_states=later("weights_alone.nanotron", "unread_states"),
    ),
    Family(
        name="Orbax",
        about="Orbax (JAX, MaxText): a tree of arrays in files of Zarr 2 or 3, or in OCDBT; optimizer states are left out.",
        files=(FileKind("", _OF_ORBAX, of_rank=False),),
        match=lambda listing: None if ORBAX in listing.files else f"no {ORBAX} of Orbax",
        read=later("weights_alone.orbax", "read"),
        second=later("weights_alone.second", "find_orbax"),
        directories=compile_late(r".+"),
        mark=ORBAX,
        every_rank=False,
        holds_run=False,
        records=later("weights_alone.orbax", "records"),
        unread_states=later("weights_alone.orbax", "unread_states"),
        state_bytes=later("weights_alone.orbax", "state_bytes"),
    ),
    Family(
        name="Llama",
        about="Llama's original files: slices of each tensor-parallel rank in consolidated.NN.pth, with params.json.",
        files=(FileKind("", LLAMA, of_rank=False),),
        match=where_there([LLAMA], later("weights_alone.sliced", "match_llama"), "no consolidated.*.pth of Llama"),
        read=later("weights_alone.sliced", "read_llama"),
        second=later("weights_alone.second", "find_llama"),
        mark="params.json",
        fallback=True,
        every_rank=False,
        holds_run=False,
    ),
    Family(
        name="NeMo 1",
        about="Archives of NeMo 1 (.nemo), read in place, or their files: a model, or slices of model-parallel ranks.",
        files=(FileKind("", compile_late(NEMO.pattern.replace(")?model", ")model")), of_rank=False),),
        match=later("weights_alone.sliced", "match_nemo"),
        read=later("weights_alone.sliced", "read_nemo"),
        second=later("weights_alone.second", "find_nemo"),
        mark="model_config.yaml",
        directories=compile_late(r"(?:mp_rank_\d{2,}|tp_rank_\d{2,}_pp_rank_\d{3,})"),
        every_rank=False,
        holds_run=False,
    ),
    Family(
        name="NxD",
        about="Neuron's NxD (neuronx-distributed): slices of tensor- and pipeline-parallel ranks, joined by rules.",
        files=(FileKind("", NXD, of_rank=False),),
        match=lambda listing: None if listing.matching(NXD) else "no dp_rank_*_tp_rank_*_pp_rank_*.pt of NxD",
        read=later("weights_alone.sliced", "read_nxd"),
        second=later("weights_alone.second", "find_nxd"),
        directories=compile_late(NXD.pattern + r"\.tensors"),
        every_rank=False,
        holds_run=False,
    ),
)
