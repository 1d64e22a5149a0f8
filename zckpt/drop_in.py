"""DeepSpeed's three functions, with DeepSpeed's signatures: code that calls them changes one import line.

For training scripts that say `from deepspeed.utils.zero_to_fp32 import ...` and want the same result sooner, in less
memory, without a pickle being run. The answers are DeepSpeed's, with these differences, each on purpose:
 - frozen half-precision parameters come as fp32 too, where DeepSpeed leaves them as they were saved;
 - fp64 buffers stay fp64, where DeepSpeed rounds them to fp32;
 - names are the model's own: `_orig_mod.` of torch.compile is stripped;
 - a plain or unsharded checkpoint, and a tag directory itself, are accepted too;
 - names that found no partner in `load_state_dict_from_zero_checkpoint` are told in a warning, not dropped silently.
Source: deepspeed/utils/zero_to_fp32.py (0.19.8).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import torch

from zckpt import live
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.engine import replicas
from zckpt.jobs.convert import Options, convert, output_dtype
from zckpt.jobs.open import open_catalog, strip_wrappers

if TYPE_CHECKING:
    Path = str | os.PathLike[str]

Model = TypeVar("Model", bound=torch.nn.Module)
Value = TypeVar("Value")

_ONE_SHARD = 1 << 62
"""What `max_shard_size=None` means: more bytes than any checkpoint has."""

_ONE_FILE = (".bin", ".pt", ".safetensors")


class LazyTensor:
    """A tensor that is read when `contiguous` is called, each time anew.

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
    """The consolidated weights in memory: fp32 parameters, integer buffers as they are.

    Args:
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        tag: which save, where there are several; by default the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: give `LazyTensor`s, which are read by `.contiguous()`, instead of tensors.

    Returns:
        Tensors by name. Tied names have the same object.

    Raises:
        ZckptError: one of its kinds says what is wrong.
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


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path,
    output_dir: Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the consolidated fp32 weights as `pytorch_model.bin` or `model.safetensors`, or shards of these.

    Args:
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        output_dir: directory for the files, which may exist. A name ending in .bin, .pt or .safetensors that is no
            directory is one file of that format.
        max_shard_size: of a file; None for a single one.
        safe_serialization: write safetensors.
        tag: which save, where there are several; by default the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.

    Raises:
        ZckptError: one of its kinds says what is wrong; no file was replaced then.
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
    )
    convert(checkpoint_dir, out, tag=tag, options=options)


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: Path, tag: str | None = None) -> Model:
    """Loads the consolidated weights straight into a model's own tensors, cast from fp32 to the dtypes these have.

    DeepSpeed's function moves the model to the CPU first; this one leaves it on its device, and needs no second copy
    of the weights in memory.

    Args:
        model: any module whose names are those of the checkpoint.
        checkpoint_dir: the directory that holds the tags, or any other form of a checkpoint.
        tag: which save, where there are several; by default the one that `latest` names.

    Returns:
        The same model.

    Warns:
        UserWarning: some names have no partner on the other side; these are left as they are.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    live.load_into(model, open_catalog(os.fspath(checkpoint_dir), tag).catalog)
    return model


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


def _open(checkpoint_dir: Path, tag: str | None) -> Catalog:
    catalog, _ = strip_wrappers(open_catalog(os.fspath(checkpoint_dir), tag).catalog)
    replicas.check(catalog)
    return catalog


def _with_tied(values: Mapping[str, Value], catalog: Catalog) -> dict[str, Value]:
    return {**values, **{dropped: values[kept] for dropped, kept in catalog.aliases.items()}}
