"""The import name `deepspeed`: the same modules under two names, what libraries ask for, and calls that come too late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hangs import HANG_S

NAMES = """
import zckpt.runtime
zckpt.runtime.as_deepspeed()
zckpt.runtime.as_deepspeed()
import importlib.metadata, importlib.util, pickle, sys
assert sum(type(finder).__name__ == "SecondFinder" for finder in sys.meta_path) == 1
spec = importlib.util.find_spec("deepspeed")
assert spec is not None and spec.submodule_search_locations
import deepspeed, deepspeed.zero
from deepspeed import zero
from deepspeed.zero import Init
assert deepspeed is zckpt.runtime and zero is deepspeed.zero is zckpt.runtime.zero and Init is zckpt.runtime.zero.Init
assert deepspeed.__spec__.name == "zckpt.runtime" and zero.__spec__.name == zero.__name__ == "zckpt.runtime.runtime.zero"
assert pickle.loads(pickle.dumps(Init)) is Init
assert importlib.metadata.version("deepspeed") == importlib.metadata.metadata("deepspeed")["Version"] == "0.19.8+zckpt"
assert "deepspeed" in {found.metadata["Name"] for found in importlib.metadata.distributions()}
assert "deepspeed" in importlib.metadata.packages_distributions()["deepspeed"]
assert importlib.metadata.version("zckpt")
for name in ("deepspeed.nosuch", "deepspeed.ops.nosuch", "deepspeed.training_run"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name and "zckpt.runtime in this process" in str(error), error
    else:
        raise AssertionError(name)
from zckpt.runtime.names import finder
for path in finder.read_lines():
    module = importlib.import_module(f"deepspeed.{path}".rstrip("."))
    assert module is importlib.import_module(f"zckpt.runtime.{path}".rstrip(".")), path
    assert module.__spec__.name == module.__name__ == f"zckpt.runtime.{path}".rstrip("."), path
    for name in finder.all_names_of(path):
        getattr(module, name)
"""

TOO_LATE = """
import sys
import zckpt.runtime
from zckpt.base.errors import UsageError

def refused(what):
    try:
        zckpt.runtime.as_deepspeed()
    except UsageError as error:
        assert what in str(error) and "before anything imports" in str(error), error
    else:
        raise AssertionError(what)

import importlib.util
found = importlib.util.find_spec  # as on a machine without DeepSpeed:
importlib.util.find_spec = lambda name, *more: None if name == "deepspeed" else found(name, *more)
import accelerate
importlib.util.find_spec = found
refused("accelerate has been imported already")
for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
    del sys.modules[name]
import deepspeed
refused("DeepSpeed itself has been imported already")
"""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        text=True, capture_output=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr


def test_the_names() -> None:
    assert not (told := python(NAMES)), told


def test_a_call_that_comes_too_late() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    assert not (told := python(TOO_LATE)), told
