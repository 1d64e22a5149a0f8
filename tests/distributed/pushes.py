"""A run that is pushed to a hub from two ranks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checks import BF16, config, refusal, start, train
from harness import check, main, rank

from zckpt import hub
from zckpt.base.errors import ZckptError
from zckpt.runtime.saves.rounds import Rounds


@check(2)
def pushed() -> dict[str, Any]:
    """The page holds what a save of the weights writes; scratch has no weights afterwards, after a failure either."""
    home = Path(sys.argv[1])
    engine = start(config(3, **BF16))
    train(engine, 2)
    given = {"token": os.environ["HUB_TOKEN"], "endpoint": os.environ["HUB_URL"], "scratch": str(home / "scratch")}
    report = engine.push_to_hub("alice/m", **given)
    engine.save_16bit_model(str(home / "want"))
    failed = refusal(engine.push_to_hub, "bob/m", **given, kind=ZckptError)
    left = sorted({path.name for path in (home / "scratch").glob("*/*")}) if rank() == 0 else []
    return {
        "report": None if report is None else report.url,
        "failed": failed,
        "left": left,
        "want": str(home / "want"),
    }


@check(2)
def pushed_while_saving() -> dict[str, Any]:
    """A save goes on in the background while the run is pushed: both end, and neither hears the other's words."""
    home = Path(sys.argv[1])
    engine = start(config(2, checkpoint={"async_save": True}, **BF16))
    train(engine, 1)
    given = {"token": os.environ["HUB_TOKEN"], "endpoint": os.environ["HUB_URL"], "scratch": str(home / "scratch")}
    write, push, mark = Rounds.carry_out, hub.push_to_hub, home / "pushing"

    def in_the_midst(*arguments: Any) -> None:
        while not mark.exists():
            time.sleep(0.01)
        write(*arguments)

    def slowly(*arguments: Any, **named: Any) -> Any:
        mark.touch()
        time.sleep(1.0)
        return push(*arguments, **named)

    Rounds.carry_out, hub.push_to_hub = in_the_midst, slowly
    engine.save_checkpoint(home / "run")
    report = engine.push_to_hub("alice/while", **given)
    engine.wait_for_checkpoint()
    hub.push_to_hub = push
    Rounds.carry_out = write
    dist.barrier()
    return {
        "report": None if report is None else report.url,
        "latest": (home / "run" / "latest").read_text(),
        "again": engine.load_checkpoint(home / "run")[0] is not None,
    }


if __name__ == "__main__":
    main()
