"""What a person asks a public function, flat: every field of the shared groups, and what deltas have beside them.

For users of `zckpt.Options`. `split` makes of it what a job takes: none of the fields is ignored in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import UsageError
from zckpt.core.dtypes import DType
from zckpt.jobs.declarations import Asked, Job
from zckpt.jobs.groups import (
    SHARED,
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
from zckpt.jobs.groups import LoraMerge as LoraMerge
from zckpt.jobs.own_groups import Delta

T = TypeVar("T")


@public
@dataclass(frozen=True, kw_only=True)
class Options(SigningKey, Pacing, Publishing, Sharding, Merging, Casting, Naming, Selecting, Reading):
    """What a conversion is to do.

    Attributes:
        tag: which save, where there are several.
        best: of a trainer's run, the save that its trainer_state.json calls the best.
        also: directories laid over the checkpoint: its parts from other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        allow_unknown_layout: go on though optimizer files hold keys that zckpt does not know.
        as_part: take one part of a save (a shard, one rank's file or directory) alone, as if it were a whole one.
        overwrite: replace an existing output.
        threads: that move data; None for the default.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        keep_cache: whether the page cache keeps what is read; None: unless the job is larger than memory.
        limit_rate: at most so many bytes a second are read and written, together.
        sign: file with a private key, with which the output is signed; None for no signature.
        dtype: of floating parameters in the output; None keeps each as it is.
        keep_dtype: globs; tensors with a name in the output that matches one keep the dtype that they have.
        like: a model's directory, or its index: each tensor gets the dtype, and in a directory the file, that it has there.
        format: container; None for what OUT's suffix says, safetensors for a directory.
        max_shard_size: of a directory's shards.
        include: globs; only tensors that match one are kept.
        exclude: globs; tensors that match one are left out.
        exclude_frozen: leave out parameters that were not trained.
        strip_prefix: taken off every name that has it; "auto" for what wraps all names.
        rename: (regular expression, replacement) pairs, applied in order to every name.
        overflow: what to do with numbers too large for the dtype.
        merge: put the files into an existing directory instead of replacing it.
        beside: allow an output beside the input's tag directories.
        form: names and order of rows that the tensors get, as `--to`, `--config` and `--layer-names` do.
        lora: adapters to merge into the weights; None to write the checkpoint as it is. Of jobs that write consolidated weights.
        base: the model that the run began with, for the parameters that the save leaves out; without `lora`, which has its own.
    """

    def __post_init__(self) -> None:
        for kind in SHARED:
            getattr(kind, "__post_init__", lambda _: None)(self)

    def with_others(self, given: Options, more: Mapping[str, Any]) -> Options:
        """These options, but for the fields of `given` that are not as usual, and for `more`.

        Raises:
            TypeError: `more` names no field.
        """
        usual = type(self)()
        chosen = {one.name: getattr(given, one.name) for one in fields(given)}
        return replace(self, **{name: value for name, value in chosen.items() if value != getattr(usual, name)}, **more)

    def split(self, job: Job[T], **given: Any) -> Asked[T]:
        """What a job is asked.

        Args:
            job: the job.
            given: fields that its public function takes as arguments, which count more than these options; of `tag` and `also`,
                those that are not empty. A path is taken as text.

        Raises:
            UsageError: an option that is not as usual has no meaning for the job; it names both.
        """
        usual, values = type(self)(), {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in values.items():
            if name not in job.takes and value != getattr(usual, name) and (name, value) != ("format", "safetensors"):
                raise UsageError(
                    f"{name} has no meaning for {job.name}", found=f"{type(self).__name__}({name}={value!r:.60})",
                    expected="the options that this job has a use for", remedy=f"Leave {name} out.",
                )  # fmt: skip
        found = {name: value for name, value in values.items() if name in job.takes}
        for name, value in given.items():
            if value or name not in ("tag", "also"):
                found[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        return job.ask(**found)


@public
@dataclass(frozen=True, kw_only=True)
class DeltaOptions(Delta, Options):
    """What `delta` is to do; of what `Options` has, what concerns reading, names and the output counts.

    Attributes:
        dtype: of floating parameters; None for those of the old version, or bf16 if that are not plain weights.
        version: of the new weights; None for the one in OUT's name, as in `weight_v000007`, or 1.
        encoding: of each tensor's difference: "xor" or "overwrite".
        checksum: of each tensor's new bytes: "xxh3-128", "blake3" or "adler32".
        old_tag: which save of the old version, where there are several.
    """

    dtype: DType | None = None


@public
@dataclass(frozen=True, kw_only=True)
class ApplyOptions(Options):
    """What `apply_delta` is to do; of what `Options` has, what concerns reading, names and the output counts.

    Attributes:
        dtype: of floating parameters; None for what the delta says, or else as in `DeltaOptions`.
    """

    dtype: DType | None = None
