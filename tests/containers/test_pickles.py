"""The pickle machine: every opcode, every protocol, and values of real client states."""

import argparse
import collections
import copyreg
import datetime
import enum
import io
import pathlib
import pickle
import pickletools
import random
import struct

import numpy as np
import pytest
import torch

from zckpt.base.errors import CorruptError, UnsafeError, UnsupportedError
from zckpt.containers import NumpyArray, Placeholder, brief, enum_value
from zckpt.containers.machine import Machine
from zckpt.containers.opcodes import HOLE, OPCODES, _unknown
from zckpt.containers.pickles import MAX_DEPTH, load_pickle, read_pickle
from zckpt.core.dtypes import ALL

PROTOCOLS = range(6)


class Stage(enum.IntEnum):
    GRADIENTS = 2


class Config:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("x",)


class Words(list):
    pass


class Table(dict):
    pass


class Made:
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (1,), {"two": 2}


Point = collections.namedtuple("Point", "x y")


def load(data, **more):
    return load_pickle(data, file="x.pt", **more)


def dumped(value, protocol):
    return load(pickle.dumps(value, protocol))


def test_every_opcode_is_known():
    assert {op.code for op in pickletools.opcodes} == {
        chr(n) for n in range(256) if OPCODES[n] is not _unknown and n != HOLE
    } | {"."}
    with pytest.raises(CorruptError, match="unknown opcode 0xfe"):
        load_pickle(b"\x80\x02\xfe\x00.", file="")


PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**2000, -(2**2000)],
    "floats": [0.0, -1.5, 1e300, float("inf")],
    "complex": 1 + 2j,
    "text": ["", "a", "ä\n\\'\"\0", "日本", "x" * 300, "\ud800"],
    "bytes": [b"", b"a", bytes(range(256)), b"x" * 300],
    "bytearray": bytearray(b"abc"),
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "dicts": {"a": {1: None, (1, "x"): 2, 2.5: 3, b"k": 4}},
    "sets": [set(), {1, 2}, frozenset(), frozenset({"a"})],
    "range": range(2, 9, 3),
    "slice": slice(1, None, 2),
    "long list": list(range(3000)),
}


