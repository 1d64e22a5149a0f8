"""Dtypes of buffers.

For `initialize`. Buffers keep the dtypes they have, whatever the parameters are computed in, unless the config says otherwise
(`data_types.buffer_dtype`, `data_types.keep_in_fp32_modules`).
Source: DeepSpeed 0.19.8, runtime/engine.py `_cast_module_mixed_precision`, runtime/keep_in_fp32.py.
"""

from __future__ import annotations

import re

from torch import nn

from zckpt.runtime.config.attributes import DTYPES
from zckpt.runtime.config.read import Settings


def cast_buffers(model: nn.Module, settings: Settings) -> None:
    """Casts floating-point buffers as the config asks, in place."""
    dtype = settings.config.data_types.buffer_dtype
    keep = _kept_in_fp32(model, settings)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if keep is not None and keep.search(f"{prefix}.{name}" if prefix else name):
                module._buffers[name] = buffer.float()
            elif dtype is not None:
                module._buffers[name] = buffer.to(DTYPES[dtype])


def _kept_in_fp32(model: nn.Module, settings: Settings) -> re.Pattern[str] | None:
    precision = settings.config.precision
    asked = settings.config.data_types.keep_in_fp32_modules
    if precision == "fp32":
        return None
    if isinstance(asked, list):
        patterns = {name.replace("*", ".*") for name in asked}
    else:
        patterns = set()
        for prefix, module in model.named_modules():
            names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
            if precision == "fp16":
                names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
            start = rf"^{re.escape(prefix)}\..*" if prefix else ""
            patterns |= {start + name.replace("*", ".*") for name in names}
    return re.compile("|".join(sorted(patterns))) if patterns else None
