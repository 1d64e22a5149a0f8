"""Names of files that Megatron-Core puts beside those of torch.distributed.checkpoint.

For `FAMILY`, `read` and `run_state`.
"""

from __future__ import annotations

COMMON = "common.pt"
CONFIG = "metadata.json"
NONE = f"no {CONFIG} of Megatron-Core, and no names of its models"
"""Why files are none of its."""
