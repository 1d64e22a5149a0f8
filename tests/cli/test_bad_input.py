"""Whatever is wrong with the input or the output: a clear error of the right kind, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synth
import torch
from hangs import HANG_S
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import Options
from zckpt.base.errors import (
    CastError,
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    OutputError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.jobs.groups import Form
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.output.checks import check_space
from zckpt.output.work_directory import is_unfinished
from zckpt.storage.location import locate

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.fixture
def zero2(tmp_path: Path) -> Path:
    return synth.zero12(tmp_path / "ckpt", synth.two_groups(1), 3)


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    return synth.zero3(tmp_path / "ckpt", synth.two_groups(1), 3)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where output would go; after a refused conversion nothing may be there, under any name."""
    place = tmp_path / "results"
    place.mkdir()
    yield place / "out.safetensors"


def refused(kind: type[ZckptError], checkpoint: Path, out: Path, **options: Any) -> ZckptError:
    tag, also = options.pop("tag", None), options.pop("also", ())
    with pytest.raises(kind) as caught:
        zckpt.convert(
            checkpoint, out, tag=tag, also=also, dtype=options.pop("dtype", "fp32"), options=Options(**options)
        )
    assert type(caught.value) is kind
    assert list(out.parent.iterdir()) == []
    return caught.value


def remove(out: Path) -> None:
    """An output, and what was written beside it."""
    out.unlink()
    out.with_name(f"{out.name}.zckpt.json").unlink()


def cli(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "zckpt", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **more)


def edit(path: Path, change: Any) -> None:
    root = torch.load(path, weights_only=False)
    change(root)
    torch.save(root, path)


# ---- which save ------------------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path, out: Path) -> None:
    error = refused(NotACheckpointError, tmp_path / "nowhere", out)
    assert error.file == str(tmp_path / "nowhere") and "latest" in error.remedy


def test_a_directory_one_too_high(zero2: Path, out: Path, tmp_path: Path) -> None:
    """The only save below is taken; of two, the fix names them, and works when it is followed."""
    above = tmp_path / "experiment"
    above.mkdir()
    assert "global_step*" not in refused(NotACheckpointError, above, out).remedy
    (above / "zero_to_fp32.py").touch()
    assert "global_step*" in refused(NotACheckpointError, above, out).remedy
    zero2.rename(above / "run")
    notes = zckpt.convert(above, tmp_path / "below", progress=False).notes
    assert any(f"'{above / 'run'}' is taken" in note for note in notes)
    shutil.copytree(above / "run", above / "other")
    error = refused(NotACheckpointError, above, out)
    assert error.remedy == f"Give one of the directories that hold saves: '{above / 'other'}', '{above / 'run'}'."
    zckpt.convert(above / "run", out)


def test_no_latest_and_several_tags(zero2: Path, out: Path) -> None:
    shutil.copytree(zero2 / "global_step5", zero2 / "global_step10")
    (zero2 / "latest").unlink()
    error = refused(IncompleteError, zero2, out)
    assert "global_step5, global_step10" in error.found and "--tag global_step10" in error.remedy
    zckpt.convert(zero2, out, tag="global_step10")


def test_no_latest_and_one_tag(zero2: Path, out: Path) -> None:
    (zero2 / "latest").unlink()
    assert any("only tag" in note for note in zckpt.convert(zero2, out).notes)


@pytest.mark.parametrize("text", ["../../x", "/etc", "a/../../b", ".."])
def test_latest_that_points_elsewhere(zero2: Path, out: Path, text: str) -> None:
    (zero2 / "latest").write_text(text)
    error = refused(UnsafeError, zero2, out)
    assert text in error.found


def test_latest_with_crlf_is_fine(zero2: Path, out: Path) -> None:
    (zero2 / "latest").write_bytes(b"global_step5\r\n")
    zckpt.convert(zero2, out)


