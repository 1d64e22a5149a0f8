"""What is in an output, and outputs as an earlier run of zckpt would have left them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from zckpt.core.plan import WrittenFile
from zckpt.output.manifest import Manifest, path_for


def contents(directory: Path) -> dict[str, bytes]:
    """Path -> bytes of all files in a directory."""
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items()}


def earlier_output(place: Path, files: Mapping[str, bytes], *, single: bool = False) -> dict[str, bytes]:
    """Writes these files and the zckpt.json that lists them: into a directory, or of one file at its own name.

    Returns:
        What there is now, the manifest too, by name.
    """
    home = place.parent if single else place
    for name, data in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    listed = tuple(WrittenFile(name, len(data), zlib.crc32(data)) for name, data in files.items())
    facts = Manifest("0.0.1", {"layout": "plain", "tag": ""}, "fp32", {}, 1, 1, listed).as_bytes()
    where = Path(path_for(str(place), single=single))
    where.write_bytes(facts)
    return {**files, where.name: facts}
