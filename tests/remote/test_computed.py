"""Jobs whose elements are computed on their way, with sources and outputs behind addresses: the same bytes and checks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import proofs
import pytest
from addresses import local_tree, put, tree
from computed import COMPUTED
from s3_server import S3Server

import zckpt
from zckpt.base.errors import CorruptError, InconsistentError
from zckpt.jobs import planned


def contents(place: Path, name: str) -> dict[str, bytes]:
    """What lies at an output's name, and a single file's manifest beside it."""
    return {path: data for path, data in local_tree(place).items() if path.startswith(name)}


@proofs.MORE
@pytest.mark.parametrize("name", COMPUTED)
def test_sources_and_outputs_behind_addresses(name: str, tmp_path: Path) -> None:
    job, roots = COMPUTED[name], ("s3://bkt", "memory://m") if proofs.IS_WHOLE or name == "Averaged" else ("s3://bkt",)
    job.make(tmp_path / "want" / job.out, "after")
    want = contents(tmp_path / "want", job.out)
    assert len(want) > 1
    for root in roots:
        far = tuple(put(source, f"{root}/in{n}/{source.name}") for n, source in enumerate(job.sources))
        job.make(tmp_path / "out" / job.out, "after", far)
        assert contents(tmp_path / "out", job.out) == want
        shutil.rmtree(tmp_path / "out")
        for sources, way in ((job.sources, "before"), (far, "after")):  # over what was there
            done = job.make(f"{root}/out/{job.out}", way, sources)
            assert not done.already_done
        assert tree(f"{root}/out") == want
        assert job.make(f"{root}/out/{job.out}", "after", far).already_done
        if name in ("Quantised", "Gguf"):
            assert zckpt.verify(far[0], f"{root}/out/{job.out}", progress=False).ok


QUICK = [("there", "Quantised"), ("there", "Averaged"), ("here", "Averaged")]
ALL = [(where, name) for where in ("here", "there") for name in COMPUTED if name != "GgufParts"]


@pytest.mark.parametrize(("where", "name"), [*QUICK, *proofs.cases(case for case in ALL if case not in QUICK)])
def test_a_source_that_changes_between_plan_and_end(
    where: str, name: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = COMPUTED[name], planned.publish
    for number in range(len(job.sources)):
        home = tmp_path / str(number)
        sources: list[Any] = [shutil.copytree(source, home / str(n)) for n, source in enumerate(job.sources)]
        (file, *_) = sorted(sources[number].rglob("*.safetensors")) or sorted(sources[number].rglob("*optim_states.pt"))
        before, address = file.read_bytes(), f"bkt/{number}/{file.relative_to(home)}"
        if where == "there":
            sources = [put(source, f"s3://bkt/{number}/{n}") for n, source in enumerate(sources)]

        def write(data: bytes, file: Path = file, address: str = address) -> None:
            file.write_bytes(data) if where == "here" else fsspec.filesystem("s3").pipe_file(address, data)

        def meanwhile(*arguments: Any, before: bytes = before, write: Callable[[bytes], None] = write) -> Any:
            write(before[: len(before) // 2] + bytes([before[len(before) // 2] ^ 1]) + before[len(before) // 2 + 1 :])
            return real(*arguments)

        monkeypatch.setattr(planned, "publish", meanwhile)
        for out in (f"{home}/out", f"s3://bkt/out{number}"):
            write(before)
            with pytest.raises((InconsistentError, CorruptError), match="changed"):
                job.make(f"{out}/{job.out}", "after", tuple(sources))
            assert tree(out) == {}
        monkeypatch.setattr(planned, "publish", real)
