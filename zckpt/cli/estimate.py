"""`zckpt estimate`: what training a model needs, before anything is started.

The function for Python is here too: it asks the trainer about a config, and about a model that only transformers knows, and no
lower room may import the trainer.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from zckpt.base.dataclass import dataclass
from zckpt.cli.arguments import Shown
from zckpt.cli.declare import command
from zckpt.cli.texts import positive

if TYPE_CHECKING:
    from zckpt.estimation.choices import Estimate

_run = partial(typer.Option, rich_help_panel="Run")
_memory = partial(typer.Option, rich_help_panel="Memory")


@dataclass(frozen=True, repr=False, eq=False)
class PlannedRun:
    """The run that is estimated."""

    gpus: Annotated[int, _run("--gpus", metavar="N", callback=positive, help="GPUs per node.")] = 1
    nodes: Annotated[int, _run("--nodes", metavar="M", callback=positive, help="Nodes.")] = 1
    config: Annotated[
        str | None,
        _run("--config", metavar="FILE.json", help="DeepSpeed's config: what it asks for is estimated too."),
    ] = None
    optimizer: Annotated[str, _run("--optimizer", metavar="NAME", help="Without --config.")] = "Adam"
    micro_batch: Annotated[
        int, _run("--micro-batch", metavar="N", callback=positive, help="Samples per GPU, where no config says it.")
    ] = 1
    accumulation: Annotated[
        int, _run("--accumulation", metavar="N", callback=positive, help="Micro batches per step, likewise.")
    ] = 1
    seq_length: Annotated[
        int | None,
        _run(
            "--seq-length", metavar="N", callback=positive,
            help="Tokens of a sample; by default what the model was made for, at most 2,048.",
        ),
    ] = None  # fmt: skip
    adapter: Annotated[
        str | None,
        _run("--adapter", metavar="DIR", help="LoRA adapter; by default the one beside the model's config."),
    ] = None


@dataclass(frozen=True, repr=False, eq=False)
class MemoryGiven:
    """The memory that is given."""

    memory: Annotated[str | None, _memory("--memory", metavar="SIZE", help="Of a GPU, to say what fits.")] = None
    cpu_memory: Annotated[str | None, _memory("--cpu-memory", metavar="SIZE", help="Of a node, likewise.")] = None


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
    from zckpt.estimation.sources import Unknown, find_source

    run = RunShape(gpus, nodes, optimizer, None, micro_batch, seq_length, accumulation)
    given = [None if one is None else to_bytes(one) for one in (memory, cpu_memory)]
    source = find_source(os.fspath(model), None if adapter is None else os.fspath(adapter))
    size = source.model
    if isinstance(size, Unknown):
        try:
            from zckpt.runtime.estimation.live import built_by_transformers
        except ImportError as error:
            raise _missing(error) from error
        size = built_by_transformers(size)
    size = source.complete(size)
    asked, file = None, ""
    if config is not None:
        try:
            from zckpt.runtime.estimation.asked import asked_of
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
    room: MemoryGiven,
    *,
    shown: Shown,
) -> None:
    """Prints an estimate; exit status 1 if it does not fit in the memory that was given."""
    found = estimate(
        model, gpus=planned.gpus, nodes=planned.nodes, config=planned.config, optimizer=planned.optimizer,
        micro_batch=planned.micro_batch, accumulation=planned.accumulation, seq_length=planned.seq_length,
        adapter=planned.adapter, memory=room.memory, cpu_memory=room.cpu_memory,
    )  # fmt: skip
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
