"""Hostfiles, choices of slots, and commands for several machines."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from zckpt.base.errors import NotACheckpointError, RemoteError, UsageError, ZckptError
from zckpt.team import hosts

HOSTS = {"a": [0, 1], "b": [0, 1, 2]}


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=2\n  b  slots=3 # more\n")
    assert hosts.read_hostfile(str(path)) == HOSTS
    for text in ("a\n", "a slots=2\na slots=1\n", "\n"):
        path.write_text(text)
        with pytest.raises(UsageError):
            hosts.read_hostfile(str(path))
    with pytest.raises(NotACheckpointError):
        hosts.read_hostfile(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("a", "", {"a": [0, 1]}),
        ("b:2,0@a:1", "", {"a": [1], "b": [0, 2]}),
        ("", "a@b:1", {"b": [0, 2]}),
        ("", "b:0,1,2", {"a": [0, 1]}),
    ],
)
def test_what_is_chosen(include: str, exclude: str, left: hosts.Hosts) -> None:
    assert hosts.choose(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [("c:0", "", "'c'"), ("a:2", "", "a:2"), ("", "a@b", "leaves no slot"), ("a:x", "", "'a:x'")],
)
def test_what_is_not_there_is_named(include: str, exclude: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        hosts.choose(HOSTS, include, exclude)
    assert said in str(error.value)


def test_the_line_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setattr("os.environ", {"HOME": "none", "NCCL_DEBUG": "INFO", "SECRET": "s"})
    (tmp_path / ".deepspeed_env").write_text("MINE=a b\n")
    *ssh, line = hosts.shell_line("other", ["python", "it's"], ssh_port=22, before="v/activate")
    assert ssh == ["ssh", "-tt", "-p", "22", "other"]
    assert line == f". v/activate && cd {tmp_path} && exec env NCCL_DEBUG=INFO 'MINE=a b' python 'it'\"'\"'s'"
    assert hosts.shell_line(socket.gethostname(), ["python"], ssh_port=None, before=None) == ["python"]


@pytest.mark.parametrize(
    ("ssh", "error"), [("exit 255", RemoteError), ("exit 3", None), (None, UsageError), ("exit 0", None)]
)
def test_a_machine_that_fails_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str | None, error: type[ZckptError] | None
) -> None:
    """What stands for ssh here ends at once; the other machine's command would go on for an hour."""
    if ssh is not None:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
        (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if ssh is not None else str(tmp_path))
    commands: dict[str, Sequence[str]] = {"localhost": ["/bin/sleep", "0" if ssh == "exit 0" else "3600"]}
    commands["other"] = ["ssh", "other", "true"]
    if error is None:
        assert hosts.start_all(commands) == int(str(ssh)[-1])
    else:
        with pytest.raises(error) as raised:
            hosts.start_all(commands)
        assert "other" in str(raised.value)
