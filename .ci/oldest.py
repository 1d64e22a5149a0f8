"""Prints the lower end of each range of versions that pyproject.toml states, for `make oldest`.

python .ci/oldest.py         libraries that pip may install with what they need
python .ci/oldest.py alone   libraries that would bring torch with them; the oldest torch has `make old-torch`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

ALONE = ("accelerate", "compressed-tensors", "peft")
TESTED = ("transformers", *ALONE)
"""What no extra of the package asks for, and zckpt works beside."""


def main() -> None:
    """Prints one line."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *(one for name in ("gguf", "train", "sign", "delta") for one in extras[name])]
    stated += [one for one in extras["test"] if one.startswith(TESTED)]
    oldest = dict(re.match(r"([\w.-]+)>=([\w.]+)", one).groups() for one in stated)
    del oldest["torch"]
    wanted = [name for name in oldest if (name in ALONE) == (sys.argv[1:] == ["alone"])]
    print(*(f"{name}=={oldest[name]}" for name in wanted))


if __name__ == "__main__":
    main()