def test_latest_names_a_tag_that_is_not_there(zero2: Path, out: Path) -> None:
    (zero2 / "latest").write_text("global_step99")
    error = refused(IncompleteError, zero2, out)
    assert "global_step99" in error.found and "global_step5" in error.expected


def test_all_forms_of_a_path(zero2: Path, tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    for step in (5, 500, 40):
        shutil.copytree(zero2, trainer / f"checkpoint-{step}")
    lightning = tmp_path / "epoch=1.ckpt"
    shutil.copytree(zero2 / "global_step5", lightning / "checkpoint")
    wanted = None
    for number, path in enumerate([
        zero2, zero2 / "global_step5", zero2 / "global_step5" / OPTIM.format(1), trainer, lightning, lightning / "checkpoint",
    ]):  # fmt: skip
        report = zckpt.convert(path, tmp_path / f"o{number}.safetensors")
        data = (tmp_path / f"o{number}.safetensors").read_bytes()
        wanted = wanted or data
        assert data == wanted
        assert (path != trainer) or any("checkpoint-500" in note for note in report.notes)


# ---- which files -----------------------------------------------------------------------------------------------------


def test_missing_rank_files_are_named(zero2: Path, out: Path) -> None:
    for rank in (0, 2):
        (zero2 / "global_step5" / OPTIM.format(rank)).unlink()
    error = refused(IncompleteError, zero2, out)
    assert "2 of 3" in error.what and "ranks 0, 2" in error.what and "world size 3" in error.expected
    done = cli("to-fp32", zero2, out)
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: ")
        and "files are missing" in done.stderr
        and not done.stdout
    )


def test_all_optimizer_files_missing(zero2: Path, out: Path) -> None:
    for rank in range(3):
        (zero2 / "global_step5" / OPTIM.format(rank)).unlink()
    report = zckpt.convert(zero2, out, progress=False)  # the model file has the weights as the module uses them
    assert any("no optimizer file" in note for note in report.notes)


def test_missing_model_files(zero2: Path, out: Path, tmp_path: Path) -> None:
    (zero2 / "global_step5" / "mp_rank_00_model_states.pt").unlink()
    assert "mp_rank_00_model_states.pt" in refused(IncompleteError, zero2, out).expected
    third = synth.zero3(tmp_path / "third", synth.two_groups(1), 3)
    (third / "global_step5" / MODEL3.format(1)).unlink()
    assert "(rank 1)" in refused(IncompleteError, third, out).what


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        (b"", CorruptError, "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", IncompleteError, "git lfs pull"),
        (b"<html>404</html>", NotACheckpointError, ""),
    ],
)
def test_files_that_are_something_else(zero2: Path, out: Path, content: bytes, kind: Any, told: str) -> None:
    path = zero2 / "global_step5" / OPTIM.format(1)
    path.write_bytes(content)
    error = refused(kind, zero2, out)
    assert str(path) in str(error) and told in str(error)


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.99])
def test_truncated_zip(zero2: Path, out: Path, keep: float) -> None:
    path = zero2 / "global_step5" / OPTIM.format(1)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert refused(CorruptError, zero2, out).file == str(path)


def test_a_record_shorter_than_its_tensor(zero2: Path, out: Path) -> None:
    path = zero2 / "global_step5" / OPTIM.format(1)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data[:-4] if "/data/" in name else data)
    assert refused(CorruptError, zero2, out).file == str(path)


def test_a_rank_of_another_world_size(zero2: Path, out: Path, tmp_path: Path) -> None:
    other = synth.zero12(tmp_path / "other", synth.two_groups(1), 4)
    shutil.copy(other / "global_step5" / OPTIM.format(1), zero2 / "global_step5")
    assert f"{OPTIM.format(1)!r} says 4" in refused(InconsistentError, zero2, out).found


