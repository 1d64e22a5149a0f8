"""The pickle of a state dict of dense tensors, for torch to read; the one pickle zckpt writes.

For `torch_zip`. It is what `torch.save` writes for such a dict, opcode by opcode within protocol 2, but for fewer memo
entries: so every torch since 1.13 reads it with `weights_only=True`, whose machine knows only those opcodes.
Source: torch/_weights_only_unpickler.py (1.13 - 2.13), torch/_tensor.py `_reduce_ex_internal`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from zckpt.containers.skeleton import TensorSpec
from zckpt.dtypes import DType


def emit_state_dict(tensors: Mapping[str, tuple[TensorSpec, str]]) -> bytes:
    """The pickle of a dict of tensors, each dense at the start of its storage.

    Args:
        tensors: name -> (the tensor, the key of its storage); tied names have the same.
    """
    emitter = _Emitter()
    for name, (spec, key) in tensors.items():
        emitter.text(name)
        emitter.tensor(spec, key)
    return emitter.finished()


class _Emitter:
    """`parts` is the pickle so far; `memo` numbers the pieces that are written once."""

    def __init__(self) -> None:
        self.parts = [b"\x80\x02}("]
        self.memo: dict[bytes, int] = {}

    def finished(self) -> bytes:
        return b"".join((*self.parts, b"u."))

    def text(self, text: str) -> None:
        self.parts.append(_text(text))

    def shared(self, code: bytes) -> None:
        """Code that pushes one object: the first time itself, later the memo's entry. There are some thirty of them."""
        if code in self.memo:
            self.parts.append(b"h%c" % self.memo[code])
        else:
            self.memo[code] = len(self.memo)
            self.parts.append(code + b"q%c" % self.memo[code])

    def name(self, module: str, name: str) -> None:
        self.shared(f"c{module}\n{name}\n".encode())

    def tensor(self, spec: TensorSpec, key: str) -> None:
        """`function(storage, 0, shape, stride, False, OrderedDict()[, dtype])`."""
        dtype = spec.dtype
        self.name("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3")
        self.parts.append(b"(")
        self.storage(dtype, key, spec.numel)
        self.parts += [b"K\x00", _tuple(spec.shape), _tuple(contiguous_stride(spec.shape)), b"\x89"]
        self.name("collections", "OrderedDict")
        self.parts.append(b")R")
        if not dtype.storage:
            self.name("torch", dtype.torch_name)
        self.parts.append(b"tR")

    def storage(self, dtype: DType, key: str, numel: int) -> None:
        """A persistent id: ("storage", class, key, "cpu", numel); bytes where the dtype has no storage class."""
        self.parts.append(b"(")
        self.shared(_text("storage"))
        self.name(*(("torch", dtype.storage) if dtype.storage else ("torch.storage", "UntypedStorage")))
        self.parts.append(_text(key))
        self.shared(_text("cpu"))
        self.parts += [_int(numel if dtype.storage else numel * dtype.itemsize), b"tQ"]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides torch gives a dense tensor; a dimension of 0 counts as 1."""
    stride = [1]
    for dim in reversed(shape[1:]):
        stride.append(stride[-1] * max(dim, 1))
    return tuple(reversed(stride)) if shape else ()


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K%c" % number
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _tuple(numbers: tuple[int, ...]) -> bytes:
    if not numbers:
        return b")"
    return b"(" + b"".join(map(_int, numbers)) + b"t"