SMALL = {name: value for name, value in PLAIN.items() if name not in ("long list", "ints", "text", "bytes")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_themselves(name, protocol):
    loaded = dumped(PLAIN[name], protocol)
    assert loaded == PLAIN[name] and type(loaded) is type(PLAIN[name])
    # Python's own pickler picks other opcodes at times
    assert load(pickle._dumps(PLAIN[name], protocol)) == PLAIN[name]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_collections_are_plain_dicts_and_lists(protocol):
    value = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, k=[1]),
        "deque": collections.deque([1, 2], maxlen=4),
        "size": torch.Size([2, 3]),
    }
    loaded = dumped(value, protocol)
    assert loaded == {
        "ordered": {"b": 1, "a": 2},
        "counter": {"a": 2, "b": 1},
        "default": {"k": [1]},
        "deque": [1, 2],
        "size": (2, 3),
    }
    assert list(loaded["ordered"]) == ["b", "a"]
    assert type(loaded["default"]) is dict and type(loaded["size"]) is tuple


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_identity_is_kept(protocol):
    shared = [1]
    loaded = dumped({"a": shared, "b": shared, "t": (shared, shared)}, protocol)
    assert loaded["a"] is loaded["b"] is loaded["t"][0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_that_contain_themselves(protocol):
    loop = []
    loop.append(loop)
    loaded = dumped(loop, protocol)
    assert loaded[0] is loaded
    if protocol < 2:
        return  # CPython cannot write it
    table = Table()
    table["self"] = table
    loaded = dumped(table, protocol)
    assert loaded.items[0][1] is loaded and "Table" in repr(loaded)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_any_class_are_placeholders(protocol):
    value = {
        "namespace": argparse.Namespace(lr=0.1, nested={"a": [1]}),
        "config": Config(x=1),
        "class": Config,
        "function": random.shuffle,
        "words": Words([1, 2]),
        "table": Table(a=1),
        "point": Point(1, 2),
        "when": datetime.datetime(2024, 5, 6, 7, 8, 9),
        "path": pathlib.PurePosixPath("/a/b"),
        "device": torch.device("cuda", 1),
        "layout": torch.sparse_coo,
    }
    loaded = dumped(value, protocol)
    assert all(isinstance(item, Placeholder) for item in loaded.values())
    assert str(loaded["namespace"]) == "argparse.Namespace" and loaded["namespace"].called
    assert loaded["namespace"].state == {"lr": 0.1, "nested": {"a": [1]}}
    assert not loaded["class"].called and loaded["class"].name == "Config"
    assert not loaded["function"].called or str(loaded["function"]) == "builtins.getattr"
    assert loaded["words"].items == [1, 2] or loaded["words"].args == ([1, 2],)
    assert loaded["table"].items == [("a", 1)] or loaded["table"].args == ({"a": 1},)
    assert loaded["point"].args in ((1, 2), ((1, 2),))
    assert str(loaded["when"]) == "datetime.datetime" and loaded["when"].called
    assert str(loaded["device"]) == "torch.device"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_new_object_arguments(protocol):
    made = dumped(Made(), protocol)
    if protocol < 4:  # spelled partial(Made.__new__, Made, 1, two=2)()
        assert str(made) == "functools.partial"
    else:
        assert made.called and made.args == (1,) and made.kwargs == {"two": 2}
    slotted = Slotted()
    slotted.x = 1
    assert dumped(slotted, protocol).state == (None, {"x": 1})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_enums_give_their_value(protocol):
    assert enum_value(dumped(Stage.GRADIENTS, protocol)) == 2
    assert enum_value(2) == 2 and enum_value(None) is None
    assert enum_value(Placeholder("m", "Stage")).called is False


def test_enum_members_by_name():
    """Python 3.11's first releases, and enums that ask for it."""
    data = b"\x80\x02c__builtin__\ngetattr\n(cds.config\nZeroStageEnum\nX\x07\x00\x00\x00weightstR."
    member = load(data)
    assert str(member) == "ds.config.ZeroStageEnum.weights" and not member.called


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "<i2", "<u4", "<i8", "<f2", "<f4", "<f8", ">f4", "<c8", "<c16", "S3", "U3", "M8[ns]"]
)
def test_numpy_arrays(dtype, protocol):
    array = np.array([[1, 0, 2], [3, 4, 5]]).astype(dtype)
    loaded = dumped(array, protocol)
    assert isinstance(loaded, NumpyArray)
    assert (loaded.shape, loaded.fortran, loaded.data) == ((2, 3), False, array.tobytes())
    if "M8" not in dtype:
        assert np.dtype(loaded.dtype) == array.dtype
    again = dumped([array.T, array[:0], array.T], protocol)
    assert again[1].shape == (0, 3) and again[1].data == b""
    restored = np.frombuffer(again[0].data, array.dtype).reshape(again[0].shape, order="F" if again[0].fortran else "C")
    assert (restored == array.T).all()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_scalars_are_numbers(protocol):
    value = [
        np.float64(1.5),
        np.float32(0.5),
        np.float16(2),
        np.int64(-3),
        np.uint8(7),
        np.bool_(True),
        np.complex64(1j),
    ]
    loaded = dumped(value, protocol)
    assert loaded == value and {type(item) for item in loaded} == {float, int, bool, complex}
    assert dumped(np.datetime64("2024-01-01"), protocol).shape == ()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_objects_and_structures(protocol):
    objects = dumped(np.array([{"a": 1}, None], dtype=object), protocol)
    assert objects.dtype == "|O" and objects.objects == [{"a": 1}, None]
    structured = dumped(np.zeros(2, dtype=[("a", "i4")]), protocol)
    assert structured.dtype == "|V" and len(structured.data) == 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_states(protocol):
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "generator": np.random.default_rng(1)}
    loaded = dumped(state, protocol)
    assert loaded["python"] == state["python"]
    assert loaded["numpy"][1].data == state["numpy"][1].tobytes() and loaded["numpy"][0] == "MT19937"
    assert isinstance(loaded["generator"], Placeholder)


def test_dtypes_are_dtypes():
    for dtype in ALL:
        assert dumped(getattr(torch, dtype.torch_name), 2) is dtype
    assert isinstance(dumped(torch.qint8, 2), Placeholder)


