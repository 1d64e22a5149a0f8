"""The meanings of a pickle's globals: which names are dtypes, which calls make a value, and which are reported as an attack.

For the pickle machine. A global is only a name here; a call of it looks up the functions below, and becomes a `Placeholder` if it
is not one of them. The functions return plain values, and raise one of `MISFITS` for impossible arguments. They copy no more
than their arguments, and the machine has charged for that (see `pickles`, [Note: bombs]).

The list of attacks need not be complete to be safe: a function that is not in it is not called either. It holds the functions
that pickle scanners and reports of attacks name; add others by hand.
Source: torch/_utils.py, torch/serialization.py (2.13); `__reduce__` of numpy's ndarray and dtype; CPython's
`_compat_pickle` for the names of Python 2.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from zckpt.base.patterns import compile_late
from zckpt.containers.inert import NumpyArray, Placeholder
from zckpt.containers.tensor_ref import MAX_DIMS, StorageRef, TensorRef, is_count
from zckpt.core.dtypes import BY_STORAGE, BY_TORCH_NAME, I8, I32, U8, DType

MISFITS = (TypeError, ValueError, LookupError, struct.error, OverflowError)
"""The errors that Python raises for arguments or bytes that do not fit."""

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "torch.tensor": "torch._tensor"}
_OLD_NAMES = {"builtins.unicode": "str", "builtins.long": "int", "builtins.xrange": "range"}


MOST_NAME = 1024
"""The most letters of a global and its module: each call goes through them."""


def global_of(module: str, name: str) -> DType | Placeholder:
    """The dtype or placeholder of a name, with one spelling for all versions."""
    if len(module) + len(name) > MOST_NAME:
        raise ValueError("a name that is too long")
    module = _OLD_MODULES.get(module, module)
    name = _OLD_NAMES.get(f"{module}.{name}", name)
    if module.startswith("numpy._core"):
        module = "numpy.core" + module[len("numpy._core") :]
    if module == "torch" and name in BY_TORCH_NAME:
        return BY_TORCH_NAME[name]
    return Placeholder(module, name)


def storage_dtype(kind: object) -> DType | None:
    """The element type of a storage class such as `torch.FloatStorage`; None for the untyped one. Raises LookupError if
    zckpt does not know it as a storage class.
    """
    if isinstance(kind, Placeholder) and (kind.module + ".").startswith("torch.") and not kind.called:
        if kind.name in ("UntypedStorage", "_UntypedStorage"):
            return None
        return _QUANTIZED.get(kind.name) or BY_STORAGE[kind.name]
    raise LookupError("a storage of an unknown class")


_QUANTIZED = {
    "QInt8Storage": I8,
    "QUInt8Storage": U8,
    "QInt32Storage": I32,
    "QUInt4x2Storage": U8,
    "QUInt2x4Storage": U8,
}
"""The dtypes of their bytes; the tensors in them stay placeholders."""


def _tensor(storage: object, offset: int, shape: Any, stride: Any, *flags: object) -> TensorRef | None:
    """`flags`: requires_grad, hooks, metadata; absent in the oldest files."""
    return _view(storage, offset, shape, stride, None, flags[2:])


def _tensor_v3(storage: object, offset: int, shape: Any, stride: Any, *flags: object) -> TensorRef | None:
    """`flags`: requires_grad, hooks, dtype, metadata."""
    dtype = flags[2]
    return _view(storage, offset, shape, stride, dtype, flags[3:]) if isinstance(dtype, DType) else None


def _view(
    storage: object, offset: int, shape: Any, stride: Any, dtype: DType | None, metadata: tuple[object, ...]
) -> TensorRef | None:
    """None for tensors with numbers that are not simply the bytes: conjugated and negated views, nested pickles."""
    if not isinstance(storage, StorageRef) or any(metadata):
        return None
    if type(shape) not in (tuple, list) or type(stride) not in (tuple, list):
        raise TypeError(f"a tensor with a shape that is a {type(shape).__name__}")
    return storage.view(offset, tuple(shape), tuple(stride), dtype or storage.dtype or U8)


def _plain(make: Callable[..., object], *accepts: type) -> Callable[..., object]:
    """`make`, for arguments of some types only: no count that would allocate, no object with a `repr` that would grow."""

    def made(*args: object) -> object:
        if not all(type(arg) in accepts for arg in args):
            raise TypeError(f"{make.__name__} of {', '.join(type(arg).__name__ for arg in args)}")
        return make(*args)

    return made


def _size(dims: Any = ()) -> tuple[object, ...]:
    if type(dims) is not tuple and type(dims) is not list:
        raise TypeError(f"a torch.Size of a {type(dims).__name__}")
    return tuple(dims)


def _number(make: Callable[..., object]) -> Callable[..., object]:
    def made(*args: object) -> object:
        if len(args) > 2 or not all(type(a) in (int, float, bool) or (type(a) is str and len(a) < 100) for a in args):
            raise TypeError(f"{make.__name__} of something that is not a number")
        return make(*args)

    return made


def _dict(items: Any = ()) -> dict[object, object]:
    """Also for OrderedDict (dicts are ordered), Counter and defaultdict."""
    if items == ():  # nearly always: every tensor has an empty one for its hooks
        return {}
    if type(items) not in (list, tuple, dict):
        raise TypeError(f"a dict of a {type(items).__name__}")
    return {plain_key(key): value for key, value in (items.items() if type(items) is dict else items)}


def _as_set(items: Any = ()) -> set[object]:
    if type(items) not in (list, tuple, set, frozenset):
        raise TypeError(f"a set of a {type(items).__name__}")
    return set(map(plain_key, items))


def _encode(text: str, encoding: str = "utf-8") -> bytes | None:
    """How protocol 2 spells bytes: `_codecs.encode("...", "latin1")`."""
    if type(text) is not str:
        raise TypeError(f"bytes of a {type(text).__name__}")
    return text.encode(encoding) if encoding in ("latin1", "latin-1", "utf-8", "ascii") else None


def _reconstructor(kind: object, base: object, state: object) -> object:
    """How protocols 0 and 1 spell an object without `__reduce__`."""
    if not isinstance(kind, Placeholder):
        raise TypeError("an object of no class")
    return Placeholder(kind.module, kind.name, () if state is None else (state,), called=True, new=True)


def numpy_dtype(value: object) -> str | None:
    """The numpy type string of a pickled dtype; None for structured and unknown ones."""
    if not isinstance(value, Placeholder) or str(value) != "numpy.dtype" or not value.args:
        return None
    name, state = value.args[0], value.state
    if type(name) is not str or not _NUMPY_NAME.fullmatch(name):
        return None
    if type(state) is not tuple or len(state) < 5:
        return f"|{name}"  # not built yet, or not by numpy
    order, subarray, fields = state[1], state[2], state[3]
    return f"{order}{name}" if order in ("<", ">", "|") and subarray is fields is None else None


_NUMPY_NAME = compile_late(r"[biufcSUVmM]\d{1,9}|O8?")

_SCALARS = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_SCALARS |= {"f2": "e", "f4": "f", "f8": "d"}


def _numpy_scalar(dtype: object, data: object = b"") -> object:
    """A Python number where it is one; other types of numpy keep their bytes."""
    kind, plain = numpy_dtype(dtype), _as_bytes(data)
    if kind is None or plain is None:
        return None
    if kind[1:] in ("c8", "c16"):
        return complex(*struct.unpack(_order(kind) + ("2f" if kind[1:] == "c8" else "2d"), plain))
    if kind[1:] in _SCALARS:
        number: int | float | bool = struct.unpack(_order(kind) + _SCALARS[kind[1:]], plain)[0]
        return number
    return NumpyArray(kind, (), plain)


def _order(kind: str) -> str:
    return ">" if kind[0] == ">" else "<"


def _numpy_array(dtype: object, shape: object, data: object, fortran: object) -> NumpyArray:
    if type(shape) is not tuple or not all(map(is_count, shape)):
        raise ValueError("an array of an impossible shape")
    kind, plain = numpy_dtype(dtype), _as_bytes(data)
    if type(data) is list:
        return NumpyArray("|O", shape, b"", bool(fortran), data)
    if kind is None or plain is None:  # structured or unknown: its bytes without a meaning
        return NumpyArray("|V", shape, plain or b"", bool(fortran))
    itemsize = int(kind[2:] or 8) * (4 if kind[1] == "U" else 1)
    if len(shape) > MAX_DIMS or math.prod(shape) * itemsize != len(plain):
        raise ValueError(f"a numpy array of {len(plain):,} bytes with a shape that needs another number")
    return NumpyArray(kind, shape, plain, bool(fortran))


def _numpy_empty(kind: object, *_: object) -> NumpyArray | None:
    """An array that BUILD will fill; its subclasses stay placeholders."""
    return NumpyArray("|u1", (0,), b"") if str(kind) == "numpy.ndarray" else None


def _numpy_frombuffer(data: object, dtype: object, shape: object, order: object) -> NumpyArray:
    return _numpy_array(dtype, shape, data, order == "F")


def fill_array(array: NumpyArray, state: Any) -> None:
    """What numpy's `ndarray.__setstate__` would do: (version, shape, dtype, column-major, bytes)."""
    _, shape, dtype, fortran, data = state
    filled = _numpy_array(dtype, shape, data, fortran)
    for name in NumpyArray.__slots__:  # in place, for the memo may have handed it out already
        object.__setattr__(array, name, getattr(filled, name))


