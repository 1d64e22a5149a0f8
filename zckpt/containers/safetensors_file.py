"""The safetensors format: reads a file's header, and writes one.

For `open_container`, and for the layouts that write `.safetensors`. A file is 8 bytes (the header's length,
little-endian), a JSON header `{"name": {"dtype", "shape", "data_offsets": [begin, end]}, .., "__metadata__": {..}}`,
and the tensors' bytes without holes. The reader is as strict as the reference implementation, so that a file has the same
meaning for both.

[Note: order of tensors] They are written by size of element, largest first: as the data begins at a multiple of 64
bytes and every tensor is a multiple of its own element, each then begins at a multiple of its element. Example: F32
(3,), BF16 (5,), U8 (1,) begin at 0, 12, 22; in another order an F32 could begin at an odd byte. With "narrow first" the
order is the other one where that does not happen: for outputs in which wide tensors (scales) are found while narrow ones
are computed. With "as aligned" it is the one in which they are given, if each begins so, and that of "narrow first" otherwise:
for scales that are narrower than codes.

[Note: tied weights] A tensor is stored once, under its kept name; the metadata says `dropped: kept`, by the convention
of huggingface_hub and safetensors.torch `save_model`.
Source: safetensors 0.8.0, src/tensor.rs (`Metadata::validate`, `SafeTensors::read_metadata`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Literal

from zckpt.base import limits
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers.container import Container, Input
from zckpt.containers.skeleton import Skeleton, TensorSpec, check_names
from zckpt.containers.tensor_ref import MAX_DIMS, StorageRef, TensorRef, contiguous_stride
from zckpt.core.dtypes import BY_NAME, IN_SAFETENSORS
from zckpt.core.stores import FileStore

Order = Literal["wide first", "narrow first", "as aligned", "as given"]

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 64
MAX_UNSIGNED = 2**64 - 1
"""The reference implementation counts in `usize`."""


def read_input(file: Input) -> Container:
    """The tensors of a safetensors file, in the header's order. Raises CorruptError if the header contradicts itself or
    the file's size, UnsupportedError if a tensor's dtype is unknown.
    """
    nbytes = int.from_bytes(file.read(0, 8, "the header's length"), "little")
    if nbytes > MAX_HEADER_BYTES:
        raise _corrupt(file, f"{nbytes:,} bytes", f"at most {MAX_HEADER_BYTES:,} bytes")
    if 8 + nbytes > file.size:
        raise file.cut_short("the header", 8 + nbytes)
    if nbytes > limits.HEADER_BYTES:
        raise UnsupportedError(
            "the header is too large", file=file.path, found=f"{nbytes:,} bytes",
            expected=f"at most {limits.HEADER_BYTES:,} bytes", remedy=limits.REMEDY,
        )  # fmt: skip
    header = _parse(file, file.read(8, nbytes, "the header"))
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise _corrupt(file, "a '__metadata__' that does not map text to text")
    store, data_at = file.store(), 8 + nbytes
    tensors = {name: _tensor(file, store, data_at, name, entry) for name, entry in header.items()}
    end = data_at
    for name, ref in sorted(tensors.items(), key=lambda item: (item[1].byte_offset, item[1].nbytes)):
        if ref.byte_offset != end:
            raise _corrupt(
                file, f"tensor {name!r} at byte {ref.byte_offset:,}", f"byte {end:,}, the end of the last one"
            )
        end += ref.nbytes
    if end > file.size:
        raise file.cut_short("the tensors", end)
    if end < file.size:
        raise _corrupt(file, f"a file of {file.size:,} bytes", f"{end:,} bytes, as the header says")
    return Container("safetensors", store, tensors, metadata)


def _parse(file: Input, data: bytes) -> dict[str, Any]:
    from zckpt.storage.json_files import check_size

    check_size(data, file.path, "a header")
    try:
        header = json.loads(
            data.decode(), object_pairs_hook=_without_doubles, parse_constant=_no_constant, parse_float=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"no JSON ({str(error)[:200]})") from error
    if not data.startswith(b"{") or type(header) is not dict:
        raise _corrupt(file, "a JSON value that is not an object")
    return header


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name that occurs twice among {examples(name for name, _ in pairs)}")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text[:20]} instead of a whole number")


def _tensor(file: Input, store: FileStore, data_at: int, name: str, entry: object) -> TensorRef:
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
        case _:
            raise _corrupt(file, f"tensor {name!r} without dtype, shape and data_offsets")
    if not all(type(number) is int and 0 <= number <= MAX_UNSIGNED for number in numbers):
        raise _corrupt(file, f"tensor {name!r} with impossible sizes")
    if dtype_name not in IN_SAFETENSORS:
        raise UnsupportedError(
            f"the dtype of tensor {name!r} is unknown", file=file.path, found=repr(dtype_name[:20]),
            expected=f"one of {', '.join(sorted(IN_SAFETENSORS))}", remedy="Save that tensor in one of these dtypes.",
        )  # fmt: skip
    dtype = BY_NAME[dtype_name]
    nbytes = dtype.itemsize
    for dim in shape:  # as in the reference implementation: an overflow is an error even if a 0 follows
        nbytes *= dim
        if nbytes > MAX_UNSIGNED or len(shape) > MAX_DIMS:
            raise _corrupt(file, f"tensor {name!r} of an impossible shape, in {len(shape):,} dimensions")
    if end - begin != nbytes:
        raise _corrupt(file, f"tensor {name!r} of {end - begin:,} bytes", f"{nbytes:,} bytes for {dtype} {shape[:8]}")
    storage = StorageRef(name, dtype, nbytes // dtype.itemsize, store, data_at + begin)
    return storage.view(0, tuple(shape), contiguous_stride(tuple(shape)))


def _corrupt(file: Input, found: str, expected: str = "") -> CorruptError:
    return file.damaged("the safetensors header is damaged", found, expected)


def _is_aligned(specs: Sequence[TensorSpec]) -> bool:
    """Whether tensors in this order each begin at a multiple of their element."""
    end = 0
    for spec in specs:
        if end % spec.dtype.itemsize:
            return False
        end += spec.nbytes
    return True


def skeleton(
    specs: Sequence[TensorSpec],
    *,
    metadata: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    order: Order = "wide first",
) -> Skeleton:
    """A safetensors file without its elements; see the module's notes for the order and tied weights.

    Args:
        specs: the tensors, in the state dict's order.
        metadata: text for `__metadata__`, beside `format: pt`.
        aliases: dropped name -> kept name.
        order: those of wider dtypes first; of narrower ones, or as they are given, if all keep their alignment so; or as they are
            given whatever that does.

    Raises:
        UnsupportedError: the format cannot hold a dtype or name.
        UsageError: two tensors have the same name, or an alias has no tensor.
    """
    aliases = aliases or {}
    check_names(specs, aliases)
    unfit = [spec.name for spec in specs if spec.dtype.name not in IN_SAFETENSORS or spec.name == "__metadata__"]
    if unfit:
        raise UnsupportedError(
            "safetensors cannot hold these tensors",
            found=examples(unfit),
            remedy="Write a .bin file instead (--format bin).",
        )
    ordered = [*specs] if order == "as given" else sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    if order in ("narrow first", "as aligned"):
        rising = sorted(specs, key=lambda spec: spec.dtype.itemsize)
        wanted = (specs, rising) if order == "as aligned" else (rising,)
        ordered = next(([*one] for one in wanted if _is_aligned(one)), ordered)
    header = io.BytesIO()  # of a million tensors, values for `json.dumps` take half a gigabyte
    header.write(bytes(8))
    header.writelines(header_pieces(ordered, {**(metadata or {}), **aliases}))
    start = data_start(header.tell() - 8)
    header.write(b" " * (start - header.tell()))
    header.seek(0)
    header.write((start - 8).to_bytes(8, "little"))
    offsets: dict[str, int] = {}
    end = start
    for spec in ordered:
        offsets[spec.name], end = end, end + spec.nbytes
    return Skeleton(end, ((0, header.getvalue()),), (), offsets)


def header_pieces(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """The header of a file of tensors in this order, behind its length and without the blanks at its end. Raises
    UnsupportedError if a name is not Unicode text.
    """
    try:
        named = json.dumps({"format": "pt", **metadata}, ensure_ascii=False, separators=(",", ":"))
        yield f'{{"__metadata__":{named}'.encode()
        end = 0
        for spec in specs:
            start, end = end, end + spec.nbytes
            shape = ",".join(map(str, spec.shape))
            said = f'"dtype":"{spec.dtype.name}","shape":[{shape}],"data_offsets":[{start},{end}]'
            yield f",{encode_basestring(spec.name)}:{{{said}}}".encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            "the name of a tensor is not Unicode text", found=ascii(error.object[error.start : error.end]),
            remedy="Write a .bin file instead (--format bin), or change the name with --rename.",
        ) from error  # fmt: skip
    yield b"}"


def data_start(nbytes: int) -> int:
    """The byte of a file at which the data begins, behind a header of so many bytes. Raises UnsupportedError if no file may have
    that header.
    """
    start = 8 + nbytes + -(8 + nbytes) % ALIGNMENT
    if start - 8 > MAX_HEADER_BYTES:
        raise UnsupportedError(
            "too many tensors for one safetensors file", found=f"a header of {nbytes:,} bytes",
            expected=f"at most {MAX_HEADER_BYTES:,} bytes", remedy="Write more shards, with a smaller --max-shard-size.",
        )  # fmt: skip
    return start
