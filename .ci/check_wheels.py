"""Proves what can be proved of the wheels in dist/ on one Linux machine: `make wheels`.

- What each holds: the same Python files, an engine of its platform, nothing of a newer C library or system than its tag says.
- Every interpreter of this machine installs its wheel where neither a compiler nor torch is, converts a fixture, and runs
  `zckpt demo` in an empty directory; so does the wheel without an engine.
- Debian's Python for arm64 does the same under qemu. What it needs comes from Debian and the package index, into .make/arm64.

The conversions of all must be equal to that of the tree's own installation, byte for byte; where the tree has none, to that of
the wheel without an engine, which shares no mover and no cast with the C++. What cannot be tried, for this machine
lacks an interpreter or qemu, is said in lines that begin with "not tried". With --here only the wheels that `wheels.py --here`
makes are checked, with this Python: `make wheels-here`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from wheels import ROOT, WORK, interpreter

LARGEST = 12 << 20
FIXTURE = ROOT / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"
INTERPRETERS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PACKAGES = (
    *(
        "python3.11-minimal",
        "libpython3.11-minimal",
        "libpython3.11-stdlib",
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "zlib1g",
    ),
    *("libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libcrypt1"),
)
OLDEST_GLIBC = (2, 17)
OLDEST_MACOS = (11, 0)


def main() -> int:
    """Checks all wheels; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--here", action="store_true", help="only the wheels of this machine and this Python")
    parser.add_argument(
        "--tree", type=Path, default=ROOT / ".venv/bin/python", help="the Python that has the tree, if any"
    )
    options = parser.parse_args()
    dist = options.dist.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    found = sorted(dist.glob("*.whl"))
    if not found:
        sys.exit(f"no wheels in {dist}")
    tools = environment("tools", Path(sys.executable))
    install(tools, "abi3audit", "pyelftools", *([] if options.here else ["auditwheel", "macholib"]))
    contents = {wheel.name: look(wheel, tools) for wheel in found}
    if len(set(contents.values())) > 1:
        sys.exit(f"the wheels hold different Python files: {contents}")
    check_sdist(dist)
    expected = check_without_engine(dist)
    if options.tree.exists():
        same(converted([str(options.tree), "-m", "zckpt"], "tree"), expected, "the tree")
    else:
        print(f"not tried: the tree's own installation: no {options.tree}", flush=True)
    versions = ["{}.{}".format(*sys.version_info)] if options.here else INTERPRETERS
    for version in versions:
        base = Path(sys.executable) if options.here else interpreter(version)
        if base is None:
            print(f"not tried: CPython {version}, which this machine does not have", flush=True)
        elif not options.here and not fitting(found, version):
            print(f"not tried: CPython {version}, for which there is no wheel in {dist.name}/", flush=True)
        else:
            check(base, version, dist, expected)
    if not options.here:
        check_arm64(dist, expected)
    return 0


def check_sdist(dist: Path) -> None:
    """Checks that the sdist has all that a build needs, and no tests."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    needed = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "zckpt").rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".js")
    }
    if lacking := sorted((needed | {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"}) - names):
        sys.exit(f"{archive.name} lacks {', '.join(lacking[:5])}")
    if archive.stat().st_size > LARGEST or any(name.startswith(("tests/", "fixtures/")) for name in names):
        sys.exit(f"{archive.name} has what no build needs: {archive.stat().st_size:,} bytes")
    print("holds what it should:", archive.name, flush=True)


def look(wheel: Path, tools: Path) -> str:
    """Checks what a wheel holds; returns a digest of its Python files."""
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {LARGEST:,}")
    tag = wheel.stem.split("-", 4)[-1]
    with zipfile.ZipFile(wheel) as archive:
        engines = [name for name in archive.namelist() if name.startswith("zckpt/_core.") and name.endswith(".so")]
        python = sorted(
            (i.filename, i.CRC) for i in archive.infolist() if not re.match(r".*\.so$|zckpt-[^/]+/", i.filename)
        )
        if len(engines) != (0 if tag == "any" else 1):
            sys.exit(f"{wheel.name} has engines {engines}")
        work = WORK / "look"
        shutil.rmtree(work, ignore_errors=True)
        for name in engines:
            archive.extract(name, work)
            (check_macho if "macosx" in tag else check_elf)(work / name, wheel.name, tag, tools)
    if "-abi3-" in wheel.name:
        run([str(tools.parent / "abi3audit"), "--strict", str(wheel)])
    if "manylinux" in tag:
        shown = run([str(tools.parent / "auditwheel"), "show", str(wheel)])
        if not re.search(r"manylinux_2_(5|12|17)_", shown):
            sys.exit(f"auditwheel does not call {wheel.name} manylinux_2_17 or older:\n{shown}")
    print("holds what it should:", wheel.name, flush=True)
    return hashlib.sha256(repr(python).encode()).hexdigest()[:12]


def check_elf(engine: Path, wheel: str, tag: str, tools: Path) -> None:
    """Checks an engine for Linux: its processor, its libraries, and the newest symbols that it asks for."""
    code = """
