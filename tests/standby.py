"""`zckpt`, `python` and `torchrun` that need not import: forked from processes that have imported zckpt, or torch too.

    python standby.py SOCKET MODULE..

What is put into PATH are small programs: each asks the process for a fork of it, with its own words, environment, directory and
open files, sends on what signals it gets, and ends as the fork ends. What a fork starts by `sys.executable` is forked, too. That
zckpt starts well by itself is for tests/test_public.py and tests/cli.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import importlib
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ending import run_to_the_end, share_imports

_LIGHT = ("zckpt.cli", "zckpt.jobs.convert", "zckpt.jobs.inspection", "zckpt.checks.verify", "zckpt.output.manifest")
"""What any command imports; nothing that reads the environment when it is imported."""
_HEAVY = (
    *_LIGHT, "safetensors.torch", "torch.distributed.run", "torch.distributed.launcher.api", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo", "zckpt.live", "zckpt.runtime",
    "zckpt.runtime.train.train", "zckpt.runtime.estimation", "matplotlib.figure",
)  # fmt: skip
_CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "transformers" / "llama_zero3" / "checkpoint"
_TRAINS = ("train", "run", "demo", "estimate")
"""Commands that import torch."""
_CLIENT = """#!{python} -IS
import _signal, _socket, marshal, posix, sys
words = sys.argv[1:]
program = {program!r}
if program == "python" and words[:2] == ["-u", "-m"]:
    del words[0]
if program == "python" and words[:2] == ["-m", "zckpt"]:
    program, words = "zckpt", words[2:]
if program == "python" and not (words and words[0].endswith(".py")):
    posix.execv({python!r}, [{python!r}, *words])
is_light = program == "zckpt" and (not words or words[0] not in {trains!r}) and b"TORCHELASTIC_RUN_ID" not in posix.environ
server = _socket.socket(_socket.AF_UNIX)
server.connect({light!r} if is_light else {heavy!r})
asked = marshal.dumps([program, words, posix.environ, posix.getcwd()])
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    _signal.signal(getattr(_signal, name), lambda number, _: server.send(bytes([number])))
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
server.sendmsg([len(asked).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
server.sendall(asked)
answer = server.recv(4)
code = int.from_bytes(answer, "little", signed=True) if answer else 70
if code < 0:
    if code != -_signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
"""
"""Which imports nothing but what is in the interpreter: `json`, `os`, `signal` and `socket` would take longer than all else."""


class Asked(NamedTuple):
    """What a client wants to become."""

    program: str
    words: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]


@functools.cache
def programs() -> str:
    """A directory with the programs, for the front of PATH; their processes start when the first of them is used."""
    if not hasattr(os, "pidfd_open"):  # only Linux has it
        return str(Path(sys.executable).parent)
    place = Path(tempfile.mkdtemp(prefix="zckpt-standby-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    sockets = {kind: str(place / f"{kind}.socket") for kind in ("light", "heavy")}
    for kind, modules in (("light", _LIGHT), ("heavy", _HEAVY)):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sockets[kind])
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno()), str(place / "python"), *modules]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "ZCKPT_"))}
        server = subprocess.Popen(
            command, env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
        )  # fmt: skip
        listener.close()
        atexit.register(end, server)
    for program in ("zckpt", "python", "torchrun"):
        text = _CLIENT.format(python=sys.executable, program=program, trains=_TRAINS, **sockets)
        (place / program).write_text(text)
        (place / program).chmod(0o755)
    return str(place)


def end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def serve(listener: socket.socket) -> Asked | None:
    """Forks for each client until stdin is closed. In a fork, returns what it is asked to become."""
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    clients: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                asked = read(client)
                child = os.fork()
                if not child:
                    return asked
                for number in asked.files:
                    os.close(number)
                watched = os.pidfd_open(child)
                clients[watched] = child, client
                ready.register(watched, selectors.EVENT_READ)
                ready.register(client, selectors.EVENT_READ, child)
            elif key.fd in clients:
                child, client = clients.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                ready.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):  # of a client that was killed
                    ready.unregister(client)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(code.to_bytes(4, "little", signed=True))
                client.close()
            elif key.fd in ready.get_map():
                numbers = key.fileobj.recv(64)  # type: ignore[union-attr]
                if not numbers:
                    ready.unregister(key.fileobj)
                for number in numbers or [signal.SIGKILL]:
                    os.kill(key.data, number)


def read(client: socket.socket) -> Asked:
    """Receives what a client asks, and its three files."""
    size, sent, *_ = client.recvmsg(4, socket.CMSG_SPACE(12))
    files = array.array("i")
    for _, _, data in sent:
        files.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(size, "little"):
        text += client.recv(1 << 20)
    program, words, environment, directory = marshal.loads(text)
    decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return Asked(program, words, decoded, directory, list(files))


def become(asked: Asked, executable: str) -> None:
    """Is from now on the program that a client asked for."""
    for number, file in enumerate(asked.files):
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.directory)
    sys.executable = executable
    sys.argv[:] = [asked.program, *asked.words]
    if asked.program == "python":
        del sys.argv[0]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path[0] = ""
        of: dict[str, Any] = {"zckpt": "zckpt.__main__", "torchrun": "torch.distributed.run"}
        importlib.import_module(of[asked.program]).main()


def convert_once() -> None:
    """Converts a small checkpoint and verifies it: what a process compiles and reads for its first job, no fork does again."""
    import zckpt

    with tempfile.TemporaryDirectory(prefix="zckpt-standby-") as place:
        zckpt.convert(_CHECKPOINT, f"{place}/out", dtype="bf16")
        zckpt.verify(_CHECKPOINT, f"{place}/out")


def main() -> None:
    number, executable, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    convert_once()
    share_imports()
    asked = serve(socket.socket(fileno=int(number)))
    if asked is not None:
        run_to_the_end(lambda: become(asked, executable))


if __name__ == "__main__":
    main()
