"""Reads the weights of a transformers model into deferred parameters: each rank reads only its own rows.

For `zero.Init`.
[Note: from_pretrained] transformers reads a checkpoint in `PreTrainedModel._load_pretrained_model`: under ZeRO-3 rank 0 reads
all files and sends every tensor to all ranks; otherwise every rank reads all files, ahead of what it needs. `take_over` puts a
function before it. A model with deferred parameters is then loaded by transformers' other function for that,
`convert_and_load_state_dict_in_model`, which renames and converts; it gets tensors that stand for a file's (`_Stored`) and one
after another. To read one gives a deferred tensor with this rank's rows. Where tensors are put together (experts), they are
gathered for that. All other models are loaded as ever.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zckpt import live
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import TensorEntry
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.live.device import device_of_messages
from zckpt.runtime.sharding.deferred import Recorder, Rows, recording, room, rows_held_by
from zckpt.runtime.world import rows_of

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""The environment variable that makes transformers read each tensor only when it needs it."""


def take_over() -> None:
    """Makes transformers, if this process has imported it, load models with deferred parameters part by part.

    Before transformers 5.0 rank 0 reads the files and gives each module its tensors. There the rest is done that is left undone:
    parameters that the files lack are initialised, and all ranks get the buffers.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    method = vars(base).get("_load_pretrained_model") if base is not None else None
    if not isinstance(method, staticmethod | classmethod) or hasattr(method.__func__, "__wrapped__"):
        return
    original: Any = method.__func__
    names = [*inspect.signature(original).parameters]
    if names[:3] == ["cls", "model", "state_dict"]:

        @functools.wraps(original)
        def load_older(cls: Any, model: Any, *rest: Any, **more: Any) -> Any:
            with _initialise_as_read(model):
                return original(cls, model, *rest, **more)

        base._load_pretrained_model = classmethod(load_older)  # type: ignore[union-attr]
    if names[:4] != ["model", "state_dict", "checkpoint_files", "load_config"]:
        return

    @functools.wraps(original)
    def load(
        model: nn.Module,
        state_dict: Any,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        recorder = _recorder_of(model)
        if recorder is None or load_config.is_quantized or (state_dict is None and checkpoint_files is None):
            return original(model, state_dict, checkpoint_files, load_config, *rest, **more)
        return _load(model, state_dict, checkpoint_files or (), load_config, recorder), None

    base._load_pretrained_model = staticmethod(load)  # type: ignore[union-attr]


@contextlib.contextmanager
def _initialise_as_read(model: nn.Module) -> Iterator[None]:
    """Initialises deferred parameters like whole ones inside the context; afterwards all ranks have rank 0's buffers."""
    recorder = _recorder_of(model)
    if recorder is None:
        yield
        return
    with recorder:
        for parameter in model.parameters():
            recorder.follow(parameter)
        yield
    for buffer in model.buffers():
        home = buffer.to(device_of_messages()).contiguous()
        dist.broadcast(home.view(-1).view(torch.uint8), 0)
        buffer.copy_(home)


def _recorder_of(model: nn.Module) -> Recorder | None:
    """The active recorder, or one for a model that was made under `zero.Init`; None for any other model."""
    if recording() is not None:
        return recording()
    rows = next((held for held in map(rows_held_by, model.parameters()) if held is not None), None)
    return None if rows is None else Recorder(rows.group)


def _load(model: Any, given: Mapping[str, Any] | None, files: Sequence[str], config: Any, recorder: Recorder) -> Any:
    """Loads weights into a model. Returns the facts that transformers expects: missing names and so on."""
    from transformers import core_model_loading, modeling_utils

    with contextlib.ExitStack() as stack:
        if recorder is not recording():
            stack.enter_context(recorder)
        stack.enter_context(_in_turn())
        states: dict[str, Any] = dict(given or {})
        for file in files if given is None else ():
            stored = _read_stored(file, recorder)
            states.update(modeling_utils.load_state_dict(file) if stored is None else stored)
        load = core_model_loading.convert_and_load_state_dict_in_model
        info, _ = load(model=model, state_dict=states, load_config=config)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and recorder.rows_of(buffer) is not None:
                    attributes = dict(vars(buffer))
                    module._buffers[name] = whole = recorder.whole(buffer)
                    vars(whole).update(attributes)
    return info


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    before = os.environ.get(_IN_TURN)
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_TURN]
        else:
            os.environ[_IN_TURN] = before


def _read_stored(file: str, recorder: Recorder) -> dict[str, _Stored] | None:
    """The tensors of a file by name, unread; None for a file that zckpt does not read."""
    try:
        catalog = open_catalog(file, Reading(allow_unknown_layout=True), as_stored=True).catalog
    except ZckptError:
        return None
    names = (*catalog, *catalog.aliases)
    if not all(hasattr(torch, catalog[name].dtype.torch_name) for name in names):
        return None
    return {name: _Stored(catalog[name], recorder) for name in names}


class _Stored:
    """A tensor in a file, with the methods that transformers calls on an unread one of safetensors."""

    def __init__(self, entry: TensorEntry, recorder: Recorder) -> None:
        self._entry = entry
        self._recorder = recorder

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype, by its safetensors name."""
        return self._entry.dtype.name

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """The tensor, deferred: only this rank's rows are read."""
        entry, group = self._entry, self._recorder.group
        shape, start = entry.shape, 0
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            if dist.get_world_size(group) > 1 and entry.shape and entry.numel:
                rows = rows_of(entry.shape[0], dist.get_world_size(group), dist.get_rank(group))
                shape, start = (len(rows), *entry.shape[1:]), rows.start * (entry.numel // entry.shape[0])
            values = room(shape, getattr(torch, entry.dtype.torch_name))
            live.move([(entry, values)], [start])
        return self._recorder.hold(Rows(values, torch.Size(entry.shape), group))