def test_a_rank_left_over_from_a_larger_run(zero2: Path, out: Path) -> None:
    shutil.copy(zero2 / "global_step5" / OPTIM.format(1), zero2 / "global_step5" / OPTIM.format(7))
    assert "rank 7" in refused(InconsistentError, zero2, out).found


def test_a_rank_of_another_step(zero3: Path, out: Path, tmp_path: Path) -> None:
    other = synth.zero3(tmp_path / "other", synth.two_groups(1), 3, step=9)
    shutil.copy(other / "global_step5" / OPTIM.format(2), zero3 / "global_step5")
    error = refused(InconsistentError, zero3, out)
    assert f"{OPTIM.format(2)!r} says 9" in error.found and f"Copy {OPTIM.format(2)!r} again" in error.remedy


def test_two_files_that_claim_one_partition(zero2: Path, out: Path) -> None:
    shutil.copy(zero2 / "global_step5" / OPTIM.format(1), zero2 / "global_step5" / ("bf16_" + OPTIM.format(1)))
    assert "rank 1" in refused(InconsistentError, zero2, out).what


@pytest.mark.parametrize("make", [synth.zero12, synth.zero3])
def test_element_counts_that_do_not_add_up(make: Any, tmp_path: Path, out: Path) -> None:
    checkpoint = make(tmp_path / "ckpt", synth.two_groups(1), 2)

    def shorten(root: Any) -> None:
        state = root["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        state[key][0] = state[key][0][:-5].clone()

    edit(checkpoint / "global_step5" / OPTIM.format(1), shorten)
    assert "do not add up" in refused(InconsistentError, checkpoint, out).what


def test_unknown_stage(zero2: Path, out: Path) -> None:
    for rank in range(3):
        edit(
            zero2 / "global_step5" / OPTIM.format(rank), lambda root: root["optimizer_state_dict"].update(zero_stage=7)
        )
    assert refused(UnsupportedError, zero2, out).found == "7"


def test_an_impossible_shape(zero2: Path, out: Path) -> None:
    def grow(root: Any) -> None:
        root["param_shapes"][0]["a.weight"] = (1 << 40, 1 << 40)

    edit(zero2 / "global_step5" / "mp_rank_00_model_states.pt", grow)
    refused(InconsistentError, zero2, out)


def test_a_pickle_that_calls_something(zero2: Path, out: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/canary",)

    edit(zero2 / "global_step5" / OPTIM.format(0), lambda root: root.update(evil=Evil()))
    assert pickle.DEFAULT_PROTOCOL
    error = refused(UnsafeError, zero2, out)
    assert "system" in str(error) and not (tmp_path / "canary").exists()


def test_keys_that_may_change_the_layout(zero2: Path, out: Path) -> None:
    for rank in range(3):
        edit(zero2 / "global_step5" / OPTIM.format(rank), lambda root: root["optimizer_state_dict"].update(swizzle=3))
    error = refused(UnsupportedError, zero2, out)
    assert "'swizzle'" in error.found and "--allow-unknown-layout" in error.remedy
    zckpt.convert(zero2, out, options=Options(allow_unknown_layout=True))


def test_a_shifted_layout_cannot_pass(zero2: Path, out: Path) -> None:
    def shift(root: Any) -> None:
        vectors = root["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        vectors[0] = torch.roll(vectors[0], 1)

    edit(zero2 / "global_step5" / OPTIM.format(1), shift)
    assert "for the optimizer" in refused(InconsistentError, zero2, out).found
    report = zckpt.convert(zero2, out, options=Options(allow_unknown_layout=True))
    assert any("would not give the model" in note for note in report.notes)


def test_ignored_alignment_padding_would_be_caught(tmp_path: Path, out: Path) -> None:
    """Two parameters of 5 and 3 elements at world size 8: padded or not, the totals round to the same 16."""
    pair = [{"x": torch.randn(5), "y": torch.randn(3)}]
    checkpoint = synth.zero12(tmp_path / "ckpt", pair, 8, alignment=8)
    zckpt.convert(checkpoint, out)
    assert torch.equal(load_file(out)["y"], pair[0]["y"])
    remove(out)
    for rank in range(8):
        name = checkpoint / "global_step5" / OPTIM.format(rank)
        edit(name, lambda root: root["optimizer_state_dict"].pop("param_alignment_paddings"))
    refused(InconsistentError, checkpoint, out)


def test_shards_on_several_disks(zero2: Path, out: Path, tmp_path: Path) -> None:
    node = tmp_path / "node1"
    (node / "global_step5").mkdir(parents=True)
    shutil.move(zero2 / "global_step5" / OPTIM.format(2), node / "global_step5")
    refused(IncompleteError, zero2, out)
    for also in (node, node / "global_step5"):
        zckpt.convert(zero2, out, also=[str(also)], options=Options(overwrite=True))
    remove(out)
    other = synth.zero12(tmp_path / "other", [{n: t + 1 for n, t in g.items()} for g in synth.two_groups(1)], 3)
    error = refused(InconsistentError, zero2, out, also=[str(other)])
    assert "differ" in error.found


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_placeholders_are_called_what_they_are(zero3: Path, out: Path, suffix: str) -> None:
    state = {"a.weight": torch.empty(0), "b.weight": torch.empty(0), "c": torch.ones(2)}
    path = zero3 / f"model{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    error = refused(IncompleteError, path, out)
    assert "placeholders" in error.what and str(zero3) in error.remedy


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "adapter_model.safetensors"])
def test_one_placeholder_among_full_tensors_is_named(zero3: Path, out: Path, name: str, tmp_path: Path) -> None:
    """GPT-2's file of a ZeRO-3 run: matrices are placeholders, biases and norms were small enough to be whole."""
    home = tmp_path / "plain"
    home.mkdir()
    state = {f"h.{i}.ln.weight": torch.ones(8) for i in range(9)} | {"h.0.attn.weight": torch.empty(0)}
    save_file(state, home / name) if name.endswith(".safetensors") else torch.save(state, home / name)
    error = refused(IncompleteError, home, out)
    assert "placeholders" in error.what and "'h.0.attn.weight'" in error.found and "1 of 10" in error.found
    inspected = inspect_checkpoint(str(home))
    assert not inspected.exportable.ok and "'h.0.attn.weight'" in inspected.exportable.reason
    (tensors,) = (check for check in zckpt.verify(home).checks if check.name == "tensors")
    assert "'h.0.attn.weight'" in tensors.problems[0]
    zckpt.convert(home, out, options=Options(allow_unknown_layout=True))  # the remedy, where the model is like that
    assert load_file(out)["h.0.attn.weight"].shape == (0,)
    remove(out)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ""])
