"""An option that a job has no use for is refused: every field of `Options` is tried with every job that takes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import zckpt
from zckpt.core.dtypes import BF16
from zckpt.jobs import average, convert, to_dcp, to_fp8, to_gguf, to_mcore, to_states
from zckpt.jobs.opening import OpenOptions
from zckpt.jobs.options import Options, extended, refuse_unused
from zckpt.jobs.planned import Planned
from zckpt.naming.transform import Form

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "transformers" / "llama_zero2" / "checkpoint"

JOBS: dict[str, Callable[..., Planned]] = {
    "convert": lambda source, out, options: convert.prepare(source, out, options),
    "to_dcp": lambda source, out, options: to_dcp.prepare(source, out, extended(options, to_dcp.DcpOptions)),
    "to_mcore": lambda source, out, options: to_mcore.prepare(source, out, extended(options, to_mcore.MegatronOptions)),
    "to_fp8": lambda source, out, options: to_fp8.prepare(source, out, extended(options, to_fp8.Fp8Options)),
    "to_gguf": lambda source, out, options: to_gguf.prepare(
        source, out, extended(options, to_gguf.GgufOptions, tokenizer="none")
    ),
    "to_states": lambda source, out, options: to_states.prepare(source, out, options),
    "average": lambda source, out, options: average.prepare(
        [source, source], out, extended(options, average.AverageOptions)
    ),
}
VALUES: dict[str, object] = {
    "dtype": BF16, "format": "bin", "max_shard_size": "1KB", "include": ["*0*"], "exclude": ["*0*"],
    "exclude_frozen": True, "strip_prefix": "model.", "rename": [("model", "other")], "overflow": "clamp",
    "merge": True, "form": Form(to="hf"), "lora": zckpt.LoraMerge(), "overwrite": True, "threads": 1, "buffer": 1 << 20,
    "keep_cache": True, "limit_rate": 10**9, "base": str(MODEL),
}  # fmt: skip
BY_BEHAVIOUR = {"beside", "sign", *(field.name for field in fields(OpenOptions))}
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
def test_an_option_has_its_effect_or_is_refused(job: str, name: str, tmp_path: Path) -> None:
    prepare, given = JOBS[job], Options(**{name: VALUES[name]})
    out = str(tmp_path / ("out.gguf" if job == "to_gguf" else "out"))
    try:
        if job != "convert":
            refuse_unused(job, given)
    except zckpt.UsageError as error:
        assert name in str(error) and job in str(error)
        return
    try:
        found = shown(prepare(str(MODEL), out, given))
    except zckpt.ZckptError as error:  # it was looked at: an adapter to merge, say, is not there
        assert name in ("lora", "base", "rename", "strip_prefix", "form", "include", "exclude"), error
        return
    if name == "form" and job == "convert":
        return  # the model has these names already
    if name in ("exclude_frozen", "base"):
        return  # nothing is frozen here, and nothing is left out
    assert found != shown(prepare(str(MODEL), out, Options()))


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
