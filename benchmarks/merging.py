"""A LoRA merged into its base model, beside PEFT's own merge and `cp` of the bytes written.

    python benchmarks/merging.py DEST [--layers 48]     # writes the base model and the adapter
    python benchmarks/merging.py --rival DEST OUT       # merges with PEFT and saves

A GPT-2 shape in bf16, with an fp32 LoRA of rank 16 on all matrices of its blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, copying, file_bytes, in_turn, remove

RANK = 16
TARGETS = ("c_attn", "c_proj", "c_fc")


def write(dest: Path, layers: int) -> None:
    """The model, `dest/base`, and `dest/adapter`."""
    import torch
    from safetensors.torch import save_file
    from synth import numbers, shapes

    base, adapter = dest / "base", dest / "adapter"
    base.mkdir(parents=True)
    adapter.mkdir()
    sizes = {"n_layer": layers, "n_embd": 1600, "n_head": 25}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "bfloat16", **sizes}
    (base / "config.json").write_text(json.dumps(config))
    tensors, factors = {}, {}
    for number, (name, shape) in enumerate(shapes(layers).items()):
        values = numbers(number, torch.Size(shape).numel()).to(torch.bfloat16).view(shape)
        tensors[f"transformer.{name}"] = values
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(TARGETS):
            key = f"base_model.model.transformer.{module}"
            factors[f"{key}.lora_A.weight"] = numbers(2 * number, RANK * shape[0]).view(RANK, shape[0])
            factors[f"{key}.lora_B.weight"] = numbers(3 * number, RANK * shape[1]).view(shape[1], RANK)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "fan_in_fan_out": True}
    said = {**lora, "target_modules": list(TARGETS), "bias": "none", "inference_mode": True}
    (adapter / "adapter_config.json").write_text(json.dumps(said))


def by_peft(dest: Path, out: Path) -> None:
    """`merge_and_unload`, and `save_pretrained`."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(dest / "base", dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(base, dest / "adapter").merge_and_unload().save_pretrained(out)


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Beside `cp`, and beside PEFT."""
    dest, out, theirs = work / "models", work / "out", work / "peft"
    subprocess.run([*PYTHON, __file__, str(dest), "--layers", str(layers)], check=True)
    ours = [*ZCKPT, "to-bf16", str(dest / "adapter"), str(out), "--merge-lora", "--base", str(dest / "base"), "--quiet"]
    rival = [*PYTHON, __file__, "--rival", str(dest), str(theirs)]
    taken = in_turn(
        {
            "ours": Job(ours, clears=(out,)),
            "cp": copying(out, work / "copy"),
            "peft": Job(rival, clears=(theirs,), drops=(theirs,)),
        },
        rounds,
    )
    least = least_time(work, read=file_bytes(dest), written=file_bytes(out))
    remove(out)
    remove(dest)
    what, peft = f"LoRA of rank {RANK} merged, bf16", "PEFT's `merge_and_unload` and `save_pretrained`"
    return [
        Row(what, taken["ours"], "`cp` and `sync` of the output", taken["cp"], least=least),
        Row(what, taken["ours"], peft, taken["peft"], "not durable", least=least),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rival", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if options.rival:
        by_peft(options.dest, options.out)
    else:
        write(options.dest, options.layers)
