"""What pushing costs, against converting alone, uploading alone, and one after the other.

    python benchmarks/hub.py [--layers 48] [--rounds 3] [--work DIR]

The hub is the tests' own (tests/hub_server.py) in a process of its own on this machine: it takes every byte over loopback, hashes
what it gets, compares, and throws it away. In turn, round after round: `zckpt to-bf16`; `upload_folder` of what that wrote, read
once before so that no disk slows it; and `zckpt push` of the checkpoint. Medians are printed as a table.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import ROOT, ZCKPT, remove, watched, write

TOKEN = "hf_aliceWrites0123456789"
UPLOAD = (
    "import sys; from huggingface_hub import HfApi; api = HfApi(); api.create_repo(sys.argv[2]);"
    "api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])"
)
SERVE = (
    "import sys, threading; sys.path.insert(0, 'tests'); from pathlib import Path; from hub_server import HubServer\n"
    "with HubServer(Path(sys.argv[1])) as hub:\n"
    "    hub.keep, hub.part_bytes = False, 512 << 20\n"
    "    print(hub.url, flush=True)\n"
    "    threading.Event().wait()\n"
)


def main() -> None:
    """Runs it all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shard", default="500MB")
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_hub.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        lines = measured(Path(work), options)
    print("\n".join(lines))
    options.results.write_text("\n".join(lines) + "\n")


def measured(work: Path, options: argparse.Namespace) -> list[str]:
    """The table's lines."""
    checkpoint = write(work / "ckpt", 3, options.layers)
    subprocess.run(["sh", "-c", "cat $0/*/* > /dev/null", str(checkpoint)], check=True)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(work / "hub")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert server.stdout is not None
    os.environ |= {
        "HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": TOKEN, "HF_HOME": str(work / "hf"),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"convert": [], "upload": [], "push": []}
    busy: dict[str, list[float]] = {name: [] for name in seconds}
    peaks: dict[str, int] = {}
    out = work / "weights"
    try:
        for number in range(options.rounds):
            jobs = {
                "convert": [*ZCKPT, "to-bf16", str(checkpoint), str(out), "--quiet", "--max-shard-size", options.shard],
                "upload": [sys.executable, "-W", "ignore", "-c", UPLOAD, str(out), f"alice/upload{number}"],
                "push": [
                    *ZCKPT, "push", str(checkpoint), f"alice/push{number}", "--dtype", "bf16", "--quiet",
                    "--max-shard-size", options.shard, "--scratch", str(work / "scratch"),
                ],
            }  # fmt: skip
            for name, command in jobs.items():
                if name == "upload":
                    subprocess.run(["sh", "-c", "cat $0/* > /dev/null", str(out)], check=True)
                subprocess.run(["sync"], check=True)
                took, usage = watched(command)
                seconds[name].append(took)
                busy[name].append(usage.ru_utime + usage.ru_stime)
                peaks[name] = max(usage.ru_maxrss, peaks.get(name, 0))
            nbytes = sum(file.stat().st_size for file in out.iterdir())
            remove(out)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(checkpoint)
    convert, upload, push = (statistics.median(seconds[name]) for name in ("convert", "upload", "push"))
    slower = max(convert, upload)
    cpu = {name: f"{statistics.median(taken):.2f}" for name, taken in busy.items()}
    return [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python "
        f"{platform.python_version()}; GPT-2 shape, {options.layers} layers of 1,600, {nbytes / 1e9:.2f} GB in bf16 from "
        f"ZeRO-3 shards of world size 8, shards of {options.shard}; hub on loopback; medians of {options.rounds} rounds; "
        f"{time.strftime('%Y-%m')}.",
        "",
        "| what | s | push, ratio | processor, s | peak memory |",
        "|---|---|---|---|---|",
        f"| `zckpt push` | {push:.2f} | | {cpu['push']} | {peaks['push'] / 1024:.0f} MiB |",
        f"| `zckpt to-bf16` alone | {convert:.2f} | {push / convert:.2f} | {cpu['convert']} | "
        f"{peaks['convert'] / 1024:.0f} MiB |",
        f"| `upload_folder` alone, of what that wrote | {upload:.2f} | {push / upload:.2f} | {cpu['upload']} | "
        f"{peaks['upload'] / 1024:.0f} MiB |",
        f"| the slower of the two | {slower:.2f} | **{push / slower:.2f}** | | |",
        f"| one after the other | {convert + upload:.2f} | **{push / (convert + upload):.2f}** | | |",
    ]


if __name__ == "__main__":
    main()
