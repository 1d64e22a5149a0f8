"""`zckpt run`: a script under it is as under `python`, but for what `import deepspeed` gives.

tests/interop/test_trainer.py starts it by torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hangs import HANG_S

SCRIPT = """
import gc, importlib.metadata, importlib.util, json, os, signal, sys, time, warnings
import beside
import deepspeed, zckpt.runtime

class InACycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(2, b"collected at the end\\n")

def main():
    rank = os.environ.get("RANK", "0")
    facts = {
        "argv": sys.argv[1:], "script": sys.argv[0], "name": __name__, "file": __file__, "beside": beside.VALUE,
        "same": deepspeed is zckpt.runtime, "version": importlib.metadata.version("deepspeed"),
        "collects": gc.isenabled(), "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "size": os.environ.get("WORLD_SIZE"), "main": sys.modules["__main__"].__dict__ is globals(),
    }
    with open(f"unnamed_{rank}", "w") as file:
        json.dump(facts, file)
    os.rename(f"unnamed_{rank}", f"facts_{rank}.json")
    warnings.warn("be warned")
    if sys.argv[1] == "raise":
        raise LookupError("of the script")
    if sys.argv[1] == "die" and rank == "1":
        while not os.path.exists("facts_0.json"):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    InACycle()
    sys.exit(int(sys.argv[-1]))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("VALUE = 5\n")
    return tmp_path


def start(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "zckpt", "run", *words], cwd=home, env=environment, text=True, capture_output=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip


def facts_of(home: Path, rank: int) -> dict[str, Any]:
    return json.loads((home / f"facts_{rank}.json").read_text())


def test_a_script(home: Path) -> None:
    """Its arguments are its own, also those that zckpt has too; its status is passed on."""
    done = start(home, "scripts/script.py", "--json", "-m", "--nproc", "3", "--help", "7")
    assert done.returncode == 7 and "UserWarning: be warned" in done.stderr, done.stderr
    assert "collected at the end" in done.stderr
    facts = facts_of(home, 0)
    assert facts.pop("version").startswith("0.19.8+")
    assert facts.pop("file").endswith("scripts/script.py")
    assert facts == {
        "argv": ["--json", "-m", "--nproc", "3", "--help", "7"], "script": "scripts/script.py", "name": "__main__", "beside": 5,
        "same": True, "collects": True, "sigterm": True, "size": None, "main": True,
    }  # fmt: skip


def test_an_error_of_a_script_is_pythons(home: Path) -> None:
    """The traceback begins in the script, and the status is 1; a script that is not there is zckpt's error."""
    done = start(home, "scripts/script.py", "raise", "0")
    assert done.returncode == 1 and "LookupError: of the script" in done.stderr
    assert "zckpt" not in done.stderr.partition("Traceback")[2].partition("LookupError")[0]
    done = start(home, "scripts/nosuch.py")
    assert done.returncode == 2 and "error: scripts/nosuch.py: there is no such script" in done.stderr


def test_a_module_by_two_processes_of_our_own(home: Path) -> None:
    done = start(home / "scripts", "-m", "--nproc", "2", "script", "die", "0")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    for rank in range(2):
        facts = facts_of(home / "scripts", rank)
        assert (facts["argv"], facts["size"], facts["same"], facts["beside"]) == (["die", "0"], "2", True, 5)
