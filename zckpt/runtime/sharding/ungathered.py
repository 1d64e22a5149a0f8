"""Finds the parameter that is used while its unit is not being called, and the place of the use.

For `engine`. torch says only that an operator got mixed tensors. The traceback has the statement that failed, with its variables:
the values of its expressions are looked up, attribute by attribute, and nothing is called.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zckpt.base.errors import UsageError
from zckpt.runtime.sharding.parameter import sharded_parameter_of

_MIXED = "mixed torch.Tensor and DTensor"


def explain_failure(error: RuntimeError, model: nn.Module) -> UsageError | None:
    """The error for a forward that failed with torch's error about mixed tensors; None for any other error."""
    if _MIXED not in str(error):
        return None
    for frame, line in reversed(list(_frames(error.__traceback__))):
        for value in _values(frame, line):
            found = sharded_parameter_of(value) if isinstance(value, torch.Tensor) else None
            if found is not None:
                unit = _unit_of(found.name, model)
                return UsageError(
                    f"parameter {found.name!r} is used while it is not gathered",
                    found=f"{frame.f_code.co_filename}, line {line}: {linecache.getline(frame.f_code.co_filename, line).strip()}",
                    expected=f"the parameter taken from its module in the forward, or the forward of {unit!r}",
                    remedy="Take it from its module where it is used, not before the forward. In a compiled model name it by "
                    "zero.register_external_parameter before initialize. "
                    f"Or call {unit!r}, so that its forward uses the parameter.",
                )
    return None


def _unit_of(name: str, model: nn.Module) -> str:
    """The innermost module around a parameter that is gathered as one."""
    modules = dict(model.named_modules())
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules[name], FSDPModule):
            break
    return name or type(model).__name__


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _values(frame: FrameType, line: int) -> Iterator[Any]:
    """The values of the names and attributes in the statement of a line; the longest chains first."""
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    if not source or not os.path.isfile(frame.f_code.co_filename):
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    holding = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    if not holding:
        return
    smallest = min(holding, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    for node in ast.walk(smallest):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            try:
                yield _value(node, frame)
            except Exception:  # whatever its attributes do
                continue


def _value(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals[node.id] if node.id in frame.f_locals else frame.f_globals[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    raise TypeError("an expression that would have to be computed")
