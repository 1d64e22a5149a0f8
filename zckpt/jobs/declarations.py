"""Every job with the groups of options that it takes: the only list, and commands and `Options.split` are made from it.

A job's own module is imported when it is to do something.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.core.dtypes import BF16, F32
from zckpt.jobs.groups import (
    SHARED,
    WHAT,
    Casting,
    Merging,
    Naming,
    Pacing,
    Publishing,
    Reading,
    Selecting,
    Sharding,
    SigningKey,
)
from zckpt.jobs.own_groups import (
    Adapter,
    Average,
    Dcp,
    Delta,
    Fp8,
    Gguf,
    Megatron,
    MergedWith,
    Mlx,
    Quantize,
    Slim,
    TargetWorld,
)

_NAMES: dict[type, str] = {kind: "signing_key" if kind is SigningKey else kind.__name__.lower() for kind in SHARED}


def place_of(kind: type) -> str:
    """The attribute of `Asked` that has a group's value."""
    return _NAMES.get(kind, "own")


Own = TypeVar("Own", covariant=True)
A = TypeVar("A", bound="Asked[Any]")


@dataclass(frozen=True, kw_only=True)
class Asked(Generic[Own]):
    """What a job is asked to do: a value of each shared group, with defaults for groups that the job does not take.
    `own`: the group that only this job has.
    """

    own: Own
    reading: Reading = Reading()
    selecting: Selecting = Selecting()
    naming: Naming = Naming()
    casting: Casting = Casting()
    merging: Merging = Merging()
    sharding: Sharding = Sharding()
    publishing: Publishing = Publishing()
    pacing: Pacing = Pacing()
    signing_key: SigningKey = SigningKey()

    def having(self: A, **values: object) -> A:
        """The same request with other values of fields, whichever groups these are in."""
        changed: dict[str, Any] = {}
        for kind in SHARED:
            name = place_of(kind)
            if mine := {one.name: values.pop(one.name) for one in fields(kind) if one.name in values}:
                changed[name] = replace(getattr(self, name), **mine)
        if values:
            changed["own"] = replace(self.own, **values)
        return replace(self, **changed)


@dataclass(frozen=True)
class Job(Generic[Own]):
    """A job, and what it can be asked.

    Attributes:
        name: of its public function.
        groups: of options, in the order in which a command shows them.
        home: the module below `jobs` with the `prepare` that plans it; empty for a job that writes nothing.
        own: the one of `groups` that no other job has; None if it needs none.
        without: fields of the groups that have no meaning for it.
        usual: defaults that it has of its own.
        words: option -> the help that it has of its own, or help and panel.
    """

    name: str
    groups: tuple[type, ...]
    home: str = ""
    own: type[Own] | None = None
    without: frozenset[str] = frozenset()
    usual: Mapping[str, object] = field(default_factory=dict[str, object])
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @cached_property
    def takes(self) -> frozenset[str]:
        """The fields that have a meaning for the job."""
        return frozenset(one.name for kind in self.groups for one in fields(kind)) - self.without

    def ask(self, **values: Any) -> Asked[Own]:
        """The request with these values of fields; fields that are not given have the job's defaults.

        Raises:
            TypeError: it takes no such field. UsageError: a value makes no sense.
        """
        if unknown := values.keys() - self.takes:
            raise TypeError(f"{self.name} takes no {min(unknown)}")
        values = {**self.usual, **values}
        made: dict[str, Any] = {"own": None}
        for kind in self.groups:
            mine = {one.name: values[one.name] for one in fields(kind) if one.name in values}
            made[place_of(kind)] = kind(**mine)
        return Asked(**made)

    def prepare(self, *arguments: Any) -> Any:
        """Plans the job; arguments and result are those of `prepare` in its module.

        Raises:
            UsageError: of a job that reads one checkpoint, CKPT and OUT seem to be swapped. ZckptError: as in its module.
        """
        checkpoint, out, *more = arguments
        if len(more) == 1 and isinstance(checkpoint, str | os.PathLike) and os.path.isdir(os.path.expanduser(out)):
            import_module("zckpt.jobs.open").check_order(checkpoint, out)
        return import_module(f"zckpt.jobs.{self.home}").prepare(*arguments)

    def options(self) -> Iterator[tuple[type, Field[Any]]]:
        """The options of commands, each with the class that has it: a group, or the parts of one of its fields."""
        for kind in self.groups:
            for one in fields(kind):
                if one.name in self.without:
                    continue
                for holder in (kind,) if (parts := one.metadata.get("parts")) is None else (parts,):
                    for own in (one,) if parts is None else fields(holder):
                        if "flag" in own.metadata:
                            yield holder, own


_OUTPUT = (Reading, Pacing, Publishing, SigningKey)
_NAMED = (Selecting, Naming, *_OUTPUT)
_STATES = ("Write only states that match, as exp_avg/*. Repeatable.", "Leave out states that match. Repeatable.")
_RUN = frozenset({"merge", "beside"})
_CAST = frozenset({"keep_dtype", "like"})

