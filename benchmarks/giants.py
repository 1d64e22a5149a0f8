"""Checkpoints of a trillion parameters, as sparse files: opening, planning, and one shard really converted.

    python benchmarks/giants.py [--work DIR] [--results FILE] [--quick]

The files have DeepSpeed's names, structure and sizes, moments included, but only their indexes and the parameters that the test
of one shard needs take room on the disk. What is measured, from outside, is `zckpt to-bf16 --dry-run`; the exponent is that of
the busy seconds over files + fragments, fitted in logarithms.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import ROOT, ZCKPT, apart, watched

from zckpt.containers import TensorSpec, torch_zip
from zckpt.containers.emit import Size
from zckpt.core.dtypes import BF16, F32, DType

VOCABULARY = 51_200
Shapes = dict[str, tuple[int, ...]]


def block_shapes(width: int, tp: int = 1) -> Shapes:
    """Twelve tensors of a transformer block, or a tensor-parallel rank's slices of them."""
    return {
        "input_layernorm.weight": (width,), "input_layernorm.bias": (width,),
        "attention.query_key_value.weight": (3 * width // tp, width), "attention.query_key_value.bias": (3 * width // tp,),
        "attention.dense.weight": (width, width // tp), "attention.dense.bias": (width,),
        "post_attention_layernorm.weight": (width,), "post_attention_layernorm.bias": (width,),
        "mlp.dense_h_to_4h.weight": (4 * width // tp, width), "mlp.dense_h_to_4h.bias": (4 * width // tp,),
        "mlp.dense_4h_to_h.weight": (width, 4 * width // tp), "mlp.dense_4h_to_h.bias": (width,),
    }  # fmt: skip


def layers_of(layers: int, width: int, tp: int = 1) -> list[Shapes]:
    """Embedding, blocks, final norm."""
    ends = ({"word_embeddings.weight": (VOCABULARY // tp, width)}, {"norm.weight": (width,), "norm.bias": (width,)})
    return [ends[0], *(block_shapes(width, tp) for _ in range(layers)), ends[1]]


RULES = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm.*", r".*\.attention\.dense\.bias", r".*\.mlp\.dense_4h_to_h\.bias"],
    "original_vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "vocabulary_parameter_patterns": [r".*word_embeddings\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*\.attention\.dense\.weight", r".*\.mlp\.dense_4h_to_h\.weight"],
}


class Sparse:
    """A torch file whose tensors are holes."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []

    def tensor(self, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
        """A tensor of the file."""
        self.specs.append(TensorSpec(str(len(self.specs)), dtype, shape))
        return self.specs[-1]

    def write(self, path: Path, root: object) -> dict[str, int]:
        """Byte offset of each tensor, by number."""
        skeleton = torch_zip.skeleton_of(root, self.specs)
        with path.open("wb") as file:
            file.truncate(skeleton.size)
            for offset, data in skeleton.literals:
                os.pwrite(file.fileno(), data, offset)
        return skeleton.offsets


def _config(stage: int) -> dict[str, object]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}


def _model(
    stage: int, world_size: int, shapes: Shapes, module: dict[str, TensorSpec], **more: object
) -> dict[str, object]:
    return {
        "module": module, "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
        "param_shapes": [{name: Size(shape) for name, shape in shapes.items()}], "shared_params": {},
        "dp_world_size": world_size, "mp_world_size": 1, "global_steps": 100, "global_samples": 0, "skipped_steps": 0,
        "ds_version": "0.19.8", "ds_config": _config(stage), **more,
    }  # fmt: skip


def _optimizer(path: Path, stage: int, world_size: int, lengths: list[int]) -> int:
    """One rank's optimizer file; the byte offset of its first masters."""
    file = Sparse()
    masters = [file.tensor(F32, (length,)) for length in lengths]
    states = {
        number: {"step": 100, **{name: file.tensor(F32, (length,)) for name in ("exp_avg", "exp_avg_sq")}}
        for number, length in enumerate(lengths)
    }
    inner = {"state": states, "param_groups": [{"lr": 1e-4, "params": list(range(len(lengths)))}]}
    if stage == 3:
        held: dict[str, object] = {
            "fp32_flat_groups": masters, "optimizer_state_dict": inner, "partition_count": world_size
        }  # fmt: skip
    else:
        held = {
            "single_partition_of_fp32_groups": masters, "base_optimizer_state": inner, "partition_count": [world_size],
        }  # fmt: skip
    root = {"optimizer_state_dict": {"zero_stage": stage, **held}, "ds_config": _config(stage), "ds_version": "0.19.8"}
    return file.write(path, root)[masters[0].name]


def numel_of(shapes: Shapes) -> int:
    """Elements of all."""
    return sum(math.prod(shape) for shape in shapes.values())


def _named(layers: list[Shapes], first: int = 0) -> Shapes:
    return {f"{n}.{name}": shape for n, layer in enumerate(layers, first) for name, shape in layer.items()}


def write_zero3(dest: Path, layers: int, width: int, world_size: int) -> None:
    """Each parameter cut over all ranks. Rank 0's masters of the first parameters are real: rank + position."""
    shapes = _named(layers_of(layers, width))
    length = sum(-(-math.prod(shape) // world_size) for shape in shapes.values())
    file = Sparse()
    module = {name: file.tensor(BF16, (0,)) for name in shapes}
    first = dest / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file.write(first, _model(3, world_size, shapes, module))
    for rank in range(world_size):
        if rank:
            shutil.copyfile(first, dest / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        path = dest / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        offset = _optimizer(path, 3, world_size, [length])
        embedding = -(-math.prod(shapes["0.word_embeddings.weight"]) // world_size)
        known = struct.pack("<f", rank + 1) * -(-width // world_size)  # the first norm, cut over all ranks
        with path.open("r+b") as opened:
            os.pwrite(opened.fileno(), known, offset + 4 * embedding)


def write_zero2(dest: Path, layers: int, width: int, world_size: int) -> None:
    """One flat vector cut over all ranks; module weights whole in one file."""
    shapes = _named(layers_of(layers, width))
    file = Sparse()
    module = {name: file.tensor(BF16, shape) for name, shape in shapes.items()}
    file.write(dest / "mp_rank_00_model_states.pt", _model(2, world_size, shapes, module))
    _flat_partitions(dest, 0, numel_of(shapes), world_size, 2)


def _flat_partitions(dest: Path, mp_rank: int, total: int, world_size: int, stage: int) -> None:
    size = -(-total // (2 * world_size)) * 2
    for rank in range(world_size):
        path = dest / f"bf16_zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
        _optimizer(path, stage, world_size, [max(0, min(size, total - rank * size))])


def write_3d(dest: Path, layers: int, width: int, world_size: int, tp: int = 8, pp: int = 16) -> None:
    """Tensor and pipeline parallel, ZeRO-1 under both."""
    dp = world_size // (tp * pp)
    all_layers = layers_of(layers, width, tp)
    for number, shapes in enumerate(all_layers):
        for tp_rank in range(tp):
            file = Sparse()
            local = {name: file.tensor(BF16, shape) for name, shape in shapes.items()}
            file.write(dest / f"layer_{number:02d}-model_{tp_rank:02d}-model_states.pt", local)
    bounds = [round(stage * len(all_layers) / pp) for stage in range(pp + 1)]
    for stage in range(pp):
        shapes = _named(all_layers[bounds[stage] : bounds[stage + 1]], bounds[stage])
        for tp_rank in range(tp):
            rank = stage * tp + tp_rank
            more = {
                "mp_world_size": tp * pp, "universal_checkpoint_info": RULES,
                "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
            }  # fmt: skip
            Sparse().write(dest / f"mp_rank_{rank:02d}_model_states.pt", _model(1, dp, shapes, {}, **more))
            _flat_partitions(dest, rank, numel_of(shapes), dp, 1)


def write(kind: str, dest: Path, layers: int, width: int, world_size: int) -> None:
    """A checkpoint of one kind."""
    dest.mkdir(parents=True)
    (dest.parent / "latest").write_text(dest.name)
    KINDS[kind](dest, layers, width, world_size)


KINDS = {"ZeRO-3": write_zero3, "ZeRO-2": write_zero2, "tensor 8 x pipeline 16 x data": write_3d}


def one_shard(home: Path, work: Path, width: int, world_size: int) -> None:
    """Converts the one shard that holds the first norm; its numbers are known."""
    import numpy
    from safetensors.numpy import load_file

    from zckpt.core.dtypes import F32
    from zckpt.core.plan import Plan
    from zckpt.engine.move import run as move
    from zckpt.jobs.convert import CONVERT, prepare

    name = "1.input_layernorm.weight"
    prepared = prepare(str(home), str(work / "out"), CONVERT.ask(dtype=F32, include=[name]))
    move(Plan(prepared.plan.files, prepared.plan.pairs), str(work))
    (path,) = (file.path for file, _ in prepared.plan.files if file.path.endswith(".safetensors"))
    found = load_file(work / path)[name]
    piece = -(-width // world_size)
    wanted = numpy.repeat(numpy.arange(1, world_size + 1, dtype="<f4"), piece)[:width]
    assert numpy.array_equal(found, wanted)


def sizes(quick: bool) -> Iterator[tuple[int, int, int]]:
    """Layers, width and ranks: each step doubles layers and ranks."""
    for step in range(2 if quick else 4):
        yield 20 << step, 22_912, 128 << step


def main() -> None:
    """Writes, measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_giants.md")
    parser.add_argument("--quick", action="store_true", help="only the two smallest sizes")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = [
        "| layout | parameters | files | fragments | seconds | of them busy | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    told = []
    for kind in KINDS:
        points = []
        for layers, width, world_size in sizes(options.quick):
            with tempfile.TemporaryDirectory(dir=options.work) as work:
                home = Path(work) / "ckpt" / "global_step100"
                apart("giants", "write", kind, home, layers, width, world_size)
                subprocess.run(["sync"], check=True)
                out = f"{work}/out"
                seconds, usage, _ = watched([*ZCKPT, "to-bf16", str(home.parent), out, "--dry-run", "--json"])
                files = len(os.listdir(home))
                numel = numel_of(_named(layers_of(layers, width)))
                tensors = 12 * layers + 3
                fragments = tensors * world_size if kind == "ZeRO-3" else tensors + world_size
                if kind.startswith("tensor"):
                    fragments = tensors * 8 + world_size
                busy = usage.ru_utime + usage.ru_stime
                points.append((files + fragments, busy))
                rows.append(
                    f"| {kind} {world_size // 128 if kind.startswith('tensor') else world_size} | {numel:,} | {files:,} | "
                    f"{fragments:,} | {seconds:.1f} | {busy:.1f} | {usage.ru_maxrss / 1024:,.0f} MiB |"
                )
                print(rows[-1], file=sys.stderr)
                if kind == "ZeRO-3" and world_size == max(w for *_, w in sizes(options.quick)):
                    apart("giants", "one_shard", home.parent, Path(work), width, world_size)
                    told.append(f"One shard of it, from {world_size:,} ranks' files, was converted and is right.")
        exponent = statistics.linear_regression(*([math.log(p[axis]) for p in points] for axis in (0, 1))).slope
        told.append(f"{kind}: busy seconds grow with (files + fragments) to the power {exponent:.2f}.")
    table = "\n".join([*rows, "", *told])
    print(table)
    options.results.write_text(table + "\n")


if __name__ == "__main__":
    main()
