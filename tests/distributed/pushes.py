"""A run that is pushed to a hub from two ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from checks import BF16, config, refusal, start, train
from harness import check, main, rank

from zckpt.errors import ZckptError


@check(2)
def pushed() -> dict[str, Any]:
    """The page holds what a save of the weights writes; scratch is empty afterwards, after a failure too."""
    home = Path(sys.argv[1])
    engine = start(config(3, **BF16))
    train(engine, 2)
    given = {"token": os.environ["HUB_TOKEN"], "endpoint": os.environ["HUB_URL"], "scratch": str(home / "scratch")}
    report = engine.push_to_hub("alice/m", **given)
    engine.save_16bit_model(str(home / "want"))
    failed = refusal(engine.push_to_hub, "bob/m", **given, kind=ZckptError)
    left = sorted(path.name for path in (home / "scratch").iterdir()) if rank() == 0 else []
    return {
        "report": None if report is None else report.url,
        "failed": failed,
        "left": left,
        "want": str(home / "want"),
    }


if __name__ == "__main__":
    main()