def test_parameters_that_have_no_elements(tmp_path: Path, suffix: str) -> None:
    """The shape is recorded, so an empty tensor is not a placeholder: neither here nor in what is made of it."""
    state = {"a": torch.ones(3), "none": torch.empty(0), "rows": torch.empty(0, 4)}
    checkpoint, out = synth.zero3(tmp_path / "ckpt", [state], 2), tmp_path / f"out{suffix}"
    zckpt.convert(checkpoint, out)
    assert zckpt.verify(checkpoint, out).ok and zckpt.verify(out).ok
    if not suffix:
        assert zckpt.open_checkpoint(out / "model.safetensors")["none"].shape == (0,)


def test_latest_means_the_tag_that_it_names(zero2: Path, out: Path) -> None:
    zckpt.convert(zero2 / "latest", out)
    assert zckpt.verify(zero2 / "latest", out).ok
    remove(out)
    (zero2 / "latest").write_text("global_step9")
    assert "'global_step9'" in refused(IncompleteError, zero2 / "latest", out).found
    (zero2 / "latest_universal").write_text("global_step5")
    assert zckpt.verify(zero2 / "latest_universal").ok


def test_an_architecture_that_there_is_not(out: Path, tmp_path: Path) -> None:
    """It is told before the checkpoint is looked at: a tensor-parallel one would ask for rules first."""
    for to in ("hf:berta", "mistral", "hf:"):
        with pytest.raises(UsageError) as caught:
            zckpt.convert(tmp_path / "nothing", out, options=Options(form=Form(to)))
        error = caught.value
        assert to in error.found and "hf:llama" in error.expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layer_00-model_states.pt", CorruptError),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", UnsupportedError),
        ("mp_rank_01_model_states.pt", IncompleteError),
    ],
)
def test_files_of_another_parallelism(zero2: Path, out: Path, name: str, kind: type[ZckptError]) -> None:
    shutil.copy(zero2 / "global_step5" / "mp_rank_00_model_states.pt", zero2 / "global_step5" / name)
    refused(kind, zero2, out)


