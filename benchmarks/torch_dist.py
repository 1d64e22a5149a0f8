"""Megatron-Core's `torch_dist` to a model of transformers and back, beside a load by Megatron-Core with a save, and `cp`.

    python benchmarks/torch_dist.py write DEST [--layers 48]       # the model that is measured
    python benchmarks/torch_dist.py rival RUN OUT                  # what stands beside zckpt

A bf16 model of Llama's shape: width 2,048, and at 24 layers 1.5 B parameters. `zckpt to-mcore` writes the save of it. The rival
loads all tensors with Megatron-Core's own `dist_checkpointing.load_plain_tensors`, takes queries, keys, values, gates and layers
apart with torch, and writes safetensors; it builds no model, makes no config and does not sync.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from limits import least_time
from measure import PYTHON, ZCKPT, Job, Row, copying, file_bytes, in_turn, remove

WIDTH, WORDS, INNER, HEADS, KEY_HEADS = 2048, 32_000, 8192, 16, 4
SHARD = 5 * 10**9


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model, as transformers has them."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH)}
    keys = WIDTH // HEADS * KEY_HEADS
    for n in range(layers):
        own = {
            "input_layernorm": (WIDTH,), "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (keys, WIDTH),
            "self_attn.v_proj": (keys, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH), "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        }  # fmt: skip
        found |= {f"model.layers.{n}.{name}.weight": shape for name, shape in own.items()}
    return {**found, "model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}


def write(dest: Path, layers: int) -> None:
    """The model, of random numbers."""
    import torch
    from safetensors.torch import save_file

    dest.mkdir(parents=True)
    torch.manual_seed(0)
    save_file({n: torch.randn(s).bfloat16() for n, s in shapes(layers).items()}, dest / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "vocab_size": WORDS,
        "head_dim": WIDTH // HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (dest / "config.json").write_text(json.dumps(config))


def rival(run: Path, out: Path) -> None:
    """The same by Megatron-Core and torch, in memory."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    held: dict[str, Any] = dist_checkpointing.load_plain_tensors(str(run / "release"))
    found: dict[str, Any] = {
        "model.embed_tokens.weight": held["embedding.word_embeddings.weight"][:WORDS],
        "model.norm.weight": held["decoder.final_layernorm.weight"],
        "lm_head.weight": held["output_layer.weight"][:WORDS],
    }
    size, group = WIDTH // HEADS, HEADS // KEY_HEADS
    own = {name.removeprefix("decoder.layers."): t for name, t in held.items() if name.startswith("decoder.layers.")}
    for n in range(len(own["mlp.linear_fc1.weight"])):
        qkv = own["self_attention.linear_qkv.weight"][n].view(KEY_HEADS, group + 2, size, WIDTH)
        gate, up = own["mlp.linear_fc1.weight"][n].chunk(2)
        made = {
            "input_layernorm": own["self_attention.linear_qkv.layer_norm_weight"][n],
            "self_attn.q_proj": qkv[:, :group].reshape(-1, WIDTH), "self_attn.k_proj": qkv[:, group].reshape(-1, WIDTH),
            "self_attn.v_proj": qkv[:, group + 1].reshape(-1, WIDTH),
            "self_attn.o_proj": own["self_attention.linear_proj.weight"][n],
            "post_attention_layernorm": own["mlp.linear_fc1.layer_norm_weight"][n], "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": own["mlp.linear_fc2.weight"][n],
        }  # fmt: skip
        found |= {f"model.layers.{n}.{name}.weight": tensor for name, tensor in made.items()}
    out.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, out / "model.safetensors")
    dist.destroy_process_group()


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """There and back, of half as many layers, which is as many parameters as other sections have."""
    model, run, out, theirs, back = (work / name for name in ("model", "run", "out", "theirs", "back"))
    subprocess.run([*PYTHON, __file__, "write", str(model), "--layers", str(max(layers // 2, 1))], check=True)
    to_mcore = [*ZCKPT, "to-mcore", str(model), str(run), "--quiet"]
    taken = in_turn({"ours": Job(to_mcore, clears=(run,)), "cp": copying(run, back)}, rounds)
    least = least_time(work, read=file_bytes(model), written=file_bytes(run))
    rows = [Row("to-mcore", taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"], least=least)]
    jobs = {
        "ours": Job([*ZCKPT, "to-bf16", str(run), str(out), "--to", "hf", "--quiet"], clears=(out,)),
        "cp": copying(out, back),
        "theirs": Job([*PYTHON, __file__, "rival", str(run), str(theirs)], clears=(theirs,), drops=(theirs,)),
    }
    taken = in_turn(jobs, rounds)
    what = "to-bf16 --to hf"
    least = least_time(work, read=file_bytes(run), written=file_bytes(out))
    loaded = "load by Megatron-Core, and safetensors' save"
    rows.append(Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"], least=least))
    rows.append(Row(what, taken["ours"], loaded, taken["theirs"], "not durable", least=least))
    for path in (model, run, out):
        remove(path)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "rival"])
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.what == "write":
        write(options.path, options.layers)
    else:
        rival(options.path, options.out)
