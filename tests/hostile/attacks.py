"""Writes every attack of `test_hostile.py` as a file, for a look at it or for another reader: `python attacks.py DIR`.

A file with a name that begins with `runs-` holds a pickle that creates `DIR/ran` in a reader that executes
pickles. Do not give it to one that you need.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

import test_hostile


def main() -> None:
    """Writes the files, and prints how many."""
    home = Path(sys.argv[1])
    home.mkdir(parents=True)
    for name, make in test_hostile.CODE.items():
        (home / f"runs-{name}.pt").write_bytes(test_hostile.torch_file(make(home / "ran")))
    for name in test_hostile.ATTACKS:
        test_hostile.write(name, home / f"{name}.pt")
    print(f"{home}: {len([*home.iterdir()])} files")


if __name__ == "__main__":
    main()
