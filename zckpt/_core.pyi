"""The engine of moves and scans, built from zckpt/csrc. zckpt.engine.batches packs the structs that the byte strings hold."""

from collections.abc import Callable

def run(
    stores: bytes,
    moves: bytes,
    literals: bytes,
    ranges: bytes,
    blob: bytes,
    threads: int,
    window: int,
    clamp: bool,
    give_back: bool,
    bytes_per_s: int,
    progress: Callable[[int], None] | None,
    consumers: list[Callable[[memoryview, int], object] | None],
) -> tuple[tuple[str, int, int, int, str], list[tuple[int, int, int, int]], list[tuple[int, int, float]]]: ...
def scan(
    stores: bytes,
    moves: bytes,
    requests: bytes,
    ranges: bytes,
    rounded: bool,
    atol: float,
    rtol: float,
    threads: int,
    give_back: bool,
    bytes_per_s: int,
    progress: Callable[[int], None] | None,
) -> tuple[
    tuple[str, int, int, int, str],
    list[tuple[int, int, int, int]],
    list[tuple[int, int, int, int, int, int, int, int, int | None, float, float, float, float, float]],
]: ...
def cast(source: int, target: int, data: bytes, clamp: bool = ...) -> tuple[bytes, int, float]: ...
def crc32(data: bytes | memoryview, crc: int = ...) -> int: ...
def crc32_combine(a: int, b: int, nbytes_b: int) -> int: ...
def inject(write: bool, nth: int, kind: int) -> None: ...
def calls(write: bool) -> int: ...
def forget(fd: int, offset: int = ..., nbytes: int = ...) -> None: ...
def is_in_memory(fd: int) -> bool: ...
def exchange(a: str, b: str) -> int: ...
def use_vector_paths(on: bool) -> None: ...
def has_vector_paths() -> bool: ...
