"""Prefixes that are found, and wishes that match nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.base.errors import UsageError
from zckpt.integrations.weights import WeightsWriter
from zckpt.jobs.declarations import TO_DCP, TO_MCORE
from zckpt.jobs.groups import Selecting
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import Options
from zckpt.jobs.selection import common_prefix, select

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = ("layers.0.mlp.up_proj.weight", "embed_tokens.weight", "norm.weight")


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        ([f"model.{name}" for name in LLAMA], ""),
        ([*(f"model.{name}" for name in LLAMA), "lm_head.weight"], ""),
        ([*(f"model.model.{name}" for name in LLAMA), "model.lm_head.weight"], "model."),
        ([f"model.model.{name}" for name in LLAMA], "model."),
        (
            [*(f"base_model.model.model.{name}" for name in LLAMA), "base_model.model.lm_head.weight"],
            "base_model.model.",
        ),
        ([f"policy.base_model.model.model.{name}" for name in LLAMA], "policy.base_model.model."),
        ([f"module._orig_mod.net.{name}" for name in LLAMA], "module._orig_mod.net."),
        (["0.weight", "1.weight"], ""),
        (["layers.0.weight", "layers.1.weight"], ""),
        (["head.weight", "head.bias"], ""),
        (["weight"], ""),
        ([], ""),
    ],
)
def test_what_wraps_all_names(names: list[str], prefix: str) -> None:
    assert common_prefix(names) == prefix


def test_the_prefix_that_is_found_is_said_and_recorded(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "ranks" / "lora_w2" / "checkpoint"
    report = zckpt.convert(checkpoint, tmp_path / "out", options=Options(strip_prefix="auto"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed.weight" in found and not any(name.startswith("base_model") for name in found)
    assert any("'base_model.model.' was stripped" in note for note in report.notes)
    assert zckpt.verify(checkpoint, tmp_path / "out").ok
    zckpt.to_dcp(checkpoint, tmp_path / "dcp", options=zckpt.Options(strip_prefix="auto"))
    assert zckpt.verify(checkpoint, tmp_path / "dcp").ok
    named = tmp_path / "named.safetensors"
    zckpt.convert(checkpoint, named, options=Options(strip_prefix="base_model.model."))
    assert load_file(named).keys() == found.keys()


def test_all_of_a_catalog_is_the_catalog_itself() -> None:
    catalog = open_catalog(FIXTURES / "zero3" / "bf16_w2" / "checkpoint").catalog
    assert select(catalog, Selecting()) is catalog
    assert 0 < len(select(catalog, Selecting(exclude=["*.bias"]))) < len(catalog)


def test_wishes_that_match_nothing_are_said(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2), "b.weight": torch.ones(3)}, tmp_path / "in.safetensors")
    source = tmp_path / "in.safetensors"

    def notes(name: str, **options: object) -> str:
        told = zckpt.convert(source, tmp_path / name, options=Options(**options)).notes
        return "\n".join(note for note in told if "cannot be told whether this is the whole model" not in note)

    assert "--strip-prefix 'model.' is at the start of no name" in notes("1.safetensors", strip_prefix="model.")
    assert "stripped nothing" in notes("2.safetensors", strip_prefix="auto")
    assert "--exclude '*.bias' matches no tensor" in notes("3.safetensors", exclude=["*.bias"])
    assert "--include 'c.*' matches no tensor" in notes("4.safetensors", include=["a.*", "c.*"])
    said = notes("5.safetensors", rename=[("^a", "x"), ("^a", "y"), ("^x", "z")])
    assert said.count("matches no name") == 1 and "--rename '^a'" in said
    assert not notes("6.safetensors", include=["a.*"], exclude=["b.*"], strip_prefix="a.", rename=[("w", "v")])


def test_sizes_that_no_file_has() -> None:
    for make in (
        lambda: Options(max_shard_size=0),
        lambda: Options(max_shard_size="0GB"),
        lambda: TO_DCP.ask(max_file_bytes=0),
        lambda: TO_MCORE.ask(max_file_bytes=0),
        lambda: WeightsWriter(max_shard_size=0),
    ):
        with pytest.raises(UsageError, match="is too small"):
            make()


def test_a_tensor_without_a_name_is_not_the_options_fault(tmp_path: Path) -> None:
    torch.save({"": torch.zeros(2), "w": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="a name that no file of weights can hold") as raised:
        zckpt.convert(tmp_path / "a.pt", tmp_path / "out.safetensors", progress=False)
    assert str(raised.value.file).endswith("a.pt") and "--rename '^$=" in str(raised.value.remedy)
    zckpt.convert(
        tmp_path / "a.pt", tmp_path / "out.safetensors", options=zckpt.Options(rename=(("^$", "v"),)), progress=False
    )
