"""`verify` says yes to what is sound, and finds whatever is not."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
import synth
import torch
from damage import edit, wrong
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import Options
from zckpt.base.errors import NotACheckpointError
from zckpt.base.words import size
from zckpt.checks.verdict import Verification
from zckpt.containers import torch_zip
from zckpt.core import plan
from zckpt.core.stores import FileStore
from zckpt.engine import scan as scan_module
from zckpt.engine.scan_requests import AGAINST, CrcRange, request_of_bytes
from zckpt.jobs.open import open_catalog
from zckpt.storage.location import locate

FIXTURES = sorted(path.parent for path in (Path(__file__).parents[2] / "fixtures").glob("*/*/how.json"))
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


NOT_PROVED = {"dcp/alone_w2", "autoep/folded_zero3_w4", "trainers/composer_w1", "trainers/lightning_w1"}
"""Saves of which nothing says how many ranks wrote them, of families without a second reader, or of one file alone."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return synth.zero12(tmp_path / "ckpt", synth.two_groups(10), 3)


def name_of(fixture: Path) -> str:
    return f"{fixture.parent.name}/{fixture.name}"


def check_of(found: Verification, name: str) -> Any:
    return next(check for check in found.checks if check.name == name)


# ---- sound ones ------------------------------------------------------------------------------------------------------


FORMS = (("fp32", "out"), ("bf16", "out.bin"), ("fp16", "out.safetensors"))


def trials() -> list[Any]:
    """Each fixture in one form, and each family's in every form; for proofs, all in all."""
    families: dict[str, list[Path]] = {}
    for path in FIXTURES:
        families.setdefault(path.parent.name, []).append(path)
    few = [
        (paths[number % len(paths)], *FORMS[number % len(FORMS)])
        for paths in families.values()
        for number in range(max(len(paths), len(FORMS)))
    ]
    return [*few, *proofs.cases(one for path in FIXTURES for form in FORMS if (one := (path, *form)) not in few)]


@pytest.mark.parametrize(
    ("path", "dtype", "name"), trials(), ids=lambda one: name_of(one) if isinstance(one, Path) else one
)
def test_real_checkpoints_are_sound_and_so_is_what_is_made_of_them(
    path: Path, dtype: str, name: str, tmp_path: Path
) -> None:
    zckpt.convert(path / "checkpoint", tmp_path / name, dtype=dtype)
    found = zckpt.verify(path / "checkpoint", tmp_path / name, deep=dtype == "fp32")
    assert wrong(found) == {}
    lacking = [
        one for one in found.not_proved if "without its frozen parameters" not in one
    ]  # the shards lack these too
    assert found.deletable is not None and found.deletable[0] == (not lacking)
    assert bool(lacking) == (name_of(path) in NOT_PROVED), lacking
    assert wrong(zckpt.verify(tmp_path / name)) == {}


