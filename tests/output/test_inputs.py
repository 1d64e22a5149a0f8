"""No job changes what it reads, whatever the names: one place under two mounts, links, parts that are mounted, hard links."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zckpt
from zckpt import ApplyOptions, DeltaOptions, Options
from zckpt.base.errors import OutputError
from zckpt.jobs import slim
from zckpt.jobs.declarations import SLIM
from zckpt.jobs.options import LoraMerge

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
OVER = Options(overwrite=True)

Mounter = Callable[[Path, str], Path]
Job = Callable[[Path, Path], object]


@pytest.fixture
def again(tmp_path: Path) -> Iterator[Mounter]:
    """Gives a directory or file a second path."""
    mounted: list[Path] = []

    def again(source: Path, name: str) -> Path:
        point = tmp_path / name
        if source.is_dir():
            point.mkdir(parents=True)
        else:
            point.touch()
        how = ["mount", "--bind", str(source), str(point)]
        if os.geteuid() or subprocess.run(how, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root, and a kernel that lets it")
        mounted.append(point)
        return point

    yield again
    for point in reversed(mounted):
        subprocess.run(["umount", str(point)], check=True)


def contents(home: Path) -> dict[str, bytes]:
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}


def refused(home: Path, work: Callable[[], object]) -> None:
    """The work is refused, and `home` is as it was."""
    before = contents(home)
    with pytest.raises(OutputError, match="input"):
        work()
    assert contents(home) == before


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of DeepSpeed."""
    return shutil.copytree(FIXTURES / "zero2" / "bf16_w2" / "checkpoint", tmp_path / "run")


@pytest.fixture
def weights(run: Path, tmp_path: Path) -> Path:
    """A directory that zckpt wrote, so that it may replace it."""
    zckpt.convert(run, tmp_path / "weights")
    return tmp_path / "weights"


