"""Which files are GGUF, by their names, and under which name a catalog has their metadata.

For `FAMILY`, `read`, and what is made of the metadata.
"""

from __future__ import annotations

import re

NAME = re.compile(r"(?P<save>.+?)(?:-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.gguf")

METADATA = "gguf"
"""The entry of a catalog's extras with the metadata: key -> number, text or list; None for long arrays."""
