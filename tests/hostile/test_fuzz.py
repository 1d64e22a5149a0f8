"""Damaged files of every kind: each is read, or refused with an error of ours; none runs anything, hangs or eats the memory.

The seeds are files of `fixtures/`; hypothesis edits them, the pickles inside torch's zip files too. In the tests the edits are
the same every time; `make fuzz` makes new ones for as long as it is let.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zckpt import ZckptError, open_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
import test_sliced

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXAMPLES = int(os.environ.get("ZCKPT_FUZZ", "60"))
MOST_SECONDS = 5
MOST_KIB = 300 << 10

Seed = tuple[str | Callable[[Path], object], str, bool]
"""Directory of a checkpoint or what writes one, a file in it, and whether the pickle in that file is edited, not the file."""


def safetensors_directory(home: Path) -> None:
    """Two shards and their index."""
    import numpy
    from safetensors.numpy import save_file

    home.mkdir()
    shards = {f"model-0000{n}-of-00002.safetensors": {f"w{n}": numpy.arange(6, dtype="f4")} for n in (1, 2)}
    for name, tensors in shards.items():
        save_file(tensors, home / name)
    names = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


SEEDS: dict[str, Seed] = {
    "torch zip": ("zero2/fp32_w1/checkpoint", "*/mp_rank_00_model_states.pt", False),
    "pickle of a model": ("zero3/bf16_w2/checkpoint", "*/zero_pp_rank_0_mp_rank_00_model_states.pt", True),
    "pickle of an optimizer": ("zero3/bf16_w2/checkpoint", "*/*zero_pp_rank_1_mp_rank_00_optim_states.pt", True),
    "optimizer on NVMe": ("nvme/bf16_w2/checkpoint", "*/*zero_pp_rank_1_mp_rank_00_optim_states.pt", True),
    "torch stream": ("zero2/legacy_w2/checkpoint", "*/mp_rank_00_model_states.pt", False),
    "rules of slices": ("tensor/zero1_tp2_dp2/checkpoint", "*/mp_rank_00_model_states.pt", True),
    "experts": ("moe/*/checkpoint", "*/layer_*_expert_0_*.pt", True),
    "DCP metadata": ("dcp/boxes_w4/checkpoint", "**/.metadata", False),
    "DCP data": ("dcp/dtypes_w2/checkpoint", "**/*.distcp", False),
    "FairScale's metadata": ("fairscale/metaseq_w4/checkpoint", "*-shard1.pt", True),
    "a rank's experts": ("fairscale_parts/experts_w2/checkpoint", "*-shared-shard1.pt", True),
    "torch_checkpointing's metadata": ("torch_checkpointing/safetensors_w4/checkpoint", "metadata.pkl", False),
    "Megatron-Core metadata": ("mcore/model_space_tp2_dp2_0_12/checkpoint", "**/.metadata", False),
    "Megatron-Core arguments": ("mcore/stages_tp2_pp2/checkpoint", "**/common.pt", True),
    "Megatron's ranks": ("megatron_legacy/moe_ep2/checkpoint", "**/mp_rank_00_001/model_optim_rng.pt", True),
    "Megatron's masters": ("megatron_legacy/moe_ep2/checkpoint", "**/mp_rank_00_000/distrib_optim.pt", True),
    "a rank's part of OSS": ("optimizers/oss_ranks_w3/checkpoint", "optimizer_rank1.pt", True),
    "nanotron's slices": ("nanotron/llama_tp2_pp2/checkpoint", "**/qkv_proj/*tp-rank-1*.safetensors", False),
    "an archive of NeMo": (
        lambda home: home.mkdir() or test_sliced.write_nemo(home / "model.nemo", 2, 1),
        "model.nemo",
        False,
    ),
    "a rank's file of Llama": (lambda home: test_sliced.write_llama(home, test_sliced.llama(), 2, 0), "*.01.pth", True),
    "a rank's file of NxD": (
        lambda home: test_sliced.write_nxd(home, {"layers.0.up_proj.weight": torch.ones(4, 4)}, 2, 1),
        "**/*tp_rank_01*.pt",
        True,
    ),
    "Orbax's metadata": ("orbax/zarr3", "_METADATA", False),
    "an array of Zarr": ("orbax/zarr2", "*wi.kernel/.zarray", False),
    "a chunk of Zarr": ("orbax/zarr3", "*wi.kernel/c/0/0/0", False),
    "a manifest of OCDBT": ("orbax/ocdbt", "manifest.ocdbt", False),
    "a node of OCDBT": ("orbax/ocdbt", "d/*", False),
    "GGUF": ("gguf/llama", "*.gguf", False),
    "safetensors": (safetensors_directory, "model-00001-of-00002.safetensors", False),
    "index": (safetensors_directory, "model.safetensors.index.json", False),
}

_INTERESTING = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"\x00" * 7 + b"\x80",
    b"\xff" * 4,
    b"\x7f" + b"\xff" * 3,
    b"../../..",
    b"[" * 64,
)

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "repeat", "overwrite", "insert", "end"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 64),
        st.sampled_from(_INTERESTING),
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    """The bytes after all edits."""
    for kind, where, count, value in changes:
        at = int(where * len(data))
        if kind == "flip":
            data = data[:at] + bytes(byte ^ count for byte in data[at : at + 1]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + count :]
        elif kind == "repeat":
            data = data[: at + count] + data[at:]
        elif kind == "overwrite":
            data = data[:at] + value + data[at + len(value) :]
        elif kind == "insert":
            data = data[:at] + value + data[at:]
        else:
            data = data[:at]
    return data


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A torch zip file whose pickle is another one; everything around it is sound."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            held = old.read(record)
            new.writestr(record.filename, change(held) if record.filename.endswith("data.pkl") else held)
    return made.getvalue()


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of each seed's checkpoint."""
    made = {}
    for number, (kind, (source, _, _)) in enumerate(SEEDS.items()):
        made[kind] = tmp_path_factory.mktemp("seeds") / str(number)
        if callable(source):
            source(made[kind])
        else:
            shutil.copytree(sorted(FIXTURES.glob(source))[0], made[kind])
    return made


_FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "shutil.rmtree",
)
_watched: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in _FORBIDDEN or writes or event in ("os.remove", "os.rename", "os.mkdir", "os.symlink"):
        _watched.append(f"{event}{arguments}")


@pytest.fixture(scope="module", autouse=True)
def _hooked() -> Iterator[None]:
    sys.addaudithook(_audit)  # stays; listens only while something is read
    sys.dont_write_bytecode = True  # of what is imported then
    yield
    sys.dont_write_bytecode = False


def look(home: Path) -> None:
    """Reads what a converter would: the catalog, and every tensor."""
    try:
        with open_checkpoint(home, framework="pt") as checkpoint:
            for name in checkpoint:
                if checkpoint.get_slice(name).get_shape() and sum(checkpoint.get_slice(name).get_shape()) < 1 << 16:
                    checkpoint[name]
    except ZckptError as error:
        assert str(error)


@pytest.mark.parametrize("kind", SEEDS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="ZCKPT_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(changes=edits)
def test_damage_is_an_error_or_nothing(
    kind: str, homes: dict[str, Path], changes: list[tuple[str, float, int, bytes]]
) -> None:
    global _watching
    _, pattern, inside = SEEDS[kind]
    path = sorted(homes[kind].glob(pattern))[0]
    sound = path.read_bytes()
    path.write_bytes(with_pickle(sound, lambda p: edited(p, changes)) if inside else edited(sound, changes))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    _watched.clear()
    _watching = True
    try:
        look(homes[kind])
    finally:
        _watching = False
        path.write_bytes(sound)
    assert not _watched
    assert time.process_time() - began < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


@pytest.mark.parametrize("kind", SEEDS)
def test_the_seeds_are_sound(kind: str, homes: dict[str, Path]) -> None:
    with open_checkpoint(homes[kind], framework="pt") as checkpoint:
        assert sum(checkpoint[name].numel() for name in checkpoint) > 0
