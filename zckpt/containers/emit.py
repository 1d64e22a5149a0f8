"""Writes the pickle of an inert object, for torch to read; the only place where zckpt writes pickles.

For `torch_zip`. Tensors are `TensorSpec`s, each dense at the start of its storage. Plain values are written with the opcodes
that `torch.save` uses, in protocol 2, and with no function but torch's own for tensors. So every torch since 1.13 reads them
with `weights_only=True`: that machine knows only those. Objects of other classes (`Placeholder`s) are written as
their pickle had them; zckpt never made one of them.
Source: torch/_weights_only_unpickler.py (1.13 - 2.13), torch/_tensor.py `_reduce_ex_internal`; CPython's Lib/pickle.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zckpt.base.errors import UnsupportedError
from zckpt.containers.inert import NumpyArray, Pair, Placeholder, brief
from zckpt.containers.skeleton import TensorSpec
from zckpt.containers.tensor_ref import contiguous_stride
from zckpt.core.dtypes import DType

_MOST_PARTS = 1 << 14


class Size(tuple[int, ...]):
    """A shape that is written as a `torch.Size`."""

    __slots__ = ()


def emit(root: object, keys: Mapping[str, str]) -> bytes:
    """The pickle of an inert object.

    Args:
        root: dicts, lists, tuples, sets, text, bytes, numbers, None, `TensorSpec`, `DType`, `Size`, `Placeholder` and
            `NumpyArray`; nested at most `pickles.MAX_DEPTH` deep, and not in itself.
        keys: tensor name -> key of its storage; tied tensors have the same key.

    Raises:
        UnsupportedError: it holds a value of another type.
    """
    emitter = _Emitter(keys)
    emitter.value(root)
    emitter.join()
    return b"".join((b"\x80\x02", emitter.joined, b"."))


class _Emitter:
    """`joined` and behind it `parts` are the pickle so far; `memo` is code of an object that is written once -> its number."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.keys = keys
        self.joined = bytearray()
        self.parts: list[bytes] = []
        self.memo: dict[bytes, int] = {}

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.parts.append(_PLAIN[kind](value))
        elif kind is dict:
            self.parts.append(b"}")
            self.pairs(value.items())
        elif kind is list:
            self.parts.append(b"]")
            self.items(value)
        elif kind is tuple:
            self.parts.append(b"(")
            for item in value:
                self.value(item)
            self.parts.append(b"t")
        elif kind in _CALLS:
            module, name, arguments = _CALLS[kind]
            self.call(module, name, *arguments(value))
        elif kind is TensorSpec:
            self.tensor(value)
        elif kind is DType:
            self.name("torch", value.torch_name)
        elif kind is Placeholder:
            self.placeholder(value)
        elif kind is NumpyArray:
            self.array(value)
        else:
            raise _not_written("a value of this type", brief(value))

    def join(self) -> None:
        """Joins the parts so far: a part for each opcode takes ten times the room."""
        self.joined += b"".join(self.parts)
        self.parts.clear()

    def pairs(self, pairs: Iterable[tuple[object, object]]) -> None:
        self.parts.append(b"(")
        for key, value in pairs:
            self.value(key)
            self.value(value)
            if len(self.parts) > _MOST_PARTS:
                self.join()
        self.parts.append(b"u")

    def items(self, items: Iterable[object]) -> None:
        self.parts.append(b"(")
        for item in items:
            self.value(item)
        self.parts.append(b"e")

    def shared(self, code: bytes) -> None:
        """Writes code that pushes one object; if it was written before, code that pushes the memo's entry instead."""
        number = self.memo.get(code)
        if number is not None:
            self.parts.append(b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number))
            return
        number = self.memo[code] = len(self.memo)
        self.parts.append(code + (b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)))

    def name(self, module: str, name: str) -> None:
        if "\n" in module + name:
            raise _not_written("a class of this name", brief(f"{module}.{name}"))
        owner, _, member = name.rpartition(".")
        if owner:  # as protocol 2 writes a name that is nested in a class
            self.call("builtins", "getattr", Placeholder(module, owner), member)
            return
        self.shared(f"c{module}\n{name}\n".encode())

    def call(self, module: str, name: str, *arguments: object) -> None:
        self.name(module, name)
        self.value(arguments)
        self.parts.append(b"R")

    def placeholder(self, value: Placeholder) -> None:
        """Writes an object as its pickle made it: `function(*args)` or `class.__new__(*args)`, its items, its state."""
        if not value.called:
            self.name(value.module, value.name)
            return
        function, args = Placeholder(value.module, value.name), value.args
        if args and isinstance(first := args[0], Placeholder) and first.called and str(first) == str(value):
            function, args = first, args[1:]  # the result of a call was called
        if value.kwargs:
            self.call("copyreg", "__newobj_ex__", function, args, value.kwargs)
        else:
            self.value(function)
            self.value(args)
            self.parts.append(b"\x81" if value.new else b"R")
        items = [item for item in value.items if type(item) is not Pair]
        pairs = [item for item in value.items if type(item) is Pair]
        if items:
            self.items(items)
        if pairs:
            self.pairs(pairs)
        if value.state is not None:
            self.value(value.state)
            self.parts.append(b"b")

    def array(self, value: NumpyArray) -> None:
        """Writes an array as numpy itself does: an empty array, and then its state."""
        order, kind = value.dtype[:1], value.dtype[1:]
        letter, size = kind[:1], int(kind[1:] or 0)
        if letter == "V":  # only its bytes are known
            raise _not_written("an array of records", f"dtype {value.dtype}")
        fixed = {"U": (4 * size, 4, 8), "S": (size, 1, 0), "O": (-1, -1, 63)}.get(letter, (-1, -1, 0))
        self.call("numpy.core.multiarray", "_reconstruct", Placeholder("numpy", "ndarray"), (0,), b"b")
        self.parts.append(b"(")
        self.value(1)
        self.value(value.shape)
        self.call("numpy", "dtype", kind, False, True)
        self.value((3, order, None, None, None, *fixed))  # `fixed`: itemsize, alignment and flags, or -1, -1, 0
        self.parts.append(b"b")
        self.value(value.fortran)
        self.value(value.objects if letter == "O" else value.data)
        self.parts.append(b"tb")

    def tensor(self, spec: TensorSpec) -> None:
        """Writes `function(storage, 0, shape, stride, False, OrderedDict()[, dtype])`.

        Of a tensor with attributes, `_rebuild_from_type_v2(function, Tensor, (those arguments), attributes)`.
        """
        dtype = spec.dtype
        if spec.attributes:
            self.name("torch._tensor", "_rebuild_from_type_v2")
            self.parts.append(b"(")
        self.name("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3")
        if spec.attributes:
            self.name("torch", "Tensor")
        self.parts.append(b"(")
        self.storage(dtype, self.keys[spec.name], spec.numel)
        self.parts.append(b"K\x00")
        self.value(spec.shape)
        self.value(contiguous_stride(spec.shape))
        self.parts.append(b"\x89")
        self.name("collections", "OrderedDict")
        self.parts.append(b")R")
        if not dtype.storage:
            self.name("torch", dtype.torch_name)
        self.parts.append(b"t" if spec.attributes else b"tR")
        if spec.attributes:
            self.value(dict(spec.attributes))
            self.parts.append(b"tR")

    def storage(self, dtype: DType, key: str, numel: int) -> None:
        """Writes a persistent id: ("storage", class, key, "cpu", numel); `numel` in bytes if the dtype has no storage class."""
        self.parts.append(b"(")
        self.shared(_text("storage"))
        self.name(*(("torch", dtype.storage) if dtype.storage else ("torch.storage", "UntypedStorage")))
        self.parts.append(_text(key))
        self.shared(_text("cpu"))
        self.parts += [_int(numel if dtype.storage else numel * dtype.itemsize), b"tQ"]


