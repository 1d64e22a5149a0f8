"""TRL's trainers for SFT, DPO and rewards, and PEFT's loop with accelerate, on two ranks of zckpt's engine.

With `use_cpu` accelerate takes torch's DDP where it finds no DeepSpeed, so the class of what trained is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from ranks import TRAINER, run_ranks

BESIDE = Path(__file__).parents[2] / ".make" / "trl" / "site-packages"
"""Where `make .make/trl` puts it: beside the environment, as its `datasets` and pandas would be imported by every Trainer."""


def test_trl_and_peft_train_on_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if BESIDE.is_dir():
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(BESIDE), os.environ.get("PYTHONPATH")))))
    elif importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    run_ranks(2, tmp_path, Path(__file__).with_name("trl_worker.py"), ("datasets", *TRAINER, "trl"))
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    for name, told in first.items():
        assert told["engine"] and second[name]["engine"], name
        assert told["losses"] == second[name]["losses"] and told["losses"][-1] < told["losses"][0], (name, told)
    assert [first[name]["stage"] for name in ("SFT", "DPO", "reward")] == [3, 2, 3]
    assert [first[name]["adapter"] for name in ("SFT", "DPO", "reward")] == [False, True, False]
    assert {told.get("latest", "global_step3") for told in first.values()} == {"global_step3"}
    assert first["PEFT"]["steps"] == 4 and first["PEFT"]["shapes"] == [[8, 16]] * 6
