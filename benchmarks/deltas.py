"""Deltas between two versions of a model, one step of fine-tuning apart, beside `cat` of both and what a trainer does.

    python benchmarks/deltas.py DEST [--layers 48]                    # writes both versions
    python benchmarks/deltas.py --rival encode|apply DEST OUT [DELTA] # does the same with both versions in memory
    python benchmarks/deltas.py --trained                             # the ratio after real steps of the trainer

A GPT-2 shape in bf16; the fp32 weights of the new version are a step of Adam with a learning rate of 1e-5 away from the old
ones. The rival does what trainers that write for SGLang do: both versions in memory, each tensor's frame made at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from limits import least_time
from measure import PYTHON, ZCKPT, Job, Row, file_bytes, in_turn, remove

RATE = 1e-5


def write(dest: Path, layers: int) -> None:
    """Both versions, `dest/old` and `dest/new`."""
    import torch
    from safetensors.torch import save_file
    from synth import numbers, shapes

    old, new = {}, {}
    for number, (name, shape) in enumerate(shapes(layers).items()):
        numel = torch.Size(shape).numel()
        masters = numbers(number, numel) * 0.02
        step = RATE * numbers(number + 1, numel).clamp(-1, 1)
        old[name] = masters.to(torch.bfloat16).view(shape)
        new[name] = (masters - step).to(torch.bfloat16).view(shape)
    for home, tensors in (("old", old), ("new", new)):
        (dest / home).mkdir(parents=True)
        save_file(tensors, dest / home / "model.safetensors", {"format": "pt"})


def encode(dest: Path, out: Path) -> None:
    """All differences in memory, then saved."""
    import numpy as np
    import safetensors.numpy
    import torch
    import xxhash
    import zstandard
    from safetensors.torch import load_file

    def of(home: str) -> dict[str, np.ndarray]:
        tensors = load_file(dest / home / "model.safetensors")
        return {name: tensor.view(torch.uint8).numpy().reshape(-1) for name, tensor in tensors.items()}

    old, new = of("old"), of("new")
    found, digests = {}, {}
    for name, data in new.items():
        difference = data ^ old[name]
        if np.count_nonzero(difference):
            found[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(difference), np.uint8)
            digests[name] = xxhash.xxh3_128(data).hexdigest()
    out.mkdir()
    safetensors.numpy.save_file(found, out / "model-00000-of-00001.safetensors", digests)


def apply(dest: Path, out: Path, delta: Path) -> None:
    """The new version in memory, proved, then saved."""
    import numpy as np
    import torch
    import xxhash
    import zstandard
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(dest / "old" / "model.safetensors")
    for file in sorted(delta.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                data = tensors[name].view(torch.uint8).numpy().reshape(-1)
                data ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(opened.get_tensor(name)), np.uint8)
                assert xxhash.xxh3_128(data).hexdigest() == opened.metadata()[name]
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def trained() -> None:
    """Prints what one step of the trainer changes, in bf16, at usual rates of fine-tuning."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import zckpt
    import zckpt.runtime

    for rate in (1e-6, 1e-5, 1e-4):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=2048, n_positions=64, bos_token_id=0, eos_token_id=0)
        )
        settings = {
            "train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        }  # fmt: skip
        engine, *_ = zckpt.runtime.initialize(model=model, config=settings)
        with tempfile.TemporaryDirectory() as home:
            for step in range(6):
                if step == 5:
                    zckpt.live.save_pretrained(engine, f"{home}/old", "bf16")
                tokens = torch.randint(0, 2048, (4, 32))
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            report = zckpt.live.export_delta(engine, f"{home}/old", f"{home}/delta")
        print(json.dumps({"rate": rate, "ratio": report.ratio, "density": report.density}))


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Making and applying, warm beside the rival; making from the disk beside reading both versions."""
    dest = work / "versions"
    subprocess.run([*PYTHON, __file__, str(dest), "--layers", str(layers)], check=True)
    old, new = dest / "old", dest / "new"
    out, applied, theirs = work / "weight_v000001", work / "applied", work / "theirs"
    making = [*ZCKPT, "delta", str(old), str(new), str(out), "--quiet"]
    reading = ["sh", "-c", f"cat {old}/model.safetensors {new}/model.safetensors > /dev/null"]
    taken = in_turn({"ours": Job(making, clears=(out,), cools=dest), "cat": Job(reading, cools=dest)}, rounds)
    manifest = json.loads((out / "zckpt.json").read_text())
    counts = manifest["options"]["delta"]
    ratio = sum(file["bytes"] for file in manifest["files"]) / counts["nbytes"]
    said = f"{ratio:.1%} of the weights; {counts['changed'] / counts['numel']:.1%} of the elements changed"
    whole, differs = file_bytes(old), file_bytes(out)
    least = least_time(work, read=2 * whole, written=differs, cold=True)
    cat = "`cat` of both versions"
    rows = [Row("delta, from the disk", taken["ours"], cat, taken["cat"], "writes nothing", least=least)]
    rival = [*PYTHON, __file__, "--rival"]
    jobs = {
        "ours": Job(making, clears=(out,)),
        "theirs": Job([*rival, "encode", str(dest), str(theirs)], clears=(theirs,), drops=(theirs,)),
    }
    taken = in_turn(jobs, rounds)
    least = least_time(work, read=2 * whole, written=differs)
    alone = "both in memory, one thread"
    rows.append(Row(f"delta: {said}", taken["ours"], alone, taken["theirs"], "not durable", least=least))
    jobs = {
        "ours": Job([*ZCKPT, "apply", str(old), str(out), str(applied), "--quiet"], clears=(applied,)),
        "theirs": Job([*rival, "apply", str(dest), str(theirs), str(out)], clears=(theirs,), drops=(theirs,)),
    }
    taken = in_turn(jobs, rounds)
    least = least_time(work, read=whole + differs, written=whole)
    rows.append(Row("apply", taken["ours"], "in memory, one thread", taken["theirs"], "not durable", least=least))
    for path in (out, applied, dest):
        remove(path)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("delta", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rival", choices=("encode", "apply"))
    parser.add_argument("--trained", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.trained:
        trained()
    elif options.rival == "encode":
        encode(options.dest, options.out)
    elif options.rival:
        apply(options.dest, options.out, options.delta)
    else:
        write(options.dest, options.layers)
