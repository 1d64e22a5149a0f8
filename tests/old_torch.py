"""Lets a second environment, which has only an older torch, use everything else of the first; for `make old-torch`.

    .venv-old/bin/python tests/old_torch.py .venv

Package indexes have older torches built for GPUs, which load NVIDIA's libraries, gigabytes, when they are imported. Here they get
libraries of these names in which every function says that there is no GPU (100, cudaErrorNoDevice).
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

THEIRS = re.compile(r"lib(cu|nccl|nv)")
UNVERSIONED = re.compile(r"nccl|cusparseLt|curand|cuda|cu[A-Z]|nvrtc")


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    first = Path(sys.argv[1]).resolve() / site.relative_to(sys.prefix)
    (site / "first_environment.pth").write_text(f"import site; site.addsitedir({str(first)!r})\n")
    stand_ins(site / "torch" / "lib")


def stand_ins(libraries: Path) -> None:
    """Makes the libraries that torch's own need and that are not there, with the functions that they call."""
    own = [path for path in libraries.glob("*.so*") if not THEIRS.match(path.name)]
    own += [path for path in libraries.glob("libcaffe2*.so*") if path not in own]
    needed: set[str] = set()
    called: set[tuple[str, str]] = set()
    for path in [*own, *libraries.parent.glob("_C*.so")]:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", path)))
        for line in _readelf("--dyn-syms", path).splitlines():
            cells = line.split()
            if len(cells) > 7 and cells[6] == "UND":
                name, _, version = cells[7].partition("@")
                called.add((name, version.lstrip("@")))
    for library in sorted(filter(THEIRS.match, needed)):
        names = {name for name, version in called if version == library}
        if library.startswith("libnccl"):  # no versions: it may have those of all libraries that have none
            names = {name for name, version in called if not version and UNVERSIONED.match(name)}
        _build(libraries / library, sorted(names), versioned=not library.startswith("libnccl"))


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", what, path], capture_output=True, text=True, check=True).stdout


def _build(library: Path, names: list[str], *, versioned: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "functions.c"), Path(scratch, "versions")
        code.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names) or "int nothing;\n")
        versions.write_text(f"{library.name} {{ global: *; }};\n")
        options = [f"-Wl,--version-script={versions}"] if versioned else []
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *options]
        subprocess.run([*command, "-o", library, code], check=True)


if __name__ == "__main__":
    main()
