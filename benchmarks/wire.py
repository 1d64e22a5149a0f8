"""A store that limits each request (`slow_store`), beside 32 parallel requests of 8 MiB for the same bytes.

    python benchmarks/wire.py get|put PORT FILE...          # the rival; prints its seconds

Sources of each kind are made of one Llama shape with zckpt's own commands. The rival reads all weights of the source and converts
nothing, or sends what zckpt wrote; both are measured from the start of the program.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import quantising
from measure import PYTHON, ROOT, ZCKPT, Job, Row, Taken, in_turn, remove, write

REQUESTS, PART = 32, 8 << 20
LEAST_BYTES = 1 << 20
"""Smaller files are not weights."""
RATE = 8.0
"""MB a second of each request."""


def measure(work: Path, layers: int, rounds: int, rate: float = RATE) -> list[Row]:
    """Every kind of source to plain weights on this machine, then an upload."""
    root = work / "bucket"
    sources = make(root, max(1, layers // 8))
    script = [*PYTHON, str(ROOT / "benchmarks" / "slow_store.py"), str(root), "--rate", str(rate)]
    server = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    rows = []
    try:
        for what, source in sources.items():
            out = work / "out"
            convert = Job([*ZCKPT, "to-bf16", f"s3://bkt/{source}", str(out), "--quiet"], clears=(out,), drops=(out,))
            rows.append(_row(f"{what} -> bf16", convert, _rival("get", port, weights(root / source), root), rounds))
        sent = root / "sent"
        upload = [*ZCKPT, "to-bf16", str(root / sources["one file"]), "s3://bkt/sent", "--quiet"]
        rival = _rival("put", port, weights(root / sources["one file"]), root)
        rows.append(_row("one file -> bf16 in the bucket", Job(upload, clears=(sent,)), rival, rounds))
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(root)
        shutil.rmtree(root.with_name("bucket.parts"), ignore_errors=True)
    return rows


def make(root: Path, layers: int) -> dict[str, str]:
    """Kind of source -> its name in the bucket."""
    whole = root / "whole"
    quantising.write(whole, layers)
    made = {"one file": "whole"}
    for what, name, command in (
        ("shards", "shards", ["to-bf16", "--max-shard-size", "300MB"]), ("DCP", "dcp", ["to-dcp"]),
        ("Megatron-Core", "mcore", ["to-mcore"]),
        ("GGUF Q8_0", "model.gguf", ["to-gguf", "--type", "q8_0", "--tokenizer", "none"]),
    ):  # fmt: skip
        run = [*ZCKPT, command[0], str(whole), str(root / name), *command[1:], "--quiet"]
        subprocess.run(run, check=True, cwd=ROOT)
        made[what] = name
    write(root / "zero", 3, "--layers", str(4 * layers))
    return made | {"ZeRO-3 of 8 ranks": "zero"}


def weights(source: Path) -> list[Path]:
    """The large files of a source; of a save with optimizer states, those that hold masters."""
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    large = [file for file in files if file.stat().st_size > LEAST_BYTES]
    return [file for file in large if "optim_states" in file.name] or large


def _rival(verb: str, port: str, files: list[Path], root: Path) -> Job:
    script = [*PYTHON, __file__, verb, port, str(root), *(str(file.relative_to(root)) for file in files)]
    return Job(script, drops=(root / "parts",))


def _row(what: str, ours: Job, rival: Job, rounds: int) -> Row:
    taken = in_turn({"rival": rival, "ours": ours}, rounds)
    both: dict[str, Taken] = dict(taken)
    return Row(what, both["ours"], "32 requests of 8 MiB", both["rival"], least=both["rival"].median)


def move(verb: str, port: int, root: Path, names: list[str]) -> None:
    """Gets or puts all bytes of files, in parallel requests."""
    own = threading.local()

    def one(name: str, at: int) -> None:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection("127.0.0.1", port)
        if verb == "get":
            own.connection.request("GET", f"/bkt/{name}", headers={"Range": f"bytes={at}-{at + PART - 1}"})
        else:
            with (root / name).open("rb") as file:
                file.seek(at)
                own.connection.request("PUT", f"/bkt/parts/{name}.{at}", file.read(PART))
        own.connection.getresponse().read()

    parts = [(name, at) for name in names for at in range(0, (root / name).stat().st_size, PART)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        for done in [pool.submit(one, *part) for part in parts]:
            done.result()
    remove(root / "parts")


if __name__ == "__main__":
    move(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
