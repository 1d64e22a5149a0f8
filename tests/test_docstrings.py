"""Docstrings of public functions have an example, and it prints what it says."""

from __future__ import annotations

import doctest
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt

FIXTURES = Path(__file__).parent.parent / "fixtures"
INPUTS = {
    "run": "transformers/llama_zero3/checkpoint",
    "model": "gguf/llama/model",
    "lora-run": "peft/lora_zero3/checkpoint",
}
"""What examples find in the current directory."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: one for name in zckpt.__all__ if inspect.isfunction(one := getattr(zckpt, name))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, fixture in INPUTS.items():
        shutil.copytree(FIXTURES / fixture, tmp_path / place)
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(FUNCTIONS[name]) or "", {"zckpt": zckpt}, name, None, 0
    )
    assert example.examples, "no example"
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=told.append)
    assert not told, "".join(told)


def test_every_public_function_has_one() -> None:
    assert len(FUNCTIONS) >= 25
    lacking = [name for name, one in FUNCTIONS.items() if one.__doc__ is None or "\n    Example:\n" not in one.__doc__]
    assert not lacking
