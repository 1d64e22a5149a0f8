"""The public functions of `deepspeed.utils.zero_to_fp32`, under their names and with their signatures.

A script that says `from deepspeed.utils.zero_to_fp32 import ...` says `from zckpt.drop_in import ...` instead, and gets the same
result sooner, in less memory, without running a pickle. The results are DeepSpeed's, with these differences:
 - frozen half-precision parameters are fp32 too; DeepSpeed leaves them as they were saved;
 - buffers of fp64 stay fp64, and a conversion to fp16 or bf16 leaves buffers of fp32 as they are; DeepSpeed casts both;
 - a number too large for fp16 is a CastError; DeepSpeed writes infinity;
 - names are the model's own: `_orig_mod.` of torch.compile is removed;
 - a plain or unsharded checkpoint, and a tag directory itself, are accepted too;
 - `load_state_dict_from_zero_checkpoint` warns of names that are on one side only; DeepSpeed ignores them.

[Note: not provided] `parse_model_states` and `parse_optim_states` return DeepSpeed's flat vectors, which mean nothing without the
rest of its script; `zckpt.open_checkpoint` gives every tensor. What begins with an underscore is not public.
Source: deepspeed/utils/zero_to_fp32.py (0.19.8).
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import torch

from zckpt import live
from zckpt.base.errors import NotACheckpointError, ZckptError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.engine import replicas
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import convert
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.jobs.options import Options

if TYPE_CHECKING:
    Path = str | os.PathLike[str]

Model = TypeVar("Model", bound=torch.nn.Module)
Value = TypeVar("Value")

_ONE_SHARD = 1 << 62
"""What `max_shard_size=None` means: more bytes than any checkpoint has."""

_ONE_FILE = (".bin", ".pt", ".safetensors")


class LazyTensor:
    """A tensor that is read when `contiguous` is called, each time again.

    Attributes:
        shape: of the tensor.
        dtype: that `contiguous` will give it.
    """

    def __init__(self, entry: TensorEntry, dtype: DType) -> None:
        self._entry = entry
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = getattr(torch, dtype.torch_name)

    def numel(self) -> int:
        """Elements in it."""
        return self._entry.numel

    def contiguous(self) -> torch.Tensor:
        """Reads it."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        live.move([(self._entry, tensor)])
        return tensor

    def __repr__(self) -> str:
        return f"LazyTensor({self._entry.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: Literal[False] = False,
) -> dict[str, torch.Tensor]: ...


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    lazy_mode: Literal[True],
) -> dict[str, LazyTensor]: ...


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path, tag: str | None, exclude_frozen_parameters: bool, lazy_mode: Literal[True]
) -> dict[str, LazyTensor]: ...


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]: ...


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]:
    """The consolidated weights in CPU memory: fp32 parameters, integer buffers as they are.

    Args:
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        tag: which save, where there are several; by default the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: give `LazyTensor`s, which are read by `.contiguous()`, instead of tensors.

    Returns:
        Tensors by name. Tied names have the same object.

    Raises:
        NotACheckpointError: there is no checkpoint in `checkpoint_dir`.
        ZckptError: another kind says what is wrong.

    Example:
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint("out/checkpoint-500"))

    Example:
        >>> state = zckpt.get_fp32_state_dict_from_zero_checkpoint("run")
        >>> state["lm_head.weight"].dtype
        torch.float32
    """
    catalog = _open(checkpoint_dir, tag)
    if exclude_frozen_parameters:
        catalog = catalog.select(lambda entry: entry.role != "frozen")
    lazy = {name: LazyTensor(entry, output_dtype(entry, F32)) for name, entry in catalog.tensors.items()}
    if lazy_mode:
        return _with_tied(lazy, catalog)
    tensors = {name: torch.empty(item.shape, dtype=item.dtype) for name, item in lazy.items()}
    live.move([(entry, tensors[name]) for name, entry in catalog.tensors.items()])
    return _with_tied(tensors, catalog)