JOBS: dict[str, Job] = {
    "convert": lambda ckpt, out: zckpt.convert(ckpt, out, dtype="bf16", options=OVER),
    "average": lambda ckpt, out: zckpt.average([ckpt, ckpt], out, options=OVER),
    "to_dcp": lambda ckpt, out: zckpt.to_dcp(ckpt, out, options=OVER),
    "to_fp8": lambda ckpt, out: zckpt.to_fp8(ckpt, out, options=OVER),
    "to_gguf": lambda ckpt, out: zckpt.to_gguf(ckpt, out, options=OVER),
    "to_mcore": lambda ckpt, out: zckpt.to_mcore(ckpt, out, options=OVER),
    "to_peft": lambda ckpt, out: zckpt.to_peft(ckpt, out, overwrite=True),
    "to_states": lambda ckpt, out: zckpt.to_states(ckpt, out, options=OVER),
    "to_universal": lambda ckpt, out: zckpt.to_universal(ckpt, out, overwrite=True),
    "reshard": lambda ckpt, out: zckpt.reshard(ckpt, out, world_size=1, overwrite=True),
    "slim": lambda ckpt, out: slim.prepare(ckpt, out, SLIM.ask(drop=("optimizer",), overwrite=True)),
    "delta": lambda ckpt, out: zckpt.delta(ckpt, ckpt, out, options=DeltaOptions(overwrite=True)),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_every_job_refuses_its_input_under_another_mount(job: str, run: Path, again: Mounter) -> None:
    if job == "to_gguf":
        pytest.importorskip("gguf")
    out = again(run, "out")
    refused(run, lambda: JOBS[job](run, out))
    refused(run, lambda: JOBS[job](run, out / "global_step2" / "new"))


def test_what_is_read_beside_the_checkpoint(tmp_path: Path, again: Mounter) -> None:
    lora = FIXTURES / "peft" / "lora_zero2"
    base = shutil.copytree(lora / "base", tmp_path / "base")
    zckpt.to_peft(lora / "checkpoint", tmp_path / "adapter")
    adapter = again(tmp_path / "adapter", "adapter again")
    merge = Options(overwrite=True, lora=LoraMerge(adapters=(tmp_path / "adapter",)))
    refused(tmp_path / "adapter", lambda: zckpt.convert(base, adapter, options=merge))
    merge = Options(overwrite=True, lora=LoraMerge(base=base))
    refused(base, lambda: zckpt.convert(lora / "checkpoint", again(base, "base again"), options=merge))


def test_the_versions_that_deltas_are_of(weights: Path, run: Path, tmp_path: Path, again: Mounter) -> None:
    zckpt.convert(run, tmp_path / "newer")
    zckpt.delta(weights, tmp_path / "newer", tmp_path / "change")
    over = ApplyOptions(overwrite=True)
    for one in (weights, tmp_path / "change"):
        place = again(one, f"{one.name} again")
        refused(one, lambda: zckpt.apply_delta(weights, [tmp_path / "change"], place, options=over))  # noqa: B023
    place = again(tmp_path / "newer", "newer again")
    refused(
        tmp_path / "newer",
        lambda: zckpt.delta(weights, tmp_path / "newer", place, options=DeltaOptions(overwrite=True)),
    )


def test_an_average_of_which_one_is_the_output(weights: Path, run: Path, tmp_path: Path, again: Mounter) -> None:
    zckpt.convert(run, tmp_path / "second")
    place = again(tmp_path / "second", "again")
    refused(tmp_path / "second", lambda: zckpt.average([weights, tmp_path / "second"], place, options=OVER))


def test_an_input_in_the_output(run: Path, tmp_path: Path, again: Mounter) -> None:
    """Of an output that zckpt may replace, a part is mounted alone, as `docker -v out/global_step2:/in -v out:/out` does."""
    zckpt.reshard(run, tmp_path / "mine", world_size=1)
    part, whole = again(tmp_path / "mine" / "global_step2", "in"), again(tmp_path / "mine", "out")
    refused(tmp_path / "mine", lambda: zckpt.reshard(part, whole, world_size=2, overwrite=True))
    refused(tmp_path / "mine", lambda: zckpt.convert(part, whole, options=OVER))


def test_files_that_lie_elsewhere(weights: Path, tmp_path: Path, again: Mounter) -> None:
    """A checkpoint of a link, or of a mounted file, to a file that zckpt may replace."""
    for name in ("linked", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(weights / "model.safetensors")
    again(weights / "model.safetensors", "mounted/model.safetensors")
    for name in ("linked", "mounted"):
        refused(weights, lambda: JOBS["convert"](tmp_path / name, weights))  # noqa: B023
        refused(weights, lambda: JOBS["convert"](tmp_path / name, weights / "model.safetensors"))  # noqa: B023
        refused(weights, lambda: JOBS["convert"](tmp_path / name / "model.safetensors", weights))  # noqa: B023


def test_one_file_of_two_names(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    os.link(next((run / "global_step2").glob("*model_states.pt")), out)
    refused(run, lambda: JOBS["convert"](run, out))
    out.unlink()
    out.symlink_to(run / "global_step2" / "mp_rank_00_model_states.pt")
    refused(run, lambda: JOBS["convert"](run, out))


def test_through_a_directory_that_is_a_link(run: Path, weights: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    refused(run, lambda: JOBS["convert"](run, tmp_path / "link" / "out"))
    (tmp_path / "above").symlink_to(tmp_path)
    refused(weights, lambda: JOBS["convert"](weights, tmp_path / "above" / "weights"))


def test_a_config_that_is_named(weights: Path, run: Path) -> None:
    config = weights / "config.json"
    config.write_text("{}")
    refused(weights, lambda: zckpt.to_dcp(run, weights, options=OVER, names="hf", config=config))


def test_what_only_looks_like_an_input(weights: Path, tmp_path: Path) -> None:
    """Hard links share bytes, and an output is a new file; so files of equal bytes are in no danger."""
    out = shutil.copytree(weights, tmp_path / "out", copy_function=os.link)
    before = contents(weights)
    zckpt.convert(weights, out, dtype="bf16", options=OVER)
    assert contents(weights) == before and contents(out) != before
