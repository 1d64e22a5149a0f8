"""Builds zckpt's wheels and its sdist into dist/, for all platforms, on one Linux machine: `make wheels`.

With --here only the wheel of this machine and this Python, the sdist and the wheel without the engine, by this machine's own
compiler: `make wheels-here`.

The compiler is zig's clang, from the package ziglang: it carries the C libraries of all platforms and the macOS headers. One
wheel per platform serves CPython 3.12 and later (abi3); 3.10 and 3.11 have one each. A version's headers come from its
interpreter on this machine; a version without one is left out, and the last line says so. Headers of CPython differ between
64-bit platforms only in what an extension does not use.

A wheel without the engine (py3-none-any) is built too: it runs where no other does, slowly, and says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".make" / "wheels-work"


@dataclass(frozen=True)
class Platform:
    """A platform.

    Attributes:
        tag: of its wheels.
        target: zig's name for it, with the oldest C library or system that it may have.
        system: CMake's name of the system.
        processor: CMake's name of the processor.
        soabi: the last part of an extension's name there.
    """

    tag: str
    target: str
    system: str
    processor: str
    soabi: str


def _linux(tags: str, processor: str, libc: str) -> Platform:
    soabi = f"{processor}-linux-{libc.partition('.')[0]}"
    return Platform(tags, f"{processor}-linux-{libc}", "Linux", processor, soabi)


PLATFORMS = {
    "manylinux-x86_64": _linux("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64", "gnu.2.17"),
    "manylinux-aarch64": _linux("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64", "gnu.2.17"),
    "musllinux-x86_64": _linux("musllinux_1_2_x86_64", "x86_64", "musl"),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "arm64", "darwin"),
}
FLAGS = ("-include", "stdio.h")
"""Of the compiler: nanobind uses stdio.h, which Python's headers for the stable ABI do not include."""
VERSIONS = ("3.10", "3.11", "3.12")
"""Of CPython; the wheel of the last is for all later ones too."""


def main() -> int:
    """Builds what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", action="append", choices=PLATFORMS, help="only this one (may be repeated)")
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only for this version (may be repeated)")
    parser.add_argument("--here", action="store_true", help="only what this machine and this Python need")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lacking: list[str] = []
    if options.here:
        for path in (here(options.out), without_engine(options.out), sdist(options.out)):
            print(path.relative_to(options.out.parent), f"{path.stat().st_size / 2**20:.1f} MiB", flush=True)
        return 0
    for version in options.python or VERSIONS:
        found = interpreter(version)
        if found is None:
            lacking.append(version)
            continue
        python = prepared(found, version, "ziglang")
        for name in options.platform or PLATFORMS:
            wheel = build(python, version, PLATFORMS[name], options.out)
            print(wheel.relative_to(options.out.parent), f"{wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
    if not options.platform and not options.python:
        for path in (without_engine(options.out), sdist(options.out)):
            print(path.relative_to(options.out.parent), f"{path.stat().st_size / 2**20:.1f} MiB", flush=True)
    if lacking:
        print(f"left out: CPython {', '.join(lacking)}, which this machine does not have")
    return 0


def interpreter(version: str) -> Path | None:
    """An interpreter of this version, with its headers: one that PATH or pyenv has."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path / "bin" / f"python{version}") for path in sorted(pyenv.glob(f"{version}.*"))]
    code = "import sys, sysconfig; print(*sys.version_info[:2], sep='.'); print(sysconfig.get_path('include'))"
    for candidate in filter(None, candidates):
        found = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        words = found.stdout.split()
        if found.returncode == 0 and words[0] == version and Path(words[1], "Python.h").is_file():
            return Path(candidate)
    return None


def prepared(base: Path, version: str, *further: str) -> Path:
    """The Python of an environment with what a build needs, and these packages."""
    home = WORK / f"python{version}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        run(str(base), "-m", "venv", "--clear", str(home))
        run(str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qU", "-c", str(ROOT / "constraints.txt"),
            "pip", "scikit-build-core", "nanobind", "wheel", "ninja", "cmake", "build", *further)  # fmt: skip
        (home / "ready").touch()
    return python