def _as_bytes(data: object) -> bytes | None:
    """Python 2 pickled bytes as text; see STRING in `pickles`."""
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, bytes | bytearray) else None


def plain_key(key: object) -> object:
    """`key`, if it is cheap to hash and to compare: for nested tuples that can take for ever, or overflow the C stack."""
    if type(key) in _ATOMS or (type(key) is str and len(key) <= _MOST_LETTERS):
        return key
    seen = letters = 0
    pending: list[Any] = [key]
    while pending:
        item = pending.pop()
        seen += 1
        if type(item) in (tuple, frozenset) and len(item) + seen <= _MOST_PARTS:
            pending.extend(item)
        elif type(item) in (str, bytes) and letters + len(item) <= _MOST_LETTERS:
            letters += len(item)
        elif type(item) not in _ATOMS:
            raise TypeError(f"a {type(item).__name__} as key, or a key of too many parts")
    return key


_list = _plain(list, list, tuple)
_bytearray = _plain(bytearray, bytes, bytearray, list)

_ATOMS = {int, float, bool, complex, type(None), range, Placeholder, DType, NumpyArray, TensorRef}
_MOST_PARTS, _MOST_LETTERS = 100, 1 << 16
"""The most parts and letters of a key."""

MEANINGS: Mapping[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch.nn.parameter.Parameter": lambda data=None, *_: data,
    "torch.nn.parameter.Buffer": lambda data=None, *_: data,
    "torch.Size": _size,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda factory=None, items=(): _dict(items),
    "collections.deque": lambda items=(), maxlen=None: _list(items),
    "builtins.dict": _dict,
    "builtins.set": _as_set,
    "builtins.frozenset": lambda items=(): frozenset(_as_set(items)),
    "builtins.list": _list,
    "builtins.tuple": _plain(tuple, list, tuple),
    "builtins.bytes": _plain(bytes, bytes, bytearray, list),
    "builtins.bytearray": lambda data=b"", encoding="": _bytearray(_encode(data, encoding) if encoding else data),
    "builtins.str": _plain(str, str),
    "builtins.int": _number(int),
    "builtins.float": _number(float),
    "builtins.bool": _number(bool),
    "builtins.complex": _number(complex),
    "builtins.range": _plain(range, int),
    "builtins.slice": _plain(slice, int, type(None)),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_empty,
    "numpy.core.numeric._frombuffer": _numpy_frombuffer,
}
"""Calls that make a value; for a result of None the call becomes a placeholder."""


