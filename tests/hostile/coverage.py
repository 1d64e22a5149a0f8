"""Damages one kind of file again and again, in whatever way reaches code that no damage reached before: `make fuzz`.

    python tests/hostile/coverage.py pickle|zip|safetensors|metadata [libFuzzer's options] CORPUS

Each file must be read, or refused with an error of zckpt's own, within the memory and the time that libFuzzer is told. CORPUS
keeps what reached something new; a file that shows a defect is left where `-artifact_prefix` says.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import atheris

# Where zckpt is installed to be edited, its modules come from a finder of their own, which atheris cannot look into.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["zckpt.containers", "zckpt.storage.json_files", "zckpt.layouts.dcp.metadata"]):
    from zckpt.containers import StorageRef, open_container
    from zckpt.containers.pickles import load_pickle
    from zckpt.layouts.dcp.metadata import read_metadata
    from zckpt.layouts.save.listing import Listing

from zckpt.base.errors import ZckptError  # noqa: E402
from zckpt.core.dtypes import F32  # noqa: E402
from zckpt.core.stores import FileStore  # noqa: E402
from zckpt.storage.location import locate  # noqa: E402

FIXTURES = Path(__file__).parents[2] / "fixtures"
MOST_BYTES = 1 << 16

_file = tempfile.NamedTemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)  # noqa: SIM115
_storage = StorageRef("0", F32, 8, "", FileStore("x", 1000), 0)


def stored(data: bytes) -> str:
    """A file that holds this."""
    os.ftruncate(_file.fileno(), 0)
    os.pwrite(_file.fileno(), data, 0)
    return _file.name


def torch_zips() -> list[bytes]:
    """Torch files of the fixtures that are small."""
    paths = sorted(FIXTURES.glob("*/*/checkpoint/*/*.pt"))
    return [path.read_bytes() for path in paths if path.stat().st_size < MOST_BYTES][:40]


def pickles() -> list[bytes]:
    """The pickles inside them."""
    found = []
    for path in sorted(FIXTURES.glob("*/*/checkpoint/*/*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                found += [file.read(name) for name in file.namelist() if name.endswith("data.pkl")]
    return sorted(data for data in found if len(data) < MOST_BYTES)[:60]


def safetensors() -> list[bytes]:
    """Files of a few tensors."""
    import numpy
    from safetensors.numpy import save

    return [save({f"w{k}": numpy.arange(6, dtype=d) for k in range(n)}) for n in (0, 1, 3) for d in ("f4", "i8", "u1")]


def metadata() -> list[bytes]:
    """What saves of torch.distributed.checkpoint say of themselves."""
    return [path.read_bytes() for path in sorted(FIXTURES.glob("dcp/*/checkpoint/**/.metadata"))]


TARGETS: dict[str, tuple[Callable[[bytes], object], Callable[[], list[bytes]]]] = {
    "pickle": (lambda data: load_pickle(data, file="x", persistent_load=lambda _: _storage), pickles),
    "zip": (lambda data: open_container(stored(data)), torch_zips),
    "safetensors": (lambda data: open_container(stored(data)), safetensors),
    "metadata": (lambda data: read_metadata(Listing(locate("x"), "", {".metadata": locate(stored(data))})), metadata),
}


def main() -> None:
    """Fuzzes one target, from seeds where its corpus is empty."""
    target, corpus = sys.argv[1], Path(sys.argv[-1])
    read, seeds = TARGETS[target]
    corpus.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        for number, data in enumerate(seeds()):
            (corpus / f"seed{number}").write_bytes(data)

    def look(data: bytes) -> None:
        try:
            read(data)
        except ZckptError as error:
            assert str(error)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], look)
    atheris.Fuzz()


main()
