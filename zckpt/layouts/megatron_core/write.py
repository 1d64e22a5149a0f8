"""Lays out a Megatron-Core save (`torch_dist`) that any tensor, pipeline and expert parallel sizes load.

For `to_mcore`. The tensors have Megatron-Core's names and are whole; `dcp.write` cuts them.

[Note: what a model asks for] Beside its tensors a model asks for one object for each module, `NAME._extra_state/shard_AT_SHAPE`
(of layer 2 of 4 stacked ones `shard_2_4`, of expert 5 of 8 in it `shard_2.5_4.8`). Which modules have one depends on the
modules that the model is built of (Transformer Engine's, or Megatron-Core's own), and an object that a model does not ask for is
no error unless `--dist-ckpt-strictness` says so. So every module of any of them has one here; each is `None`, as of a model
without fp8, and all are one place in a file. In the same way a norm that modules call by several names has all of them.
Source: megatron-core 0.14 and 0.16.1, dist_checkpointing/{mapping,core}.py, dist_checkpointing/strategies/{torch,common}.py,
models/gpt/gpt_layer_specs.py; Megatron-LM, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.containers import Placeholder, torch_zip
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import FileStore
from zckpt.core.plan import OutputFile, literal_file
from zckpt.layouts.dcp.write import DcpWriter
from zckpt.layouts.run.steps import TRACKER

RELEASE = "release"
"""The save of a model without a run: Megatron loads no optimizer and no random states from it, and begins at iteration 0."""

_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ATTENTION = re.compile(r"(.*\.self_attention\.)linear_(?:qkv|kv_up_proj)\.weight")
_NO_MODULE = re.compile(r"(?:embedding|output_layer)\.|.*\.(?:router|shared_experts\.gate)")


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """A tensor of the save.

    Attributes:
        entry: it, with its name.
        dtype: that it is cast to.
        stacked: how many of its leading axes are layers or experts.
        spellings: further names of it.
    """

    entry: TensorEntry
    dtype: DType
    stacked: int
    spellings: tuple[str, ...] = ()


def lay_out(
    tensors: Sequence[MegatronTensor],
    arguments: Mapping[str, object],
    *,
    numbered_layers: bool,
    max_file_bytes: int,
) -> tuple[list[tuple[OutputFile, FileStore]], list[tuple[TensorEntry, TensorEntry]]]:
    """The files of a run directory with this one save, and (source, destination) of each tensor.

    Args:
        tensors: of the model.
        arguments: of the run, as Megatron's argument parser has them: plain values.
        numbered_layers: whether layers have numbers in names, instead of being stacked.
        max_file_bytes: a data file that would become larger is followed by another.

    Raises:
        UnsupportedError: an argument is no plain value.
    """
    save = DcpWriter(max_file_bytes, directory=RELEASE)
    for tensor in tensors:
        name = tensor.entry.name
        save.tensor((name,), tensor.entry, tensor.dtype)
        for spelling in tensor.spellings:
            save.again((spelling,), (name,))
    save.values(((name,) for name in _objects(tensors)), [None])
    files, pairs = save.finish()
    content = {"singleton_local_shards": False, "non_homogeneous_layers": numbered_layers}
    common = {
        "args": Placeholder("argparse", "Namespace", (), dict(arguments), called=True, new=True),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    skeleton = torch_zip.skeleton_of(common, [])
    path = f"{RELEASE}/common.pt"
    files.append(
        (OutputFile(path, skeleton.size, skeleton.literals, skeleton.checksums), FileStore(path, skeleton.size))
    )
    files.append(literal_file(f"{RELEASE}/metadata.json", json.dumps(_VERSIONS).encode()))
    files.append(literal_file(TRACKER, RELEASE.encode()))
    return files, pairs


def _objects(tensors: Iterable[MegatronTensor]) -> Iterator[str]:
    """The names of all objects that models may ask for; see [Note: what a model asks for]."""
    known: set[str] = set()
    for tensor in tensors:
        lead = tensor.entry.shape[: tensor.stacked]
        for module in _modules((tensor.entry.name, *tensor.spellings)):
            if module in known:
                continue
            known.add(module)
            shape = ".".join(map(str, lead)) if lead else "1"
            for offsets in itertools.product(*map(range, lead)):
                yield f"{module}._extra_state/shard_{'.'.join(map(str, offsets)) if lead else '0'}_{shape}"


def _modules(names: Iterable[str]) -> Iterator[str]:
    """The modules that have a tensor of one of these names."""
    for name in names:
        if name.endswith(".weight") and not _NO_MODULE.match(name):
            yield name.removesuffix(".weight")
        if match := _ATTENTION.fullmatch(name):
            yield f"{match[1]}core_attention"
