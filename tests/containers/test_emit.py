"""What is read from a pickle and written again is the same object, for Python and for torch."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import pickle

import numpy as np
import pytest
import torch

from zckpt.base.errors import UnsupportedError
from zckpt.containers import TensorSpec, load_pickle, torch_zip
from zckpt.containers.emit import Size, emit
from zckpt.core.dtypes import BF16, BY_NAME, F32


class Mood(enum.Enum):
    CALM = 1


class Config:
    """Instances are made by `__new__` alone; `__init__` would complain."""

    def __init__(self, needed):
        self.needed = needed

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


class Words(list):
    pass


class Table(dict):
    pass


class Named:
    def __new__(cls, *, name):
        made = super().__new__(cls)
        made.name = name
        return made

    def __getnewargs_ex__(self):
        return (), {"name": self.name}

    def __eq__(self, other):
        return self.name == other.name

    __hash__ = None


VALUES = {
    "plain": [
        None,
        True,
        False,
        0,
        255,
        256,
        65536,
        -1,
        2**31,
        -(2**31),
        2**64,
        -(2**4000),
        1.5,
        float("inf"),
        "é\ud800",
    ],
    "containers": {"a": [1, (2, ()), {}], "b": {1, 2}, 3: frozenset("xy"), "c": b"\0\xff", "d": bytearray(b"x")},
    "numbers": [1j, range(3, 9, 2), slice(1, None, 2)],
    "namespace": argparse.Namespace(lr=0.1, mood=Mood.CALM),
    "instance": Config(5),
    "words": Words([1, [2]]),
    "table": Table(a=1, b=Words("x")),
    "named": Named(name="n"),
    "when": datetime.datetime(2024, 5, 6),
    "path": pathlib.PurePosixPath("/a"),
    "class": Config,
    "arrays": [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array("x"),
        np.asfortranarray(np.eye(3)),
        np.array([None, {}]),
    ],
    "torch": [torch.float32, torch.Size([2]), torch.device("cuda", 1)],
    "many names": [type(f"C{n}", (), {"__module__": __name__}) for n in range(3)],
}
for made in VALUES["many names"]:
    globals()[made.__name__] = made


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        a = a.astype(a.dtype.newbyteorder("="))  # as numpy's own pickles of protocol 2 come back
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and a.flags.f_contiguous == (
            b.flags.f_contiguous
        )  # fmt: skip
    if isinstance(a, list) and not isinstance(a, Words):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_what_is_read_and_written_again_is_the_same(name: str, protocol: int) -> None:
    value = VALUES[name]
    if name == "arrays":
        value = [*value[:3]]  # an array of objects has no one byte order: compared below
    inert = load_pickle(pickle.dumps(value, protocol), file="x")
    written = emit(inert, {})
    again = pickle.loads(written)
    if name == "torch":
        again[1] = torch.Size(again[1])  # a plain tuple is enough for whoever reads it
    assert same(value, again)
    assert emit(load_pickle(written, file="x"), {}) == written
    objects = np.array([None, {"a": 1}])
    assert pickle.loads(emit(load_pickle(pickle.dumps(objects, protocol), file="x"), {})).tolist() == objects.tolist()


def test_plain_values_pass_torchs_own_safe_reader(tmp_path, fill, bytes_of) -> None:
    specs = [TensorSpec("a", F32, (2, 3)), TensorSpec("b", BF16, ()), TensorSpec("c", BY_NAME["U16"], (4,))]
    root = {
        "state": {0: {"step": specs[1], "exp_avg": specs[0], "again": [specs[0]]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "fused": None}],
        "shapes": {"x": Size((2, 3))},
        "bytes": b"\x00\xff",
        "text": "é",
        "counts": [1, -5, 2**40, 1e300],
        "dtype": F32,
        "odd": specs[2],
    }
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.tensor(7, dtype=torch.bfloat16),
        "c": torch.arange(4).to(torch.uint16),
    }
    path = fill(torch_zip.skeleton_of(root, specs), {n: bytes_of(t) for n, t in tensors.items()}, tmp_path / "x.pt")
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["state"][0]["exp_avg"], tensors["a"]) and loaded["state"][0]["step"] == 7
    assert loaded["state"][0]["again"][0].untyped_storage().data_ptr() == (
        loaded["state"][0]["exp_avg"].untyped_storage().data_ptr()
    )
    assert loaded["odd"].tolist() == [0, 1, 2, 3] and loaded["dtype"] is torch.float32
    assert isinstance(loaded["shapes"]["x"], torch.Size) and loaded["shapes"]["x"].numel() == 6
    for key in ("param_groups", "bytes", "text", "counts"):
        assert loaded[key] == root[key]


@pytest.mark.parametrize("value", [object(), lambda: None, pathlib.Path("x")])
def test_what_is_not_inert_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match="cannot write a value of this type"):
        emit({"x": value}, {})


def test_names_cannot_smuggle_opcodes() -> None:
    inert = load_pickle(pickle.dumps(collections.OrderedDict), file="x")
    inert.name = "OrderedDict\nR"
    with pytest.raises(UnsupportedError, match="cannot write a class of this name"):
        emit(inert, {})


def test_a_large_dict_is_joined_piece_by_piece() -> None:
    large = {f"layer {number}": {"offset": number, "shape": (number, 2)} for number in range(20_000)}
    assert pickle.loads(emit({"a": large, "b": [large, 1]}, {})) == {"a": large, "b": [large, 1]}
