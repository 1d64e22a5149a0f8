"""What nanotron saves: a real save of four ranks, and slices in the form of its headers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, NotACheckpointError, ZckptError
from zckpt.core.evidence import Evidence
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog
from zckpt.storage.location import locate

FIXTURE = Path(__file__).parents[2] / "fixtures" / "nanotron" / "llama_tp2_pp2"
QKV = "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-{}-of-2.safetensors"
NORM = "model/model/decoder/1/pp_block/input_layernorm/model_weight.safetensors"


def evidence_of(path: Path) -> Evidence:
    return open_catalog(locate(path), Reading()).catalog.evidence


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE / "checkpoint", tmp_path / "run"))


def test_every_element(run: Path, tmp_path: Path) -> None:
    """The run, a step of it, and a file deep inside it mean the same."""
    truth = load_file(FIXTURE / "truth.safetensors")
    for number, path in enumerate(
        (run, run / "1", run / "1" / NORM, run / "1/optimizer", run / "1/checkpoint_metadata.json")
    ):
        out = tmp_path / f"out{number}"
        zckpt.convert(path, out)
        found = load_file(out / "model.safetensors")
        assert found.keys() == truth.keys()
        assert all(same_bits(found[name], tensor.float()) for name, tensor in truth.items())
    verified = zckpt.verify(run, tmp_path / "out0")
    assert verified.ok and verified.deletable and verified.deletable[0], verified
    facts = inspect_checkpoint(run)
    assert "4 files in 'optimizer/'" in "".join(facts.lines())
    opened = zckpt.open_checkpoint(run)
    assert opened.metadata()["layout"] == "nanotron"


def test_what_is_missing_is_named(run: Path) -> None:
    """A slice; a parameter of both ranks, by the optimizer's names; a stage, by the config; a save that was not finished."""
    step = run / "1"
    slice_file = step / QKV.format(1)
    data = slice_file.read_bytes()
    slice_file.unlink()
    with pytest.raises(IncompleteError, match=r"qkv_proj.weight.*tp-rank-1"):
        zckpt.open_checkpoint(run)
    slice_file.write_bytes(data)
    norm = (step / NORM).read_bytes()
    (step / NORM).unlink()
    with pytest.raises(IncompleteError, match=r"input_layernorm.*optimizer"):
        zckpt.open_checkpoint(run)
    shutil.rmtree(step / "optimizer")
    with pytest.raises(IncompleteError, match=r"input_layernorm.*model_config.json"):
        zckpt.open_checkpoint(run)
    (step / NORM).write_bytes(norm)
    assert evidence_of(run).level == "shapes"
    (step / "model_config.json").unlink()
    assert evidence_of(run).level == "unknown"
    (step / "checkpoint_metadata.json").unlink()
    with pytest.raises(ZckptError):
        zckpt.open_checkpoint(step)


def rewrite(file: Path, how: Callable[[dict[str, str], dict[str, torch.Tensor]], object]) -> None:
    with safe_open(file, "pt") as opened:
        metadata, tensors = dict(opened.metadata() or {}), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    how(metadata, tensors)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (lambda said, held: said.pop("unsharded_shape"), CorruptError),
        (lambda said, held: said.update(unsharded_shape="(16; 8)"), CorruptError),
        (lambda said, held: said.update(unsharded_shape="(99999999999999999999, 8)"), CorruptError),
        (lambda said, held: said.update(unsharded_shape="(16, 4)"), ZckptError),
        (lambda said, held: said.update(local_global_slices_pairs="0,4,None|None,None,None"), CorruptError),
        (lambda said, held: said.update(local_global_slices_pairs="0,9,2|None,None,None#0,9,2|None,None,None"), CorruptError),
        (lambda said, held: said.update(local_global_slices_pairs="-4,4,None|None,None,None#0,8,None|0,8,None"), CorruptError),
        (lambda said, held: said.update(local_global_slices_pairs="None,None,None|None,None,None#0,8,None|None,None,None"),
         InconsistentError),
        (lambda said, held: said.update(local_global_slices_pairs=";" * 9999), CorruptError),
        (lambda said, held: held.update(more=torch.zeros(1)), CorruptError),
        (lambda said, held: held.update(data=held["data"].float()), InconsistentError),
    ],
)  # fmt: skip
def test_headers_that_do_not_fit(how: Callable[..., object], kind: type[ZckptError], run: Path) -> None:
    rewrite(run / "1" / QKV.format(1), how)
    with pytest.raises(kind):
        zckpt.open_checkpoint(run)


def test_files_of_another_save(run: Path) -> None:
    """A file of a run with more ranks, and one that is whole beside slices."""
    step = run / "1"
    other = step / QKV.format(1).replace("of-2.", "of-4.")
    shutil.copy(step / QKV.format(1), other)
    with pytest.raises(InconsistentError, match="of-4"):
        zckpt.open_checkpoint(run)
    other.rename(step / "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight.safetensors")
    with pytest.raises(InconsistentError, match="several saves"):
        zckpt.open_checkpoint(run)


def test_newer_shapes_and_experts(tmp_path: Path) -> None:
    """Numbers of numpy in the shape, expert ranks, and a tensor without dimensions."""
    step = tmp_path / "step"
    home = step / "model/experts"
    home.mkdir(parents=True)
    whole = torch.arange(32.0).view(4, 8)
    for ep in range(2):
        for tp in range(2):
            pairs = f"None,None,None|None,None,None#{2 * ep},{2 * ep + 2},None|{4 * tp},{4 * tp + 4},None"
            said = {
                "version": "1.5",
                "unsharded_shape": "(np.int64(4), np.int64(8))",
                "local_global_slices_pairs": pairs,
            }
            part = whole[2 * ep : 2 * ep + 2, 4 * tp : 4 * tp + 4].clone()
            file = home / f"model_w1_pp-rank-0-of-1_tp-rank-{tp}-of-2_exp-rank-{ep}-of-2.safetensors"
            save_file({"data": part}, file, said)
    save_file({"data": torch.tensor(3.0)}, step / "model/model_scale.safetensors")
    (step / "checkpoint_metadata.json").write_text(
        json.dumps({"version": "1.5", "tp": 2, "dp": 1, "metas": {"last_train_step": 7}})
    )
    zckpt.convert(step, tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["experts.w1"].equal(whole) and found["scale"].item() == 3
    assert zckpt.verify(step, tmp_path / "out").ok
    file.unlink()
    with pytest.raises(IncompleteError, match="exp-rank-1"):
        zckpt.open_checkpoint(step)


def test_directories_called_model_alone_are_no_save_of_it(tmp_path: Path) -> None:
    home = tmp_path / "model/layer"
    home.mkdir(parents=True)
    save_file({"data": torch.zeros(2)}, home / "model_weight.safetensors")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    opened = zckpt.open_checkpoint(tmp_path)
    assert opened.metadata()["layout"] == "plain weights" or "plain" in str(opened.metadata()["layout"])
    (home / "model_weight.safetensors").unlink()
    with pytest.raises(NotACheckpointError):
        zckpt.open_checkpoint(tmp_path)
