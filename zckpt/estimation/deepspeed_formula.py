"""DeepSpeed's estimator of memory, number for number and line for line, under its own names.

For `zckpt.runtime.runtime.zero`. It is a formula of parameter counts; docs/estimate.md says what it leaves out. For what this
trainer needs, see `zckpt.runtime.estimate`.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py; compared in tests/interop/test_estimators.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def parameters_of(model: Any) -> tuple[int, int]:
    """A model's parameters, those that share memory once, and those of its largest layer. `model`: an `nn.Module`; a
    model made under `zero.Init` is counted whole. Returns elements of all parameters, and of the module that has the
    most of its own.
    """
    total = {p.data_ptr() or id(p): _numel(p) for p in model.parameters()}
    largest = max((sum(_numel(p) for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return sum(total.values()), largest


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """DeepSpeed's figures for stage 2. Returns bytes of host memory per node, and bytes per GPU."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    gpu = 2 * total_params + int(18 * total_params / gpus)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """DeepSpeed's figures for stage 3. Returns bytes of host memory per node, bytes per GPU, and bytes of the largest
    layer.
    """
    gpus = num_nodes * num_gpus_per_node
    largest = 4 * largest_layer_params
    if cpu_offload:
        per_element = 18 if cpu_offload_params else 16
        gpu = largest + (0 if cpu_offload_params else int(2 * total_params / gpus))
        if zero_init:
            cpu = total_params * per_element * (1 / num_nodes)  # in this order, rounding is DeepSpeed's
        else:
            cpu = total_params * max(4 * num_gpus_per_node, per_element * (1 / num_nodes))
    else:
        gpu = largest + int(18 * total_params / gpus)
        cpu = (largest_layer_params if zero_init else total_params) * 4 * num_gpus_per_node
    return int(cpu * additional_buffer_factor), int(gpu), largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints DeepSpeed's figures for stage 2 and a model that exists; see `parameters_of`."""
    total, _ = parameters_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints DeepSpeed's figures for stage 2: GiB per node's CPU and per GPU, for each choice of offload."""
    rows = []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((*needs, f"offload_optimizer={_device(offload)}"))
    _print(f"{int(total_params / 1e6)}M total params.", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints DeepSpeed's figures for stage 3 and a model that exists; see `parameters_of`."""
    total, largest = parameters_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints DeepSpeed's figures for stage 3: GiB per node's CPU and per GPU, for each choice of offload and `zero.Init`."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params, init,
                additional_buffer_factor,
            )  # fmt: skip
            words = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero_init={int(init)}"
            rows.append((cpu, gpu, words))
    what = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params."
    _print(what, num_gpus_per_node, num_nodes, rows)


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _print(model: str, gpus: int, nodes: int, rows: Iterable[tuple[int, int, str]]) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.",
        f"SW: Model with {model}",
        "  per CPU  |  per GPU |   Options",
        *(f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {words}" for cpu, gpu, words in rows),
    ]
    print("\n".join(lines))  # noqa: T201 - DeepSpeed's function prints
