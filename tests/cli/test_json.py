"""What every command prints with --json, and zckpt.json, is as docs/schemas says, and no field is there that it does not name."""

import io
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from schemas import SCHEMAS, check, validator
from typer.testing import CliRunner

from zckpt.cli import app
from zckpt.cli.output import Console
from zckpt.jobs.declarations import Job

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
CHECKPOINT = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"
LLAMA = FIXTURES / "transformers" / "llama_zero3" / "checkpoint"
ADAPTER = FIXTURES / "peft" / "lora_zero2" / "checkpoint"


def shown(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == status, result.output
    return result.stdout


class Counted(io.StringIO):
    """A stream that knows the longest text that it was given at once."""

    longest = 0

    def write(self, text: str) -> int:
        self.longest = max(self.longest, len(text))
        return super().write(text)


def test_long_results_are_printed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream copies what it is given, and the facts of a million tensors have a hundred million letters."""
    facts: dict[str, object] = {"names": ["x" * 1000] * 5000}
    stream = Counted()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        Console(as_json=True).result(lambda: facts, lambda: ())
    assert json.loads(stream.getvalue()) == facts and stream.getvalue().endswith("}\n")
    assert stream.longest <= 1 << 20 < len(stream.getvalue())


def test_commands_that_write(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    check("plan", shown("to-fp32", CHECKPOINT, out, "--dry-run"))
    assert check("written", shown("to-fp32", CHECKPOINT, out))["already_done"] is False
    assert check("written", shown("to-fp32", CHECKPOINT, out))["already_done"] is True
    check("manifest", (tmp_path / "weights.safetensors.zckpt.json").read_text())
    for words in (
        ("convert", CHECKPOINT, tmp_path / "converted", "--dtype", "bf16"),
        ("to-bf16", CHECKPOINT, tmp_path / "bf16"),
        ("to-mcore", LLAMA, tmp_path / "mcore"),
        ("to-fp16", CHECKPOINT, tmp_path / "fp16", "--overflow", "clamp"),
        ("to-peft", ADAPTER, tmp_path / "adapter"),
        ("to-fp8", LLAMA, tmp_path / "fp8"),
        ("quantize", LLAMA, tmp_path / "int8", "--to", "int8"),
        ("to-mlx", LLAMA, tmp_path / "mlx"),
        ("to-dcp", CHECKPOINT, tmp_path / "dcp", "--optimizer", "optim"),
        ("average", CHECKPOINT, CHECKPOINT, tmp_path / "averaged"),
        ("to-universal", CHECKPOINT, tmp_path / "universal"),
        ("to-states", CHECKPOINT, tmp_path / "states"),
        ("reshard", CHECKPOINT, tmp_path / "resumable", "--world-size", 3, "--stage", 3),
        ("slim", CHECKPOINT, tmp_path / "slim", "--drop", "optimizer", "--drop", "module-weights"),
    ):
        check("plan", shown(*words, "--dry-run"))
        check("written", shown(*words))
    manifests = list(tmp_path.glob("*/zckpt.json"))
    assert len(manifests) >= 3
    for path in manifests:
        check("manifest", path.read_text())


@pytest.mark.parametrize("words", [("to-fp8",), ("quantize", "--to", "int8"), ("to-mlx",), ("to-bf16",)])
def test_the_time_of_a_command_has_its_planning_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    clock, plan = [0.0], Job.prepare

    def slowly(job: Job[Any], *arguments: Any) -> Any:
        clock[0] += 1000
        return plan(job, *arguments)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Job, "prepare", slowly)
    assert check("written", shown(words[0], LLAMA, tmp_path / "out", *words[1:]))["seconds"] == 1000


def test_commands_that_look(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    shown("to-bf16", CHECKPOINT, out)
    check("inspect", shown("inspect", CHECKPOINT))
    check("inspect", shown("inspect", CHECKPOINT, "--tensors"))
    assert [one["name"] for one in check("inspect", shown("inspect", CHECKPOINT, "--states"))["states"]] == [
        "exp_avg",
        "exp_avg_sq",
    ]
    check("inspect", shown("inspect", FIXTURES / "moe" / "tensor_w4" / "checkpoint"))
    check("verify", shown("verify", CHECKPOINT, out))
    assert check("verify", shown("verify", CHECKPOINT, "--deep"))["numbers"] == {}
    assert check("diff", shown("diff", CHECKPOINT, out, "--tensors", status=1))["same"] is False
    check("estimate", shown("estimate", CHECKPOINT, "--memory", "1GB"))


def test_commands_for_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(CHECKPOINT / "global_step2", tmp_path / f"global_step{step}")
    assert check("du", shown("du", tmp_path))["beside_bytes"] == 0
    check("du", shown("du", CHECKPOINT))
    assert check("prune", shown("prune", tmp_path, "--keep-last", 1))["deleted"] is False
    assert check("prune", shown("prune", tmp_path, "--keep-last", 1, "--yes"))["deleted"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["global_step2"]


def test_an_error() -> None:
    from zckpt.base.errors import CorruptError, UsageError

    for error in (CorruptError("is damaged", file="a", byte_offset=3), UsageError("is wrong")):
        check("error", json.dumps({**error.as_json(), "notes": ["a note"]}))


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_a_schema_is_versioned_and_takes_nothing_else(path: Path) -> None:
    schema = json.loads(path.read_text())
    assert schema["$id"] == f"zckpt/{path.stem}/1" and schema["title"] and schema["description"]
    assert schema["additionalProperties"] is False and schema["required"]
    validator(path.stem)


def test_the_page_of_schemas_names_all() -> None:
    page = (SCHEMAS.parent / "json.md").read_text()
    assert set(re.findall(r"\(schemas/([\w-]+)\.json\)", page)) == {path.stem for path in SCHEMAS.glob("*.json")}
