"""How much memory and time a file may cost, so that a hostile one cannot exhaust the machine and no honest one is refused.

For `containers` and `storage.json_files`. Opening any one file takes less than 600 MiB of memory, and a few seconds.
With ZCKPT_LIFT_LIMITS=1 in the environment all limits are 64 times as high.
"""

from __future__ import annotations

import os

_LIFTED = 64 if os.environ.get("ZCKPT_LIFT_LIMITS") == "1" else 1

REMEDY = "If you trust the file, set ZCKPT_LIFT_LIMITS=1 in the environment and try again."

PICKLE_BYTES = _LIFTED * (64 << 20)
"""Size of a pickle. With 100,000 tensors it has 16 MB, as their elements are stored elsewhere."""

METADATA_BYTES = _LIFTED * (512 << 20)
"""Size of the `.metadata` pickle of torch.distributed.checkpoint: three million chunks, of all ranks. Each takes 170 bytes of
the pickle and 100 of memory, or 1 kB where the C++ is not built."""

METADATA_COST_PER_BYTE = _LIFTED * 20
"""Memory for each byte of that pickle; pickles that name a million tensors cost 13. It is counted from 26 MB on. A
smaller
pickle may take what any pickle may.
"""

PICKLE_COST = _LIFTED * (512 << 20)
"""Memory of the objects that a pickle makes, in bytes, plus 8 for each opcode. A tensor costs about 3 kB."""

PICKLE_COST_FREE = _LIFTED * (8 << 20)
PICKLE_COST_PER_BYTE = _LIFTED * 256
"""The most that a small pickle may cost for each of its bytes, in addition to `PICKLE_COST`."""

RANKS = _LIFTED * (1 << 17)
"""Ranks on any axis of a run's parallelism. A larger number in a file is treated as this one."""

DIRECTORY_BYTES = _LIFTED * (24 << 20)
"""Size of a zip file's directory: 200,000 records."""

RECORD_COST = 440
"""Bytes of memory for each record of a zip file."""

HEADER_BYTES = _LIFTED * (48 << 20)
"""Size of a safetensors header. The format allows 100 MB; 100,000 tensors need 13 MB."""

JSON_MEMORY_BYTES = _LIFTED * (192 << 20)
"""Memory of the objects in a JSON document. A header of 100,000 tensors needs 110 MB."""

GGUF_MEMORY_BYTES = _LIFTED * (192 << 20)
"""Memory of the objects that a GGUF header makes: 280,000 tensors. Models have a few thousand, and a few dozen entries."""

TAR_MEMBERS = 4096
"""Files in a tar archive. Archives that torch wrote have four."""
