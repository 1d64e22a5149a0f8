"""Every script of examples/ runs as its table says, and leaves what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import proofs
from hangs import HANG_S
from hub_server import HubServer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def ran(home: Path, *words: object, **environment: str) -> str:
    """What a command prints; it must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RANK", "WORLD"))}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=home, env=clean, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_table_names_every_example() -> None:
    table = re.findall(r"^\| \[(\S+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {*table} == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    for name in (name for name in table if name.endswith(".py")):
        assert re.search(rf"^ *(python|zckpt run.*) {name}", (EXAMPLES / name).read_text(), re.MULTILINE), name


@proofs.only
def test_trainer_to_hub(tmp_path: Path) -> None:
    with HubServer(tmp_path / "server") as hub:
        hub.user("me", "hf_meWrites0123456789")
        said = ran(
            tmp_path, "-m", "zckpt", "run", EXAMPLES / "trainer_to_hub.py", "me/my-model",
            HF_ENDPOINT=hub.url, HF_TOKEN="hf_meWrites0123456789", HF_HUB_DISABLE_XET="1", HF_HOME=str(tmp_path / "hf"),
        )  # fmt: skip
    assert "me/my-model: " in said and "files" in said


@proofs.only
def test_lora(tmp_path: Path) -> None:
    said = ran(tmp_path, "-m", "zckpt", "run", EXAMPLES / "lora.py")
    gap = float(re.search(r"differ by (\S+)", said)[1])  # type: ignore[index]
    assert gap < 1e-5 and (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@proofs.only
def test_lost_node(tmp_path: Path) -> None:
    said = ran(tmp_path, EXAMPLES / "lost_node.py")
    assert "without node 1: " in said and re.search(r"with node 1: \d+ tensors", said)


@proofs.only
def test_another_world_size(tmp_path: Path) -> None:
    assert "the run went on: 4 steps" in ran(tmp_path, EXAMPLES / "another_world_size.py")


@proofs.only
def test_torch_loop(tmp_path: Path) -> None:
    assert "hold the same: True" in ran(tmp_path, "-m", "zckpt", "run", "--nproc", "2", EXAMPLES / "torch_loop.py")
