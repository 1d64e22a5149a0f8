"""Small functions and classes: memory, seeds, norms, devices, files' names, the logger, operations; loaders that begin again.

Source: DeepSpeed 0.19.8, runtime/utils.py, runtime/dataloader.py, utils/init_on_device.py, utils/nvtx.py, utils/module_utils.py,
launcher/runner.py, checkpoint/utils.py, utils/logging.py.
Scripts and tests that ask `deepspeed.ops` are told what they may use: device nvme, too, without DeepSpeed's library.

Functions on models and parameters at stage 3: runtime/zero/config.py, partition_parameters.py, stage3.py, stage_1_and_2.py,
utils.py, and utils/tensor_fragment.py; all of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zckpt import drop_in
from zckpt.base.errors import UsageError
from zckpt.base.words import join_words
from zckpt.estimation.deepspeed_formula import parameters_of
from zckpt.live.device import CPU
from zckpt.live.parts import unwrap
from zckpt.live.slices import copies_of
from zckpt.runtime import parameters
from zckpt.runtime.deepspeed_api.accelerator import get_accelerator
from zckpt.runtime.init_context import GatheredParameters
from zckpt.runtime.loader import map_tensors
from zckpt.runtime.names.table import OWN_FILES, refuse
from zckpt.runtime.observe.timer import GIB
from zckpt.runtime.observe.timer import see_memory_usage as see_memory_usage
from zckpt.runtime.optimizers.build import ELEMENTWISE

Function = TypeVar("Function", bound=Callable[..., Any])

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The name of the file of variables that `accelerate launch` reads before it starts torchrun's processes."""


class DummyOptim:
    """A stand-in with parameters, where there is no optimizer. `params`: the parameters."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params)}]


noop_context = nullcontext


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Makes the directory of a file, if it is not there."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """The same lists, tuples and dicts with their tensors on a device. `criterion_func` says which are moved."""
    return map_tensors(lambda one: one.to(device) if criterion_func is None or criterion_func(one) else one, item)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of a model-parallel rank's model file."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's optimizer file."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of a layer's file in a pipeline's checkpoint."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = CPU) -> Any:
    """The same lists, tuples and dicts with copies of their tensors, each in memory of its own."""
    return map_tensors(lambda one: one.detach().to(device, copy=True), item)


def get_global_norm(norm_list: Sequence[float]) -> float:
    """The norm of all tensors together, from the norm of each."""
    return float(sum(float(norm) ** 2 for norm in norm_list) ** 0.5)


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """The norm of these tensors together, on this rank."""
    norms = [torch.linalg.vector_norm(tensor.detach().float(), norm_type) for tensor in input_tensors]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clips the gradients of plain parameters and returns their norm; an engine clips by `gradient_clipping`."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The bounds of parts of equal length: `num_parts` + 1 numbers, the first 0 and the last `num_items`."""
    size, more = divmod(num_items, num_parts)
    bounds = [0]
    for part in range(num_parts):
        bounds.append(bounds[-1] + size + (part < more))
    return bounds


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """The bounds of parts, with the heaviest as light as can be. Some are empty if there are fewer items than parts."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums, best = [0.0, *itertools.accumulate(weights)], [(0.0, [0])] + [(math.inf, [0])] * len(weights)
    for _ in range(num_parts):  # the heaviest part of the first items, and the bounds, with one part more
        best = [
            min((max(best[begin][0], sums[end] - sums[begin]), [*best[begin][1], end]) for begin in range(end))
            if end
            else (math.inf, [0])
            for end in range(len(sums))
        ]
    return best[-1][1]


def empty_cache() -> None:
    """Gives memory that torch keeps back to the device, and begins to look for the most again."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def get_ma_status() -> int:
    """Memory of tensors on rank 0, in bytes; 0 on other ranks."""
    return get_accelerator().memory_allocated() if _rank() == 0 else 0


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints how much memory tensors have, on one rank, or on all with -1."""
    if reset_max:
        get_accelerator().reset_peak_memory_stats()
    if print_rank in (-1, _rank()):
        now, most = get_accelerator().memory_allocated() / GIB, get_accelerator().max_memory_allocated() / GIB
        print(f"RANK={_rank()} MEMSTATS {msg} current alloc={now:.4f}GB max={most:.4f}GB")  # noqa: T201


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class RepeatingLoader:
    """A loader that begins again when it has ended. `loader`: what is repeated."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Makes new tensors on a device, "meta" by default, inside a `with` block; those of floating-point numbers in `dtype`,
    unless they are made with another. `enabled`: False does nothing.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._inside.enter_context(torch.device(self.device))
            if self.dtype is not None:
                self._inside.enter_context(_OfDtype(self.dtype))
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


