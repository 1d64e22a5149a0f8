"""Numbers with a unit, as DeepSpeed's profiler writes them: `1.57 GMACs`, `124.44 M`, `3.2 ms`.

For `profiler`, `table`, and scripts. Source: DeepSpeed 0.19.8, profiling/flops_profiler/profiler.py.
"""

from __future__ import annotations

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
PRECISION = 2


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """A number with the letter of its magnitude: 2500 is `2.5 K`.

    Args:
        num: at least 0.
        units: T, G, M, K, m or u; None chooses.
        precision: digits after the point.
    """
    if units is None:
        units = next((unit for unit, one in _UNITS.items() if num >= one), "u") if num else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Operations per second: `1.2 TFLOPS`."""
    return number_to_string(flops, units, precision) + "FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Multiplications with an addition: `1.2 GMACs`."""
    return number_to_string(macs, units, precision) + "MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Bytes in decimal units: `1.2 GB`."""
    return number_to_string(b, units, precision) + "B"


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """How many parameters: `1.2 B` for 1.2 thousand millions."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Seconds: `1.2 ms`."""
    return number_to_string(duration, units, precision) + "s"
