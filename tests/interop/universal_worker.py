"""DeepSpeed's own converter to universal checkpoints, over several checkpoints: `universal_worker.py JOBS.json`.

JOBS is a list of [tag directory, output directory]. Writes `JOBS.json.done`: for each, an empty string or why it failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.checkpoint import ds_to_universal


def main() -> None:
    """All jobs, one after another."""
    told = []
    for source, out in json.loads(Path(sys.argv[1]).read_text()):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        args = argparse.Namespace(
            input_folder=source, output_folder=out, num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
            strict=False, inject_missing_state=True,
        )  # fmt: skip
        try:
            ds_to_universal.main(args)
            told.append("")
        except (Exception, SystemExit) as error:
            told.append(f"{type(error).__name__}: {error}")
    Path(sys.argv[1] + ".done").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
