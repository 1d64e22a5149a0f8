"""Estimates what a model in memory needs, or one that transformers builds without memory.

For scripts, as `zckpt.runtime.estimate`, and for the command where no formula knows a kind of model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import UnsupportedError
from zckpt.base.sizes import to_bytes
from zckpt.estimation.choices import PRECISIONS, Estimate, RunShape, estimate_choices
from zckpt.estimation.deepspeed_formula import parameters_of
from zckpt.estimation.sizes import ModelSize, ParameterSize
from zckpt.runtime.config.asked import asked_of
from zckpt.runtime.sharding.units import Wrap, find_units, parts_of


def estimate(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    gpus: int = 1,
    nodes: int = 1,
    memory: int | str | None = None,
    cpu_memory: int | str | None = None,
    seq_length: int | None = None,
    micro_batch: int = 1,
    accumulation: int = 1,
    optimizer: str = "Adam",
    accelerator: bool = True,
    auto: Mapping[str, Any] | None = None,
    wrap: Wrap | Iterable[Wrap] | None = None,
) -> Estimate:
    """What training a model needs, by GPU and by node, for every stage, offload, precision, with and without checkpointing.

        print(*zckpt.runtime.estimate(model, gpus=8, memory="80GB").lines(), sep=chr(10))

    Nothing is allocated. Frozen parameters (`requires_grad=False`) have no gradients and no states.

    Args:
        model: before `initialize`; on any device, also meta, or made under `zero.Init`.
        config: DeepSpeed's; its stage, precision, optimizer and batch sizes are taken.
        gpus: per node.
        nodes: how many.
        memory: of a GPU, in bytes or as "80GB", to say what fits.
        cpu_memory: host memory of a node.
        seq_length: tokens of a sample; by default what the model was made for, at most 2,048.
        micro_batch: samples per rank and forward, where the config does not say it.
        accumulation: micro batches in a step, where the config does not say it.
        optimizer: where the config does not say it.
        accelerator: False for a run on CPUs: the figures are then of processes.
        auto: values for keys of the config that say "auto".
        wrap: as in `initialize`.

    Raises:
        UsageError: an argument or the config is wrong.
    """
    run = RunShape(gpus, nodes, optimizer, None, micro_batch, seq_length, accumulation, accelerator)
    asked, file = None, ""
    size = size_of(model, wrap=wrap)
    if config is not None:
        width = (size.config or {}).get("hidden_size")
        run, asked, file = asked_of(config, run, auto=auto, width=width if isinstance(width, int) else None)
    room, host = [None if one is None else to_bytes(one) for one in (memory, cpu_memory)]
    return estimate_choices(size, run, precisions=PRECISIONS, memory=room, host_memory=host, asked=asked, file=file)


def size_of(
    model: nn.Module, *, name: str = "", counted: str = "the model in memory", wrap: Wrap | Iterable[Wrap] | None = None
) -> ModelSize:
    """The parameters of a model, in the units that the trainer gathers."""
    sizes: dict[int, ParameterSize] = {}
    tied: set[str] = set()
    for key, p in model.named_parameters(remove_duplicate=False):
        if id(p) in sizes:
            tied.add(sizes[id(p)].name)
        else:
            shape = tuple(getattr(p, "ds_shape", None) or p.shape)
            sizes[id(p)] = ParameterSize(key, shape, p.requires_grad)
    inner = find_units(model, wrap)
    parts = [[id(p) for p in part] for part in parts_of([[unit] for unit in inner])]
    taken = {p for part in parts for p in part}
    units = tuple(tuple(sizes[p] for p in part) for part in reversed(parts) if part)
    order = list(sizes)
    first = min((order.index(p) for p in taken), default=len(order))
    outside = [(at, one) for at, one in enumerate(sizes.values()) if order[at] not in taken]
    before = tuple(one for at, one in outside if at < first)
    _, largest = parameters_of(model)
    return ModelSize(
        name or type(model).__name__, counted, before, units, tuple(one for at, one in outside if at >= first),
        tied=any(one.name in tied for one in before),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        largest_layer=largest, config=_config_of(model),
    )  # fmt: skip


def built_by_transformers(given: Mapping[str, Any], file: str, name: str) -> ModelSize:
    """The parameters of a Hugging Face model, which is built without memory; arguments as in `sources.Build`. Raises
    UnsupportedError if transformers is not installed, or does not know the model.
    """
    remedy = "Run pip install transformers torch, in a version of transformers that knows this kind of model."
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "there is no formula for this kind of model, and transformers is not installed to build it",
            file=file, found=f"model_type {given.get('model_type')!r}", remedy=remedy,
        ) from error  # fmt: skip
    try:
        config = transformers.AutoConfig.for_model(**given)
        head = (given.get("architectures") or [None])[0]
        kind = getattr(transformers, str(head), None)
        with torch.device("meta"):
            model = kind(config) if kind is not None else transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the code of a model raises on a config that it does not like
        raise UnsupportedError(
            "transformers cannot make a model of this config", file=file,
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", remedy=remedy,
        ) from error  # fmt: skip
    model.tie_weights()
    return size_of(model, name=name, counted="config.json, built by transformers without memory")


def _config_of(model: nn.Module) -> Mapping[str, Any] | None:
    """The config of a Hugging Face model, also inside PEFT's wrapper; None if it has none."""
    base: Any = model
    if hasattr(model, "get_base_model"):
        base = base.get_base_model()
    config: Any = getattr(base, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return None
    return {**config.to_dict(), "architectures": [type(base).__name__]}
