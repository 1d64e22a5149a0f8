"""Which saves of a run stay, and that a prune may be killed at any moment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import at_each

from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsupportedError, UsageError
from zckpt.jobs.open import open_catalog
from zckpt.storage.identity import mounts
from zckpt.upkeep import removal
from zckpt.upkeep.keep_rules import KeepRules, metric_of
from zckpt.upkeep.prune import Pruning, prune

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
ZERO2 = FIXTURES / "zero2" / "bf16_w2" / "checkpoint" / "global_step2"
ONE_FILE = FIXTURES / "zero0" / "fp32" / "checkpoint" / "global_step2"
DCP = FIXTURES / "dcp" / "fsdp2_flat_w4" / "checkpoint"


def run_of(
    place: Path, steps: tuple[int, ...], latest: str = "", source: Path = ZERO2, name: str = "global_step{}"
) -> Path:
    run = place / "run"
    run.mkdir(parents=True)
    for step in steps:
        shutil.copytree(source, run / name.format(step))
    if latest:
        (run / "latest").write_text(latest)
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def stay(found: Pruning) -> list[str]:
    return [fate.save.name for fate in found.fates if fate.why]


def test_rules(tmp_path: Path) -> None:
    run = run_of(tmp_path, (5, 10, 15, 20, 100), "global_step15")
    before = contents(run)
    assert stay(prune(run, KeepRules(last=1))) == ["global_step15", "global_step100"]
    assert stay(prune(run, KeepRules(last=2))) == ["global_step15", "global_step20", "global_step100"]
    assert stay(prune(run, KeepRules(every=10))) == [
        "global_step10",
        "global_step15",
        "global_step20",
        "global_step100",
    ]
    assert stay(prune(run, KeepRules(every=7))) == ["global_step15", "global_step100"]
    assert contents(run) == before, "a dry run changes nothing"
    found = prune(run, KeepRules(last=2), delete=True, deep=True)
    assert found.freed_bytes == sum(len(data) for name, data in before.items() if re.match(r"global_step(5|10)/", name))
    assert contents(run) == {name: data for name, data in before.items() if not re.match(r"global_step(5|10)/", name)}
    assert sorted(os.listdir(run)) == ["global_step100", "global_step15", "global_step20", "latest"]


@pytest.mark.parametrize("rules", [{}, {"last": 0}, {"every": 0}])
def test_rules_that_keep_nothing(rules: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        KeepRules(**rules)  # type: ignore[arg-type]


def test_what_is_no_save_and_what_is_behind_links_is_never_touched(tmp_path: Path) -> None:
    run = run_of(tmp_path, (1, 2, 3, 4))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(ZERO2, elsewhere / "global_step0")
    (run / "global_step0").symlink_to(elsewhere / "global_step0")
    (run / "best").symlink_to("global_step2")
    (run / "checkpoint-7").mkdir()  # a trainer's name, and no checkpoint
    (run / "checkpoint-7" / "notes.txt").write_text("mine")
    (run / "logs-1").mkdir()
    (run / "logs-1" / "events").write_text("mine")
    (run / "global_step1" / "outside").symlink_to(elsewhere)
    shutil.copytree(ZERO2, run / "final")  # a save whose name has no step
    found = prune(run, KeepRules(last=1), delete=True)
    assert stay(found) == ["global_step2", "global_step4", "final"]
    assert sorted(os.listdir(run)) == [
        "best",
        "checkpoint-7",
        "final",
        "global_step0",
        "global_step2",
        "global_step4",
        "logs-1",
    ]
    assert len(list((elsewhere / "global_step0").iterdir())) == len(list(ZERO2.iterdir()))
    assert contents(run / "checkpoint-7") == {"notes.txt": b"mine"}
    assert any("best" in note and "left alone" in note for note in found.notes)


FILE = "global_step{}/mp_rank_00_model_states.pt"


def link(place: Path, target: str | Path) -> None:
    """A symbolic link in the place of what is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target)


def by_file(run: Path) -> None:
    link(run / FILE.format(3), f"../{FILE.format(1)}")


def by_absolute_path(run: Path) -> None:
    link(run / FILE.format(3), run / FILE.format(1))


def by_a_chain(run: Path) -> None:
    """By a link of another save, which itself leads out of the run."""
    shutil.copy(run / FILE.format(1), run.parent / "elsewhere.pt")
    link(run / FILE.format(1), run.parent / "elsewhere.pt")
    link(run / FILE.format(3), f"../{FILE.format(1)}")


