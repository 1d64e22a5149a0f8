"""What a link in a stranger's checkpoint leads to is never written to an output: a private key is not a tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt
from zckpt import Options
from zckpt.base.errors import UnsafeError
from zckpt.hub import load
from zckpt.hub.cargo import cargo_of
from zckpt.jobs import slim
from zckpt.jobs.declarations import PUSH, SLIM
from zckpt.jobs.options import LoraMerge
from zckpt.layouts.save.companions import companions
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
SECRET = b"SECRET of this machine"


def slimmed(ckpt: Path, out: Path, drop: str = "optimizer") -> tuple[str, ...]:
    planned = slim.prepare(ckpt, out, SLIM.ask(drop=(drop,)))
    slim.execute(planned)
    return planned.notes


JOBS: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {
    "convert": lambda ckpt, out: zckpt.convert(ckpt, out).notes,
    "average": lambda ckpt, out: zckpt.average([ckpt, ckpt], out).notes,
    "to_dcp": lambda ckpt, out: zckpt.to_dcp(ckpt, out).notes,
    "to_universal": lambda ckpt, out: zckpt.to_universal(ckpt, out).notes,
    "reshard": lambda ckpt, out: zckpt.reshard(ckpt, out, world_size=2).notes,
    "slim": slimmed,
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "id_rsa").write_bytes(SECRET)
    (tmp_path / "elsewhere" / "auth.json").write_text(json.dumps({"model_type": "llama", "auth": SECRET.decode()}))
    return tmp_path / "elsewhere" / "id_rsa"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "zero2" / "bf16_w2" / "checkpoint", tmp_path / "made" / "run" / "checkpoint-2")


def holding(out: Path) -> list[str]:
    return [path.name for path in out.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


@pytest.mark.parametrize("job", JOBS)
def test_no_job_copies_what_a_link_leads_to(job: str, checkpoint: Path, secret: Path, tmp_path: Path) -> None:
    names = ["tokenizer.model", "vocab.txt", "rng_state_0.pth", "trainer_state.json"]
    for name in names:
        (checkpoint / name).symlink_to(secret)
    for name in ("config.json", "generation_config.json"):
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).symlink_to(secret.parent / "auth.json")
    (checkpoint / "real.model").write_bytes(b"a tokenizer")
    (checkpoint / "merges.txt").symlink_to("real.model")
    notes = JOBS[job](checkpoint, tmp_path / "out")
    assert not holding(tmp_path / "out")
    assert (tmp_path / "out" / "merges.txt").read_bytes() == b"a tokenizer", "a link in the checkpoint's own tree"
    said = " ".join(notes)
    for name in ("tokenizer.model", "vocab.txt", "config.json", "generation_config.json"):
        assert repr(name) in said and not (tmp_path / "out" / name).exists()
    if job in ("to_dcp", "to_universal", "reshard"):
        assert "'rng_state_0.pth'" in said and "'trainer_state.json'" in said


def test_slim_copies_no_file_of_the_save_by_a_link(checkpoint: Path, secret: Path, tmp_path: Path) -> None:
    (checkpoint / "global_step2" / "extra").symlink_to(secret)
    notes = slimmed(checkpoint, tmp_path / "out")
    assert not holding(tmp_path / "out") and any("'global_step2/extra'" in note for note in notes)
    assert zckpt.verify(tmp_path / "out").ok
    other = next((checkpoint / "global_step2").glob("*model_states.pt"))
    shutil.move(other, tmp_path / "elsewhere" / other.name)
    other.symlink_to(tmp_path / "elsewhere" / other.name)
    slimmed(checkpoint, tmp_path / "again")
    assert zckpt.verify(tmp_path / "again").ok, "weights may lie elsewhere"


def test_slim_copies_no_data_by_a_link(secret: Path, tmp_path: Path) -> None:
    save = shutil.copytree(FIXTURES / "dcp" / "fsdp2_flat_w4" / "checkpoint" / "step-2", tmp_path / "save")
    data = next(save.glob("*.distcp"))
    shutil.move(data, tmp_path / "moved")
    data.symlink_to(tmp_path / "moved")
    with pytest.raises(UnsafeError, match="leads out"):
        slimmed(save, tmp_path / "out")
    data.unlink()
    shutil.move(tmp_path / "moved", data)
    (save / "__9_9.distcp").symlink_to(secret)
    with pytest.raises(UnsafeError, match="leads out"):
        slimmed(save, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_base_and_the_adapter(secret: Path, tmp_path: Path) -> None:
    lora = shutil.copytree(FIXTURES / "peft" / "lora_zero2", tmp_path / "lora")
    (lora / "base" / "tokenizer.model").symlink_to(secret)
    (lora / "base" / "config.json").unlink()
    (lora / "base" / "config.json").symlink_to(secret.parent / "auth.json")
    report = zckpt.convert(lora / "checkpoint", tmp_path / "out", options=Options(lora=LoraMerge(base=lora / "base")))
    assert not holding(tmp_path / "out") and "'tokenizer.model'" in " ".join(report.notes)
    (lora / "checkpoint" / "vocab.txt").symlink_to(secret)
    for config in lora.glob("checkpoint/**/adapter_config.json"):
        kept = json.loads(config.read_text())
        secret.write_text(json.dumps({**kept, "auth": SECRET.decode()}))
        config.unlink()
        config.symlink_to(secret)
    report = zckpt.to_peft(lora / "checkpoint", tmp_path / "adapter")
    assert not holding(tmp_path / "adapter")
    assert "'vocab.txt'" in " ".join(report.notes) and "'adapter_config.json'" in " ".join(report.notes)


def hub_cache(place: Path, name: str, data: bytes) -> Path:
    """A snapshot in the hub's cache, as huggingface_hub lays it out."""
    model = place / "models--org--model"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / "0a1b2c").write_bytes(data)
    snapshot = model / "snapshots" / "c0ffee"
    (snapshot / "inner").mkdir(parents=True)
    (snapshot / name).symlink_to("../../blobs/0a1b2c")
    (snapshot / "inner" / name).symlink_to("../../../blobs/0a1b2c")
    return snapshot