def build(python: Path, version: str, platform: Platform, out: Path) -> Path:
    """One wheel; returns where it is."""
    work = WORK / f"{version}-{platform.target}"
    made = work / "wheel"
    shutil.rmtree(made, ignore_errors=True)
    tools = {
        tool: script(python, work, tool, *rest)
        for tool, *rest in (("c++", "-target", platform.target, *FLAGS), ("ar",), ("ranlib",))
    }
    soabi = f"cpython-{version.replace('.', '')}-{platform.soabi}"
    defines = {
        "CMAKE_SYSTEM_NAME": platform.system,
        "CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "CMAKE_AR": tools["ar"],
        "CMAKE_RANLIB": tools["ranlib"],
        "CMAKE_EXE_LINKER_FLAGS": "-Wl,-s",
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-s",
        "CMAKE_SKIP_RPATH": "ON",  # there is none, and CMake must not have to know how to change it
        "SKBUILD_SOABI": soabi,
    }
    settings = [f"cmake.define.{name}={value}" for name, value in defines.items()]
    wheel_of_tree(python, made, f"build-dir={work / 'build'}", *settings, env={"CXX": str(tools["c++"])})
    (wheel,) = made.glob("*.whl")
    if "-none-" in wheel.name:
        sys.exit(f"the engine did not build for {platform.target}: run the same pip wheel with -v")
    run(str(python), "-m", "wheel", "tags", "--remove", "--platform-tag", platform.tag, str(wheel))
    (wheel,) = made.glob("*.whl")
    return Path(shutil.move(wheel, out / wheel.name))


def here(out: Path) -> Path:
    """The wheel for this machine alone, which says so (`linux_x86_64`), as `pip wheel .` makes it."""
    python, made = prepared(Path(sys.executable), "-here"), WORK / "here"
    shutil.rmtree(made, ignore_errors=True)
    wheel_of_tree(python, made, f"build-dir={WORK / 'here-build'}")
    (wheel,) = made.glob("*.whl")
    if "-none-" in wheel.name:
        sys.exit("the engine did not build with this machine's compiler: run pip wheel -v .")
    return Path(shutil.move(wheel, out / wheel.name))


def wheel_of_tree(python: Path, made: Path, *settings: str, env: dict[str, str] | None = None) -> None:
    """Builds a wheel of the tree with settings of scikit-build-core, into `made`."""
    options = [word for setting in settings for word in ("-C", setting)]
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "-w", str(made), *options, str(ROOT), env=env)


def without_engine(out: Path) -> Path:
    """The wheel without the engine."""
    python, made = any_prepared(), WORK / "pure"
    shutil.rmtree(made, ignore_errors=True)
    wheel_of_tree(python, made, "wheel.cmake=false", "wheel.py-api=py3")
    (wheel,) = made.glob("*.whl")
    return Path(shutil.move(wheel, out / wheel.name))


def sdist(out: Path) -> Path:
    """The source, as it is in git's index."""
    python, made = any_prepared(), WORK / "sdist"
    shutil.rmtree(made, ignore_errors=True)
    run(str(python), "-m", "build", "--sdist", "--no-isolation", "--outdir", str(made), str(ROOT))
    (archive,) = made.glob("*.tar.gz")
    return Path(shutil.move(archive, out / archive.name))


def any_prepared() -> Path:
    """The first environment that was prepared."""
    return next(iter(sorted(WORK.glob("python*/bin/python"))))


def script(python: Path, work: Path, tool: str, *arguments: str) -> Path:
    """A file that runs one of zig's tools, as CMake wants a compiler to be."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / tool
    # For macOS: nanobind lists the symbols that Python defines in a file, which zig's linker does not read, and the linker
    # crashes when it makes a bundle; a library is loaded as well.
    words = 'case "$a" in -Wl,@*) a=-Wl,-undefined,dynamic_lookup;; -bundle) a=-shared;; esac'
    text = f'for a do shift; {words}; set -- "$@" "$a"; done\nexec "{python}" -m ziglang {tool} {" ".join(arguments)} "$@"\n'
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Runs a command; one that fails ends the build."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