def by_the_way(run: Path) -> None:
    """Through a directory of one save to another that stays."""
    link(run / "global_step3" / "notes", "../global_step1/../global_step3/mp_rank_00_model_states.pt")


def by_another_name_of_the_run(run: Path) -> None:
    (run.parent / "alias").symlink_to(run)
    link(run / FILE.format(3), run.parent / "alias" / FILE.format(1))


def by_directory(run: Path) -> None:
    (run / "global_step1" / "inner").mkdir()
    link(run / "global_step3" / "inner", "../global_step1/inner")


def by_directory_elsewhere(run: Path) -> None:
    """What a link in the save leads to is outside the run, and a link there leads into it again."""
    shutil.copytree(run / "global_step3", run.parent / "elsewhere")
    shutil.copytree(ZERO2.parent, run / "checkpoint-3")
    link(run / "checkpoint-3" / "global_step2", run.parent / "elsewhere")
    link(run.parent / "elsewhere" / "mp_rank_00_model_states.pt", run / FILE.format(1))


def beside_the_saves(run: Path) -> None:
    link(run / "best" / "model", "../global_step1")


def to_a_file_beside_the_saves(run: Path) -> None:
    link(run / "best.pt", FILE.format(1))


def adapter_of(place: Path, base: str) -> None:
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))


def by_an_adapter(run: Path) -> None:
    """Of a kept save, whose base is an older one; as scripts name it, from the directory above the run."""
    adapter_of(run / "global_step3", f"{run.name}/global_step1")


def by_an_adapter_beside_the_saves(run: Path) -> None:
    adapter_of(run / "best", str(run / "global_step1"))