@pytest.mark.parametrize("path", FIXTURES, ids=name_of)
def test_every_byte_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, list[tuple[int, int]]] = {}
    real = scan_module._run_native

    def watched(batch: Any, *more: Any) -> Any:
        for how, (_, _, move) in zip(batch.flags, batch.moves, strict=True):
            sides = [(move.src, move.src_offset, move.src_dtype, move.src_pitch, move.src_step)]
            if how & AGAINST:
                sides.append((move.dst, move.dst_offset, move.dst_dtype, move.dst_pitch, move.dst_step))
            for store, offset, dtype, pitch, step in sides:
                if not isinstance(store, FileStore):
                    continue
                for row in range(move.rows):
                    for i in range(1 if step == 1 else move.count):
                        at = offset + row * pitch + i * step * dtype.itemsize
                        n = move.count if step == 1 else 1
                        read.setdefault(str(store), []).append((at, at + n * dtype.itemsize))
        return real(batch, *more)

    monkeypatch.setattr(scan_module, "_run_native", watched)
    assert zckpt.verify(path / "checkpoint", deep=True).ok
    assert read
    tensors = open_catalog(str(path / "checkpoint")).catalog.tensors.values()
    again = sum((len(entry.replicas) - 1) * entry.nbytes for entry in tensors if entry.replicas)
    for file, ranges in read.items():
        covered = np.zeros(os.path.getsize(file), int)
        for start, stop in ranges:
            covered[start:stop] += 1
        assert covered.min() == 1, file
        # Views of the same bytes are read once each, a master once for each copy of it, what lies transposed once in the
        # order of the file too; nothing else is read twice.
        again -= int((covered - 1).sum())
        assert again >= 0 or path.name in ("tied_w2", "packed_w2", "bf16", "bf16_groups", "fp16", "boxes_w4"), file


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("make", [synth.zero12, synth.zero3])
def test_padding_and_ranks_of_any_number(make: Any, world: int, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "ckpt", synth.two_groups(10), world)
    found = zckpt.verify(checkpoint, deep=True)
    assert found.ok and found.numbers == {}
    assert f"world size {world}" in found.about


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_no_flipped_bit_in_a_record_is_missed(checkpoint: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = chance.choice(sorted((checkpoint / "global_step5").iterdir()))
    records = [record for record in torch_zip.records(path) if record[2]]
    name, offset, nbytes, _ = chance.choice(records)
    with open(path, "r+b") as file:
        file.seek(offset + chance.randrange(nbytes))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    found = zckpt.verify(checkpoint, deep=True)
    assert not found.ok
    assert any(path.name in problem or str(path) in problem for p in wrong(found).values() for problem in p)
    if "/data/" in name:
        assert f"record {name!r} of {path.name!r}" in str(wrong(found)["bytes"])


def flip(path: Path, record: str, at: int) -> None:
    """One bit of a record of a zip file."""
    offset = next(offset for name, offset, *_ in torch_zip.records(path) if name.endswith(record))
    with open(path, "r+b") as file:
        file.seek(offset + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def record_of(path: Path, nbytes: int) -> str:
    """The name of the first record of this many bytes."""
    return next(name for name, _, size, _ in torch_zip.records(path) if size == nbytes)


@pytest.mark.parametrize("of", ["a master", "a weight of the model", "an optimizer state"])
@pytest.mark.parametrize("made", ["weights", "run"])
def test_nothing_is_deleted_on_the_word_of_damaged_bytes(tmp_path: Path, of: str, made: str) -> None:
    """The bit was flipped before the output was made, so the output agrees with it."""
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"a.weight": torch.randn(300, 257)}], 1)
    save = checkpoint / "global_step5"
    numel = 300 * 257
    if of == "a weight of the model":
        flip(save / MODEL, record_of(save / MODEL, 2 * numel), 77)
    else:  # both are as long: masters come first
        names = [name for name, _, size, _ in torch_zip.records(save / OPTIM.format(0)) if size == 4 * numel]
        flip(save / OPTIM.format(0), names[of == "an optimizer state"], 4 * 777)
    if made == "weights":
        zckpt.convert(checkpoint, tmp_path / "out")
    else:
        zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert found.deletable is not None
    if of == "an optimizer state" and made == "weights":  # only in the shards: nobody says anything of it
        assert found.ok and found.deletable[0] and "exp_avg" in found.deletable[1]
    else:
        assert not found.deletable[0]
        assert "does not match its checksum" in str(wrong(found)["bytes"])


@pytest.mark.parametrize("form", ["zero3", "dcp", "bin"])
def test_a_flipped_bit_in_any_form(form: str, tmp_path: Path) -> None:
    """Forms without half-precision copies, which would have told."""
    source = tmp_path / "source"
    checkpoint = synth.zero3(tmp_path / "ckpt", [{"a.weight": torch.randn(300, 257)}], 2)
    if form == "dcp":
        zckpt.to_dcp(checkpoint, source)
        for path in source.rglob("zckpt.json"):
            path.unlink()
    elif form == "bin":
        source.mkdir()
        torch.save({"a.weight": torch.randn(300, 257)}, source / "pytorch_model.bin")
    else:
        source = checkpoint
    (entry,) = open_catalog(str(source)).catalog.tensors.values()
    fragment = entry.fragments[0]
    with open(str(fragment.store), "r+b") as file:
        file.seek(fragment.byte_offset + 4 * 777)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    zckpt.convert(source, tmp_path / "out", dtype="bf16")
    found = zckpt.verify(source, tmp_path / "out")
    assert found.deletable is not None and not found.deletable[0]
    assert wrong(found).keys() == {"bytes"}


