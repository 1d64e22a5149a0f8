"""What files of tests cost, in seconds of processors: those that cost much, by which several workers share them."""

from __future__ import annotations

BUDGET: dict[str, float] = {}
"""File -> its seconds in `make test`."""
