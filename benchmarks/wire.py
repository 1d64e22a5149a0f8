"""A store that limits each request (`slow_store`), beside 32 parallel requests of 8 MiB for the same bytes.

    python benchmarks/wire.py get|put PORT FILE...          # the rival; prints its seconds

Sources of each kind are made of one Llama shape with zckpt's own commands. The rival reads all weights of the source and converts
nothing, or sends what zckpt wrote; both are measured from the start of the program. One file is also read and sent by s3fs, which
is asked for where fsspec has settings of its own, and read from the tests' hub, which sends its readers on to the store.
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

from measure import PYTHON, ROOT, ZCKPT, Job, Row, Taken, in_turn, remove, write

REQUESTS, PART = 32, 8 << 20
LEAST_BYTES = 1 << 20
"""Smaller files are not weights."""
RATE = 1.0
"""MB a second of each request: so few that two processors, which the server takes its part of, are no limit."""
S3FS = ["env", "FSSPEC_S3_KEY=k", "FSSPEC_S3_SECRET=s"]
HUB = (
    "import os, sys, threading; sys.path.insert(0, 'tests'); from pathlib import Path\n"
    "from hub_server import Blob, HubServer\n"
    "root, source, store = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
    "with HubServer(root / 'cdn') as hub:\n"
    "    hub.store, name = store, 'ab' * 32\n"
    "    os.link(source / 'model.safetensors', hub.root / name)\n"
    "    repo = hub.create('alice/model', files={'config.json': (source / 'config.json').read_bytes()})\n"
    "    weights = Blob.large(name, (hub.root / name).stat().st_size)\n"
    "    repo.add('main', {**repo.commits[repo.branches['main'][-1]], 'model.safetensors': weights}, 'weights')\n"
    "    print(hub.url, flush=True)\n"
    "    threading.Event().wait()\n"
)
"""Serves the model in one file as `hf://alice/model`."""


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
    whole, out, sent = root / sources["one file"], work / "out", root / "sent"
    told = f"http://localhost:{port}/bkt"
    hub = subprocess.Popen(
        [*PYTHON, "-c", HUB, str(root), str(whole), told], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert hub.stdout is not None
    by_hub = ["env", f"HF_ENDPOINT={hub.stdout.readline().strip()}", f"HF_HOME={work / 'hf'}"]
    rows = []
    try:
        reads = {what: ([], f"s3://bkt/{source}", source) for what, source in sources.items()}
        reads["one file, s3fs"] = (S3FS, f"s3://bkt/{whole.name}", whole.name)
        reads["one file, hf://"] = (by_hub, "hf://alice/model", whole.name)
        for what, (settings, address, source) in reads.items():
            convert = [*settings, *ZCKPT, "to-bf16", address, str(out), "--quiet"]
            rival = _rival("get", port, weights(root / source), root)
            rows.append(_row(f"{what} -> bf16", Job(convert, clears=(out,), drops=(out,)), rival, rounds))
        for what, settings in (("bf16 in the bucket", []), ("bf16 in the bucket, s3fs", S3FS)):
            upload = [*settings, *ZCKPT, "to-bf16", str(whole), "s3://bkt/sent", "--quiet"]
            rival = _rival("put", port, weights(whole), root)
            rows.append(_row(f"one file -> {what}", Job(upload, clears=(sent,)), rival, rounds))
    finally:
        for process in (server, hub):
            process.kill()
            process.wait()
        shutil.rmtree(root)
        shutil.rmtree(root.with_name("bucket.parts"), ignore_errors=True)
    return rows


def make(root: Path, layers: int) -> dict[str, str]:
    """Kind of source -> its name in the bucket."""
    whole = root / "whole"
    script = str(ROOT / "benchmarks" / "quantising.py")  # on its own: children begin with the peak of who starts them
    subprocess.run([*PYTHON, script, "--whole", str(whole), "--layers", str(layers)], check=True)
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