import sys
from elftools.elf.elffile import ELFFile
file = ELFFile(open(sys.argv[1], "rb"))
print(file["e_machine"])
print(*[tag.needed for tag in file.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"])
section = file.get_section_by_name(".gnu.version_r")
print(*[aux.name for _, auxes in section.iter_versions() for aux in auxes] if section else [])
"""
    machine, needed, versions = run([str(tools), "-c", code, str(engine)]).split("\n")[:3]
    if "-linux_" in f"-{tag}":  # for the machine that built it, with its libraries
        return
    if machine != ("EM_AARCH64" if "aarch64" in tag else "EM_X86_64"):
        sys.exit(f"the engine of {wheel} is for {machine}")
    glibc = {f"lib{name}.so.{n}" for name, n in (("c", 6), ("m", 6), ("pthread", 0), ("dl", 2), ("rt", 1))}
    loaders = {"ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2"}
    allowed = {"libc.so"} if "musl" in tag else glibc | loaders
    if not set(needed.split()) <= allowed:
        sys.exit(f"the engine of {wheel} needs {needed}")
    newest = max((tuple(map(int, v[6:].split("."))) for v in versions.split() if v.startswith("GLIBC_2")), default=(0,))
    if newest > OLDEST_GLIBC or ("musl" in tag and newest != (0,)):
        sys.exit(f"the engine of {wheel} needs glibc {newest}")


def check_macho(engine: Path, wheel: str, tag: str, tools: Path) -> None:
    """Checks an engine for macOS: its processor, its libraries and the oldest system that it runs on."""
    code = """
import sys
from macholib.MachO import MachO
(header,) = MachO(sys.argv[1]).headers
print(header.header.cputype)
print(*[name for _, _, name in header.walkRelocatables()])
oldest = [command for load, command, _ in header.commands if load.cmd in (0x24, 0x32)]
print(*[getattr(command, "minos", getattr(command, "version", 0)) for command in oldest])
"""
    processor, libraries, oldest = run([str(tools), "-c", code, str(engine)]).split("\n")[:3]
    if int(processor) != 0x0100000C:
        sys.exit(f"the engine of {wheel} is for processor {processor}")
    if not set(libraries.split()) <= {"/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib"}:
        sys.exit(f"the engine of {wheel} needs {libraries}")
    if (int(oldest) >> 16, int(oldest) >> 8 & 255) > OLDEST_MACOS:
        sys.exit(f"the engine of {wheel} needs macOS {int(oldest) >> 16}")


def fitting(wheels: list[Path], version: str) -> bool:
    """Whether one of the wheels is for this machine and this version."""
    tag = f"cp{version.replace('.', '')}" if version in ("3.10", "3.11") else "cp312"
    return any(f"-{tag}-" in wheel.name and "manylinux" in wheel.name and "x86_64" in wheel.name for wheel in wheels)


def check(base: Path, version: str, dist: Path, expected: str) -> None:
    """Installs a wheel where no compiler can be found, and converts."""
    python = environment(f"try{version}", base)
    install(
        python,
        "--only-binary=:all:",
        "--find-links",
        str(dist),
        "--force-reinstall",
        "--no-index",
        "--no-deps",
        "zckpt",
    )
    install(python, "--only-binary=:all:", "zckpt", pinned=False)  # as users do; pins need not exist for every version
    command = [str(python), "-m", "zckpt"]
    about = run([*command, "--version", "--verbose"])
    if "with the C++ engine" not in about or not re.search(r"^torch +not installed$", about, re.MULTILINE):
        sys.exit(f"{version}: {about}")
    same(converted(command, version), expected, f"CPython {version}")
    check_demo(command, version)


def check_without_engine(dist: Path) -> str:
    """Installs the wheel that has no engine, and converts; returns a digest of the weights."""
    python = environment("try-pure", Path(sys.executable))
    (wheel,) = dist.glob("*-py3-none-any.whl")
    install(python, "--only-binary=:all:", "--force-reinstall", "--no-deps", str(wheel))
    install(python, "--only-binary=:all:", "zckpt", pinned=False)  # pins need not exist for every version
    command = [str(python), "-m", "zckpt"]
    check_demo(command, "pure")
    return converted(command, "pure", says="C++ engine was not built")


def check_demo(command: list[str], name: str) -> None:
    """Runs `zckpt demo` in an empty directory outside the tree; it must find its weights equal, and leave nothing behind."""
    with tempfile.TemporaryDirectory() as empty:
        began = time.monotonic()
        shown = run([*command, "demo"], cwd=Path(empty))
        if "bit for bit" not in shown or "Safe to delete" not in shown or os.listdir(empty):
            sys.exit(f"{name}: the demo does not show what it should:\n{shown}")
    print(f"shows itself in {time.monotonic() - began:.1f} s: {name}", flush=True)


def check_arm64(dist: Path, expected: str) -> None:
    """The same with the wheel for aarch64, by Debian's Python under qemu."""
    wheels = list(dist.glob("*-cp311-*aarch64.whl"))
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    lacking = "no qemu-aarch64 here (Debian's package qemu-user)" if qemu is None else ""
    lacking = lacking or ("" if wheels else "no wheel for CPython 3.11 and aarch64")
    lacking = lacking or ("" if shutil.which("apt-get") else "no apt-get here, which brings Debian's Python for arm64")
    if lacking or qemu is None:
        print(f"not tried: aarch64: {lacking}", flush=True)
        return
    home = ROOT / ".make" / "arm64"
    if not (home / "ready").exists():
        system(home)
    packages = home / "packages"
    pip = environment("tools", Path(sys.executable))
    platforms = (
        "--platform",
        "manylinux2014_aarch64",
        "--platform",
        "manylinux_2_28_aarch64",
        "--python-version",
        "3.11",
    )
    install(pip, "--upgrade", "--target", str(packages), "--only-binary=:all:", *platforms, str(wheels[0]))
    root = home / "root"
    command = [qemu, "-L", str(root), "-E", f"PYTHONPATH={packages}", str(root / "usr/bin/python3.11"), "-m", "zckpt"]
    about = run([*command, "--version", "--verbose"])
    if "with the C++ engine" not in about or "aarch64" not in about:
        sys.exit(f"aarch64: {about}")
    same(converted(command, "arm64"), expected, "aarch64 under qemu")


def system(home: Path) -> None:
    """Debian's Python for arm64, unpacked into a directory of its own."""
    shutil.rmtree(home, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "root", "debs"):
        (home / name).mkdir(parents=True)
    (home / "status").touch()
    (home / "sources").mkdir()
    for source in (
        Path("/etc/apt/sources.list.d/debian.sources"),
        Path("/etc/apt/sources.list"),
    ):  # where this machine gets Debian's
        if source.is_file():
            shutil.copy(source, home / "sources" / source.name.replace("sources.list", "own.list"))
    (home / "apt.conf").write_text(
        'APT::Architecture "arm64";\nAPT::Architectures { "arm64"; };\nAPT::Sandbox::User "root";\n'
        f'Dir::State "{home}/state";\n'
        f'Dir::Cache "{home}/cache";\nDir::Etc::sourceparts "{home}/sources";\nDir::Etc::sourcelist "/dev/null";\n'
        f'Dir::State::status "{home}/status";\n'
    )
    run(["apt-get", "-c", str(home / "apt.conf"), "-q", "update"])
    run(["apt-get", "-c", str(home / "apt.conf"), "-q", "download", *PACKAGES], cwd=home / "debs")
    for package in (home / "debs").glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(home / "root")])
    (home / "ready").touch()


