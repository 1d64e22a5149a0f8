"""An option that a job has no use for is refused: every field of `Options` is tried with every job that takes them."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.dtypes import BF16
from zckpt.jobs.declarations import (
    APPLY,
    AVERAGE,
    CONVERT,
    DELTA,
    PUSH,
    QUANTIZE,
    TO_DCP,
    TO_FP8,
    TO_GGUF,
    TO_MCORE,
    TO_MLX,
    TO_STATES,
    Asked,
    Job,
)
from zckpt.jobs.groups import Form, Reading
from zckpt.jobs.options import Options
from zckpt.jobs.planned import Planned

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "transformers" / "llama_zero2" / "checkpoint"

JOBS: dict[str, Job[Any]] = {
    "convert": CONVERT, "to_dcp": TO_DCP, "to_mcore": TO_MCORE, "to_fp8": TO_FP8, "to_gguf": TO_GGUF, "to_states": TO_STATES,
    "to_mlx": TO_MLX, "quantize": QUANTIZE, "average": AVERAGE, "push_to_hub": PUSH, "delta": DELTA, "apply_delta": APPLY,
}  # fmt: skip
PLANNED = ("convert", "to_dcp", "to_mcore", "to_fp8", "quantize", "to_gguf", "to_states", "average")
VALUES: dict[str, object] = {
    "dtype": BF16, "format": "bin", "max_shard_size": "1KB", "include": ["*0*"], "exclude": ["*0*"],
    "exclude_frozen": True, "keep_dtype": ["*norm*"], "like": str(MODEL.parent / "truth.safetensors"),
    "strip_prefix": "model.", "rename": [("model", "other")], "overflow": "clamp",
    "merge": True, "form": Form(to="hf"), "lora": zckpt.LoraMerge(), "overwrite": True, "threads": 1, "buffer": 1 << 20,
    "keep_cache": True, "limit_rate": 10**9, "base": str(MODEL),
}  # fmt: skip
BY_BEHAVIOUR = {"beside", "sign", *(field.name for field in fields(Reading))}
"""Which save is read, where the output may lie, and a key: tried below, or in tests of their own."""


def shown(planned: Planned) -> tuple[object, ...]:
    """All that an option can change of a planned job."""
    order = planned.order
    written = [(file.path, file.size) for file, _ in order.plan.files]
    moves = [(str(a.dtype), str(b.dtype), b.name) for a, b in order.plan.pairs]
    how = order.overflow, order.overwrite, order.merge, order.buffer, order.pace
    return written, moves, order.names, order.dtype, order.left_out, how, repr(sorted(order.options.items()))


def test_every_field_is_tried() -> None:
    assert {field.name for field in fields(Options)} == VALUES.keys() | BY_BEHAVIOUR


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", VALUES)
def test_an_option_has_a_meaning_for_a_job_or_is_refused(job: str, name: str) -> None:
    """And whether it has one does not depend on its value."""
    given = Options(**{name: VALUES[name]})
    if name in JOBS[job].takes:
        assert VALUES[name] in [getattr(group, name, None) for group in groups_of(given.split(JOBS[job]))]
    else:
        with pytest.raises(zckpt.UsageError, match=f"{name} has no meaning for {job}"):
            given.split(JOBS[job])


def groups_of(asked: Asked[Any]) -> list[object]:
    return [getattr(asked, field.name) for field in fields(asked)]


@pytest.mark.parametrize("job", PLANNED)
@pytest.mark.parametrize("name", VALUES)
def test_an_option_has_its_effect_or_is_refused(job: str, name: str, tmp_path: Path) -> None:
    more = {"tokenizer": "none"} if job == "to_gguf" else {}
    source = [str(MODEL), str(MODEL)] if job == "average" else str(MODEL)
    out = str(tmp_path / ("out.gguf" if job == "to_gguf" else "out"))
    if name not in JOBS[job].takes:
        return
    try:
        found = shown(JOBS[job].prepare(source, out, Options(**{name: VALUES[name]}).split(JOBS[job], **more)))
    except zckpt.ZckptError as error:  # it was looked at: an adapter to merge, say, is not there
        assert name in ("lora", "base", "rename", "strip_prefix", "form", "include", "exclude"), error
        return
    if name == "form" and job == "convert":
        return  # the model has these names already
    if name in ("exclude_frozen", "base"):
        return  # nothing is frozen here, and nothing is left out
    assert found != shown(JOBS[job].prepare(source, out, Options().split(JOBS[job], **more)))


def test_what_a_public_function_says_itself_counts_more_than_options() -> None:
    asked = Options(dtype=BF16, tag="a").split(TO_DCP, dtype=None, under="", tag="b")
    assert (asked.casting.dtype, asked.own.under, asked.reading.tag) == (None, "", "b")
    with pytest.raises(TypeError, match="to_dcp takes no lora"):
        TO_DCP.ask(lora=None)


def test_the_usual_options_are_keywords_with_plain_defaults(tmp_path: Path) -> None:
    """What is given beside `options` counts more, and what is not given does not."""
    said = {name: one.default for name, one in inspect.signature(zckpt.convert).parameters.items()}
    usual = {
        name: value for name, value in said.items() if hasattr(Options, name) and name not in ("dtype", "tag", "also")
    }
    assert len(usual) == 8 and all(value == getattr(Options(), name) for name, value in usual.items())
    given = Options(overwrite=True, include=["*.weight"], threads=3).with_others(Options(threads=2), {"best": True})
    assert (given.overwrite, given.include, given.threads, given.best) == (True, ["*.weight"], 2, True)
    with pytest.raises(TypeError, match="wrong"):
        zckpt.convert(MODEL, tmp_path / "o", wrong=1)


def test_groups_are_imported_without_layouts_and_names() -> None:
    """Every command imports them to parse its options."""
    code = "import sys, zckpt.jobs.declarations; print(*[name for name in sys.modules if name.startswith('zckpt.')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[1] for name in shown} == {"base", "core", "jobs"}
    assert len(shown) <= 16


@pytest.mark.parametrize("call", [zckpt.to_dcp, zckpt.to_mcore, zckpt.to_fp8, zckpt.to_gguf, zckpt.to_states])
def test_an_adapter_is_never_left_unmerged_in_silence(call: Callable[..., object], tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "peft" / "lora_zero2" / "checkpoint", tmp_path / "in")
    options = Options(lora=zckpt.LoraMerge())
    with pytest.raises(zckpt.UsageError, match="lora has no meaning"):
        call(tmp_path / "in", tmp_path / "out.gguf", options=options, progress=False)
    assert not (tmp_path / "out.gguf").exists()


def test_a_push_has_no_output_to_overwrite() -> None:
    for given in ({"overwrite": True}, {"format": "bin"}, {"merge": True}):
        with pytest.raises(zckpt.UsageError, match="has no meaning for push_to_hub"):
            zckpt.push_to_hub(MODEL, "me/model", options=Options(**given), progress=False)  # type: ignore[arg-type]
