"""Averages of three checkpoints, beside reading them all (and writing as much), `cp` of the output, and what people do today.

    python benchmarks/averaging.py DEST [--layers 48]                # writes what is averaged
    python benchmarks/averaging.py --rival torch DEST OUT            # averages it in another way; or mergekit, ties, dare_ties

A GPT-2 shape in bf16. The rivals: torch with the tensors of all three files in memory maps, and mergekit's merges.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, copying, file_bytes, in_turn, remove

COUNT = 3
MERGEKIT = ROOT / ".make" / "mergekit"


def write(dest: Path, layers: int) -> None:
    """The checkpoints, `dest/0` and so on."""
    import torch
    from safetensors.torch import save_file
    from synth import numbers, shapes

    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": 1600,
        "n_head": 25,
    }
    for number in range(COUNT):
        home = dest / str(number)
        home.mkdir(parents=True)
        (home / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, shape in shapes(layers).items():
            numel = torch.Size(shape).numel()
            tensors[f"transformer.{name}"] = numbers(number, numel).to(torch.bfloat16).view(shape)
        save_file(tensors, home / "model.safetensors", {"format": "pt"})


def by_torch(dest: Path, out: Path) -> None:
    """The mean in fp32, tensor by tensor; everything is in memory when it is saved."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = [safe_open(dest / str(number) / "model.safetensors", "pt") for number in range(COUNT)]
    mean = {}
    for name in files[0].keys():  # noqa: SIM118 - not a dict
        mean[name] = torch.stack([file.get_tensor(name).float() for file in files]).mean(0).to(torch.bfloat16)
    out.mkdir()
    save_file(mean, out / "model.safetensors", {"format": "pt"})


def by_mergekit(dest: Path, out: Path, method: str = "linear") -> None:
    """A merge of mergekit on the CPU, as its command does it."""
    sys.path.insert(0, str(MERGEKIT))
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    models: list[dict[str, Any]] = [
        {"model": str(dest / str(number)), "parameters": {"weight": 1.0}} for number in range(COUNT)
    ]
    config = {"models": models, "merge_method": method, "dtype": "bfloat16"}
    if method != "linear":
        models[0:1] = []
        for model in models:
            model["parameters"] = {"weight": 0.5, "density": 0.5}
        config["base_model"] = str(dest / "0")
    options = MergeOptions(copy_tokenizer=False, lazy_unpickle=True, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(config), str(out), options)


def reading_and_writing(files: list[str], out: Path, copy: Path, dest: Path) -> Job:
    """All of `files` (in `dest`) are read while what stands in `out` then is written past the page cache: nothing is computed."""
    write = f"dd if={out}/model.safetensors of={copy} bs=4M oflag=direct conv=fsync status=none"
    script = f"{write} & cat {' '.join(files)} > /dev/null; wait"
    return Job(["sh", "-c", script], clears=(copy,), drops=(copy,), warms=(out,), cools=dest)


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Warm beside the rivals, and cold beside reading."""
    dest = work / "models"
    subprocess.run([*PYTHON, __file__, str(dest), "--layers", str(layers)], check=True)
    homes = [str(dest / str(number)) for number in range(COUNT)]
    files = [f"{home}/model.safetensors" for home in homes]
    out = work / "out"
    ours = [*ZCKPT, "average", *homes, str(out), "--quiet"]
    taken = in_turn(
        {
            "ours": Job(ours, clears=(out,), cools=dest),
            "cat": Job(["sh", "-c", f"cat {' '.join(files)} > /dev/null"], cools=dest),
            "both": reading_and_writing(files, out, work / "copy", dest),
        },
        rounds,
    )
    what = "average of 3, from the disk"
    one = file_bytes(out)
    least = least_time(work, read=COUNT * one, written=one, cold=True)
    both = "`cat` of all three while `dd` writes the output"
    rows = [
        Row(what, taken["ours"], "`cat` of all three", taken["cat"], "writes nothing", least=least),
        Row(what, taken["ours"], both, taken["both"], "what the disk can do", least=least),
    ]
    jobs = {"ours": Job(ours, clears=(out,)), "cp": copying(out, work / "copy")}
    rivals = {"torch": "torch, all in memory"}
    sparse = ("ties", "dare_ties") if (MERGEKIT / "mergekit").is_dir() else ()
    if sparse:
        rivals["mergekit"] = "mergekit's linear merge"
    for rival in rivals:
        theirs = work / rival
        command = [*PYTHON, __file__, "--rival", rival, str(dest), str(theirs)]
        jobs[rival] = Job(command, clears=(theirs,), drops=(theirs,))
    taken = in_turn(jobs, rounds)
    what, least = "average of 3", least_time(work, read=COUNT * one, written=one)
    rows.append(Row(what, taken["ours"], "`cp` and `sync` of the output", taken["cp"], least=least))
    rows += [Row(what, taken["ours"], name, taken[rival], "not durable", least=least) for rival, name in rivals.items()]
    taken = in_turn(
        {"ours": Job([*ours[: -2 - COUNT], *homes[:2], str(out), "--slerp", "0.5", "--quiet"], clears=(out,))}, rounds
    )
    rows.append(Row("slerp of 2", taken["ours"], least=least_time(work, read=2 * one, written=one)))
    for method in sparse:
        theirs = work / method
        how = ["--task-vector", homes[0], "--method", method, "--density", "0.5", "--weights", "0.5,0.5", "--quiet"]
        taken = in_turn(
            {
                "ours": Job([*ZCKPT, "average", *homes[1:], str(out), *how], clears=(out,)),
                "theirs": Job([*PYTHON, __file__, "--rival", method, str(dest), str(theirs)], (theirs,), (theirs,)),
            },
            rounds,
        )
        least = least_time(work, read=COUNT * one, written=one)
        what = f"{method} of 2 on a base"
        rows.append(Row(what, taken["ours"], f"mergekit's {method}", taken["theirs"], "not durable", least=least))
    remove(out)
    remove(dest)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rival", choices=("torch", "mergekit", "ties", "dare_ties"))
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if options.rival == "torch":
        by_torch(options.dest, options.out)
    elif options.rival:
        by_mergekit(options.dest, options.out, "linear" if options.rival == "mergekit" else options.rival)
    else:
        write(options.dest, options.layers)