def to_torch_tensor(
    state_dict: Mapping[str, torch.Tensor | LazyTensor],
    return_empty_tensor: bool = False,
    dtype: str | torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors by name of what `get_fp32_state_dict_from_zero_checkpoint(..., lazy_mode=True)` gave; tied names, which share one
    lazy tensor, share one tensor. `return_empty_tensor`: make tensors of the right shape and dtype, and read nothing. `dtype`:
    "fp32", "fp16", "bf16" or torch's, for floating tensors; None keeps each as it is. Raises UsageError for an unknown dtype.
    """
    wanted = None if dtype is None else getattr(torch, _dtype(dtype).torch_name)
    made: dict[int, torch.Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in made:
            target = wanted if wanted is not None and tensor.dtype.is_floating_point else tensor.dtype
            empty = return_empty_tensor
            made[id(tensor)] = torch.empty(tensor.shape, dtype=target) if empty else tensor.contiguous().to(target)
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Path,
    output_dir: Path,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the consolidated weights as `pytorch_model.bin` or `model.safetensors`, or shards of these.

    Args:
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        output_dir: directory for the files, which may exist. A name ending in .bin, .pt or .safetensors that is not a
            directory is one file of that format.
        dtype: "fp32", "fp16", "bf16", or torch's dtype; of parameters.
        max_shard_size: of a file, in bytes or as "5GB"; None for a single one.
        safe_serialization: write safetensors.
        tag: which save, where there are several; by default the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.

    Raises:
        UsageError: an unknown dtype.
        CastError: a number is too large for `dtype`.
        ZckptError: another kind says what is wrong; no file was replaced then.

    Example:
        >>> zckpt.convert_zero_checkpoint_to_state_dict("run", "weights/", dtype="bf16", safe_serialization=True)
    """
    out = os.fspath(output_dir)
    if os.path.isdir(out):
        out = os.path.join(out, "")
    options = Options(
        format=None if out.endswith(_ONE_FILE) else "safetensors" if safe_serialization else "bin",
        max_shard_size=_ONE_SHARD if max_shard_size is None else max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
        overwrite=True,
        merge=True,
        beside=True,
        tag=tag,
    )
    convert(checkpoint_dir, out, dtype=_dtype(dtype), options=options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path,
    output_dir: Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the whole fp32 weights; arguments and errors as for `convert_zero_checkpoint_to_state_dict`.

    Example:
        >>> zckpt.convert_zero_checkpoint_to_fp32_state_dict("run", "weights/", safe_serialization=True)
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Path, tag: str | None = None) -> Model:
    """Loads the consolidated weights straight into a model's own tensors, cast from fp32 to the dtypes these have.

    DeepSpeed's function moves the model to the CPU first; this one leaves it on its device, and needs no second copy
    of the weights in memory.

    Args:
        model: any module with the names of the checkpoint.
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        tag: which save, where there are several; by default the one that `latest` names.

    Returns:
        The same model.

    Warns:
        UserWarning: some names have no partner on the other side; these are left as they are.

    Raises:
        NotACheckpointError: there is no checkpoint in `checkpoint_dir`.
        ZckptError: another kind says what is wrong.

    Example:
        >>> model = load_state_dict_from_zero_checkpoint(model, "run")  # doctest: +SKIP
    """
    live.load_into(model, open_catalog(os.fspath(checkpoint_dir), Reading(tag=tag)).catalog)
    return model


def get_checkpoint_files(checkpoint_dir: Path, glob_pattern: str) -> list[str]:
    """Paths of the files in a tag directory, such as `out/checkpoint-500/global_step500`, that match a pattern, such as
    "*_optim_states.pt", in natural order (rank 2 before rank 10). Raises NotACheckpointError, a FileNotFoundError, if none does.
    """
    directory = os.fspath(checkpoint_dir)
    found = sorted(glob.glob(os.path.join(glob.escape(directory), glob_pattern)), key=natural_keys)
    if not found:
        raise NotACheckpointError(
            "no such files in this directory", file=directory, expected=f"files {glob_pattern}",
            remedy="Give the tag directory, such as global_step500.",
        )  # fmt: skip
    return found


def get_optim_files(checkpoint_dir: Path) -> list[str]:
    """Paths of a tag directory's optimizer files, in natural order; errors as in `get_checkpoint_files`."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: Path) -> list[str]:
    """Paths of a tag directory's model files, in natural order; errors as in `get_checkpoint_files`."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: Path, zero_stage: int) -> str:
    """The path of rank 0's model file in a tag directory, in which each rank has one of its own at stage 3. Raises
    NotACheckpointError, a FileNotFoundError, if it does not exist.
    """
    name = "mp_rank_00_model_states.pt"
    return get_checkpoint_files(checkpoint_dir, f"zero_pp_rank_0_{name}" if zero_stage == 3 else name)[0]


def natural_keys(text: str) -> list[int | str]:
    """A key to sort names by, so that numbers in them count as numbers: `sorted(names, key=natural_keys)`."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def atoi(text: str) -> int | str:
    """Digits as a number, any other text as it is."""
    return int(text) if text.isdigit() else text


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """How ZeRO-3 cuts a parameter: elements on each rank, and elements of padding at the end of the last."""
    return -(-unpartitioned_numel // world_size), -unpartitioned_numel % world_size


def main(arguments: Sequence[str] | None = None) -> int:
    """DeepSpeed's script: `zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR`, with its options. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Writes the whole fp32 weights of a sharded checkpoint."
    )
    parser.add_argument("checkpoint_dir", help="the directory that holds 'latest'")
    parser.add_argument("output_dir", help="a directory for shards, or a file ending in .bin, .pt or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="of a shard; 5GB where not given")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of pickles")
    parser.add_argument("-t", "--tag", help="which save; the one that 'latest' names where not given")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    given = vars(parser.parse_args(arguments))
    debug = given.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except ZckptError as error:
        if debug:
            raise
        sys.stderr.writelines(f"{line}\n" for line in error.lines())
        return 2
    return 0


def _dtype(dtype: str | torch.dtype) -> DType:
    return to_dtype(str(dtype).lower())


def _open(checkpoint_dir: Path, tag: str | None) -> Catalog:
    catalog, _ = strip_wrappers(open_catalog(os.fspath(checkpoint_dir), Reading(tag=tag)).catalog, of_trl=False)
    replicas.check(catalog)
    return catalog


def _with_tied(values: Mapping[str, Value], catalog: Catalog) -> dict[str, Value]:
    return {**values, **{dropped: values[kept] for dropped, kept in catalog.aliases.items()}}