def test_python_2_strings():
    assert load(b"U\x03abc.") == "abc"
    assert load(b"T\x04\x00\x00\x00\xff\x00ab.") == b"\xff\x00ab"
    assert load(b"S'a\\x41\\n'\n.") == "aA\n"
    assert load(b'S"it\'s"\n.') == "it's"
    assert load(b"c__builtin__\nunicode\n(Vabc\ntR.") == "abc"
    assert load(b"c__builtin__\nxrange\n(I0\nI4\nI1\ntR.") == range(0, 4, 1)
    array = load(  # numpy.zeros(1, "f4"), from Python 2
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I1\ntcnumpy\ndtype\n(S'f4'\nI0\nI1\ntR"
        b"(I3\nS'<'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x00\\x00\\x80?'\ntb."
    )
    assert array.data == struct.pack("<f", 1.0) and array.dtype == "<f4"


def test_rare_opcodes():
    assert load(b"(I1\nI2\nl.") == [1, 2]
    assert load(b"(I1\nI2\nd.") == {1: 2}
    assert load(b"N(I1\nI2\n1.") is None
    assert load(b"N(0.") is None  # POP takes a mark, too
    assert load(b"NI1\n0.") is None
    assert load(b"I1\n2\x86.") == (1, 1)
    assert load(b"I7\np300\n0g300\n.") == 7
    assert load(b"K\x07r\x00\x01\x00\x00" + b"0j\x00\x01\x00\x00.") == 7
    assert load(b"F1.5\n.") == 1.5
    assert load(b"L12L\n.") == 12
    assert load(b"I01\n.") is True
    assert load(b"]K\x01a.") == [1]
    assert load(b"}K\x01K\x02s.") == {1: 2}
    assert load(b"\x8b\x02\x00\x00\x00\x00\xff.") == -256
    made = load(b"(I5\nimodule\nClass\n.")
    assert (str(made), made.args, made.called) == ("module.Class", (5,), True)
    made = load(b"(cmodule\nClass\nI5\no.")
    assert (str(made), made.args, made.called) == ("module.Class", (5,), True)
    assert load(b"P12\n.", persistent_load=lambda key: [key]) == ["12"]
    assert load(b"K\x01Q.", persistent_load=lambda key: [key]) == [1]
    assert load(b"ccopy_reg\n__newobj__\n(cm\nC\nK\x01tR.").args == (1,)


def test_calls_of_what_calls_made_stay_inert():
    made = load(b"cm\nf\n)R)R.")
    assert made.called and made.args[0].called


@pytest.mark.parametrize("dtype", ["torch.FloatStorage", "torch.cuda.HalfStorage", "torch.storage.UntypedStorage"])
def test_unknown_rebuilds_are_placeholders(dtype):
    module, name = dtype.rsplit(".", 1)
    data = f"ctorch._utils\n_rebuild_qtensor\n(c{module}\n{name}\nK\x00tR.".encode()
    assert str(load(data)) == "torch._utils._rebuild_qtensor"


def test_where_a_pickle_ends():
    data = pickle.dumps([1, 2], 2)
    machine = Machine(data + b"rest", "x")
    assert (read_pickle(machine), machine.position) == ([1, 2], len(data))
    with pytest.raises(EOFError):
        read_pickle(Machine(data[:-1], "x"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_an_error(protocol):
    value = [SMALL, Config(x=1), np.arange(3), collections.OrderedDict(a=1)]
    data = pickle.dumps(value, protocol)
    for end in range(len(data)):
        with pytest.raises(EOFError):
            read_pickle(Machine(data[:end], "x"))
    with pytest.raises(CorruptError, match="has no end") as caught:
        load(data[:-1], record="data.pkl")
    assert caught.value.byte_offset == len(data) - 1 and "data.pkl" in caught.value.found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_damage_is_an_error_or_another_value(protocol):
    value = [SMALL, Config(x=1), np.arange(3), Stage.GRADIENTS, torch.Size([1])]
    data = pickle.dumps(value, protocol)
    chance = random.Random(protocol)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 3))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            load(bytes(damaged))
        except (CorruptError, UnsafeError, UnsupportedError) as error:
            assert error.file == "x.pt" and str(error) and error.as_json()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "has no end"),
        (b"\x80\x09N.", "protocol after 5"),
        (b"\x99.", "unknown opcode"),
        (b".", "damaged"),
        (b"h\x05.", "damaged"),
        (b"t.", "damaged"),
        (b"K\x01R.", "damaged"),
        (b"K\x01)R.", "damaged"),
        (b"K\x01K\x01b.", "damaged"),
        (b"}]K\x01s.", "damaged"),
        (b"}(K\x01u.", "damaged"),
        (b"K\x01K\x02a.", "damaged"),
        (b"Q.", "damaged"),
        (b"K\x01Q.", "outside of it"),
        (b"X\x01\x00\x00\x00\xff.", "damaged"),
        (b"Inot\n.", "damaged"),
        (b"Fnot\n.", "damaged"),
        (b"Sx\n.", "without its quotes"),
        (b"S'\\q'\n.", "without its quotes"),
        (b"V\\u12\n.", "damaged"),
        (b"\x97.", "out of band"),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xff.", "has no end"),
        (b"cc\xff\n\n.", "damaged"),
        (b"K\x01K\x02\x93.", "damaged"),
        (b"ctorch\nSize\n(K\x05tR.", "damaged"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n)C\x01btRK\x01b.", "damaged"),
        (b"\x8b\xff\xff\xff\xffN.", "too large"),
        (b"I" + b"9" * 3000 + b"\n.", "too large"),
    ],
)
def test_damaged_pickles(data, what):
    with pytest.raises((CorruptError, UnsupportedError), match=what):
        load(data)


def test_depth_is_bounded_for_those_who_walk():
    def nested(depth):
        return b"]" * depth + b"a" * (depth - 1) + b"."

    load(nested(MAX_DEPTH - 10))
    with pytest.raises(CorruptError, match="nested"):
        load(nested(MAX_DEPTH + 10))
    shared = b"".join(b"2\x86" for _ in range(MAX_DEPTH + 10))  # each tuple holds the last one twice
    with pytest.raises(CorruptError, match="nested"):
        load(b")" + shared + b".")
    load(b")" + shared[: 2 * (MAX_DEPTH - 10)] + b".")


def test_brief_never_walks():
    loop = []
    loop.append(loop)
    assert brief(loop) == "a list" and brief("x" * 99) == repr("x" * 60) and brief(3) == "3"
    assert brief(Placeholder("m", "C")) == "<m.C>"


def test_pickles_of_cpython_s_own_pickler_with_copyreg():
    """dispatch tables, as multiprocessing and torch's own reductions use them."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[Config] = lambda config: (Config, (), config.__dict__)
    pickler.dump(Config(x=1))
    assert load(buffer.getvalue()).state == {"x": 1}
