"""What transposing costs: `--to hf:gpt2`, whose linear layers are transposed, beside the same conversion as it is stored.

The save is one of Megatron-DeepSpeed's without ZeRO, with fp32 weights: GPT-2's shape under Megatron's names. In memory no disk
hides what a processor does; to a disk is what most people wait for. The other output has the same numbers in another order.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, file_bytes, in_turn, paired

WIDTH, WORDS, POSITIONS, HEADS = 1600, 50_257, 1024, 25
MOST = 12
"""Layers of the model whose save and outputs fit in memory together."""


def shapes(layers: int, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model, as Megatron-DeepSpeed has them."""
    model = "language_model."
    found: dict[str, tuple[int, ...]] = {
        f"{model}embedding.word_embeddings.weight": (WORDS, width),
        f"{model}embedding.position_embeddings.weight": (POSITIONS, width),
    }
    for layer in range(layers):
        for name, rows, columns in (
            ("input_layernorm", 0, width), ("self_attention.query_key_value", 3 * width, width),
            ("self_attention.dense", width, width), ("post_attention_layernorm", 0, width),
            ("mlp.dense_h_to_4h", 4 * width, width), ("mlp.dense_4h_to_h", width, 4 * width),
        ):  # fmt: skip
            block = f"{model}encoder.layers.{layer}.{name}"
            found[f"{block}.weight"] = (rows, columns) if rows else (columns,)
            found[f"{block}.bias"] = (rows or columns,)
    return {**found, **{f"{model}encoder.final_layernorm.{kind}": (width,) for kind in ("weight", "bias")}}


def write(dest: Path, layers: int) -> None:
    """The save, of random numbers."""
    import torch

    torch.manual_seed(0)
    args = argparse.Namespace(
        num_layers=layers, hidden_size=WIDTH, num_attention_heads=HEADS, max_position_embeddings=POSITIONS,
        layernorm_epsilon=1e-5, bias_gelu_fusion=True,
    )  # fmt: skip
    root = {
        "module": {name: torch.randn(shape) for name, shape in shapes(layers).items()}, "optimizer": None, "args": args,
        "checkpoint_version": 3.0, "iteration": 3, "global_steps": 3, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {},
        "ds_version": "0.19.8", "buffer_names": [], "param_shapes": None, "shared_params": {},
    }  # fmt: skip
    tag = dest / "global_step3"
    tag.mkdir(parents=True)
    (dest / "latest").write_text(tag.name)
    torch.save(root, tag / "mp_rank_00_model_states.pt")


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """fp32 and bf16, in memory and to a disk."""
    few = min(layers, MOST)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        rows = _rows(f", {few} layers", Path(memory), few, rounds)
    return [*rows, *_rows(" to a disk", work, layers, rounds)]


def _rows(where: str, place: Path, layers: int, rounds: int) -> list[Row]:
    save, turned, stored = place / "run", place / "turned", place / "stored"
    script = [*PYTHON, str(ROOT / "benchmarks" / "transposing.py"), str(save), "--layers", str(layers)]
    subprocess.run(script, check=True)
    rows = []
    for dtype in ("fp32", "bf16"):
        command = [*ZCKPT, f"to-{dtype}", str(save), "--quiet"]
        jobs = {
            "turned": Job(
                [*command, str(turned), "--to", "hf:gpt2"], clears=(turned, stored), warms=(save,), touches=True
            ),
            "stored": Job([*command, str(stored)], clears=(turned, stored), warms=(save,), touches=True),
        }
        taken = in_turn(jobs, rounds)
        what, rival = f"to-{dtype} --to hf:gpt2{where}", f"`zckpt to-{dtype}`, not transposed"
        least = least_time(place, read=file_bytes(save), written=file_bytes(stored))
        ratio = paired(taken["turned"], taken["stored"])
        rows.append(Row(what, taken["turned"], rival, taken["stored"], least=least, paired=ratio))
        shutil.rmtree(stored)
    shutil.rmtree(save)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--layers", type=int, default=MOST)
    options = parser.parse_args()
    write(options.dest, options.layers)