CONVERT: Job[None] = Job("convert", (Sharding, Casting, Merging, *_NAMED), "convert")
PUSH: Job[None] = Job(
    "push_to_hub", (Casting, Sharding, Merging, *_NAMED), "convert",
    without=frozenset({"dtype", "format", "overwrite", "merge", "beside"}),
)  # fmt: skip
TO_DCP: Job[Dcp] = Job(
    "to_dcp", (Casting, Dcp, *_NAMED), "to_dcp", Dcp, frozenset({"merge", "form"}) | _CAST, {"dtype": None},
)  # fmt: skip
TO_MCORE: Job[Megatron] = Job(
    "to_mcore", (Casting, Megatron, *_NAMED), "to_mcore", Megatron, frozenset({"merge", "form"}) | _CAST, {"dtype": None},
)  # fmt: skip
TO_FP8: Job[Fp8] = Job(
    "to_fp8", (Fp8, Casting, Sharding, *_NAMED), "quantize", Fp8, frozenset({"format"}) | _CAST, {"dtype": BF16},
    {"dtype": ("Of what is not quantised.",)},
)  # fmt: skip
QUANTIZE: Job[Quantize] = Job(
    "quantize", (Quantize, Casting, Sharding, Naming, *_OUTPUT), "quantize", Quantize, frozenset({"format", "form"}) | _CAST,
    {"dtype": BF16}, {"dtype": ("Of what is not quantised.",)},
)  # fmt: skip
TO_MLX: Job[Mlx] = Job(
    "to_mlx", (Mlx, Casting, Sharding, *_NAMED), "to_mlx", Mlx, frozenset({"format"}) | _CAST, {"dtype": None},
    {"dtype": ("Of scales and of what is not quantised; by default what the config says.",)},
)  # fmt: skip
TO_GGUF: Job[Gguf] = Job(
    "to_gguf", (Gguf, Casting, *_NAMED), "to_gguf", Gguf, frozenset({"dtype", "merge", "form"}) | _CAST, {"dtype": None},
)  # fmt: skip
TO_PEFT: Job[Adapter] = Job(
    "to_peft", (Adapter, Casting, *_OUTPUT), "to_peft", Adapter, frozenset({"merge"}) | _CAST, {"dtype": F32},
    {"dtype": ("Of the adapter's tensors.",)},
)  # fmt: skip
TO_STATES: Job[None] = Job(
    "to_states", (Sharding, Selecting, Casting, *_OUTPUT), "to_states", None,
    frozenset({"dtype", "overflow", "format", "exclude_frozen", *_RUN, *_CAST}), {"dtype": None},
    {"include": (_STATES[0], WHAT), "exclude": (_STATES[1], WHAT)},
)  # fmt: skip
AVERAGE: Job[Average] = Job(
    "average", (Average, Casting, Sharding, *_NAMED), "average", Average, frozenset({"tag", "best"}) | _CAST, {"dtype": None},
    {
        "dtype": ("Of the output; by default that of the last checkpoint's weights.",),
        "also": ("Directory with other parts of the CKPTs, from another node. Repeatable.",),
    },
)  # fmt: skip
RESHARD: Job[TargetWorld] = Job("reshard", (TargetWorld, *_OUTPUT), "reshard", TargetWorld, _RUN)
TO_UNIVERSAL: Job[None] = Job("to_universal", _OUTPUT, "to_universal", None, _RUN)
SLIM: Job[Slim] = Job("slim", (*_OUTPUT, Slim), "slim", Slim, _RUN)
DELTA: Job[Delta] = Job(
    "delta", (Delta, Casting, Sharding, Naming, Selecting, *_OUTPUT), "delta", Delta,
    frozenset({"overflow", "format", "buffer", *_RUN, *_CAST}), {"dtype": None},
    {
        "dtype": ("Of the weights; by default as in OLD, or bf16 if OLD is a checkpoint.",),
        "max_shard_size": ("Most bytes of weights with differences that one file holds; by default 5GB.",),
    },
)  # fmt: skip
APPLY: Job[None] = Job(
    "apply_delta", (Casting, Sharding, Naming, Selecting, *_OUTPUT), "apply_delta", None,
    frozenset({"overflow", "format", "buffer", *_RUN, *_CAST}), {"dtype": None},
    {"dtype": ("Of the weights; by default what the deltas were made for.",)},
)  # fmt: skip

_LOOKED = frozenset({"allow_unknown_layout", "best", "buffer"})
LOOK: Job[None] = Job("inspect_checkpoint", (Reading,), without=_LOOKED)
DIFF: Job[None] = Job("diff", (Reading, Pacing), without=_LOOKED | {"tag", "also"})
VERIFY: Job[MergedWith] = Job("verify", (MergedWith, Reading, Pacing), "", MergedWith, _LOOKED)
PRUNE: Job[None] = Job("prune", (Pacing,), without=_LOOKED)
