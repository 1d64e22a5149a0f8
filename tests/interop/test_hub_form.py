"""What transformers keeps in another form in memory reaches the hub in the hub's form; `from_pretrained` proves it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import zckpt
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import reorder_rows
from zckpt.core.stores import MemoryStore
from zckpt.core.views import rows_of_strided, transpose_fragments
from zckpt.jobs.open import read_tensor

transformers = pytest.importorskip("transformers", minversion="5")

HOMES = sorted(path.parent for path in (Path(__file__).parents[2] / "fixtures" / "fused").glob("*/how_fused.json"))

SMALL = {
    "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def mixtral(**more: Any) -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, intermediate_size=12, num_local_experts=3, num_experts_per_tok=2, **more)
    )


def qwen() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SMALL, intermediate_size=12, moe_intermediate_size=6, num_experts=4, num_experts_per_tok=2, head_dim=4
        )
    )


def neox() -> Any:
    """Another name in memory (`lm_head`) than on the hub (`embed_out`)."""
    own = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**own, intermediate_size=12))


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen, "gpt_neox": neox, "tied": lambda: mixtral(tie_word_embeddings=True)}


def saved(model: Any, path: Path) -> Path:
    """As it lies in memory, with its config."""
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    return path


def all_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_names_and_bytes_as_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "theirs")
    home = saved(model, tmp_path / "in")
    report = zckpt.convert(home, tmp_path / "out")
    assert "transformers' own mapping" in report.notes[-1]
    found, wanted = all_of(tmp_path / "out"), all_of(tmp_path / "theirs")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), name
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert same_bits(loaded.state_dict()[name], tensor), name


def test_one_file_keeps_the_models_own_names(tmp_path: Path) -> None:
    model = mixtral()
    zckpt.convert(saved(model, tmp_path / "in"), tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors").keys() == model.state_dict().keys()


def test_what_has_the_hubs_form_keeps_it(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "in")
    notes = zckpt.convert(tmp_path / "in", tmp_path / "out").notes
    assert all("cannot be told" in note for note in notes)
    assert all_of(tmp_path / "out").keys() == all_of(tmp_path / "in").keys()


def test_a_mapping_that_fails_changes_nothing(tmp_path: Path) -> None:
    home = saved(mixtral(), tmp_path / "in")
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "hidden_size": "eight"}))
    report = zckpt.convert(home, tmp_path / "out")
    assert "Names stay as they are" in report.notes[-1]
    assert all_of(tmp_path / "out").keys() == mixtral().state_dict().keys()


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_a_run_of_deepspeed_ends_on_the_hub(home: Path, tmp_path: Path) -> None:
    half = json.loads((home / "checkpoint" / "config.json").read_text())["dtype"] == "bfloat16"
    zckpt.convert(home / "checkpoint", tmp_path / "out", dtype="bf16" if half else "fp32")
    truth = {name: t.bfloat16() if half else t for name, t in load_file(home / "truth.safetensors").items()}
    fused, found = {name for name in truth if ".experts." in name}, all_of(tmp_path / "out").keys()
    assert fused and not fused & found and any(".experts.1." in name for name in found)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weights = model.state_dict()
    assert weights.keys() == truth.keys()
    for name, tensor in truth.items():
        assert same_bits(weights[name], tensor), name
    stored = load_file(home / "logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(input_ids=stored["input_ids"]).logits.float()
    assert torch.allclose(logits, stored["logits"], atol=2e-2 if half else 1e-5)
    assert zckpt.verify(home / "checkpoint", tmp_path / "out").ok


def test_there_are_fixtures() -> None:
    assert len(HOMES) == 2


@settings(deadline=None)
@given(data=st.data(), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_a_transposed_matrix_in_any_pieces(data: st.DataObject, rows: int, columns: int) -> None:
    numel = rows * columns
    tensor = torch.arange(numel, dtype=torch.float32).reshape(rows, columns)
    store = MemoryStore(tensor.data_ptr(), numel * 4, tensor)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, numel), max_size=4)) - {numel}), numel]
    fragments = tuple(Fragment(store, a * 4, a, b - a) for a, b in itertools.pairwise(cuts))
    turned = transpose_fragments(fragments, rows, columns, 4)
    entry = TensorEntry("x", (columns, rows), F32, "parameter", turned)
    assert torch.equal(read_tensor(entry, "pt"), tensor.t())
    again = TensorEntry("x", (rows, columns), F32, "parameter", transpose_fragments(turned, columns, rows, 4))
    assert torch.equal(read_tensor(again, "pt"), tensor)


@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_view_is_where_torch_puts_it(data: st.DataObject, shape: list[int]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    view = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(len(shape)):
        start = data.draw(st.integers(0, view.shape[dim] - 1))
        view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
    store = MemoryStore(tensor.data_ptr(), tensor.numel() * 4, tensor)
    rows = rows_of_strided(int(view.storage_offset()), view.shape, view.stride())
    fragments = reorder_rows((Fragment(store, 0, 0, tensor.numel()),), rows, 4)
    assert torch.equal(read_tensor(TensorEntry("x", tuple(view.shape), F32, "parameter", fragments), "pt"), view)