def test_what_was_not_read_is_told(tmp_path: Path) -> None:
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"a.weight": torch.randn(300, 257)}], 1)
    found = zckpt.verify(checkpoint)
    assert found.unread_bytes > 0 and f"not read    {size(found.unread_bytes)} of" in "\n".join(found.lines())
    assert any("--deep" in line for line in found.lines())
    zckpt.convert(checkpoint, tmp_path / "out")
    compared = zckpt.verify(checkpoint, tmp_path / "out")
    assert compared.deletable is not None and compared.deletable[0]
    assert 0 < compared.unread_bytes < found.unread_bytes  # the optimizer states
    deep = zckpt.verify(checkpoint, deep=True)
    assert deep.unread_bytes == 0 and not any("--deep" in line for line in deep.lines())


def test_every_damaged_file_is_told(checkpoint: Path) -> None:
    for rank in (0, 2):
        path = checkpoint / "global_step5" / OPTIM.format(rank)
        path.write_bytes(path.read_bytes()[:1000])
    found = zckpt.verify(checkpoint, deep=True)
    text = str(wrong(found))
    assert OPTIM.format(0) in text and OPTIM.format(2) in text
    assert found.about == "cannot be read whole"


def test_a_file_that_cannot_be_read_is_not_counted_as_read(checkpoint: Path) -> None:
    path = checkpoint / "global_step5" / OPTIM.format(0)
    path.write_bytes(path.read_bytes()[:1000])
    text = "\n".join(zckpt.verify(checkpoint).lines())
    assert "can be read; the other one is under 'tensors'" in text


def test_a_damaged_pickle_is_found_without_reading_everything(checkpoint: Path) -> None:
    path = checkpoint / "global_step5" / OPTIM.format(1)
    offset = next(offset for name, offset, _, _ in torch_zip.records(path) if name.endswith("/version"))
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"9")
    assert "version' of" in str(wrong(zckpt.verify(checkpoint))["checksums"])


def test_missing_ranks(checkpoint: Path) -> None:
    (checkpoint / "global_step5" / OPTIM.format(1)).unlink()
    found = zckpt.verify(checkpoint)
    assert "(rank 1)" in wrong(found)["tensors"][0]