_MODULES = """
os posix nt subprocess _posixsubprocess commands popen2 pty runpy code codeop pdb bdb timeit profile cProfile trace
doctest pydoc inspect importlib imp pkgutil zipimport pip ensurepip setuptools distutils venv ctypes _ctypes cffi
marshal pickle _pickle cPickle shelve shutil tempfile signal threading _thread multiprocessing asyncio sys gc webbrowser
socket _socket ftplib smtplib telnetlib requests aiohttp httpx _winapi winreg
"""
MODULES = frozenset(_MODULES.split())
"""Modules without plain data: a call of anything in them is an attack."""

_HARMLESS = "os.stat_result os.terminal_size signal.Signals socket.AddressFamily socket.SocketKind threading.local"
HARMLESS = frozenset(_HARMLESS.split())
"""The exceptions: plain data in these modules."""

_FUNCTIONS = """
builtins.eval builtins.exec builtins.execfile builtins.compile builtins.open builtins.__import__ builtins.getattr
builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.vars builtins.input builtins.breakpoint
builtins.apply builtins.help io.open io.open_code io.FileIO _io.open _io.FileIO codecs.open linecache.getline
operator.methodcaller operator.attrgetter _operator.methodcaller _operator.attrgetter types.FunctionType types.CodeType
urllib.request.urlopen urllib.request.urlretrieve http.client.HTTPConnection http.client.HTTPSConnection
http.server.HTTPServer logging.config._resolve logging.config.listen uuid._popen platform.popen
torch.load torch.serialization.load torch.jit.load torch.hub.load torch.hub.download_url_to_file
torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline torch.utils.collect_env.run
torch.fx.graph_module._exec_with_source torch._inductor.codecache.compile_file
numpy.load numpy.fromfile numpy.memmap numpy.lib.npyio.load numpy.testing.runstring
numpy.testing._private.utils.runstring numpy.f2py.crackfortran.myeval numpy.f2py.capi_maps.getinit
joblib.load pandas.read_pickle yaml.load yaml.unsafe_load lib2to3.pgen2.pgen.ParserGenerator
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Functions of other modules that run code, load pickles, or open files and connections."""


def runs_code(function: Placeholder) -> bool:
    """Whether calling this function would run code."""
    return not function.called and _runs_code(function.module, function.name)


@functools.lru_cache(maxsize=1024)
def _runs_code(module: str, name: str) -> bool:
    full = f"{module}.{name}"
    owners = name.split(".")[:-1]  # protocol 4 follows attributes: 'torch', 'os.system'
    known = full in FUNCTIONS or module.split(".")[0] in MODULES or not MODULES.isdisjoint(owners)
    return known and full not in HARMLESS