@pytest.mark.parametrize("make", [
    by_an_adapter, by_an_adapter_beside_the_saves, by_file, by_absolute_path, by_a_chain, by_the_way, by_another_name_of_the_run,
    by_directory, by_directory_elsewhere, beside_the_saves, to_a_file_beside_the_saves,
])  # fmt: skip
def test_what_a_link_leads_into_stays(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A save is verified through links, so what they lead to stays with it; the dry run says the same."""
    run = run_of(tmp_path, (1, 2, 3))
    make(run)
    before = contents(run)
    planned = prune(run, KeepRules(last=1))
    assert contents(run) == before and "global_step1" in stay(planned) and "global_step2" not in stay(planned)
    (reasons,) = (fate.why for fate in planned.fates if fate.save.name == "global_step1")
    assert any("leads into it" in why for why in reasons)
    found = prune(run, KeepRules(last=1), delete=True, deep=True)
    assert stay(found) == stay(planned) and not (run / "global_step2").exists()
    kept = {name: data for name, data in before.items() if name.partition("/")[0] in {*stay(found), "best", "best.pt"}}
    assert contents(run) == kept, "every file that was verified can be read"


@pytest.mark.parametrize(
    "said", ['{"base_model_name_or_path": 7}', "[", '{"base_model_name_or_path": "a\\u0000b"}', "[]"]
)
def test_adapters_that_keep_nothing(said: str, tmp_path: Path) -> None:
    """One that cannot be read, one of a base on the hub, and one that goes too."""
    run = run_of(tmp_path, (1, 2, 3))
    adapter_of(run / "global_step2", "../global_step1")
    adapter_of(run / "best", "org/model")
    (run / "global_step3" / "adapter_config.json").write_text(said)
    assert stay(prune(run, KeepRules(last=1))) == ["global_step3"]


def test_saves_lead_to_each_other_in_a_row(tmp_path: Path) -> None:
    """3 leads into 2, and 2 into 1; links of a save that goes keep nothing, and hard links are files of their own."""
    run = run_of(tmp_path, (1, 2, 3, 4))
    for step in (2, 3):
        link(run / FILE.format(step), f"../{FILE.format(step - 1)}")
    (run / FILE.format(4)).unlink()
    os.link(run / FILE.format(1), run / FILE.format(4))
    whole = contents(run / "global_step4")
    assert stay(prune(run, KeepRules(last=2))) == [f"global_step{step}" for step in (1, 2, 3, 4)]
    assert stay(prune(run, KeepRules(last=1), delete=True)) == ["global_step4"]
    assert contents(run / "global_step4") == whole and os.listdir(run) == ["global_step4"]


def test_a_link_that_is_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, (1, 2, 3))
    real = removal.bytes_below

    def linked(path: str) -> int:
        link(run / "best" / "model", "../global_step1")
        return real(path)

    monkeypatch.setattr("zckpt.upkeep.prune.bytes_below", linked)
    assert stay(prune(run, KeepRules(last=1), delete=True)) == ["global_step1", "global_step3"]
    assert sorted(os.listdir(run)) == ["best", "global_step1", "global_step3"]


@pytest.mark.parametrize("said", ["global_step1/", "./global_step1", "global_step1/mp_rank_00_model_states.pt"])
def test_a_pointer_into_a_save(said: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, (1, 2, 3), said)
    assert stay(prune(run, KeepRules(last=1), delete=True)) == ["global_step1", "global_step3"]


def test_mounts(tmp_path: Path) -> None:
    """What is mounted in a save lies elsewhere, and is not deleted; what a save has by a mount from another one stays."""
    run = run_of(tmp_path, (1, 2, 3, 4))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("mine")
    (run / "global_step2" / "data").mkdir()
    (run / "global_step4" / "inner").mkdir()
    wanted = {run / "global_step2" / "data": elsewhere, run / "global_step4" / "inner": run / "global_step1"}
    try:
        for point, source in wanted.items():
            how = ["mount", "--bind", str(source), str(point)]
            if os.geteuid() or subprocess.run(how, capture_output=True, check=False).returncode:
                pytest.skip("mounting needs root, and a kernel that lets it")
        found = prune(run, KeepRules(last=1), delete=True)
        assert stay(found) == ["global_step1", "global_step2", "global_step4"]
        why = {fate.save.name: fate.why for fate in found.fates}
        assert why["global_step2"] == ("'data' in it is mounted",)
        assert why["global_step1"] == ("the mount 'global_step4/inner' leads into it",)
        assert (elsewhere / "data").read_text() == "mine" and len(list((run / "global_step4" / "inner").iterdir())) > 1
    finally:
        for point in mounts():  # wherever they are now
            if point.startswith(f"{tmp_path}/"):
                subprocess.run(["umount", point], check=True)


def test_a_directory_that_cannot_be_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, (1, 2))
    (run / "private").mkdir()
    real = os.scandir

    def refused(path: str) -> object:
        if os.path.basename(path) == "private":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("zckpt.upkeep.links.os.scandir", refused)
    assert any("'private'" in note and "not known" in note for note in prune(run, KeepRules(last=1)).notes)


def test_incomplete_saves_count_for_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, (1, 2, 3, 4, 5), "global_step5")
    for step in (2, 5):
        next((run / f"global_step{step}").glob("*optim*")).unlink()
    found = prune(run, KeepRules(last=1))
    assert stay(found) == ["global_step2", "global_step4", "global_step5"]
    assert {fate.save.name for fate in found.fates if fate.problem} == {"global_step2", "global_step5"}
    found = prune(run, KeepRules(last=1, incomplete=True), delete=True)
    assert stay(found) == ["global_step4", "global_step5"] == sorted(n for n in os.listdir(run) if n != "latest")


def test_deep_reads_what_stays_before_anything_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.checks.integrity._SMALL_BYTES", 0)  # the quick check reads small records
    run = run_of(tmp_path, (1, 2, 3), source=ONE_FILE)
    (damaged,) = (run / "global_step3").iterdir()
    data = bytearray(damaged.read_bytes())
    weight = next(entry for entry in open_catalog(run / "global_step3").catalog.tensors.values() if entry.numel > 8)
    data[weight.fragments[0].byte_offset + 5] ^= 0xFF
    damaged.write_bytes(data)
    assert stay(prune(run, KeepRules(last=1))) == ["global_step3"]
    assert stay(prune(run, KeepRules(last=1), deep=True)) == ["global_step2", "global_step3"]


def test_no_complete_save(tmp_path: Path) -> None:
    run = run_of(tmp_path, (1, 2))
    for step in (1, 2):
        next((run / f"global_step{step}").glob("*optim*")).unlink()
    with pytest.raises(IncompleteError, match="none may go"):
        prune(run, KeepRules(last=1), delete=True)
    assert sorted(os.listdir(run)) == ["global_step1", "global_step2"]


def test_wrong_places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "missing", tmp_path / "empty", ZERO2):
        with pytest.raises(NotACheckpointError):
            prune(place, KeepRules(last=1))
    with pytest.raises(UnsupportedError):
        prune("s3://bucket/run", KeepRules(last=1))


@pytest.mark.parametrize(("pointer", "said", "name"), [
    ("latest_checkpointed_iteration.txt", "2", "iter_{:07d}"),
    ("latest_checkpointed_iteration.txt", "2", "global_step_{}"),
    ("latest", "step-2", "step-{}"),
])  # fmt: skip
def test_steps_that_a_file_names_stay(tmp_path: Path, pointer: str, said: str, name: str) -> None:
    run = run_of(tmp_path, (1, 2, 3), source=DCP, name=name)
    (run / pointer).write_text(said)
    assert stay(prune(run, KeepRules(last=1), delete=True)) == [name.format(2), name.format(3)]
    assert not (run / name.format(1)).exists()


def trainers_run(place: Path, losses: dict[int, float], best: str | None = None) -> Path:
    """Folders as transformers' Trainer writes them; its real files are in tests/interop."""
    run = run_of(place, tuple(losses), source=ZERO2.parent, name="checkpoint-{}")
    log: list[dict[str, float]] = []
    for step, loss in losses.items():
        log += [{"step": step, "loss": 9.0}, {"step": step, "eval_loss": loss, "eval_accuracy": -loss, "epoch": 1.0}]
        state = {"global_step": step, "log_history": log, "best_model_checkpoint": best}
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    return run


def test_the_best_by_a_metric(tmp_path: Path) -> None:
    run = trainers_run(tmp_path, {10: 3.0, 20: 1.0, 30: 1.0, 40: float("nan"), 50: 2.0})

    def best(metric: str) -> list[str]:
        return stay(prune(run, KeepRules(best=(metric,))))[:-1]

    assert best("eval_loss") == best("loss") == best("accuracy") == ["checkpoint-20"]
    assert best("eval_loss:max") == best("eval_accuracy:min") == ["checkpoint-10"]
    with pytest.raises(UsageError, match="eval_accuracy"):
        best("bleu")
    for text in ("", "loss:most", ":max"):
        with pytest.raises(UsageError):
            metric_of(text)


def test_what_the_trainer_calls_the_best_stays(tmp_path: Path) -> None:
    run = trainers_run(tmp_path, {10: 3.0, 20: 1.0, 30: 2.0}, best="/gone/run/checkpoint-20")
    assert stay(prune(run, KeepRules(last=1), delete=True)) == ["checkpoint-20", "checkpoint-30"]


def test_the_pointer_that_moves_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, (1, 2, 3), "global_step3")
    real = removal.bytes_below

    def moved(path: str) -> int:
        (run / "latest").write_text("global_step1")
        return real(path)

    monkeypatch.setattr("zckpt.upkeep.prune.bytes_below", moved)
    assert stay(prune(run, KeepRules(last=1), delete=True)) == ["global_step1", "global_step3"]
    assert sorted(os.listdir(run)) == ["global_step1", "global_step3", "latest"]


