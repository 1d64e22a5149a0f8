"""`zckpt run`: a script under it is as under `python`, but for what `import deepspeed` gives.

tests/interop/test_trainer.py starts it by torchrun.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from ending import WHOLE
from hangs import HANG_S
from standby import programs
from typer.testing import CliRunner

from zckpt.base.errors import ZckptError
from zckpt.cli import app
from zckpt.cli.hints import option_meant

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
    if "die" in sys.argv and rank == "1":
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
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120", WHOLE: "1"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        environment.pop(name, None)
    return subprocess.run(
        [f"{programs()}/python", "-m", "zckpt", "run", *words], cwd=home, env=environment, text=True, capture_output=True,
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


GROUP = """
import sys
import torch.distributed as dist
if sys.argv[1] == "ours":
    import zckpt.runtime
    zckpt.runtime.init_distributed("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group = lambda: print("taken down")
print("done")
if "raise" in sys.argv:
    raise LookupError
"""


def test_a_process_group_is_taken_down_at_a_good_end(home: Path) -> None:
    """Else gloo may abort the process after the script's last line. After an error it could wait for another rank."""
    (home / "group.py").write_text(GROUP)
    assert start(home, "group.py", "own").stdout == "done\ntaken down\n"
    failed = start(home, "group.py", "own", "raise")
    assert (failed.returncode, failed.stdout) == (1, "done\n")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", WHOLE: "1"}
    for words, said in ((["ours"], "done\ntaken down\n"), (["ours", "raise"], "done\n")):
        command = [f"{programs()}/python", "group.py", *words]
        done = subprocess.run(command, cwd=home, env=environment, text=True, capture_output=True, check=False)
        assert done.stdout == said, done.stderr


def test_a_module_by_two_processes_of_our_own(home: Path) -> None:
    """As `deepspeed` starts them; the rank that a signal ends is named."""
    done = start(home / "scripts", "-m", "--num_gpus=2", "script", "die", "$$", "${local_rank}", "0")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "error: rank 1 was killed by SIGKILL" in done.stderr and "memory ran out" in done.stderr
    for rank in range(2):
        facts = facts_of(home / "scripts", rank)
        assert facts["argv"] == [f"--local_rank={rank}", "die", "$$", "${local_rank}", "0"]
        assert (facts["size"], facts["same"], facts["beside"]) == ("2", True, 5)


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["run", *words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(home / "scripts")
    return home / "scripts"


def test_the_commands_for_several_machines(alone: Path) -> None:
    (alone / "hosts").write_text("one slots=2\ntwo slots=4\nthree slots=1\n")
    words = ("-H", "hosts", "--exclude", "three@two:1", "--no_local_rank", "--dry-run", "script.py", "a b", "--nproc")
    first, second = map(shlex.split, printed(*words).splitlines())
    assert [first[:3], second[:3]] == [["ssh", "-tt", "one"], ["ssh", "-tt", "two"]]
    there = "-m zckpt run --include localhost:0,2,3 --num_nodes 2 --node_rank 1 --master_addr one --master_port 29500"
    assert second[3].endswith(f"{there} --no_local_rank script.py 'a b' --nproc") and f"cd {alone} && " in first[3]
    assert "localhost:0,1,2" in printed("-H", "hosts", "--num_gpus", "3", "--num_nodes", "1", "-n", "script.py")
    assert printed("--nproc_per_node=2", "-n", "script.py").endswith("--no_local_rank script.py\n")
    assert shlex.split(printed("--force_multi", "--nproc", "1", "-n", "script.py"))[:3] == ["ssh", "-tt", "localhost"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num_nodes", "2"), "2 machines are asked for, and 1"),
        (("--num_nodes", "1:2"), "'1:2' is not a whole number"),
        (("--num_nodes", "2", "--node_rank", "1"), "cannot reach the first one"),
        (("--num_nodes", "2", "--node_rank", "2", "--master_addr", "one"), "--node_rank does not name"),
        (("--hostfile", "none"), "no such hostfile"),
        (("--include", "far:0"), "'far'"),
        (("--include", "localhost:0", "--num_gpus", "2"), "--include and --exclude say"),
        (("--nproc", "2", "--nproc_per_node", "2"), "say the same"),
        (("--log_level", "loud"), "no level 'loud'"),
        (("--standalone", "--nnodes", "2"), "--standalone means this machine alone"),
        (("--standalone", "--hostfile", "hosts"), "--standalone means this machine alone"),
    ],
)
def test_what_cannot_be_started_is_named(alone: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ZckptError) as error:
        printed(*words, "script.py")
    assert said in str(error.value)


def test_the_commands_that_are_started_are_shown_if_asked(home: Path) -> None:
    """With --log_level info, as `deepspeed` shows them, and with no other level; --standalone changes nothing here."""
    for level, count in ((("--log_level", "info"), 1), (("-q",), 0)):
        done = subprocess.run(
            [f"{programs()}/python", "-m", "zckpt", "run", "--standalone", *level, "--nproc", "1", "script.py", "x", "5"],
            cwd=home / "scripts", check=False, env={k: v for k, v in os.environ.items() if k != "RANK"}, capture_output=True,
            text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 5 and done.stderr.count("-m zckpt run script.py") == count, done.stderr


def test_under_deepspeeds_own_launcher(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`deepspeed --module zckpt run script.py` puts its option before the command; it belongs to the script."""
    command = [f"{programs()}/python", "-m", "zckpt", "--local_rank=3", "run", "script.py", "x", "5"]
    done = subprocess.run(
        command, cwd=home / "scripts", check=False,
        env={**os.environ, "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert facts_of(home / "scripts", 3)["argv"] == ["--local_rank=3", "x", "5"]


def test_every_option_of_both_launchers_is_there_or_refused_with_what_to_use() -> None:
    from torch.distributed.run import get_args_parser

    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.origin is not None
    runner = ast.parse(Path(found.origin).with_name("launcher").joinpath("runner.py").read_text())
    calls = [node for node in ast.walk(runner) if isinstance(node, ast.Call)]
    added = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"]
    theirs = {arg.value for node in added for arg in node.args if isinstance(arg, ast.Constant)}
    theirs |= {name for action in get_args_parser()._actions for name in action.option_strings}
    command = typer.main.get_command(app).get_command(None, "run")  # type: ignore[attr-defined]
    ours = [name for param in command.params for name in param.opts] + ["-h", "--help"]
    options = [name for name in theirs if name.startswith("-")]
    assert len(options) > 50
    for name in options:
        assert name in ours or option_meant(name, "zckpt run", ours).endswith("."), name
