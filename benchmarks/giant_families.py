"""Saves of 671 billion parameters of each family with experts, as sparse files: planned for the hub, and the outcome verified.

    python benchmarks/giant_families.py [--work DIR] [--results FILE] [--only FAMILY]

With `--only`, rows of other families stay as they are in the results.

A model of transformers on the meta device says names and shapes, in memory as 64 ranks of `fully_shard` have them; torch's own
classes describe the save (`torch.distributed.checkpoint`), and each rank's file has the headers of its parts and holes between
them. `zckpt to-bf16 --to hf --dry-run` plans it. What would be written is then laid out as sparse files, which `zckpt verify
--like config.json` holds against the model's class, name by name and shape by shape. Seconds are those of processors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, ZCKPT, apart, watched

RANKS = 64
COUNTS = "counts.json"
"""What a save holds: the process that measures imports no torch, since a child's peak memory starts from its parent's."""
SIZES: dict[str, Any] = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 129_280, "intermediate_size": 2048, "moe_intermediate_size": 2048, "max_position_embeddings": 4096,
    "num_experts": 256, "num_local_experts": 256, "n_routed_experts": 256, "moe_num_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 3,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", LATENT),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "ernie4_5-moe": ("Ernie4_5_Moe", {}),
    "glm4-moe": ("Glm4Moe", {"first_k_dense_replace": 3}),
    "glm5": ("GlmMoeDsa", LATENT),
    "gpt-oss": ("GptOss", {}),
    "granitemoe": ("GraniteMoe", {}),
    "hunyuan-moe": ("HunYuanMoEV1", {}),
    "jamba": ("Jamba", {"num_experts": 256}),
    "minimax": ("MiniMax", {}),
    "minimax-m2": ("MiniMaxM2", {}),
    "mixtral": ("Mixtral", {}),
    "olmoe": ("Olmoe", {}),
    "phimoe": ("Phimoe", {}),
    "qwen2-moe": ("Qwen2Moe", {}),
    "qwen3-moe": ("Qwen3Moe", {}),
    "qwen3-next": ("Qwen3Next", {}),
    "qwen3_5-moe": ("Qwen3_5Moe", {}),
}
"""Family -> beginning of its classes' names, and what differs in its config."""


def model_of(family: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The config, and the shapes of the tensors of a save."""
    import torch
    import transformers

    name, more = FAMILIES[family]
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    known = kind().to_dict()
    config = kind(**{key: value for key, value in {**SIZES, **more}.items() if key in known or key in more})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    config.architectures = [type(model).__name__]
    return config, {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def write(family: str, home: Path) -> None:
    """The save, and `config.json` beside it."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from zckpt.containers import TensorSpec, torch_zip
    from zckpt.core.dtypes import BF16

    config, shapes = model_of(family)
    home.mkdir(parents=True)
    config.save_pretrained(home)
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    held = [0] * RANKS
    files = [os.open(home / f"__{rank}_0.distcp", os.O_CREAT | os.O_WRONLY) for rank in range(RANKS)]
    for name, shape in shapes.items():
        rows = -(-shape[0] // RANKS) if shape else 1
        chunks = []
        for rank, first in enumerate(range(0, shape[0] if shape else 1, rows)):
            size = (min(rows, shape[0] - first), *shape[1:]) if shape else ()
            offset = (first, *[0] * (len(shape) - 1)) if shape else ()
            spec = TensorSpec("0", BF16, size)
            skeleton = torch_zip.skeleton_of(spec, [spec])
            for at, data in skeleton.literals:
                os.pwrite(files[rank], data, held[rank] + at)
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            place = _StorageInfo(f"__{rank}_0.distcp", held[rank], skeleton.size)
            stored[MetadataIndex(name, torch.Size(offset))] = place
            held[rank] += skeleton.size
        described[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(shape), chunks)
    for fd, nbytes in zip(files, held, strict=True):
        os.ftruncate(fd, nbytes)
        os.close(fd)
    with (home / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, {name: (name,) for name in described}, stored), file)
    counts = {"parameters": sum(map(math.prod, shapes.values())), "tensors": len(shapes), "chunks": len(stored)}
    (home.parent / COUNTS).write_text(json.dumps(counts))


def lay_out(home: Path, out: Path) -> None:
    """What a conversion would write, with holes for its elements."""
    from zckpt.core.dtypes import BF16
    from zckpt.jobs.convert import CONVERT, prepare
    from zckpt.jobs.groups import Form

    prepared = prepare(str(home), str(out), CONVERT.ask(dtype=BF16, form=Form("hf")))
    out.mkdir()
    for output, _ in prepared.plan.files:
        with (out / output.path).open("wb") as file:
            for offset, data in output.literals:
                os.pwrite(file.fileno(), data, offset)
            file.truncate(output.size)


def _lines(page: Path) -> list[str]:
    return page.read_text().splitlines() if page.exists() else []


def main() -> None:
    """Writes, measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_giant_families.md")
    parser.add_argument("--only", choices=FAMILIES, action="append")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    known = {row.split(" ")[1]: row for row in _lines(options.results) if row.startswith("| ")}
    head = [
        f"Models of transformers with 61 layers and 256 experts as {RANKS} ranks of `fully_shard` save them, made by "
        "`benchmarks/giant_families.py`.", "",
        "| family | parameters | tensors | chunks | planned for the hub, CPU s | MiB | tensors there | verified, CPU s | MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    failed = []
    for family in options.only or FAMILIES:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            home, out = Path(work) / "ckpt", Path(work) / "out"
            apart("giant_families", "write", family, home)
            counts = json.loads((Path(work) / COUNTS).read_text())
            try:
                _, plan, _ = watched([*ZCKPT, "to-bf16", str(home), f"{work}/o", "--to", "hf", "--dry-run", "--json"])
                apart("giant_families", "lay_out", home, out)
                _, verify, printed = watched([*ZCKPT, "verify", str(out), "--like", str(home / "config.json")])
            except Exception as error:
                failed.append(f"{family}: {error}")
                print(failed[-1], file=sys.stderr)
                continue
            index = json.loads((out / "model.safetensors.index.json").read_text())
            cells = [
                family, *(f"{number:,}" for number in counts.values()),
                f"{plan.ru_utime + plan.ru_stime:.1f}", f"{plan.ru_maxrss / 1024:,.0f}", f"{len(index['weight_map']):,}",
                f"{verify.ru_utime + verify.ru_stime:.1f}", f"{verify.ru_maxrss / 1024:,.0f}",
            ]  # fmt: skip
            known[family] = f"| {' | '.join(cells)} |"
            print(known[family], printed.splitlines()[-1:], file=sys.stderr)
    table = "\n".join([*head, *(known[family] for family in FAMILIES if family in known)])
    print(table)
    options.results.write_text(table + "\n")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
