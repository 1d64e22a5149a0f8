"""How much of a machine one file of a stranger may take: so little that no file is a bomb, so much that no honest one is hurt.

For `containers` and `jsons`. Together they keep the memory for any one file under 600 MiB, and its opening under seconds.
A file of one's own that is refused opens with ZCKPT_LIFT_LIMITS=1 in the environment.
"""

from __future__ import annotations

import os

_LIFTED = 64 if os.environ.get("ZCKPT_LIFT_LIMITS") == "1" else 1

REMEDY = "No file of weights is known to need that. If you trust its origin, set ZCKPT_LIFT_LIMITS=1 and try again."

PICKLE_BYTES = _LIFTED * (64 << 20)
"""Of a pickle. One of a hundred thousand tensors has 16 MB; their numbers are not in it."""

METADATA_BYTES = _LIFTED * (512 << 20)
"""Of the pickle that describes a save of torch.distributed.checkpoint: three million chunks, of all ranks. A chunk takes 170
bytes of it and 4 kB of memory."""

METADATA_COST_PER_BYTE = _LIFTED * 64
"""What that pickle may cost, beyond what any may."""

PICKLE_COST = _LIFTED * (512 << 20)
"""Of a pickle: the bytes of all objects that it makes, and 8 for each step. A tensor costs about 3 kB."""

PICKLE_COST_FREE = _LIFTED * (8 << 20)
PICKLE_COST_PER_BYTE = _LIFTED * 256
"""What a pickle of few bytes may cost: so much whatever its length, and so much for each of them."""

RANKS = _LIFTED * (1 << 17)
"""Of a run, on any axis of its parallelism. What a file says is more than that is not counted up to."""

DIRECTORY_BYTES = _LIFTED * (24 << 20)
"""Of a zip file's directory: two hundred thousand records."""

RECORD_COST = 440
"""Bytes of memory for a record of a zip file."""

HEADER_BYTES = _LIFTED * (48 << 20)
"""Of a safetensors header. The format allows 100 MB; 100,000 tensors need 13."""

JSON_MEMORY_BYTES = _LIFTED * (192 << 20)
"""Of the objects that a JSON document makes. A header of 100,000 tensors needs 100 MB."""

TAR_MEMBERS = 64
"""Torch's tar archives had four."""
