"""Buckets of the hub: stores of files without commits, which the hub's client reads by ranges and writes through Xet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from addresses import local_tree
from hangs import HANG_S
from hub_server import HubServer

import zckpt

pytest.importorskip("hf_xet")
Shell = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def bucket(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, bytes]]:
    """Its files."""
    (tmp_path / "store").mkdir()
    server.spool = tmp_path / "temporary"
    server.spool.mkdir()
    monkeypatch.setenv("TMPDIR", str(server.spool))
    server.xet = f"local://{tmp_path / 'store'}"
    server.buckets["alice/b"] = {}
    return server.buckets["alice/b"]


def run(shell: Shell, *words: object) -> str:
    process = shell(*words, HF_HUB_DISABLE_XET=None)
    out, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, error
    assert "%|" not in error  # no bars of the hub's client
    return out


def test_there_and_back(
    checkpoint: Path,
    bucket: dict[str, tuple[str, bytes]],
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--max-shard-size", "250000")
    zckpt.convert(checkpoint, tmp_path / "want", dtype="bf16", options=zckpt.Options(max_shard_size=250_000))
    want = {name: data for name, data in local_tree(tmp_path / "want").items() if name != "zckpt.json"}
    run(shell, "to-bf16", checkpoint, "hf://buckets/alice/b/models/m", *options)
    found = {name.removeprefix("models/m/"): data for name, (_, data) in bucket.items()}
    assert {name: found[name] for name in want} == want
    assert "already" in run(shell, "to-bf16", checkpoint, "hf://buckets/alice/b/models/m", *options)
    run(shell, "verify", checkpoint, "hf://buckets/alice/b/models/m")
    run(shell, "to-bf16", "hf://buckets/alice/b/models/m", tmp_path / "again", *options)
    again = local_tree(tmp_path / "again")
    assert {name: again[name] for name in want} == want
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_bucket_that_does_not_exist(checkpoint: Path, bucket: object, shell: Shell, tmp_path: Path) -> None:
    for words in (("to-bf16", checkpoint, "hf://buckets/alice/none/m"), ("inspect", "hf://buckets/alice/none/m")):
        process = shell(*words, HF_HUB_DISABLE_XET=None)
        _, error = process.communicate(timeout=HANG_S)
        assert process.returncode != 0 and "no such" in error


GIVEN_UP = """
from zckpt.storage.uploads import Upload
try:
    with Upload("hf://buckets/alice/b/f", 40 << 20) as upload:
        for _ in range(10):
            upload.write(bytes(4 << 20))
        raise KeyError
except KeyError:
    print("given up")
"""


def test_an_upload_that_is_given_up_leaves_nothing(
    bucket: dict[str, tuple[str, bytes]], server: HubServer, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-c", GIVEN_UP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "given up\n", done.stderr
    assert bucket == {} and list(server.spool.iterdir()) == []
    assert not any(path.endswith("/batch") for _, path, _, _ in server.log)
