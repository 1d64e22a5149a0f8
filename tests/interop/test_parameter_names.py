"""Of real DeepSpeed's saves come the parameters that its lists name, once each, in fp32: whatever the state dict calls them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import zckpt
from zckpt.checks.second import compare_places
from zckpt.cli import app
from zckpt.containers import TensorRef
from zckpt.core.dtypes import F32
from zckpt.core.stores import FileStore
from zckpt.jobs.open import open_catalog
from zckpt.layouts.save.state_names import WRAPPERS, match_names

pytest.importorskip("deepspeed")

WORKER = Path(__file__).with_name("named_worker.py")
KINDS = ("value head", "hook", "prefix", "checkpoint wrapper", "other words")
JOBS: list[dict[str, Any]] = [
    *({"kind": kind, "stage": stage, "precision": "bf16"} for kind in KINDS for stage in (2, 3)),
    *({"kind": "plain", "middle": True, "stage": stage, "precision": "bf16"} for stage in (1, 2, 3)),
]


WITHOUT: list[dict[str, Any]] = [
    {"kind": "fixed embedding", "exclude": True, "stage": stage, "precision": "bf16"} for stage in (1, 2, 3)
]


def place_of(home: Path, job: dict[str, Any]) -> Path:
    return home / f"{job['kind']} {job['stage']}"


def tell(home: Path, ranks: int, jobs: list[dict[str, Any]]) -> list[list[float]]:
    path = home / f"jobs on {ranks}.json"
    path.write_text(json.dumps(jobs))
    run_ranks(ranks, path, WORKER)
    return json.loads(Path(f"{path}.told").read_text())[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("named")
    tell(home, 2, [{**job, "save": str(place_of(home, job))} for job in (*JOBS, *WITHOUT)])
    return home


def each(saved: Path) -> list[tuple[dict[str, Any], Path, dict[str, torch.Tensor]]]:
    places = [(job, place_of(saved, job)) for job in JOBS]
    return [(job, at / "checkpoint", torch.load(at / "live.pt")) for job, at in places]


def test_masters_of_the_listed_parameters(saved: Path, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for number, (job, checkpoint, live) in enumerate(each(saved)):
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
        truth = {WRAPPERS.sub("", name): tensor for name, tensor in theirs.items()}
        found = zckpt.get_fp32_state_dict_from_zero_checkpoint(checkpoint)
        assert truth.keys() - {"scale"} <= found.keys(), job
        assert all(torch.equal(found[name], tensor) for name, tensor in truth.items()), job
        zckpt.convert(checkpoint, tmp_path / f"{number}.safetensors", dtype="fp32")
        written = load_file(tmp_path / f"{number}.safetensors")
        bare = {WRAPPERS.sub("", name).removeprefix("pretrained_model."): tensor for name, tensor in live.items()}
        buffers = written.keys() - bare.keys()
        assert (len(buffers) == 1 and "scale" in buffers.pop()) or job["kind"] == "other words", job
        assert len(written) == len(bare) + 1, (job, written.keys() - bare.keys())
        assert all(torch.equal(written[name], tensor.float()) for name, tensor in bare.items()), job


def zckpt_says(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, (words, result.output)
    return result.output


def test_verify_and_inspect(saved: Path, tmp_path: Path) -> None:
    for number, (_, checkpoint, _) in enumerate(each(saved)):
        zckpt_says("inspect", checkpoint)
        zckpt_says("to-fp32", checkpoint, tmp_path / f"{number}", "--quiet")
        zckpt_says("verify", checkpoint, tmp_path / f"{number}")
        assert zckpt.verify(checkpoint).proved_by["places"] == "second reader"


def test_a_second_reader_misses_what_the_first_one_leaves_out(saved: Path) -> None:
    for job, checkpoint, _ in each(saved):
        opened = open_catalog(str(checkpoint))
        assert compare_places(opened.place.listing, opened.catalog) == ("second reader", len(opened.catalog), "", ())
        for name in opened.catalog.tensors:
            tensors = {other: entry for other, entry in opened.catalog.tensors.items() if other != name}
            aliases = {old: new for old, new in opened.catalog.aliases.items() if new != name}
            less = replace(opened.catalog, tensors=tensors, aliases=aliases)
            found = compare_places(opened.place.listing, less)
            assert f"{name!r} is in the files, and is not read from them" in found.problems, (job, name)


def test_a_save_without_frozen_parameters_is_completed(saved: Path, tmp_path: Path) -> None:
    for job in WITHOUT:
        at, out = place_of(saved, job), tmp_path / str(job["stage"])
        live = torch.load(at / "live.pt")
        said = " ".join(zckpt_says("inspect", at / "checkpoint").split())
        is_here = job["stage"] < 3  # the save has its numbers, under the name of the head
        known = "it cannot be told" if is_here else "not the whole model, which has also 'embed.weight'"
        assert zckpt.inspect_checkpoint(at / "checkpoint").complete is (None if is_here else False)
        written = zckpt_says("to-fp32", at / "checkpoint", out / "part")
        told = " ".join(zckpt_says("verify", at / "checkpoint", out / "part", status=1).split())
        assert f"Do not delete the shards: {known}" in told and "every weight is in the output" not in told
        if not is_here:
            assert "not the whole model, which has also 'embed.weight'" in said and "complete" not in said
            assert "lacks the model's frozen parameters" in " ".join(written.split()) and "load it with" not in written
        assert zckpt.inspect_checkpoint(out / "part").complete is (None if is_here else False)
        save_file({name: tensor.contiguous() for name, tensor in live.items()}, tmp_path / "base.safetensors")
        base = ("--base", tmp_path / "base.safetensors")
        zckpt_says("to-fp32", at / "checkpoint", out / "whole.safetensors", *base)
        zckpt_says("verify", at / "checkpoint", out / "whole.safetensors", *base)
        whole = load_file(out / "whole.safetensors")
        assert whole.keys() == live.keys() | {"scale"}
        assert all(torch.equal(whole[name], tensor.float()) for name, tensor in live.items())
        assert zckpt.inspect_checkpoint(out / "whole.safetensors").complete


def test_names_of_many_dots_cost_as_names_of_few() -> None:
    ref = TensorRef(FileStore("a", 64), 0, F32, (2,), (1,), "0", 0, 64, 0)
    module = {"a." * 5000 + "w": ref, **{f"{number}." * 5000 + "v": ref for number in range(20)}}
    begun = time.process_time()
    assert match_names(module, {"b." + "a." * 4999 + "w": (2,), "c.v": (3,)}, [], {}) == {
        "a." * 5000 + "w": "b." + "a." * 4999 + "w"
    }
    assert time.process_time() - begun < 1  # where each dot counts it is more than half a minute


def test_universal_has_each_parameter_once(saved: Path, tmp_path: Path) -> None:
    for number, (job, checkpoint, live) in enumerate(each(saved)):
        out = tmp_path / f"{number}"
        zckpt.to_universal(checkpoint, out)
        assert zckpt.verify(out).ok, job
        names = {str(path.parent.relative_to(out)).split("/", 2)[2] for path in out.rglob("fp32.pt")}
        wanted = {name for name in live if job["stage"] != 3 or "frozen" not in name}
        others = {name for name in names - wanted if name.split(".")[-1] != "scale" and "head.weight" not in name}
        assert wanted <= names and (not others or job["kind"] == "other words"), (job, others)


def test_a_live_model_is_filled(saved: Path) -> None:
    sys.path.insert(0, str(WORKER.parent))
    import named_worker

    for job, checkpoint, live in each(saved):
        if job["kind"] == "other words":
            continue  # its buffer's name is not known
        model = named_worker.KINDS[job["kind"]]()
        zckpt.load_state_dict_from_zero_checkpoint(model, checkpoint)
        for name, tensor in model.named_parameters():
            assert torch.equal(tensor.float(), live[name].float()), (job, name)


def test_resharded_saves_load_strictly(saved: Path, tmp_path: Path) -> None:
    """DeepSpeed takes the state dict's names, and goes on at another stage on one rank as from its own save on two."""
    jobs = [(job, at) for job, at, _ in each(saved) if job["kind"] != "other words" and job["stage"] > 1]
    straight = tell(tmp_path, 2, [{**job, "middle": False, "load": str(at), "seed": 1} for job, at in jobs])
    resumed = []
    for number, (job, at) in enumerate(jobs):
        zckpt.reshard(at, tmp_path / f"{number}", world_size=1, stage=5 - job["stage"])
        resumed.append(
            {**job, "middle": False, "stage": 5 - job["stage"], "load": str(tmp_path / f"{number}"), "seed": 1}
        )
    for (job, _), found, wanted in zip(jobs, tell(tmp_path, 1, resumed), straight, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)) < 1e-2, job
