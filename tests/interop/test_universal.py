"""Universal checkpoints are those that DeepSpeed's own converter writes, and DeepSpeed goes on from them."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from ranks import run_ranks

import zckpt
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.to_universal import to_universal

pytest.importorskip("deepspeed")

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORKER = Path(__file__).with_name("universal_worker.py")

CANNOT = {
    "zero1/elastic_w2": "AttributeError",  # expects a torch state dict of the optimizer
    "zero2/adagrad_w2": "KeyError",  # expects Adam's states
    "zero2/sgd_w2": "KeyError",
    "zero2/scalar_w2": "RuntimeError",  # cannot concatenate scalars
    "zero2/client_state_w2": "AttributeError",  # runs the pickle, whose class is elsewhere
    "nvme/bf16_w2": "RuntimeError",  # does not look for swap files
    "nvme/fp16_w1": "RuntimeError",
    "nvme/params_w2": "RuntimeError",
}
"""What DeepSpeed's converter fails on."""

WRONG = {"zero2/round_robin_w2", "autotp/zero2_tp2_dp2", "nvme/pipelined_w2"}
"""What it converts wrongly: its addresses ignore the other order; a tied name gets one slice; buffers are of others now."""


EXPERTS = {
    path.parent.as_posix()[len(FIXTURES.as_posix()) + 1 :]
    for path in FIXTURES.glob("moe/*/how.json")
    if path.parent.name != "zero1_ep1_w2"
} | {"autoep/folded_w4", "autoep/folded_zero3_w4"}
"""Which neither has a universal form for: experts that ranks hold under the same names, and those under AutoTP."""


def jobs() -> dict[str, tuple[Path, str]]:
    found = {}
    for how in sorted(FIXTURES.glob("*/*/how.json")):
        home = how.parent / "checkpoint"
        if f"{how.parent.parent.name}/{how.parent.name}" in EXPERTS:
            continue
        if json.loads(how.read_text()).get("stage") and (home / "latest").exists():
            found[f"{how.parent.parent.name}/{how.parent.name}"] = home, (home / "latest").read_text().strip()
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every fixture as DeepSpeed converts it."""
    root = tmp_path_factory.mktemp("theirs")
    listed = [[str(home / tag), f"{root}/{name}/{tag}_universal"] for name, (home, tag) in jobs().items()]
    path = root / "jobs.json"
    path.write_text(json.dumps(listed))
    run_ranks(1, path, WORKER)
    told = dict(zip(jobs(), json.loads(Path(f"{path}.done").read_text()), strict=True))
    assert {name: why.split(":")[0] for name, why in told.items() if why} == CANNOT
    return root


def assert_same(a: Any, b: Any, where: str) -> None:
    """Two objects out of torch files, value for value, types too."""
    assert type(a) is type(b) or (type(a), type(b)) == (dict, OrderedDict), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b) or a.keys() == b.keys(), (where, a.keys(), b.keys())
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}/{number}")
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        assert_same(dict(vars(a)), dict(vars(b)), where)
    else:
        assert a == b or (a != a and b != b), (where, a, b)


@pytest.mark.parametrize("name", [name for name in jobs() if name not in CANNOT])
def test_the_files_are_those_of_deepspeed(name: str, theirs: Path, tmp_path: Path) -> None:
    home, _ = jobs()[name]
    to_universal(home, tmp_path / "out")
    for made in (tmp_path / "out", theirs / name):
        verdict = inspect_checkpoint(str(made)).resumable
        assert verdict.ok and verdict.reason.startswith("at any world size")
    if name in WRONG:
        return  # what is in these is shown by reading them back
    assert (tmp_path / "out/latest_universal").read_text() == (theirs / name / "latest_universal").read_text()
    ours = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file()}
    wanted = {p.relative_to(theirs / name) for p in (theirs / name).rglob("*") if p.is_file()}
    beyond = {p for p in ours if p.suffix == ".pt"} ^ {p for p in wanted if p.suffix == ".pt"}
    assert all(name == "moe/zero1_ep1_w2" and p.parent.name.endswith(".gain") for p in beyond & ours) and beyond <= ours
    for path in sorted(wanted):
        if path.suffix != ".pt":
            continue
        one, two = tmp_path / "out" / path, theirs / name / path
        if path.name.endswith("model_states.pt") and not name.startswith("autoep/"):
            assert one.read_bytes() == two.read_bytes()
        else:
            assert_same(torch.load(one, weights_only=False), torch.load(two, weights_only=False), str(path))


@pytest.mark.xdist_group("resume")
def test_the_engine_loads_experts_at_other_world_sizes(tmp_path: Path) -> None:
    """Every master of every rank is the truth's, to the bit, and a step can be taken."""
    names = ["autoep/zero2_w4", "autoep/zero3_w4", "moe/zero1_ep1_w2"]
    for number, name in enumerate(names):
        to_universal(FIXTURES / name / "checkpoint", tmp_path / str(number))
    jobs = [{"fixture": name, "load": str(tmp_path / str(number))} for number, name in enumerate(names)]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(2, path, WORKER.with_name("experts_worker.py"))
    for told in json.loads(Path(f"{path}.told").read_text()):
        assert [differ for differ, _ in told] == [[], [], []]
        assert all(compared > 20 for _, compared in told)


NOT_WHOLE = {*WRONG, "pipeline/bf16_pp2_dp2", "pipeline/zero1_pp2_dp2", "pipeline/zero1_pp3_dp2", "moe/zero1_ep1_w2"}
"""Also what loses frozen parameters and buffers: they lie in a pipeline's layer files, and in the experts' own."""


@pytest.mark.parametrize("name", [name for name in jobs() if name not in CANNOT])
def test_verify_tells_what_deepspeed_converts_wrongly(name: str, theirs: Path) -> None:
    home, tag = jobs()[name]
    found = zckpt.verify(home, theirs / name / f"{tag}_universal")
    assert found.ok == (name not in NOT_WHOLE), list(found.lines())
    assert found.deletable and found.deletable[0] == found.ok
