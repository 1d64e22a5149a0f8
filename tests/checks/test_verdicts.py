"""A verdict is as strong as its evidence: what proves it is said, and where nothing does, nobody is told to delete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.checks import soundness
from zckpt.checks.second import as_unproved
from zckpt.cli import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO2 = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    zckpt.convert(ZERO2, tmp_path / "weights", progress=False)
    return tmp_path / "weights"


def test_the_verdict_begins_with_what_is_lost(weights: Path, tmp_path: Path) -> None:
    found = zckpt.verify(ZERO2, weights, progress=False)
    assert (found.complete, found.not_proved, set(found.proved_by)) == (True, (), {"whole", "places"})
    *_, last = found.lines()
    assert last.startswith("Safe to delete if you will not resume training from it: every weight is in the output")
    zckpt.convert(ZERO2, tmp_path / "half", dtype="bf16", progress=False)
    *_, last = zckpt.verify(ZERO2, tmp_path / "half", progress=False).lines()
    assert last.startswith("Safe to delete if you will not resume training from it or need full precision: ")


def test_without_a_second_reader_nothing_is_called_safe(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soundness, "compare_places", lambda listing, catalog: as_unproved("nobody wrote one", 1))
    found = zckpt.verify(ZERO2, weights, progress=False)
    assert found.ok and found.deletable is not None and not found.deletable[0]
    assert "nobody wrote one" in found.deletable[1] and "--trust-reader" in found.deletable[1]
    assert "places" not in found.proved_by and len(found.not_proved) == 1
    trusted = zckpt.verify(ZERO2, weights, trust_reader=True, progress=False)
    assert trusted.deletable is not None and trusted.deletable[0] and trusted.not_proved == ()
    for more, status in (([], 1), (["--trust-reader"], 0)):
        monkeypatch.setattr("sys.argv", ["zckpt", "verify", str(ZERO2), str(weights), "--json", *more])
        with pytest.raises(SystemExit) as ended:
            main()
        facts = json.loads(capfd.readouterr().out)
        assert (ended.value.code or 0, facts["deletable"]["ok"]) == (status, not status)


def test_a_checkpoint_that_may_lack_parts_is_never_safe_to_delete(tmp_path: Path) -> None:
    """Ranks that saved alone say nothing of each other."""
    checkpoint = FIXTURES / "dcp" / "alone_w2" / "checkpoint"
    zckpt.convert(checkpoint, tmp_path / "out", progress=False)
    found = zckpt.verify(checkpoint, tmp_path / "out", trust_reader=True, progress=False)
    assert found.ok and found.complete is None and found.as_json()["complete"] is None
    assert found.deletable is not None and not found.deletable[0] and "cannot be told" in found.deletable[1]
    told = list(found.lines())
    assert any(line.split()[0] == "intact" and "cannot be told" in line for line in told)


def test_problems_are_counted_each(weights: Path) -> None:
    for path in weights.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    (weights / "zckpt.json").unlink()
    found = zckpt.verify(ZERO2, weights, progress=False)
    equal = next(check for check in found.checks if check.name == "equal")
    assert equal.number > 3 and len(equal.problems) == 4
    wrong = sum(check.number for check in found.checks)
    assert any(line.split() == ["intact", "no:", str(wrong), "problems"] for line in found.lines())
    assert found.deletable == (False, f"{wrong} problems were found")


def test_arguments_the_wrong_way_round(weights: Path) -> None:
    with pytest.raises(zckpt.UsageError, match="wrong way round") as raised:
        zckpt.verify(weights, ZERO2, progress=False)
    assert raised.value.remedy == f"Run zckpt verify {ZERO2} {weights}."


def test_an_output_of_another_save_is_told_as_that(tmp_path: Path) -> None:
    """The manifest says what an output was made from; a list of tensors that differ does not."""
    other = tmp_path / "other"
    shutil.copytree(ZERO2, other)
    (other / "global_step2").rename(other / "global_step9")
    (other / "latest").write_text("global_step9")
    name = "global_step9/mp_rank_00_model_states.pt"
    root = torch.load(other / name, weights_only=False)
    torch.save({**root, "global_steps": 9}, other / name)
    zckpt.convert(other, tmp_path / "out", progress=False)
    told = zckpt.verify(ZERO2, tmp_path / "out", progress=False)
    assert told.ok and any("made from another save (zero2 global_step9 dp 2)" in note for note in told.notes)
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        tensors = load_file(path)
        save_file({key: tensor * 2 + 1 for key, tensor in tensors.items()}, path, {"format": "pt"})
    again = zckpt.verify(ZERO2, tmp_path / "out", progress=False)
    assert not again.ok


def test_fp32_weights_that_nothing_read_are_said_to_be_in_the_shards(tmp_path: Path) -> None:
    """Megatron's masters have no names; those of another stage are not this one's, and its bf16 weights are taken."""
    home = shutil.copytree(FIXTURES / "megatron_legacy" / "tied_pp2_dp2" / "checkpoint", tmp_path / "save")
    first, second = (home / "iter_0000002" / f"mp_rank_00_00{stage}" / "distrib_optim.pt" for stage in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    zckpt.convert(home, tmp_path / "out", progress=False)
    *_, last = zckpt.verify(home, tmp_path / "out", progress=False).lines()
    assert "or need fp32 weights, which may be among the optimizer states" in last
