"""docs/config.md is what the models say, and the models know every key that DeepSpeed knows."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from config_page import page

from zckpt.runtime.config.fields import (
    FlopsProfilerSection,
    Section,
    ThroughputSection,
    keys_of,
    kind_of,
    names_of_fields,
    section_of,
)
from zckpt.runtime.config.sections import BF16, FP16, Config, OffloadOptimizer, OffloadParam, Zero

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    if os.environ.get("ZCKPT_GOLDEN") == "rewrite":
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run: make golden"


def test_every_row_says_something() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if row.split("|")[-2].strip() == ""] == []


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def known(section: type[Section]) -> set[str]:
    return {name for name, _ in names_of_fields(section)}


def names_of(model: Any) -> set[str]:
    """Names and aliases of one of DeepSpeed's own pydantic models."""
    return {n for name, field in model.model_fields.items() for n in (name, field.alias) if n}


def test_every_key_of_deepspeeds_models_has_a_row(deepspeed: Any) -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config as zero_config
    from deepspeed.runtime.zero import offload_config

    for theirs, ours in {
        zero_config.DeepSpeedZeroConfig: Zero,
        offload_config.DeepSpeedZeroOffloadParamConfig: OffloadParam,
        offload_config.DeepSpeedZeroOffloadOptimizerConfig: OffloadOptimizer,
        precision_config.DeepSpeedFP16Config: FP16,
        precision_config.DeepSpeedBF16Config: BF16,
    }.items():
        assert names_of(theirs) - known(ours) == set(), theirs
        for name, field in theirs.model_fields.items():
            mine = ours.model_fields[name]
            if isinstance(field.default, bool | int | float | str) and kind_of(mine) != "own":
                assert mine.default == field.default, name
    text = PAGE.read_text()
    assert [n for n in sorted(names_of(zero_config.DeepSpeedZeroConfig)) if f"`{n}`" not in text] == []


def test_every_key_that_deepspeeds_code_reads_is_known(deepspeed: Any) -> None:
    """Top level, checkpoint and data types are read by hand there: by constants, or from a dict."""
    from deepspeed.runtime import config, constants

    reader = Path(config.__file__).read_text()
    read = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", reader))
    read |= set(re.findall(r"(?:if|return) ([A-Z_]+) in param_dict", reader))
    keys = {getattr(constants, name) for name in read if isinstance(getattr(constants, name, None), str)}
    keys -= {"enabled", "dtype", "lower_precision_safe_modules"}  # inside torch_autocast
    assert len(keys) > 20
    assert keys - known(Config) == set()
    top = {"checkpoint", "data_types", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger"}
    top |= set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {"hybrid_engine", "pipeline", "compile", "weight_quantization"}
    assert top - known(Config) == set()
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) - known(Zero) == set()
    sections = Config.model_fields
    data_types = {
        constants.GRAD_ACCUM_DTYPE,
        constants.PARAM_DTYPE,
        constants.BUFFER_DTYPE,
        constants.KEEP_IN_FP32_MODULES,
    }
    assert data_types == known(sections["data_types"].annotation)  # type: ignore[arg-type]
    checkpoint = {getattr(constants, n) for n in ("CHECKPOINT_TAG_VALIDATION", "LOAD_UNIVERSAL_CHECKPOINT")}
    checkpoint |= {constants.USE_NODE_LOCAL_STORAGE_CHECKPOINT, constants.CHECKPOINT_PARALLEL_WRITE, "writer"}
    assert checkpoint < known(sections["checkpoint"].annotation)  # type: ignore[arg-type]


def test_the_names_inside_foreign_sections_are_deepspeeds(deepspeed: Any) -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig

    for name, theirs in {
        "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig, "wandb": WandbConfig,
        "csv_monitor": CSVConfig, "comet": CometConfig, "compile": CompileConfig, "hybrid_engine": HybridEngineConfig,
    }.items():  # fmt: skip
        section = section_of(Config.model_fields[name])
        ours = known(section) if section is not None else set(keys_of(Config.model_fields[name]) or ())
        assert names_of(theirs) - ours == set(), name
        for key, field in section.model_fields.items() if section is not None else ():
            assert field.default == theirs.model_fields[key].default, f"{name}.{key}"
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    theirs = vars(DeepSpeedFlopsProfilerConfig({}))
    assert {name: field.default for name, field in FlopsProfilerSection.model_fields.items()} == theirs
    assert names_of(DeepSpeedThroughputTimerConfig) == known(ThroughputSection)
    assert names_of(ZenFlowConfig) - set(keys_of(Zero.model_fields["zenflow"]) or ()) == set()
