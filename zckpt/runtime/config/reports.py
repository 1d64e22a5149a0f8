"""The sections of what a run shows of itself (monitors, timers, profilers), and of activations that are computed again.

For `sections`. Source: DeepSpeed 0.19.8, monitor/config.py, profiling/config.py, utils/config.py, comm/config.py and
runtime/activation_checkpointing/config.py.
"""

from __future__ import annotations

from typing import Literal

from zckpt.runtime.config.fields import Section, unshown_key, unused_key, used_key


class TensorBoardSection(Section):
    """Rank 0 writes losses, learning rates and loss scales for TensorBoard (`pip install tensorboard`)."""

    enabled: bool = used_key(False, "write them")
    output_path: str = used_key("", "files go into `output_path`/`job_name`; by default where the script runs")
    job_name: str = used_key("DeepSpeedJobName", "a directory in `output_path`")


class WandbSection(Section):
    """Rank 0 sends losses, learning rates and loss scales to Weights & Biases (`pip install wandb`)."""

    enabled: bool = used_key(False, "send them; with WANDB_MODE=offline they are kept in files")
    group: str | None = used_key(None, "of runs")
    team: str | None = used_key(None, "wandb's entity")
    project: str = used_key("deepspeed", "wandb's project")


class CSVSection(TensorBoardSection):
    """Rank 0 writes losses, learning rates and loss scales into CSV files, one for each name."""


class CometSection(Section):
    """Rank 0 sends losses, learning rates and loss scales to Comet (`pip install 'comet_ml>=3.41'`)."""

    enabled: bool = used_key(False, "send them")
    samples_log_interval: int = used_key(100, "samples that pass at least between two values of one name", ge=0)
    project: str | None = used_key(None, "for `comet_ml.start`; Comet's variables or its config file hold without it")
    workspace: str | None = used_key(None, "for `comet_ml.start`")
    api_key: str | None = used_key(None, "for `comet_ml.start`")
    experiment_name: str | None = used_key(None, "name of the experiment")
    experiment_key: str | None = used_key(None, "for `comet_ml.start`: 32 to 50 letters and digits")
    online: bool | None = used_key(None, "false keeps the experiment in a file")
    mode: Literal["get", "create", "get_or_create"] | None = used_key(None, "for `comet_ml.start`")


class FlopsProfilerSection(Section):
    """Rank 0 counts the operations of the forward of one step, and prints a table."""

    enabled: bool = used_key(False, "count them")
    recompute_fwd_factor: float = used_key(0.0, "share of the forward that backward repeats, for its FLOPS", ge=0.0)
    profile_step: int = used_key(1, "the step that is counted, from 0", ge=0)
    module_depth: int = used_key(-1, "the table has modules down to this depth; -1: all", ge=-1)
    top_modules: int = used_key(1, "modules of each depth, without `detailed`", ge=0)
    detailed: bool = used_key(True, "all modules in the table; otherwise the costliest of each depth")
    output_file: str | None = used_key(None, "a file for the table; by default stdout")


class ThroughputSection(Section):
    """Samples per second, logged with `steps_per_print`."""

    enabled: bool = used_key(True, "measure them")
    synchronized: bool = used_key(True, "wait for the device before and after a step")


class TimersSection(Section):
    """The parts that are timed."""

    throughput: ThroughputSection = used_key(ThroughputSection(), "see below")


class ActivationSection(Section):
    """The settings of `zckpt.runtime.checkpointing.checkpoint`, which recomputes activations in the backward."""

    partition_activations: bool = unshown_key(False, "there are no tensor-parallel ranks to share activations out over")
    number_checkpoints: int | None = unused_key(None, "only the buffer's size for `contiguous_memory_optimization`")
    contiguous_memory_optimization: bool = unshown_key(False, "kept activations are not copied into one buffer")
    synchronize_checkpoint_boundary: bool = used_key(False, "wait for the device around each call, in the backward too")
    profile: bool = used_key(False, "rank 0 prints the milliseconds of each call, and of each again in the backward")
    cpu_checkpointing: bool = used_key(False, "keep the arguments of a call in host memory until the backward")