@pytest.mark.parametrize("deep", [False, True])
def test_masters_that_are_not_their_copies(checkpoint: Path, deep: bool) -> None:
    def harm(root: Any) -> None:
        root["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][0 if not deep else 77] += 1.0

    edit(checkpoint / "global_step5" / OPTIM.format(0), harm)
    found = zckpt.verify(checkpoint, deep=deep)
    (problem,) = wrong(found)["masters"]
    assert "'a.weight'" in problem and ("number 77" in problem) == deep


def test_a_difference_in_the_middle_needs_a_deep_look(checkpoint: Path) -> None:
    def harm(root: Any) -> None:
        root["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][77] += 1.0

    edit(checkpoint / "global_step5" / OPTIM.format(0), harm)
    assert zckpt.verify(checkpoint).ok
    assert not zckpt.verify(checkpoint, deep=True).ok


@pytest.mark.parametrize("deep", [False, True])
def test_padding_that_is_not_zero(tmp_path: Path, deep: bool) -> None:
    for cut_padding, alignment in ((False, 1), (True, 8)):  # at the end, and between parameters: filled with 9 and 7
        checkpoint = synth.zero12(
            tmp_path / str(alignment), [{"x": torch.randn(5), "y": torch.randn(2)}], 4, alignment=alignment,
            cut_padding=cut_padding,
        )  # fmt: skip
        assert "are not zero" in wrong(zckpt.verify(checkpoint, deep=deep))["padding"][0]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zero2/groups_w3", OPTIM.format(2)),
        ("bf16_optimizer/groups_w3", OPTIM.format(2)),
        ("tensor/zero2_tp2_dp2", "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        ("pipeline/zero1_pp2_tp2_dp2", "zero_pp_rank_1_mp_rank_02_optim_states.pt"),
        ("moe/zero2_w2", OPTIM.format(1)),
    ],
)
def test_padding_of_real_checkpoints(name: str, file: str, deep: bool, tmp_path: Path) -> None:
    """The last rank's moments are as long as the others'."""
    home = shutil.copytree(FIXTURES[0].parents[1] / name / "checkpoint", tmp_path / "ckpt")
    padded = []

    def harm(root: Any) -> None:
        inner = root["optimizer_state_dict"]
        for number, padding in enumerate(inner["group_paddings"]):
            if padding:
                inner["base_optimizer_state"]["state"][number]["exp_avg_sq"][-1] = 1e-30
                padded.append(number)

    (path,) = home.glob(f"*/*{file}")
    edit(path, harm)
    found = wrong(zckpt.verify(home, deep=deep))
    assert padded and found.keys() == {"padding"}
    assert len(found["padding"]) == len(padded)
    assert all("1 of " in problem and f" in {path.name!r} are not zero" in problem for problem in found["padding"])


def test_numbers_that_are_none_are_counted(tmp_path: Path) -> None:
    tensors = synth.two_groups(10)
    tensors[0]["a.weight"][3, 4:6] = math.nan
    tensors[0]["a.weight"][9, 9] = -math.inf
    tensors[1]["c.weight"][0, 0] = math.inf
    buffers = {"mask": torch.full((3,), -math.inf)}
    checkpoint = synth.zero12(tmp_path / "ckpt", tensors, 3, buffers=buffers)
    found = zckpt.verify(checkpoint, deep=True)
    assert found.numbers == {"a.weight": (2, 1), "c.weight": (0, 1), "mask": (0, 3)}
    assert wrong(found) == {"numbers": ("2 NaN and 2 infinite in 2 parameters",)}
    assert zckpt.verify(checkpoint).numbers is None
    only_buffers = synth.zero12(tmp_path / "fine", synth.two_groups(10), 3, buffers=buffers)
    assert zckpt.verify(only_buffers, deep=True).ok


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [("global_steps", 9, "step"), ("ds_version", "0.1.0", "DeepSpeed version"), ("dp_world_size", 7, "world size")],
)
def test_files_of_several_saves(tmp_path: Path, key: str, value: object, told: str) -> None:
    checkpoint = synth.zero3(tmp_path / "ckpt", synth.two_groups(10), 3)
    name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    edit(checkpoint / "global_step5" / name, lambda root: root.update({key: value}))
    (problem,) = wrong(zckpt.verify(checkpoint))["save"]
    assert told in problem and name in problem and str(value) in problem


def test_files_of_another_age_are_pointed_out(checkpoint: Path) -> None:
    path = checkpoint / "global_step5" / OPTIM.format(1)
    now = path.stat().st_mtime
    os.utime(path, (now, now - 3 * 86400))
    found = zckpt.verify(checkpoint)
    assert found.ok
    assert any(path.name in note and "3 days older" in note for note in found.notes)


def test_files_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint = synth.zero12(tmp_path / "ckpt", synth.two_groups(10), 2)
    finally:
        torch.serialization.set_crc32_options(True)
    found = zckpt.verify(checkpoint, deep=True)
    assert found.ok and any("no checksums" in note for note in found.notes)


def test_a_disk_that_fails(checkpoint: Path) -> None:
    from zckpt._core import inject

    inject(False, 3, 5)
    try:
        found = zckpt.verify(checkpoint, deep=True)
    finally:
        inject(False, 0, 0)
    assert "cannot be read" in wrong(found)["bytes"][0]