def names_of(home: Path, named: Path | None = None) -> list[str]:
    return [name for _, name in companions(locate(home), None if named is None else locate(named))[0]]


def test_the_hubs_cache_is_a_checkpoints_own(tmp_path: Path, secret: Path) -> None:
    snapshot = hub_cache(tmp_path, "tokenizer.model", b"a tokenizer")
    (snapshot / "vocab.txt").symlink_to(secret)
    (snapshot / "merges.txt").symlink_to("../../../elsewhere/id_rsa")
    assert names_of(snapshot) == names_of(snapshot / "inner") == ["tokenizer.model"]
    (tmp_path / "link").symlink_to(snapshot)
    assert names_of(tmp_path / "link") == ["tokenizer.model"]


def test_blobs_that_are_a_link_themselves(tmp_path: Path, secret: Path) -> None:
    snapshot = hub_cache(tmp_path, "tokenizer.model", b"a tokenizer")
    shutil.rmtree(tmp_path / "models--org--model" / "blobs")
    (tmp_path / "models--org--model" / "blobs").symlink_to(secret.parent)
    os.rename(secret, secret.parent / "0a1b2c")
    assert (snapshot / "tokenizer.model").read_bytes() == SECRET and names_of(snapshot) == []


def test_the_tree_is_what_a_person_names(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parent
    (run / "tokenizer.model").write_bytes(b"of the run")
    (checkpoint / "tokenizer.model").symlink_to("../tokenizer.model")
    assert names_of(checkpoint) == [] and names_of(checkpoint, run) == ["tokenizer.model"]
    zckpt.convert(run, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"of the run"


def test_a_directory_that_is_a_link(checkpoint: Path, secret: Path) -> None:
    (secret.parent / "tokenizer.model").write_bytes(SECRET)
    (checkpoint / "tokenizer").symlink_to(secret.parent)
    own, notes = companions(locate(checkpoint))
    assert "tokenizer.model" not in [name for _, name in own] and "'tokenizer.model'" in " ".join(notes)


def test_weights_behind_a_link_are_made_again_for_a_push(tmp_path: Path) -> None:
    """A push sends converted weights as they are, header and all; of those that lie elsewhere, it sends the tensors."""
    weights, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    zckpt.convert(FIXTURES / "zero2" / "bf16_w2" / "checkpoint", weights)
    assert [shard.scratch_bytes for shard in cargo_of(load(str(weights), None, PUSH.ask())).shards] == [0]
    shutil.move(weights / "model.safetensors", elsewhere)
    (weights / "model.safetensors").symlink_to(elsewhere)
    (shard,) = cargo_of(load(str(weights), None, PUSH.ask())).shards
    assert shard.scratch_bytes == shard.nbytes
