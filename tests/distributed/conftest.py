"""One start of ranks per world size runs every check of a script; the tests look at what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hangs import HANG_S
from ranks import BARE, DEEPSPEED, OURS, OWN, fork_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for what the scripts and the tests share
Results = dict[str, list[Any]]
MODULES = {
    "deepspeed_losses.py": DEEPSPEED, "deepspeed_goes_on.py": DEEPSPEED, "monitor_checks.py": DEEPSPEED,
    "pushes.py": BARE, "pretrained_checks.py": BARE,
}  # fmt: skip
"""What some scripts have imported when they begin; `BARE` where transformers must see an environment or a trainer first."""

TORCHRUN = "api_checks.py"
"""Its ranks are torchrun's own, with an order of sets for each."""


def torchrun(script: str, world: int, out: Path) -> None:
    """Runs a script of this folder on `world` processes; what it says is in `out`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run(
        [*launcher, str(HERE / script), str(out)], env={**os.environ, **OWN}, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    (out / "log.txt").write_text(done.stdout + done.stderr)


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Results]:
    """`launched(script, world)`: by check, what each rank gave; launched once, whoever asks first."""
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        home = home.parent

    def results(script: str, world: int) -> Results:
        out = home / f"{Path(script).stem}_{world}"
        with FileLock(home / f"{out.name}.lock"):
            if not out.exists():
                out.mkdir()
                if script == TORCHRUN:
                    torchrun(script, world, out)
                else:
                    modules = MODULES.get(script, OURS)
                    fork_ranks(world, [str(HERE / script), str(out)], out / "log.txt", modules)
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank_*.json"))]
        assert len(ranks) == world, (out / "log.txt").read_text()[-4000:]
        return {name: [rank.get(name) for rank in ranks] for name in ranks[0]}

    return results


@pytest.fixture
def outcome(launched: Callable[[str, int], Results]) -> Callable[..., list[Any]]:
    """`outcome(script, world, check)`: what each rank gave; an error in the check fails the test."""

    def of(script: str, world: int, check: str) -> list[Any]:
        given = launched(script, world).get(check)
        assert given is not None, f"{check} was not run"
        for rank, value in enumerate(given):
            assert value is not None and "error" not in value, f"rank {rank}: {value and value['error']}"
        return [value["value"] for value in given]

    return of
