"""How much of a machine one file of a stranger may take: so little that no file is a bomb, so much that no honest one is hurt.

For `containers` and `jsons`. Together they keep the memory for any one file under 300 MiB and its opening under seconds.
A file of one's own that is refused opens with ZCKPT_LIFT_LIMITS=1 in the environment.
"""

from __future__ import annotations

import os

_LIFTED = 64 if os.environ.get("ZCKPT_LIFT_LIMITS") == "1" else 1

REMEDY = "No file of weights is known to need that. If you trust its origin, set ZCKPT_LIFT_LIMITS=1 and try again."

PICKLE_BYTES = _LIFTED * (32 << 20)
"""Of a pickle. One of a hundred thousand tensors has 16 MB; their numbers are not in it."""

METADATA_BYTES = _LIFTED * (512 << 20)
"""Of the pickle that describes a save of torch.distributed.checkpoint: three million chunks, of all ranks. A chunk takes 170
bytes of it and 4 kB of memory, so its limits grow with its size, beyond what is said above."""

PICKLE_MEMORY_BYTES = _LIFTED * (192 << 20)
"""Of the objects that a pickle makes. A tensor needs about 2 kB."""

PICKLE_STEPS = _LIFTED * 6_000_000
"""Of a pickle, through the opcodes that are not among the ten commonest. A tensor needs ten."""

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
