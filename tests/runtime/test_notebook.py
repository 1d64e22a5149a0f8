"""The example notebook, executed cell by cell in a kernel as a person's."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from hangs import HANG_S
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_in_a_notebook.ipynb"


class ThisPython(AsyncKernelManager):
    """Starts kernels of the Python that runs the tests, whatever kernels the machine has."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python", display_name="tests")


def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, a progress bar, a picture, the same numbers from plain weights, and a resume."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(shutil.copy(EXAMPLE, tmp_path), as_version=4)
    notebook = NotebookClient(
        notebook, timeout=HANG_S, kernel_manager_class=ThisPython, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = [str(cell.outputs) for cell in cells]
    assert "(32, 0)" in said[1] and "epochs" in said[2] and "image/png" in said[3]
    assert "'text/plain': '5'" in said[4] and "'text/plain': 'True'" in said[5], said[4:6]
    assert "(96, 'from a notebook')" in said[6].replace('"', ""), said[6]
    assert (tmp_path / "run" / "latest").read_text() == "global_step96"