class _OfDtype(TorchDispatchMode):
    """Makes new floating-point tensors in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        new = func.overloadpacket.__name__ in ("empty", "zeros", "ones", "full", "randn", "rand")
        if new and isinstance(made, torch.Tensor) and made.is_floating_point():
            made = made.to(self._dtype)
        return made


def instrument_w_nvtx(func: Function) -> Function:
    """A function that torch.profiler shows under its name."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """An attribute by its dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets an attribute by its dotted name."""
    place, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, place) if place else model, last, module)


logger = logging.getLogger("zckpt.runtime")

_NAMES = ("debug", "info", "warning", "error", "critical")
log_levels: dict[str, int] = {name: getattr(logging, name.upper()) for name in _NAMES}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks, with their number; [-1] means all, and without a process group every process logs."""
    if (text := _of_ranks(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints a message on some ranks."""
    if (text := _of_ranks(message, ranks)) is not None:
        print(text)  # noqa: T201


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """The same as `log_dist`, once per process and message."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(message: str) -> None:
    """Logs a warning once per process."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets which messages are logged. Raises UsageError for an unknown level."""
    chosen = custom_logger or logger
    chosen.setLevel(_level(log_level_str))
    for handler in chosen.handlers:
        handler.setLevel(_level(log_level_str))


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of this level are logged. Raises UsageError for an unknown level."""
    return logger.getEffectiveLevel() <= _level(max_log_level_str)


def _level(name: str) -> int:
    if name.lower() not in log_levels:
        known = join_words(_NAMES, "or")
        raise UsageError(f"there is no log level {name!r}", expected=known, remedy="Choose one of these.")
    return log_levels[name.lower()]


def _of_ranks(message: str, ranks: Sequence[int] | None) -> str | None:
    """The message with the rank's number, if this rank logs it; otherwise None."""
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    rank = dist.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None


COMPATIBLE_OPS = {
    **dict.fromkeys(("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"), True),
    **dict.fromkeys(
        (
            "cutlass_ops", "dc", "deepspeed_ccl_comm", "deepspeed_not_implemented", "deepspeed_shm_comm",
            "evoformer_attn", "fp_quantizer", "gds", "inference_core_ops", "pin_memory", "quantizer",
            "ragged_device_ops", "ragged_ops", "random_ltd", "spatial_inference", "stochastic_transformer",
            "transformer", "transformer_inference", "utils",
        ),
        False,
    ),
}  # fmt: skip
"""DeepSpeed's names of its C++ and CUDA parts -> whether their function is available here, by any means."""


class AsyncIOBuilder:
    """DeepSpeed's builder of I/O for device nvme; ours needs no libaio. `NAME`: its key in `COMPATIBLE_OPS`."""

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a run may use device nvme: True."""
        del verbose
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuses to load DeepSpeed's library, which is not here. Raises UnsupportedError always."""
        del verbose
        refuse("AsyncIOBuilder.load", OWN_FILES)


Directory = str | os.PathLike[str]


class ZeroStageEnum(IntEnum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: Directory, tag: str | None = None) -> Any:
    """Loads the consolidated fp32 weights into a model. A sharded model gets them as plain tensors on the CPU, on every
    rank.

    Its engine's parts are loaded too, and used again by the next forward that trains. `zckpt` has a function of this name that
    loads the parts alone.
    """
    drop_in.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag)
    copies = copies_of(unwrap(model))
    if copies is not None:
        copies.make_plain(unwrap(model))
        drop_in.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag)
    return model


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model inside an engine, with whole parameters, for generating on all ranks."""
    with GatheredParameters(model.parameters()):
        yield getattr(model, "module", model)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: torch.device | None = None
) -> Callable[..., Any]:
    """Returns the constructor of tensors as it is; transformers replaces this function around `zero.Init`.

    DeepSpeed's casts what a constructor makes. `Init` casts the parameters of a module, and no other tensor.
    """
    del target_fp_dtype, target_device
    return fn


def model_to_params(model: Any) -> int:
    """Elements of a model's parameters, those that share memory once."""
    return parameters_of(model)[0]


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Whether a parameter is sharded at stage 3."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to treat each element by itself, so that it may see shards."""
    return type(optimizer).__name__ in ELEMENTWISE


def get_full_hp_param(self: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
    """The whole fp32 weight of a parameter, or with a key one of its optimizer states."""
    if optim_state_key is None:
        return parameters.safe_get_full_fp32_param(self)
    return parameters.safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Sets the value that `get_full_hp_param` returns."""
    if optim_state_key is None:
        parameters.safe_set_full_fp32_param(self, value)
    else:
        parameters.safe_set_full_optimizer_state(self, value, optim_state_key)
