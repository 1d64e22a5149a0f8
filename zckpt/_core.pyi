"""The mover's engine; see zckpt/mover.py."""



def run(stores: bytes, moves: bytes, literals: bytes, ranges: bytes, blob: bytes, threads: int, window: int, clamp: bool, progress: object | None) -> tuple: ...

def cast(source: int, target: int, data: bytes, clamp: bool = False) -> tuple:
    """Casts bytes, for tests."""

def crc32(data: bytes, crc: int = 0) -> int: ...

def crc32_combine(a: int, b: int, nbytes_b: int) -> int: ...

def inject(write: bool, nth: int, kind: int) -> None:
    """Makes the n-th read or write misbehave, for tests."""

def use_vector_paths(on: bool) -> None: ...

def has_vector_paths() -> bool: ...