@pytest.mark.parametrize("version", ["0.3.15", "0.2.1+cpu", None])
def test_a_version_that_is_too_old(zero2: Path, out: Path, version: str | None) -> None:
    def harm(root: Any) -> None:
        root.pop("param_shapes")
        root["ds_version"] = version

    edit(zero2 / "global_step5" / "mp_rank_00_model_states.pt", harm)
    assert "too old" in refused(UnsupportedError, zero2, out).what


@pytest.mark.parametrize("stage", [2, 3])
def test_a_version_that_is_not_too_old(tmp_path: Path, out: Path, stage: int) -> None:
    checkpoint = (synth.zero12 if stage == 2 else synth.zero3)(tmp_path / "c", synth.two_groups(1), 2)
    for path in checkpoint.glob("*/*model_states.pt"):
        edit(path, lambda root: root.pop("param_shapes"))
    error = refused(UnsupportedError, checkpoint, out)
    assert "old" not in str(error) and "0.19.8" in error.found and "optimizer" in error.remedy


def test_shapes_before_0_3_17(tmp_path: Path, out: Path) -> None:
    checkpoint = synth.zero12(tmp_path / "ckpt", synth.two_groups(1)[:1], 2)

    def age(root: Any) -> None:
        root["param_shapes"] = OrderedDict((name, tuple(shape)) for name, shape in root["param_shapes"][0].items())
        for key in ("frozen_param_shapes", "frozen_param_fragments", "shared_params"):
            del root[key]

    edit(checkpoint / "global_step5" / "mp_rank_00_model_states.pt", age)
    zckpt.convert(checkpoint, out)
    assert all(torch.equal(load_file(out)[name], tensor) for name, tensor in synth.two_groups(1)[0].items())


# ---- the output ------------------------------------------------------------------------------------------------------


def test_existing_output(zero2: Path, out: Path) -> None:
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="--overwrite"):
        zckpt.convert(zero2, out)
    assert out.read_bytes() == b"precious"
    zckpt.convert(zero2, out, options=Options(overwrite=True))
    assert load_file(out)


def test_existing_directory(zero2: Path, tmp_path: Path) -> None:
    place = tmp_path / "dir"
    place.mkdir()
    zckpt.convert(zero2, place)  # empty: nothing to lose
    with pytest.raises(OutputError, match="not empty"):
        zckpt.convert(zero2, place, dtype="bf16")
    zckpt.convert(zero2, place, dtype="bf16", options=Options(overwrite=True, format="bin"))
    assert sorted(path.name for path in place.iterdir()) == ["pytorch_model.bin", "zckpt.json"]
    with pytest.raises(OutputError, match="found a directory"):
        (tmp_path / "x.bin").mkdir()
        zckpt.convert(zero2, tmp_path / "x.bin")


@pytest.mark.parametrize("inside", [".", "out", "global_step5", "global_step5/out.bin", "latest"])
def test_output_inside_the_input(zero2: Path, inside: str) -> None:
    before = sorted(path for path in zero2.rglob("*"))
    with pytest.raises(OutputError, match="input"):
        zckpt.convert(zero2, zero2 / inside, options=Options(overwrite=True))
    assert sorted(path for path in zero2.rglob("*")) == before