def killed_at(run: Path, rules: KeepRules, nth: int) -> bool:
    """Runs a prune in a child that is killed before its n-th call that changes something; whether there was one."""
    child = os.fork()
    if not child:
        try:

            def die(number: int, *_: object) -> None:
                if number == nth:
                    os.kill(os.getpid(), signal.SIGKILL)

            with at_each(die):
                prune(run, rules, delete=True)
            os._exit(0)
        finally:
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def accelerate_loads(run: Path) -> str:
    """Which folder accelerate's `load_state` takes (accelerator.py, 1.15)."""
    return max((e for e in os.listdir(run)), key=lambda e: int(re.findall(r"[\/]?([0-9]+)(?=[^\/]*$)", e)[0]))


def test_killed_at_every_call(tmp_path: Path) -> None:
    """Every directory with a save's name is whole at any time, those that stay are there, and the next run finishes."""
    rules = KeepRules(last=1)
    nth = 0
    while True:
        nth += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = run_of(tmp_path, (1, 2, 3), source=ONE_FILE, name="checkpoint_{}")
        whole = contents(run / "checkpoint_3")
        was_killed = killed_at(run, rules, nth)
        there = [name for name in os.listdir(run) if not name.startswith(".")]
        assert "checkpoint_3" in there
        for name in there:
            assert contents(run / name) == whole, f"{name} is not a whole save after call {nth}"
        assert accelerate_loads(run) == "checkpoint_3"
        if not was_killed:
            break
        left = any(path.is_file() for path in (run / removal.WORK).glob("files/**/*"))
        found = prune(run, rules, delete=True)
        assert (found.left_bytes > 0) == left
        assert os.listdir(run) == ["checkpoint_3"], f"after call {nth}"
    assert nth > 12
