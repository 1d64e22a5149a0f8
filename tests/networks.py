"""Network namespaces of this machine that stand for machines: each has a link, a loopback and a host name of its own.

All links lead to one switch, in a namespace where a server can run. What a machine gets over its link and what it sends there
are each limited to a rate. It takes root, `ip` and `tc`, and leaves the network of this machine itself alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from types import TracebackType

SERVER = "10.86.0.1"
"""The address of what runs at the switch."""


def refusal() -> str:
    """Why there can be no such networks here; empty where there can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "ip, tc or unshare is not installed"
    try:
        with Network(1, 10**9):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"


class Network:
    """Use as a context manager.

    Args:
        count: of machines.
        bytes_per_s: that each link carries, in each direction.
    """

    def __init__(self, count: int, bytes_per_s: int) -> None:
        self.count, self._rate = count, bytes_per_s
        self._switch = f"zckpt-{os.getpid()}"

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*map(self._name, range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _name(self, number: int) -> str:
        return f"{self._switch}-{number}"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        inside = ("-n", self._switch)
        _ip(*inside, "link", "add", "switch", "type", "bridge")
        _ip(*inside, "addr", "add", f"{SERVER}/24", "dev", "switch")
        for link in ("lo", "switch"):
            _ip(*inside, "link", "set", "dev", link, "up")
        for number in range(self.count):
            name, port = self._name(number), f"port{number}"
            _ip("netns", "add", name)
            _ip(*inside, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip(*inside, "link", "set", "dev", port, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", "dev", link, "up")
            for place, device in ((self._switch, port), (name, "eth0")):
                # Packets are not joined: few large ones would fill the queue, and others would be lost and sent again, late.
                _ip("-n", place, "link", "set", "dev", device, "gso_max_size", "2048", "gso_max_segs", "1")
                limit = ("tbf", "rate", f"{self._rate * 8}bit", "burst", "64kb", "latency", "400ms")
                _run("tc", "-n", place, "qdisc", "add", "dev", device, "root", *limit)

    def address(self, number: int) -> str:
        """Of a machine."""
        return f"10.86.0.{number + 10}"

    def at_switch(self, command: list[str]) -> list[str]:
        """A command line that runs a command where all links meet."""
        return ["ip", "netns", "exec", self._switch, *command]

    def on(self, number: int, command: list[str]) -> list[str]:
        """A command line that runs a command on a machine, whose host name is then `machineNUMBER`."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname machine{number}; exec "$@"', "sh", *command]
        return ["ip", "netns", "exec", self._name(number), *named]

    def carried(self, number: int) -> tuple[int, int]:
        """Bytes that a machine got over its link so far, and that it sent."""
        told = _ip("-n", self._name(number), "-j", "-s", "link", "show", "dev", "eth0")
        counts = json.loads(told)[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
