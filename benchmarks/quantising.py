"""Quantised weights and GGUF out of a sharded run, beside what people do today: whole weights, then a second tool over them.

    python benchmarks/quantising.py --whole WEIGHTS [--layers 48]            # the model as transformers has it
    python benchmarks/quantising.py --rival RIVALS[n] WEIGHTS OUT  # from weights; llama.cpp's, from a GGUF in bf16

A Llama shape in bf16. The rivals' times begin with whole weights: zckpt's begin with shards of torch.distributed.checkpoint.
llm-compressor is its model-free path, which reads shards of safetensors one by one. llama-quantize is llama.cpp's
`llama_model_quantize`, by llama-cpp-cffi, which was built for a newer C++ library than many systems have: a function that it
takes from there, and calls where an error ends the program, is in `.make/llama/missing.so`. Rows that are cold read the shards
from the disk, as `cold` does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from cold import beside_the_disk
from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, copying, file_bytes, in_turn, remove

WIDTH, INNER, WORDS = 2048, 5632, 32000
RIVALS = (
    *("torch-fp8", "compressed-nvfp4", "compressed-int4", "compressor-fp8", "compressor-nvfp4", "compressor-int4"),
    *("gguf-q8_0", "llama-q8_0", "llama-q4_k_m", "mlx-4"),
)


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Llama's parameters by name; 22 layers are 1.1 B."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{kind}_proj.weight": (WIDTH, WIDTH) for kind in "qkvo"}
        found |= {f"{at}mlp.{kind}_proj.weight": (INNER, WIDTH) for kind in ("gate", "up")}
        found |= {f"{at}mlp.down_proj.weight": (WIDTH, INNER)}
        found |= {f"{at}{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
    return {**found, "model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}


def write(dest: Path, layers: int) -> None:
    """The model in one file, with its config."""
    import torch
    from safetensors.torch import save_file
    from synth import numbers

    dest.mkdir(parents=True)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 16}
    more = {"num_key_value_heads": 16, "vocab_size": WORDS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    more |= {"tie_word_embeddings": False}  # which mlx-lm takes for true
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **sizes, **more}
    (dest / "config.json").write_text(json.dumps(config))
    tensors = {
        name: numbers(number, torch.Size(shape).numel()).to(torch.bfloat16).view(shape)
        for number, (name, shape) in enumerate(shapes(layers).items())
    }
    save_file(tensors, dest / "model.safetensors", {"format": "pt"})


def by_torch(whole: Path, out: Path) -> None:
    """fp8 in blocks of 128 x 128, tensor by tensor; everything is in memory when it is saved."""
    import torch
    from safetensors.torch import load_file, save_file

    made = {}
    for name, weight in load_file(whole / "model.safetensors").items():
        if "_proj." not in name:
            made[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
        made[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales
    out.mkdir()
    save_file(made, out / "model.safetensors", {"format": "pt"})


def by_compressed_tensors(form: str, whole: Path, out: Path) -> None:
    """nvfp4 or int4 by compressed-tensors' scales and compressor, tensor by tensor; all are in memory when they are saved."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import load_file, save_file

    preset, name = {"nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"), "int4": ("W4A16", "pack-quantized")}[form]
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[preset])
    kind, size, made = BaseCompressor.get_value_from_registry(name), scheme.weights.group_size, {}
    for key, weight in load_file(whole / "model.safetensors").items():
        if "_proj." not in key:
            made[key] = weight
            continue
        groups = weight.reshape(len(weight), -1, size)
        second = generate_gparam(weight.amin().float(), weight.amax().float()) if form == "nvfp4" else None
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=second)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        state |= {} if second is None else {"weight_global_scale": second}
        made |= {key.removesuffix("weight") + end: t.contiguous() for end, t in kind.compress(state, scheme).items()}
    out.mkdir()
    save_file(made, out / "model.safetensors", {"format": "pt"})


def by_llm_compressor(form: str, whole: Path, out: Path) -> None:
    """Its model-free path, with as many workers as there are processors."""
    sys.path.append(str(ROOT / ".make" / "llm-compressor"))
    from llmcompressor.entrypoints.model_free import model_free_ptq

    scheme = {"fp8": "FP8_BLOCK", "nvfp4": "NVFP4A16", "int4": "W4A16"}[form]
    ignore = ["lm_head", "re:.*embed_tokens"]
    model_free_ptq(whole, out, scheme=scheme, ignore=ignore, max_workers=os.cpu_count() or 1, device="cpu")


