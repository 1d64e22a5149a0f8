"""What pushing costs, beside converting alone, uploading alone, and one after the other.

The hub is the tests' own (tests/hub_server.py) in a process of its own on this machine: it takes every byte over loopback and
throws it away unseen; a real hub's work is done elsewhere. `upload_folder` sends what `to-bf16` wrote, read once before so
that no disk slows it: its memory is at hand then, and so that of the others is too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from limits import limits
from measure import PYTHON, ROOT, ZCKPT, Job, Row, Taken, file_bytes, in_turn, optimizer_bytes, write

TOKEN = "hf_aliceWrites0123456789"
UPLOAD = (
    "import sys; from huggingface_hub import HfApi; api = HfApi(); api.create_repo(sys.argv[2]);"
    "api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])"
)
SERVE = (
    "import sys, threading; sys.path.insert(0, 'tests'); from pathlib import Path; from hub_server import HubServer\n"
    "with HubServer(Path(sys.argv[1])) as hub:\n"
    "    hub.keep, hub.checks, hub.part_bytes, hub.tick_bytes = False, False, 512 << 20, 1 << 60\n"
    "    print(hub.url, flush=True)\n"
    "    threading.Event().wait()\n"
)


def measure(work: Path, layers: int, rounds: int, shard: str = "500MB") -> list[Row]:
    """bf16 from ZeRO-3, to the hub."""
    checkpoint = write(work / "ckpt", 3, "--layers", str(layers))
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(work / "hub")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert server.stdout is not None
    os.environ |= {
        "HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": TOKEN, "HF_HOME": str(work / "hf"),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    out, scratch = work / "weights", work / "scratch"
    convert = [*ZCKPT, "to-bf16", str(checkpoint), str(out), "--quiet", "--max-shard-size", shard]
    upload = [*PYTHON, "-c", UPLOAD, str(out)]
    push = [*ZCKPT, "push", str(checkpoint), "--dtype", "bf16", "--quiet", "--max-shard-size", shard]
    taken = {"convert": Taken(), "upload": Taken(), "push": Taken()}
    try:
        for number in range(rounds):
            jobs = {
                "convert": Job(convert, clears=(out,), touches=True),
                "upload": Job([*upload, f"alice/upload{number}"], warms=(out,), touches=True),
                "push": Job([*push, f"alice/push{number}", "--scratch", str(scratch)], clears=(scratch,), touches=True),
            }
            for name, once in in_turn(jobs, 1).items():
                taken[name].seconds += once.seconds
                taken[name].busy += once.busy
                taken[name].peak = max(taken[name].peak, once.peak)
        nbytes = file_bytes(out)
        least = limits(work).least(cached=optimizer_bytes(checkpoint) + nbytes)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(checkpoint)
        shutil.rmtree(out, ignore_errors=True)
    first, second, pushed = taken["convert"], taken["upload"], taken["push"]
    slower = max(first, second, key=lambda side: side.median)
    both = Taken([a + b for a, b in zip(first.seconds, second.seconds, strict=True)], [], max(first.peak, second.peak))
    what = f"push of {nbytes / 1e9:.1f} GB in bf16"
    return [
        Row(what, pushed, "`zckpt to-bf16` alone", first, least=least),
        Row(what, pushed, "`upload_folder` alone", second, least=least),
        Row(what, pushed, "the slower of the two", slower, least=least),
        Row(what, pushed, "one after the other", both, least=least),
    ]
