"""Machines with links, loopbacks and names of their own convert together to the bytes of one process; each gets its part only.

The machines are network namespaces, so this takes root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import proofs
import pytest
import synth
import torch
from hangs import HANG_S
from networks import SERVER, Network, refusal
from s3_server import KEYS

import zckpt
from zckpt.jobs.options import Options

TESTS = Path(__file__).parents[1]
RATE = 50_000_000

pytestmark = proofs.ONLY


def launched(launcher: str, network: Network, rank: int) -> dict[str, str]:
    """What a launcher says: torch's store is then on the first machine; srun's processes leave notes beside the output."""
    size = str(network.count)
    if launcher == "srun":
        return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": size, "SLURM_PROCID": str(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": network.address(0), "MASTER_PORT": "29511"}


@pytest.mark.parametrize(("launcher", "source"), [("torch", "s3"), ("srun", "shared")])
def test_two_machines_convert_together(launcher: str, source: str, tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    generator = torch.Generator().manual_seed(0)
    groups = [{f"w{i}": torch.randn(1_500_000 + i, generator=generator) for i in range(8)}]
    checkpoint = synth.zero12(tmp_path / "ckpt", groups, 4)
    needed = 4 * sum(tensor.numel() for tensor in groups[0].values())
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    with Network(2, RATE) as network:
        share = [sys.executable, str(TESTS / "shared_directory.py")]
        serve = [*share, "serve", SERVER, str(tmp_path)]
        if source == "s3":
            serve = [sys.executable, str(TESTS / "s3_server.py"), SERVER, str(checkpoint)]
        server = subprocess.Popen(network.at_switch(serve), stdout=subprocess.PIPE, text=True)
        running: list[subprocess.Popen[str]] = []
        try:
            assert server.stdout is not None
            told = server.stdout.readline().strip()
            command = [sys.executable, "-m", "zckpt", "to-bf16", "s3://bkt", str(out)]
            if source == "shared":
                mount = [*share, "mount", SERVER, told, str(place)]
                command = [*mount, *command[:-2], str(place / "ckpt"), str(place / "out")]
            environment = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": told, "PYTHONPATH": str(TESTS.parent)}
            running = [
                subprocess.Popen(
                    network.on(rank, [*command, "--quiet", "--max-shard-size", "7MB"]),
                    env={**environment, **launched(launcher, network, rank)}, stderr=subprocess.PIPE, text=True,
                )
                for rank in range(2)
            ]  # fmt: skip
            told_of = [process.communicate(timeout=HANG_S)[1] for process in running]
            assert [process.returncode for process in running] == [0, 0], told_of
            carried = [network.carried(rank) for rank in range(2)]
        finally:
            for process in (*running, server):
                process.kill()
                process.communicate()
    # every packet has 66 bytes beside the file's
    assert all(needed * 0.5 < got < needed * 0.53 + 1_500_000 for got, _ in carried), carried
    if source == "shared":
        assert all(needed * 0.25 < sent < needed * 0.27 + 1_500_000 for _, sent in carried), carried
    zckpt.convert(checkpoint, tmp_path / "one", dtype="bf16", options=Options(max_shard_size="7MB"))
    one, both = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path / "one", out))
    assert both == one and len(one) > 3