def _not_written(what: str, found: str) -> UnsupportedError:
    remedy = "Remove it from what the checkpoint saves beside its tensors, or convert the weights alone (to-fp32)."
    return UnsupportedError(f"cannot write {what} to a torch file", found=found, remedy=remedy)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _int(number: int) -> bytes:
    if 0 <= number < 1 << 8:
        return b"K%c" % number
    if 0 <= number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if -1 << 31 <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    packed = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a%c" % len(packed) if len(packed) < 256 else b"\x8b" + struct.pack("<I", len(packed))) + packed


_PLAIN: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _int,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: _text,
}

_CALLS: Mapping[type, tuple[str, str, Callable[[Any], tuple[object, ...]]]] = {
    Size: ("torch", "Size", lambda value: (tuple(value),)),
    bytes: ("_codecs", "encode", lambda value: (value.decode("latin1"), "latin1")),
    bytearray: ("builtins", "bytearray", lambda value: (bytes(value),)),
    set: ("builtins", "set", lambda value: (sorted(value, key=repr),)),
    frozenset: ("builtins", "frozenset", lambda value: (sorted(value, key=repr),)),
    complex: ("builtins", "complex", lambda value: (value.real, value.imag)),
    range: ("builtins", "range", lambda value: (value.start, value.stop, value.step)),
    slice: ("builtins", "slice", lambda value: (value.start, value.stop, value.step)),
}
"""Functions and arguments by which protocol 2 writes these types. Sets are sorted, so that the bytes are always the same."""
