"""Opens files at addresses ahead: while one of a series is read, such as those of all ranks, the next ones are opened.

For the listing of a save. To open a file there takes three requests, one after the other, with answers that come
from far away:
one by one, the files of a thousand ranks would take minutes, and every process of several takes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zckpt.storage.fsspec_io import THREADS, RemoteFile
from zckpt.storage.location import Address, Location

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_MOST = 2 * THREADS
"""The most files that are open ahead; each has its first and its last block in memory."""

_NUMBER = re.compile(r"\d+")


class OpenAhead:
    """The files of one directory, in the order in which they are most likely opened.

    Args:
        files: name -> where it is. Names that differ in numbers alone are a series.
    """

    def __init__(self, files: Mapping[str, Location]) -> None:
        self._files = files
        self._series: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        self._begun: dict[str, Future[RemoteFile]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def where(self, name: str) -> Location:
        """The place of a file that is opened once: its first and last bytes may be in memory.

        The second file of a series that is asked for has the next ones of it opened.
        """
        location = self._files[name]
        if not location.is_remote or name in self._asked:
            return location
        if not self._asked:
            for other, place in self._files.items():
                if place.is_remote:
                    self._series.setdefault(_NUMBER.sub("0", other), []).append(other)
        series = self._series[_NUMBER.sub("0", name)]
        if not self._asked.isdisjoint(series):
            self._begin(series, series.index(name))
        self._asked.add(name)
        begun = self._begun.pop(name, None)
        return location if begun is None else Address(location.path, begun)

    def beforehand(self, name: str) -> Location:
        """The place of a file that is read now and opened again later: it is requested once."""
        location = self._files[name]
        if not location.is_remote or name in self._asked:
            return location
        if name not in self._begun:
            self._begun[name] = self._workers().submit(_open_remote, location.path)
        return Address(location.path, self._begun[name])

    def _workers(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor  # which is slow to import, and only wanted of addresses

        self._pool = self._pool or ThreadPoolExecutor(THREADS, "zckpt-open")
        return self._pool

    def _begin(self, series: list[str], at: int) -> None:
        for name in series[at : at + _MOST]:
            if len(self._begun) >= _MOST:
                return
            if name not in self._asked and name not in self._begun:
                self._begun[name] = self._workers().submit(_open_remote, self._files[name].path)


def _open_remote(address: str) -> RemoteFile:
    file = RemoteFile.opened(address)
    file.read(0, 1)
    if not address.endswith(".safetensors"):  # what torch writes has its directory at the end
        file.read(file.size - 1, 1)
    return file
