"""Whatever goes wrong under the engine is an error of the job: never the end of the process that it works for."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plans
import pytest
from hangs import HANG_S
from plans import plan_of

from zckpt import Options
from zckpt.base import pace as tuning
from zckpt.base.errors import UsageError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Plan
from zckpt.core.stores import FileStore
from zckpt.engine.move import Mode, run
from zckpt.engine.scan import scan
from zckpt.storage.location import locate

GIB = 1 << 30
NUMEL = 1 << 20

CHILD = """
import resource, sys
sys.path[:0] = {tests!r}
import test_engine
from pathlib import Path
from zckpt.base.errors import ZckptError
try:
    {work}
except ZckptError as error:
    print(type(error).__name__, error)
else:
    print("done")
"""


def small_plan(root: Path) -> Plan:
    """4 MiB of numbers from one file to another."""
    source = root / "source"
    if not source.exists():
        source.write_bytes(np.arange(NUMEL, dtype="<f4").tobytes())
    store, to = locate(source).store(), FileStore("out", 4 * NUMEL)
    entries = [TensorEntry("x", (NUMEL,), F32, "parameter", (Fragment(place, 0, 0, NUMEL),)) for place in (store, to)]
    return Plan(((OutputFile("out", 4 * NUMEL), to),), [(entries[0], entries[1])])


def child(root: Path, work: str, limits: Callable[[], object]) -> str:
    """What a process says that does this under these limits. It must end by itself."""
    code = CHILD.format(tests=[str(Path(__file__).parent), str(Path(plans.__file__).parent)], work=work)
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=HANG_S, preexec_fn=limits,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


MOVE = "test_engine.run(test_engine.small_plan(root := Path(sys.argv[1])), str(root), engine='native', {how})"


def test_a_buffer_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    work = MOVE.format(how="threads=1, window=1 << 30")
    told = child(tmp_path, work, lambda: resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB)))
    assert told.startswith("ResourceError there is too little memory") and "--buffer" in told


def stacks(stack: int, space: int) -> None:
    """Every thread gets a stack of so many bytes, out of so many of addresses."""
    resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (space, space))


needs_stacks = pytest.mark.skipif(
    sys.platform != "linux" or resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY,
    reason="the limit of stacks cannot be raised here",
)


@needs_stacks
def test_threads_that_cannot_start_are_an_error(tmp_path: Path) -> None:
    told = child(tmp_path, MOVE.format(how="threads=2"), lambda: stacks(64 * GIB, 32 * GIB))
    assert told.startswith("ResourceError no thread could be started") and "limits" in told


@needs_stacks
def test_the_threads_that_start_do_the_work_of_all(tmp_path: Path) -> None:
    work = MOVE.format(how="threads=32, window=4096")
    assert child(tmp_path, work, lambda: stacks(4 * GIB, 32 * GIB)) == "done"
    assert (tmp_path / "out").read_bytes() == (tmp_path / "source").read_bytes()


@needs_stacks
def test_a_scan_without_threads_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(bytes(1 << 16))
    work = (
        "from zckpt.engine.scan_requests import request_of_bytes; store = test_engine.locate(sys.argv[1] + '/s').store();"
        "test_engine.scan([request_of_bytes(store, 0, 1 << 16)], engine='native')"
    )
    told = child(tmp_path, work, lambda: stacks(64 * GIB, 32 * GIB))
    assert told.startswith("ResourceError no thread could be started")


@pytest.mark.parametrize("threads", [0, -1, tuning.MOST_THREADS + 1, 10**9])
def test_threads_have_bounds(threads: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be started"):
        Options(threads=threads)
    with pytest.raises(UsageError, match="cannot be started"):
        run(plan_of(tmp_path), "", mode=Mode.STREAMED, threads=threads)
    with pytest.raises(UsageError, match="cannot be started"):
        scan([], threads=threads)


@pytest.mark.parametrize("window", [0, -4096, tuning.MOST_WINDOW_BYTES + 1, 10**6 * GIB])
def test_buffers_have_bounds(window: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a buffer cannot have"):
        Options(buffer=window)
    with pytest.raises(UsageError, match="a buffer cannot have"):
        run(plan_of(tmp_path), "", mode=Mode.STREAMED, window=window)


# ---- sinks that keep what they are lent -------------------------------------------------------------------------------

KEEPERS: dict[str, Callable[[memoryview], Any]] = {
    "slice": lambda view: view[3:1000],
    "view": memoryview,
    "array": lambda view: np.frombuffer(view, np.uint8),
    "array of a slice": lambda view: np.frombuffer(view[8:16], "<f8"),
}


@pytest.mark.parametrize(
    ("keep", "engine"), [*((keep, "native") for keep in KEEPERS), ("array of a slice", "reference")]
)
def test_what_is_kept_of_a_view_is_an_error_and_keeps_its_bytes(keep: str, engine: str, tmp_path: Path) -> None:
    kept: list[tuple[Any, bytes]] = []

    def sink(view: memoryview) -> None:
        mine = KEEPERS[keep](view)
        kept.append((mine, bytes(mine)))

    plan = plan_of(tmp_path)
    with pytest.raises(UsageError, match="keeps the bytes it gets"):
        run(plan, "", consumers={"a": sink}, mode=Mode.STREAMED, engine=engine, threads=4, window=4096)
    for _ in range(3):  # whoever comes next does not get the same memory
        run(plan_of(tmp_path), "", mode=Mode.STREAMED, threads=4, window=4096)
    ((mine, bytes_then),) = kept
    assert bytes(mine) == bytes_then and any(bytes_then)
    del mine
    kept.clear()
    gc.collect()


def test_a_sink_that_keeps_a_view_and_raises(tmp_path: Path) -> None:
    kept = []

    def sink(view: memoryview) -> None:
        kept.append(view[:40])
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run(plan_of(tmp_path), "", consumers={"a": sink}, mode=Mode.STREAMED, engine="native", threads=4, window=4096)
    assert bytes(kept[0]) == b"x" * 40


def test_a_sink_that_holds_the_very_view(tmp_path: Path) -> None:
    """An exporter cannot be released while somebody has its buffer: it was the end of the process."""
    import ctypes

    kept = []

    class Buffer(ctypes.Structure):
        _fields_ = [("space", ctypes.c_char * 256)]

    def sink(view: memoryview) -> None:
        buffer = Buffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
        kept.append(buffer)

    with pytest.raises(UsageError, match="keeps the bytes it gets"):
        run(plan_of(tmp_path), "", consumers={"a": sink}, mode=Mode.STREAMED, engine="native", threads=2, window=4096)
    for buffer in kept:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def test_sinks_may_run_on_several_threads_and_fail_on_all(tmp_path: Path) -> None:
    """Two files: the first error is told."""
    barrier = threading.Barrier(2, timeout=10)

    def sink(view: memoryview) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            pass
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run(
            plan_of(tmp_path),
            "",
            consumers={"a": sink, "b": sink},
            mode=Mode.STREAMED,
            engine="native",
            threads=4,
            window=4096,
        )


# ---- file systems that take no direct writes ----------------------------------------------------------------------------

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
static long refused;
long refusals(void) { return refused; }
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
  if ((fcntl(fd, F_GETFL) & O_DIRECT) && AFTER <= at) { __sync_fetch_and_add(&refused, 1); errno = EINVAL; return -1; }
  return real(fd, from, n, at);
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { return pwrite64(fd, from, n, at); }
"""


def direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and Linux")
@pytest.mark.parametrize("after", [0, 1 << 21], ids=["at once", "later"])
def test_a_file_system_that_refuses_direct_writes(after: int, tmp_path: Path) -> None:
    """As FUSE and disks of large blocks do: EINVAL. The file is written the plain way, and direct writes are not tried on."""
    if not direct(tmp_path / "probe"):
        pytest.skip("no direct I/O here")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DAFTER={after}", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    work = MOVE.format(how="threads=1, window=1 << 16")
    code = CHILD.format(tests=[str(Path(__file__).parent), str(Path(plans.__file__).parent)], work=work)
    code += "import ctypes; print(ctypes.CDLL(None).refusals())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S,
        env={**os.environ, "LD_PRELOAD": str(shim)},
    )  # fmt: skip
    assert done.stdout.split() == ["done", "1"], (done.stdout, done.stderr)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "source").read_bytes()
