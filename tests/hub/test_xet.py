"""Where the hub speaks Xet: the real hf_xet sends chunks to a real Xet store (its own, on this disk)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hangs import HANG_S
from hub_server import HubServer

import zckpt

hf_xet = pytest.importorskip("hf_xet")

Shell = Callable[..., "subprocess.Popen[str]"]
FETCH = """
import sys, hf_xet
endpoint, path, out = sys.argv[1:]
(known,) = hf_xet.hash_files([path])
session = hf_xet.XetSession()
with session.new_file_download_group(endpoint=endpoint) as group:
    group.start_download_file(hf_xet.XetFileInfo(known.hash, known.file_size), out)
"""


def test_a_page_of_a_hub_with_xet(
    checkpoint: Path, server: HubServer, shell: Shell, environment: dict[str, str], tmp_path: Path
) -> None:
    zckpt.convert(checkpoint, tmp_path / "want", dtype="bf16", options=zckpt.Options(max_shard_size=250_000))
    shards = sorted((tmp_path / "want").glob("*.safetensors"))
    for shard in shards:  # the server only names them; what a range request of a header finds comes from here
        (tmp_path / "hub" / hashlib.sha256(shard.read_bytes()).hexdigest()).write_bytes(shard.read_bytes())
    (tmp_path / "store").mkdir()
    server.xet = f"local://{tmp_path / 'store'}"
    process = shell("push", checkpoint, "alice/m", "--max-shard-size", "250000", HF_HUB_DISABLE_XET=None)
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert any("xet-write-token" in path for _, path, _, _ in server.log)
    assert not any(method == "PUT" for method, _, _, _ in server.log)
    repo = server.repos["alice/m"]
    page = repo.commits[repo.branches["main"][-1]]
    for shard in shards:
        assert page[shard.name].sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()
        command = [sys.executable, "-c", FETCH, server.xet, str(shard), str(tmp_path / shard.name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (tmp_path / shard.name).read_bytes() == shard.read_bytes()


def test_a_hub_without_xet_is_sent_to_plainly(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    """The library, with hf_xet there, would otherwise try nothing else."""
    process = shell("push", checkpoint, "alice/m", HF_HUB_DISABLE_XET=None)
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert not any("xet" in path for _, path, _, _ in server.log)


def test_a_xet_store_that_fails_is_gone_around(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    server.xet = "http://127.0.0.1:9"
    process = shell(
        "push", checkpoint, "alice/m", HF_HUB_DISABLE_XET=None, HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="1",
        HF_XET_CLIENT_RETRY_BASE_DELAY="10ms",
    )  # fmt: skip
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "trying again" in err and server.url in out
    assert any(method == "PUT" for method, _, _, _ in server.log)
