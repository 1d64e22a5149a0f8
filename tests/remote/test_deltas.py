"""Deltas and what is made of them at addresses: the same as on the disk, and whole whichever request fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
from address_models import Killed
from address_requests import Requests
from addresses import local_tree, put, tree
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file

import zckpt
from zckpt.base.errors import OutputError, UsageError, ZckptError
from zckpt.deltas.form import INDEX
from zckpt.team import together

Tree = dict[str, bytes]


def versions(place: Path) -> list[Path]:
    """Weights of four tensors, of which some change from version to version."""
    made = []
    for version, changed in enumerate(((), (0, 1, 2), (1,))):
        weights = {f"w{i}": np.arange(100, dtype=np.float16) + (version if i in changed else 0) for i in range(4)}
        made.append(place / f"version{version}")
        made[-1].mkdir()
        save_file(weights, made[-1] / "model.safetensors")
        (made[-1] / "tokenizer.json").write_text("{}")
    return made


def delta(old: object, new: object, out: str, size: int = 200) -> Any:
    how = zckpt.DeltaOptions(version=9, max_shard_size=size, overwrite=True, threads=1)
    return zckpt.delta(str(old), str(new), out, options=how)


def apply(old: object, changes: object, out: str, size: int = 450) -> Any:
    how = zckpt.ApplyOptions(max_shard_size=size, overwrite=True, threads=1)
    return zckpt.apply_delta(str(old), str(changes), out, options=how)


def test_they_are_those_on_the_disk(root: str, tmp_path: Path) -> None:
    v0, v1, v2 = versions(tmp_path)
    for version in (v0, v1):
        put(version, f"{root}/{version.name}")
    delta(f"{root}/{v0.name}", f"{root}/{v1.name}", f"{root}/weight_v000009")
    delta(v0, v1, str(tmp_path / "weight_v000009"))
    there, here = tree(f"{root}/weight_v000009"), local_tree(tmp_path / "weight_v000009")
    unnumbered = {name for name in here if name.startswith("model-0")}
    assert len(unnumbered) == 3 and {name for name in there if name.startswith("model-0")} == {
        name.replace("of-00003", "of-00004") for name in unnumbered
    }, "at an address, files keep the numbers of their groups"
    assert not [name for name in there if "group" in name]
    again = delta(f"{root}/{v0.name}", f"{root}/{v1.name}", f"{root}/weight_v000009")
    assert again.already_done and again.counts.changed_tensors == 3
    for size, name in ((450, "shards"), (10**6, "one")):
        apply(f"{root}/{v0.name}", f"{root}/weight_v000009", f"{root}/{name}", size)
        apply(v0, tmp_path / "weight_v000009", str(tmp_path / name), size)
        there, here = tree(f"{root}/{name}"), local_tree(tmp_path / name)
        assert {n: data for n, data in there.items() if n != "zckpt.json"} == {
            n: data for n, data in here.items() if n != "zckpt.json"
        }
        assert zckpt.verify(f"{root}/{name}").ok and zckpt.diff(f"{root}/{name}", v1).same
        assert apply(f"{root}/{v0.name}", f"{root}/weight_v000009", f"{root}/{name}", size).already_done
    delta(v0, v2, f"{root}/weight_v000009", 10**6)  # replaced: fewer files, under other names
    apply(v0, f"{root}/weight_v000009", f"{root}/shards")
    assert zckpt.diff(f"{root}/shards", v2).same
    with pytest.raises(OutputError, match="already exists"):
        zckpt.apply_delta(v0, f"{root}/weight_v000009", f"{root}/one")


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    v0, v1, _ = versions(tmp_path)
    monkeypatch.setattr(together, "_asked", True)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="several processes"):
        delta(v0, v1, "memory://m/out")
    with pytest.raises(UsageError, match="several processes"):
        zckpt.convert(v0, "memory://m/out")
    assert tree("memory://m/out") == {}


def parts(files: Tree) -> Tree | None:
    """What a reader takes: the index and the files that it names; None where there is no index."""
    if INDEX not in files:
        return None
    named = set(json.loads(files[INDEX])["weight_map"].values())
    return {name: files[name] for name in (INDEX, *named)}


@proofs.MORE
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("job", ["delta", "apply"])
def test_every_request(job: str, requests: Requests, tmp_path: Path) -> None:
    """A reader finds the old files, the new ones, or no index; the same command then ends well."""
    v0, v1, v2 = versions(tmp_path)
    store, out = MemoryFileSystem.store, "memory://m/out"
    delta(v0, v1, str(tmp_path / "to1"))
    delta(v0, v2, str(tmp_path / "to2"))

    def write(version: int) -> Any:
        if job == "delta":
            return delta(v0, (v1, v2)[version - 1], out, 150 + 50 * version)
        return apply(v0, tmp_path / f"to{version}", out, 600 - 150 * version)

    write(1)
    before, beginning = tree(out), dict(store)
    requests.begin(0, "")
    write(2)
    count, after = requests.count, tree(out)
    assert count > 30 and parts(before) != parts(after)
    modes = ("killed", "refused", "lost", "down")
    kept = 0
    seen: set[str] = set()
    for nth in range(1, count + 1) if proofs.IS_WHOLE else range(1, count + 1, 3):
        for mode in modes if proofs.IS_WHOLE else [modes[nth // 3 % 4]]:
            store.clear()
            store.update(beginning)
            requests.begin(nth, mode)
            try:
                write(2)
                failed = False
            except (ZckptError, Killed):
                failed = True
            finally:
                requests.begin(0, "")
            files = tree(out)
            found = parts(files)
            assert found in (None, parts(before), parts(after)), (nth, mode, sorted(files))
            seen.add("none" if found is None else "old" if found == parts(before) else "new")
            assert failed or files == after
            if mode == "refused" and found == parts(before):
                assert files == before, "something was left"
            kept += write(2).kept > 0
            assert tree(out) == after, "the same command does not end with the new output"
    assert seen >= {"old", "new"} and kept
