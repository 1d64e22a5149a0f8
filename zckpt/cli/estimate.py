"""`zckpt estimate`: what training a model needs, before anything is started.

The function for Python is here too: it asks the trainer about a config, and about a model that only transformers knows, and no
lower room may import the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zckpt.base.dataclass import dataclass
from zckpt.cli.declare import Shown, command
from zckpt.jobs.groups import option

if TYPE_CHECKING:
    from zckpt.estimation.choices import Estimate
    from zckpt.estimation.sizes import ModelSize

_RUN = "Run"
_MEMORY = "Memory"


@dataclass(frozen=True, repr=False, eq=False)
class PlannedRun:
    """The run that is estimated, and the memory that it has; the arguments of `estimate`."""

    gpus: int = option(1, "--gpus", "positive", "GPUs per node.", _RUN, metavar="N")
    nodes: int = option(1, "--nodes", "positive", "Nodes.", _RUN, metavar="M")
    config: str | None = option(
        None, "--config", "text", "DeepSpeed's config: what it asks for is estimated too.", _RUN, metavar="FILE.json"
    )
    optimizer: str = option("Adam", "--optimizer", "text", "Without --config.", _RUN, metavar="NAME")
    micro_batch: int = option(
        1, "--micro-batch", "positive", "Samples per GPU, where no config says it.", _RUN, metavar="N"
    )
    accumulation: int = option(1, "--accumulation", "positive", "Micro batches per step, likewise.", _RUN, metavar="N")
    seq_length: int | None = option(
        None, "--seq-length", "positive", "Tokens of a sample; by default what the model was made for, at most 2,048.",
        _RUN, metavar="N",
    )  # fmt: skip
    adapter: str | None = option(
        None, "--adapter", "text", "LoRA adapter; by default the one beside the model's config.", _RUN, metavar="DIR"
    )
    memory: str | None = option(None, "--memory", "text", "Of a GPU, to say what fits.", _MEMORY, metavar="SIZE")
    cpu_memory: str | None = option(None, "--cpu-memory", "text", "Of a node, likewise.", _MEMORY, metavar="SIZE")


def estimate(
    model: str | os.PathLike[str],
    *,
    gpus: int = 1,
    nodes: int = 1,
    config: str | os.PathLike[str] | None = None,
    optimizer: str = "Adam",
    micro_batch: int = 1,
    accumulation: int = 1,
    seq_length: int | None = None,
    adapter: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    cpu_memory: int | str | None = None,
) -> Estimate:
    """Estimates how much memory of a GPU and of a node training a model with ZeRO needs, and what fits.

    Args:
        model: a number of parameters such as "7B", a config.json, a directory with one, a checkpoint, or a model of the hub.
        gpus: per node.
        nodes: how many.
        config: DeepSpeed's config: what it asks for is estimated too.
        optimizer: where no config says it.
        micro_batch: samples per GPU, where no config says it.
        accumulation: micro batches per step, where no config says it.
        seq_length: tokens of a sample; None for what the model was made for, at most 2,048.
        adapter: a LoRA adapter; None for the one beside the model's config.
        memory: of a GPU, as bytes or "80GB", to say what fits.
        cpu_memory: of a node, to say what fits.

    Returns:
        Every combination of stage, offload and precision with what it needs. `print` shows what `zckpt estimate` prints; `ok`
        says whether it fits, `best("bf16")` the first choice that does.

    Raises:
        UsageError: there is no such model.
        UnsupportedError: this estimate needs libraries that are not installed.
        ZckptError: another kind says what is wrong with the checkpoint or the config.

    Example:
        >>> zckpt.estimate("model", gpus=8, memory="80GB").choices[0].fits
        True
    """
    from zckpt.base.sizes import to_bytes
    from zckpt.estimation.choices import RunShape, estimate_choices
    from zckpt.estimation.sources import find_source

    run = RunShape(gpus, nodes, optimizer, None, micro_batch, seq_length, accumulation)
    given = [None if one is None else to_bytes(one) for one in (memory, cpu_memory)]

    def build(config: Mapping[str, Any], file: str, name: str) -> ModelSize:
        try:
            from zckpt.runtime.estimation import built_by_transformers
        except ImportError as error:
            raise _missing(error) from error
        return built_by_transformers(config, file, name)

    size = find_source(os.fspath(model), None if adapter is None else os.fspath(adapter), build)
    asked, file = None, ""
    if config is not None:
        try:
            from zckpt.runtime.config.asked import asked_of
        except ImportError as error:
            raise _missing(error) from error
        width = (size.config or {}).get("hidden_size")
        run, asked, file = asked_of(os.fspath(config), run, width=width if isinstance(width, int) else None)
    return estimate_choices(size, run, memory=given[0], host_memory=given[1], asked=asked, file=file)


@command(
    "estimate",
    about="Say how much memory of a GPU and of a node training a model with ZeRO needs, for every stage, offload and "
    "precision, and what fits. MODEL is a config.json, a directory with one, a checkpoint, or a model of the hub.",
    example="zckpt estimate meta-llama/Llama-3.1-8B --gpus 8 --memory 80GB",
    status="0 it fits or no memory is given, 1 it does not fit, 2 error",
)
def _print_estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model to be trained.", show_default=False)],
    planned: PlannedRun,
    *,
    shown: Shown,
) -> None:
    """Prints an estimate; exit status 1 if it does not fit in the memory that was given."""
    found = estimate(model, **asdict(planned))
    sink = shown.console
    sink.result(found.as_json, lambda: found.lines(sink.width))
    if not found.ok:
        raise typer.Exit(1)


def _missing(error: ImportError) -> Exception:
    from zckpt.base.errors import UnsupportedError

    return UnsupportedError(
        "this estimate needs libraries that are not installed",
        found=str(error),
        remedy="Run pip install 'zckpt[train]'.",
    )
