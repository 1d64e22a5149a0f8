"""Which files are of the package torch_checkpointing, by their names.

For `FAMILY` and `read`.
"""

from __future__ import annotations

import re

METADATA = "metadata.pkl"
ITEM = re.compile(r"(?P<item>[\w-]+?)_(?P<dp>\d+)\.pt")