def by_llama(form: str, source: Path, out: Path) -> None:
    """What llama-quantize does, with as many threads as there are processors."""
    home = ROOT / ".make" / "llama"
    ctypes.CDLL(str(home / "missing.so"), ctypes.RTLD_GLOBAL)
    found = importlib.util.spec_from_file_location("_llama_cpp_cpu", next(home.glob("llama/_llama_cpp_cpu*.so")))
    assert found is not None and found.loader is not None
    llama = importlib.util.module_from_spec(found)
    found.loader.exec_module(llama)
    how = llama.lib.llama_model_quantize_default_params()
    how.ftype, how.nthread = {"q8_0": 7, "q4_k_m": 15}[form], os.cpu_count() or 1
    if llama.lib.llama_model_quantize(str(source).encode(), str(out).encode(), llama.ffi.addressof(how)):
        raise SystemExit("llama.cpp could not quantise it")


def by_gguf(whole: Path, out: Path) -> None:
    """q8_0 by the gguf package's own quantisation and writer, without vocabulary."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    writer = gguf.GGUFWriter(out, "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 48)
    with safe_open(whole / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(name).float().numpy()
            target = names.get_name(name, (".weight",))
            if tensor.ndim == 1:
                writer.add_tensor(target, tensor)
            else:
                blocks = gguf.quants.quantize(np.ascontiguousarray(tensor), gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(target, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_mlx(whole: Path, out: Path) -> None:
    """4 bits by mlx_lm.convert itself, without a tokenizer."""
    sys.path.insert(0, str(ROOT / "fixtures"))
    from generate_mlx import convert

    convert(whole, out, 4, 64)


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Each from shards, beside `cp` of the output, and the second pass of each rival."""
    whole, shards, source = work / "whole", work / "shards", work / "whole.gguf"
    subprocess.run([*PYTHON, __file__, "--whole", str(whole), "--layers", str(min(layers, 22))], check=True)
    subprocess.run([*ZCKPT, "to-dcp", str(whole), str(shards), "--quiet"], check=True)
    plain = ["--type", "bf16", "--tokenizer", "none", "--quiet"]
    subprocess.run([*ZCKPT, "to-gguf", str(whole), str(source), *plain], check=True)
    compressed = ("compressed-tensors, from consolidated weights in memory", whole)
    compressor = ("llm-compressor, from consolidated weights", whole)
    llama = ("llama-quantize, from a GGUF in bf16", source)
    commands = {
        "to-fp8, blocks of 128 x 128": (
            ["to-fp8"], [],
            {"torch-fp8": ("torch, from consolidated weights in memory", whole), "compressor-fp8": compressor},
        ),
        "quantize, nvfp4": (
            ["quantize"], ["--to", "nvfp4"], {"compressed-nvfp4": compressed, "compressor-nvfp4": compressor},
        ),
        "quantize, int4": (
            ["quantize"], ["--to", "int4"], {"compressed-int4": compressed, "compressor-int4": compressor},
        ),
        "to-gguf, q8_0": (
            ["to-gguf"], ["--type", "q8_0", "--tokenizer", "none"],
            {"gguf-q8_0": ("the gguf package, from consolidated weights", whole), "llama-q8_0": llama},
        ),
        "to-gguf, q4_k_m": (["to-gguf"], ["--type", "q4_k_m", "--tokenizer", "none"], {"llama-q4_k_m": llama}),
        "to-mlx, 4 bits": (
            ["to-mlx"], ["--bits", "4"], {"mlx-4": ("mlx_lm.convert, from consolidated weights", whole)},
        ),
    }  # fmt: skip
    rows: list[Row] = []
    for what, (command, words, rivals) in commands.items():
        out = work / ("own.gguf" if command == ["to-gguf"] else "own")
        clears = (out, out.with_name(f"{out.name}.zckpt.json"))
        jobs = {
            "ours": Job([*ZCKPT, *command, str(shards), str(out), *words, "--quiet"], clears=clears),
            "cp": copying(out, work / "copy"),
        }
        for rival, (_, begin) in rivals.items():
            theirs = work / "theirs"
            taking = [*PYTHON, __file__, "--rival", rival, str(begin), str(theirs)]
            jobs[rival] = Job(taking, clears=(theirs,), drops=(theirs,))
        taken = in_turn(jobs, rounds)
        least = least_time(work, read=file_bytes(shards), written=file_bytes(out))
        rows.append(Row(what, taken["ours"], "`cp` and `sync` of the output", taken["cp"], least=least))
        for rival, (named, _) in rivals.items():
            rows.append(Row(what, taken["ours"], named, taken[rival], "not durable", least=least))
        rows.append(beside_the_disk(what, [*command, *words], shards, out, rounds, "*.distcp"))
    for path in (whole, shards, source):
        remove(path)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--rival", choices=RIVALS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if options.rival:
        kind, _, form = options.rival.partition("-")
        if kind in ("compressed", "compressor", "llama"):
            by = {"compressed": by_compressed_tensors, "compressor": by_llm_compressor, "llama": by_llama}[kind]
            by(form, options.dest, options.out)
        else:
            {"torch": by_torch, "gguf": by_gguf, "mlx": by_mlx}[kind](options.dest, options.out)
    else:
        write(options.dest, options.layers)