def converted(command: list[str], name: str, says: str = "") -> str:
    """Converts the fixture; returns a digest of the weights."""
    out = WORK / "converted" / f"{name}.safetensors"
    out.parent.mkdir(parents=True, exist_ok=True)
    shown = run([*command, "to-bf16", str(FIXTURE), str(out), "--overwrite"])
    if says not in shown:
        sys.exit(f"{name} does not say {says!r}:\n{shown}")
    return hashlib.sha256(out.read_bytes()).hexdigest()


def same(found: str, expected: str, what: str) -> None:
    """Ends if two conversions differ."""
    if found != expected:
        sys.exit(f"{what}: another output than the tree's own installation gives")
    print(f"converts as it should: {what}", flush=True)


def environment(name: str, base: Path) -> Path:
    """The Python of an environment."""
    home = WORK / name
    if not (home / "bin/python").exists():
        run([str(base), "-m", "venv", str(home)])
    return home / "bin" / "python"


def install(python: Path, *what: str, pinned: bool = True) -> None:
    """Installs into an environment, without a compiler in PATH; `pinned`: in the versions of constraints.txt."""
    run(
        [
            str(python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            *(["-c", str(ROOT / "constraints.txt")] if pinned else []),
            *what,
        ],
        bare=True,
    )


def run(command: list[str], *, cwd: Path | None = None, bare: bool = False) -> str:
    """Runs a command; returns what it prints. `bare`: in an environment in which no compiler can be found."""
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    if bare:
        env.update(PATH="/nowhere", CC="/nowhere/cc", CXX="/nowhere/c++")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd or WORK, env=env)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