def test_what_is_no_answer_is_an_error(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(NotACheckpointError):
        zckpt.verify(tmp_path / "nothing")
    with pytest.raises(NotACheckpointError):
        zckpt.verify(checkpoint, tmp_path / "nothing")
    (tmp_path / "poem.txt").write_text("Whose woods these are I think I know.")
    with pytest.raises(NotACheckpointError):
        zckpt.verify(tmp_path / "poem.txt")
    shutil.copy(checkpoint / "global_step5" / MODEL, checkpoint / "global_step5" / "layer_00-model_states.pt")
    assert "more than tensors" in str(wrong(zckpt.verify(checkpoint)))


# ---- against a manifest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "out.bin", "out.safetensors"])
def test_any_damage_to_an_output_shows_in_its_manifest(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "x"}')
    (checkpoint / "tokenizer.json").write_text("{}")
    zckpt.convert(checkpoint, tmp_path / name, options=Options(max_shard_size=8000))
    out = tmp_path / name
    assert zckpt.verify(out).ok
    files = [path for path in out.iterdir() if path.name != "zckpt.json"] if out.is_dir() else [out]
    assert len(files) == (6 if name == "out" else 1)
    chance = random.Random(1)
    for path in files:
        data = path.read_bytes()
        for at in {0, len(data) - 1, chance.randrange(len(data))}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert wrong(zckpt.verify(out))
        path.write_bytes(data[:-1])
        assert f"{path.name!r} has {len(data) - 1:,} bytes" in wrong(zckpt.verify(out))["manifest"][0]
        path.unlink()
        if out.is_dir() and path.suffix != ".safetensors" and not path.name.endswith("index.json"):
            assert f"{path.name!r} is missing" in wrong(zckpt.verify(out))["manifest"][0]
        path.write_bytes(data)
    assert zckpt.verify(out).ok


@pytest.mark.parametrize("stage", [1, 3, "universal"])
def test_damage_to_a_checkpoint_of_ours_shows_in_its_manifest(tmp_path: Path, stage: int | str) -> None:
    source, out = FIXTURES[0].parents[1] / "zero2" / "groups_w3" / "checkpoint", tmp_path / "out"
    if stage == "universal":
        zckpt.to_universal(source, out)
    else:
        zckpt.reshard(source, out, world_size=2, stage=int(stage))
    found = zckpt.verify(out)
    assert not wrong(found) and "all " in check_of(found, "manifest").answer
    path = max(out.rglob("*model_states.pt"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert wrong(zckpt.verify(out))
    path.unlink()
    assert f"{path.name!r} is missing" in wrong(zckpt.verify(out))["manifest"][0].replace(f"{path.parent.name}/", "")


def test_files_that_the_manifest_does_not_know(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    found = zckpt.verify(tmp_path / "out")
    assert found.ok and any("README.md" in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{" * 100_000,
        '{"zckpt": 1}',
        '{"zckpt":"0","source":{},"dtype":"fp32","options":{},"tensors":1,"numel":1,"files":[]}',
        '{"zckpt":"0","source":{},"dtype":"fp32","options":{},"tensors":1,"numel":1,"files":[{"path":"../../etc/passwd","bytes":1,"crc32":"00000000"}]}',
        '{"zckpt":"0","source":{},"dtype":"fp32","options":{},"tensors":1,"numel":1,"files":[{"path":"/etc/passwd","bytes":1,"crc32":"00000000"}]}',
        '{"zckpt":"0","source":{},"dtype":"fp32","options":{},"tensors":1,"numel":1,"files":[{"path":"a","bytes":-1,"crc32":"00000000"}]}',
    ],
)
def test_manifests_of_strangers(checkpoint: Path, tmp_path: Path, text: str) -> None:
    zckpt.convert(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "zckpt.json").write_text(text)
    assert wrong(zckpt.verify(tmp_path / "out")).keys() == {"manifest"}
    assert not zckpt.verify(checkpoint, tmp_path / "out").ok


# ---- an output against its checkpoint --------------------------------------------------------------------------------


def test_an_output_made_by_others(checkpoint: Path, tmp_path: Path) -> None:
    state = {name: tensor for group in synth.two_groups(10) for name, tensor in group.items()}
    torch.save(state, tmp_path / "their.bin")
    found = zckpt.verify(checkpoint, tmp_path / "their.bin")
    assert found.ok and "bit for bit" in check_of(found, "equal").answer
    save_file({name: tensor.bfloat16() for name, tensor in state.items()}, tmp_path / "their.safetensors")
    found = zckpt.verify(checkpoint, tmp_path / "their.safetensors")
    assert found.ok and "rounded to BF16" in found.deletable[1]


def test_deepspeeds_own_output(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    import warnings

    path = next(path for path in FIXTURES if path.name == "w12" and path.parent.name == "zero3") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

        convert_zero_checkpoint_to_fp32_state_dict(str(path), str(tmp_path / "theirs"))
    assert zckpt.verify(path, tmp_path / "theirs").ok


def ulp_up(state: dict[str, torch.Tensor]) -> None:
    flat = state["a.weight"].view(torch.int32 if state["a.weight"].dtype == torch.float32 else torch.int16).view(-1)
    flat[1234] += 1


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (ulp_up, "'a.weight': 1 element differs, the first is number 1,234"),
        (lambda state: state.pop("b.bias"), "1 tensor is missing in the output: 'b.bias'"),
        (lambda state: state.update(extra=torch.ones(1)), "1 tensor of the output is not in the checkpoint: 'extra'"),
        (
            lambda state: state.update({"b.bias": state["b.bias"][:5]}),
            "has shape [5] in the output, [11] in the checkpoint",
        ),
        (
            lambda state: state.update({"b.bias": torch.ones(11, dtype=torch.int32)}),
            "is I32 in the output, F32 in the checkpoint",
        ),
        (
            lambda state: state.update({"b.bias": state["b.bias"].double()}),
            "is F64 in the output, F32 in the checkpoint",
        ),
        (lambda state: state.update({"b.bias": -state["b.bias"]}), "'b.bias': 11 elements differ"),
        (
            lambda state: state.update({"a.weight": state["a.weight"].T.contiguous().view(70, 50)}),
            "'a.weight': 3,4",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_difference_is_found(
    harm: Callable[[dict[str, torch.Tensor]], object], told: str, dtype: torch.dtype, checkpoint: Path, tmp_path: Path
) -> None:
    state = {name: tensor.to(dtype) for group in synth.two_groups(10) for name, tensor in group.items()}
    harm(state)
    torch.save(state, tmp_path / "out.bin")
    found = zckpt.verify(checkpoint, tmp_path / "out.bin")
    assert told in str(wrong(found)["equal"])
    assert found.deletable == (False, "1 problem was found")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mistake_of_the_fast_path_is_not_repeated(
    checkpoint: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router is broken, and stays broken while it is checked: what derives the tensors again does not use it."""
    real = plan.route

    def broken(*sides: Any) -> Any:
        for move in real(*sides):
            back = move.src_dtype.itemsize if move.count > 100 and move.start > 0 else 0
            yield move._replace(src_offset=move.src_offset - back)

    monkeypatch.setattr(plan, "route", broken)
    zckpt.convert(checkpoint, tmp_path / "out.bin", dtype=dtype)
    assert zckpt.verify(tmp_path / "out.bin").ok  # it is what was written; but that was wrong
    assert "elements differ" in str(wrong(zckpt.verify(checkpoint, tmp_path / "out.bin"))["equal"])


def test_the_options_of_the_conversion_are_known(checkpoint: Path, tmp_path: Path) -> None:
    options = Options(rename=[("^", "model.")], strip_prefix="a.", exclude=["b.*"])
    zckpt.convert(checkpoint, tmp_path / "out", dtype="bf16", options=options)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"model.weight", "model.c.weight"}
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert found.ok
    assert found.deletable == (False, "1 tensor was left out of the output: 'b.bias'")


def test_clamped_numbers(tmp_path: Path) -> None:
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"w": torch.tensor([1e30, -1e30, 1.0])}], 2)
    for overflow in ("clamp", "inf"):
        out = tmp_path / overflow
        zckpt.convert(checkpoint, out, dtype="fp16", options=Options(overflow=overflow))
        assert zckpt.verify(checkpoint, out).ok
    (tmp_path / "clamp" / "zckpt.json").unlink()
    assert not zckpt.verify(checkpoint, tmp_path / "clamp").ok


def test_a_manifest_of_another_dtype(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "out", dtype="bf16")
    place = tmp_path / "out" / "zckpt.json"
    place.write_text(place.read_text().replace('"bf16"', '"fp16"'))
    assert "is BF16 in the output, F32 in the checkpoint" in str(
        wrong(zckpt.verify(checkpoint, tmp_path / "out"))["equal"]
    )


def test_tied_names(tmp_path: Path) -> None:
    tensors = [{"embed.weight": torch.randn(20, 4), "other": torch.randn(3)}]
    checkpoint = synth.zero12(tmp_path / "ckpt", tensors, 2, shared={"head.weight": "embed.weight"})
    for name in ("out.bin", "out.safetensors"):
        zckpt.convert(checkpoint, tmp_path / name)
        assert zckpt.verify(checkpoint, tmp_path / name).ok
    save_file(tensors[0], tmp_path / "theirs.safetensors")  # as transformers does: the tied name is not in the file
    found = zckpt.verify(checkpoint, tmp_path / "theirs.safetensors")
    assert found.ok and any("'head.weight'" in note for note in found.notes)
    state = {**tensors[0], "head.weight": tensors[0]["embed.weight"] + 1}
    save_file(state, tmp_path / "untied.safetensors")
    assert "'head.weight'" in str(wrong(zckpt.verify(checkpoint, tmp_path / "untied.safetensors"))["equal"])


@pytest.mark.parametrize("place", ["global_step5/out.bin", "global_step5/deeper/out.bin", "linked.bin"])
def test_what_lies_among_the_shards_goes_with_them(checkpoint: Path, tmp_path: Path, place: str) -> None:
    zckpt.convert(checkpoint, tmp_path / "out.bin")
    inside = checkpoint / ("global_step5/out.bin" if place == "linked.bin" else place)
    inside.parent.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "out.bin", inside)
    out = inside
    if place == "linked.bin":
        out = tmp_path / place
        out.symlink_to(inside)
    found = zckpt.verify(checkpoint, out)
    assert found.ok and found.deletable is not None
    assert not found.deletable[0] and "would be deleted with them" in found.deletable[1]


def test_weights_against_weights(tmp_path: Path) -> None:
    save_file({"w": torch.randn(1000)}, tmp_path / "in.safetensors")
    zckpt.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    found = zckpt.verify(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert (
        found.ok and found.deletable is not None and not found.deletable[0]
    )  # nothing tells whether it is all of a model
    assert found.complete is None and "config" in str(found.not_proved)
    assert not zckpt.verify(tmp_path / "in.safetensors", tmp_path / "in.safetensors").deletable[0]


def test_the_zip_files_of_others(tmp_path: Path) -> None:
    """A record with a wrong checksum in otherwise equal weights: torch loads it, an unzip would not."""
    zckpt.convert(FIXTURES[0] / "checkpoint", tmp_path / "out.bin")
    with zipfile.ZipFile(tmp_path / "out.bin") as archive:
        info = next(info for info in archive.infolist() if "/data/" in info.filename and info.file_size)
    data = bytearray((tmp_path / "out.bin").read_bytes())
    for at in (info.header_offset + 14, data.index(struct.pack("<L", info.CRC), len(data) // 2)):
        data[at : at + 4] = struct.pack("<L", info.CRC ^ 1)
    (tmp_path / "out.bin").write_bytes(data)
    (tmp_path / "out.bin.zckpt.json").unlink()
    assert "does not match its checksum" in str(wrong(zckpt.verify(tmp_path / "out.bin", deep=True))["bytes"])


def test_json_is_what_it_says(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "out")
    facts = json.loads(json.dumps(zckpt.verify(checkpoint, tmp_path / "out", deep=True).as_json()))
    assert facts["ok"] and facts["deep"] and facts["deletable"]["ok"] and facts["numbers"] == {}
    assert [check["name"] for check in facts["checks"]] == [
        "tensors", "whole", "places", "files", "save", "optimizer", "bytes", "masters", "numbers", "output", "equal",
    ]  # fmt: skip


def test_stores_with_one_path_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    a, b = locate(path).store(), locate(path).store()
    report = scan_module.scan([request_of_bytes(a, 0, 100)], [CrcRange(b, 0, 100)])
    assert report.crcs[0]
