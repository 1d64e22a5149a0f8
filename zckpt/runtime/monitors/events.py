"""What a monitor writes: a name, a number, and how many samples the run has seen.

For the monitors and those who write to them.
"""

from __future__ import annotations

from typing import Any

Event = tuple[str, Any, int]
"""Name, value (a number, or a tensor of one element), samples so far."""
