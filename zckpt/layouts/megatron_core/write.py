"""Lays out a Megatron-Core save (`torch_dist`) that any tensor, pipeline and expert parallel sizes load.

For `to_mcore`. The tensors have Megatron-Core's names and are whole; `dcp.write` cuts them.

[Note: what a model asks for] Beside its tensors a model asks for one object for each module, `NAME._extra_state/shard_AT_SHAPE`
(of layer 2 of 4 stacked ones `shard_2_4`, of expert 5 of 8 in it `shard_2.5_4.8`). Which modules have one depends on the
modules that the model is built of (Transformer Engine's, or Megatron-Core's own), and an object that a model does not ask for is
no error unless `--dist-ckpt-strictness` says so. So every module of any of them has one here; each is `None`, as of a model
without fp8, and all are one place in a file. In the same way a norm that modules call by several names has all of them.

[Note: the optimizer] Megatron-Core has one optimizer, with a group of what decays and one of what does not; where experts are
spread over ranks, it has a second one for them, with items that have `chained_1.` before their names.
Source: megatron-core 0.14 and 0.16.1, dist_checkpointing/{mapping,core}.py, optimizer/{__init__,optimizer,distrib_optimizer}.py,
dist_checkpointing/strategies/{torch,common}.py, models/gpt/gpt_layer_specs.py; Megatron-LM, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.containers import Placeholder, torch_zip
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.plan import OutputFile, Plan, literal_file
from zckpt.core.stores import FileStore
from zckpt.layouts.dcp.write import DcpWriter
from zckpt.layouts.run.steps import TRACKER

RELEASE = "release"
"""The save of a model without a run: Megatron loads no optimizer and no random states from it, and begins at iteration 0."""

RESHARDABLE = "fully_reshardable"
"""How the optimizer's states are laid out, by Megatron-Core's name: each has the name and the shape of its weight."""

_VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ATTENTION = re.compile(r"(.*\.self_attention\.)linear_(?:qkv|kv_up_proj)\.weight")
_PROJECTION = re.compile(r"(.*\.mixer\.in_proj)\.weight\.z")
_NO_MODULE = re.compile(r"(?:language_model\.)?(?:embedding|output_layer)\.|.*\.(?:router|shared_experts\.gate)")


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


@dataclass(frozen=True, slots=True)
class MegatronOptimizer:
    """The states of Adam; see [Note: the optimizer].

    Attributes:
        states: (`param`, `exp_avg` or `exp_avg_sq`, its elements under the name of the weight).
        settings: of every group: lr, betas, eps, weight_decay.
        step: that the run has reached.
        experts_apart: whether experts have an optimizer of their own, as where they are spread over ranks.
    """

    states: tuple[tuple[str, TensorEntry], ...]
    settings: Mapping[str, object]
    step: int
    experts_apart: bool

    def key(self, state: str, name: str) -> str:
        """The name of the item that holds a state of a weight."""
        chain = f"chained_{int(is_of_expert(name))}." if self._is_chained else ""
        return f"{chain}optimizer.state.{state}.{name}"

    @property
    def _is_chained(self) -> bool:
        return self.experts_apart and any(is_of_expert(entry.name) for _, entry in self.states)

    def common(self) -> dict[object, object]:
        """The common state: what is the same on all ranks."""
        if self._is_chained:
            return {number: self._one(is_expert=bool(number)) for number in (0, 1)}
        return self._one(is_expert=False)

    def _one(self, *, is_expert: bool) -> dict[object, object]:
        groups = [
            {**self.settings, "bias_correction": True, "step": self.step, "wd_mult": decays, "lr_mult": 1.0,
             "is_expert_parallel": is_expert, "is_decoupled_lr": False}
            for decays in (1.0, 0.0)
        ]  # fmt: skip
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": RESHARDABLE}

    def schedule(self) -> dict[str, object]:
        """The state of a schedule that Megatron-LM asks for; a run without a schedule has these keys and no more."""
        decay, rate = self.settings["weight_decay"], self.settings["lr"]
        return {
            "max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant",
            "lr_decay_steps": 1, "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": 0,
        }  # fmt: skip


def is_of_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts."""
    return ".mlp.experts." in name


def lay_out(
    tensors: Sequence[MegatronTensor],
    arguments: Mapping[str, object],
    *,
    numbered_layers: bool,
    max_file_bytes: int,
    optimizer: MegatronOptimizer | None = None,
) -> Plan:
    """The files of a run directory with this one save.

    Args:
        tensors: of the model.
        arguments: of the run, as Megatron's argument parser has them: plain values.
        numbered_layers: whether layers have numbers in names, instead of being stacked.
        max_file_bytes: a data file that would become larger is followed by another.
        optimizer: its states; None for a release.

    Raises:
        UnsupportedError: an argument is not a plain value.
    """
    tag = f"iter_{optimizer.step:07d}" if optimizer else RELEASE
    save = DcpWriter(max_file_bytes, directory=tag)
    for tensor in tensors:
        name = tensor.entry.name
        save.tensor((name,), tensor.entry, tensor.dtype)
        for spelling in tensor.spellings:
            save.again((spelling,), (name,))
    save.values(((name,) for name in _objects(tensors)), [None])
    content: dict[str, object] = {"singleton_local_shards": False, "non_homogeneous_layers": numbered_layers}
    if optimizer is not None:
        spellings = {tensor.entry.name: tensor.spellings for tensor in tensors}
        for state, entry in optimizer.states:
            save.tensor((optimizer.key(state, entry.name),), entry, F32)
            for spelling in spellings[entry.name]:
                save.again((optimizer.key(state, spelling),), (optimizer.key(state, entry.name),))
        content["distrib_optim_sharding_type"] = RESHARDABLE
    common: dict[str, object] = {
        "args": Placeholder("argparse", "Namespace", (), dict(arguments), called=True, new=True),
        "checkpoint_version": 3.0,
        "iteration": optimizer.step if optimizer else 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if optimizer is not None:
        common |= {"optimizer": optimizer.common(), "opt_param_scheduler": optimizer.schedule()}
    skeleton = torch_zip.skeleton_of(common, [])
    path = f"{tag}/common.pt"
    return save.finish().with_files(
        (OutputFile(path, skeleton.size, skeleton.literals, skeleton.checksums), FileStore(path, skeleton.size)),
        literal_file(f"{tag}/metadata.json", json.dumps(_VERSIONS).encode()),
        literal_file(TRACKER, (str(optimizer.step) if optimizer else RELEASE).encode()),
    )


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
        if match := _PROJECTION.fullmatch(name):
            yield match[1]
        if match := _ATTENTION.fullmatch(name):
            yield f"{match[1]}core_attention"
