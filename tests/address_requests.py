"""Requests to fsspec's memory, one of which fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from address_models import Killed


class Requests:
    """Of fsspec's memory: counts them, and does something at one of them."""

    def __init__(self) -> None:
        self.begin(0, "")

    def begin(self, nth: int, mode: str) -> None:
        self.nth, self.mode, self.count = nth, mode, 0

    def __call__(self, real: Callable[[], Any]) -> Any:
        self.count += 1
        if self.mode == "killed" and self.count >= self.nth:
            raise Killed
        if self.mode == "down" and self.count >= self.nth:
            raise ConnectionError("down")
        if self.mode == "refused" and self.count == self.nth:
            raise ConnectionError("refused")
        answer = real()
        if self.mode == "lost" and self.count == self.nth:
            raise ConnectionError("the answer was lost")
        return answer