def test_output_that_would_swallow_the_input(zero2: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="replace the input"):
        zckpt.convert(zero2, tmp_path, options=Options(overwrite=True))


def test_unwritable_place(zero2: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        zckpt.convert(zero2, tmp_path / "file" / "out.bin")


def test_unreadable_file(zero2: Path, out: Path) -> None:
    path = zero2 / "global_step5" / OPTIM.format(1)
    path.unlink()
    path.symlink_to(zero2 / "gone")
    refused(IncompleteError, zero2, out)
    if os.geteuid():  # the superuser may read everything
        path.unlink()
        path.touch(mode=0)
        refused(NotACheckpointError, zero2, out)


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="too little free disk"):
        check_space(locate(tmp_path / "new" / "out"), 1 << 60)


def test_a_full_disk(tmp_path: Path, out: Path) -> None:
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"w": torch.randn(1 << 20)}], 2)
    limit = f"ulimit -f 1024; exec {sys.executable} -m zckpt to-fp32 {checkpoint} {out}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", limit], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "full" in done.stderr, done.stderr
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, out: Path, number: int) -> None:
    checkpoint = synth.zero3(tmp_path / "ckpt", [{f"w{i}": torch.zeros(1 << 22) for i in range(16)}], 2)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "zckpt", "to-fp32", str(checkpoint), str(out), "--threads", "1"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(out.parent.iterdir()):
        time.sleep(0.001)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG_S)
    if process.returncode:  # else it was done before the signal came
        assert process.returncode == (130 if number == signal.SIGINT else 2) and "interrupted" in err.lower()
        assert {path.name for path in out.parent.iterdir()} <= {f".{out.name}.zckpt"}
        assert is_unfinished(str(out)) == ("the same command goes on" in err)
        subprocess.run(command, env=environment, check=True)
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name, f"{out.name}.zckpt.json"]


def test_fp16_overflow(tmp_path: Path, out: Path) -> None:
    tensors = {"big": torch.tensor([1.0, 91203.4, -1e30]), "fine": torch.ones(3)}
    checkpoint = synth.zero12(tmp_path / "ckpt", [tensors], 2)
    error = refused(CastError, checkpoint, out, dtype="fp16")
    assert "'big' (2 elements" in error.found and "--overflow clamp" in error.remedy
    report = zckpt.convert(checkpoint, out, dtype="fp16", options=Options(overflow="clamp"))
    assert load_file(out)["big"].tolist() == [1.0, 65504.0, -65504.0] and report.overflows["big"][0] == 2
    zckpt.convert(checkpoint, out, dtype="fp16", options=Options(overflow="inf", overwrite=True))
    assert torch.equal(load_file(out)["big"], tensors["big"].half())


def test_what_safetensors_cannot_hold(tmp_path: Path, out: Path) -> None:
    buffers = {"z": torch.ones(2, dtype=torch.complex128)}
    checkpoint = synth.zero12(tmp_path / "ckpt", synth.two_groups(1), 2, buffers=buffers)
    assert ".bin" in refused(UnsupportedError, checkpoint, out).remedy
    zckpt.convert(checkpoint, out.with_suffix(".bin"))
    assert torch.equal(torch.load(out.with_suffix(".bin"), weights_only=True)["z"], buffers["z"])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"include": ["nothing*"]}, UsageError),
        ({"rename": [("(", "x")]}, UsageError),
        ({"rename": [(".*", "same")]}, InconsistentError),
        ({"format": "bin"}, UsageError),
        ({"dtype": "int8"}, UsageError),
    ],
)
def test_wrong_wishes(zero2: Path, out: Path, options: dict[str, Any], kind: Any) -> None:
    refused(kind, zero2, out, **options)
