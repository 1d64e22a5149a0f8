"""The line on loading promises no model of tensors that are not there, or are there twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_llama import CONFIG, SHAPES

from zckpt.cli.loading import loading_line

Names = list[str]


def without_a_layer(names: Names) -> Names:
    return [name for name in names if ".layers.1." not in name]


def twice(names: Names) -> Names:
    return [*names, *(f"model.{name}" for name in names)]


def half_wrapped(names: Names) -> Names:
    return [name if ".layers.1." in name else f"module.{name}" for name in names]


def with_a_stranger(names: Names) -> Names:
    return [*(f"net.{name}" for name in names), "temperature"]


def two_models(names: Names) -> Names:
    return [f"{model}.{name}" for model in ("policy", "ref") for name in names]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (list, "transformers.AutoModelForCausalLM.from_pretrained("),
        (without_a_layer, "it would make up 9 tensors that are not here, such as 'model.layers.1."),
        (twice, "leave out one of two models: 21 tensors are there twice, such as 'model.embed_tokens.weight'"),
        (two_models, "each of its 2 models by itself, such as with --include 'policy.*' --strip-prefix policy."),
        (half_wrapped, "with --strip-prefix module.: "),
        (with_a_stranger, "with --strip-prefix net. and --include 'net.*': "),
    ],
)
def test_what_is_promised(change: Callable[[Names], Names], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    line = loading_line(str(tmp_path), change([*SHAPES]))
    assert says in line
    assert ("from_pretrained" in line) == (change is list)
