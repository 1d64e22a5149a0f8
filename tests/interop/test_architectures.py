"""Megatron's and GPT-NeoX's checkpoints become models of transformers: the same weights, the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import megatron_writer as writer
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.jobs.groups import Form
from zckpt.layouts.save.listing import ReadOptions
from zckpt.naming.schemes import families

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def filled(model: Any) -> Any:
    """Every parameter other numbers, of so few digits that sums of slices are exact."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator).mul(32).round().div(64))
    return model.eval()


def gpt_neox(**more: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=None,
        **{"tie_word_embeddings": False, "rope_parameters": rope, **more},
    )  # fmt: skip
    return filled(transformers.GPTNeoXForCausalLM(config))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=3, n_head=4, n_positions=16, n_inner=24, activation_function="gelu_fast",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return filled(transformers.GPT2LMHeadModel(config))


def llama(heads: int = 4, key: int = 4) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=key, max_position_embeddings=16, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return filled(transformers.LlamaForCausalLM(config))


NEOX_YML = """
# hyphens and comments, as in GPT-NeoX's own files
{"pipe-parallel-size": 1, "num-layers": 3, "hidden-size": 16, "num-attention-heads": 4,
 "max-position-embeddings": 16, "rotary-pct": 0.5, "rotary-emb-base": 5000, "pos-emb": "rotary",
 "gpt-j-residual": RESIDUAL, "norm": "NORM", "rms-norm-epsilon": RMS, "layernorm-epsilon": LAYER,
 "no-weight-tying": true, # and so on
}
"""


def neox_args(home: Path, *, residual: bool = True, norm: str = "layernorm") -> None:
    configs = home / "global_step3" / "configs"
    configs.mkdir()
    own, other = ("RMS", "LAYER") if norm == "rmsnorm" else ("LAYER", "RMS")
    text = NEOX_YML.replace("RESIDUAL", str(residual).lower()).replace("NORM", norm)
    (configs / "model.yml").write_text(text.replace(own, "1.0e-5").replace(other, "0.5"))


NEOX_CLIENT = {"args": {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 16}}


def converted(home: Path, out: Path, to: str, rules: str | None = None, **form: Any) -> Any:
    """The model that `from_pretrained` makes of it; it finds nothing missing and nothing unexpected."""
    read_options = ReadOptions(tp_rules=rules) if rules else None
    zckpt.convert(home, out, options=zckpt.Options(form=Form(f"hf:{to}", **form), read_options=read_options))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def assert_same(found: Any, wanted: Any) -> None:
    """Every weight to the last bit, and the logits."""
    assert type(found) is type(wanted)
    weights = found.state_dict()
    assert weights.keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert same_bits(weights[name], tensor), name
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(found(input_ids=tokens).logits, wanted(input_ids=tokens).logits)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("residual", [True, False])
def test_neox_pipeline(tp: int, residual: bool, tmp_path: Path) -> None:
    wanted = gpt_neox(use_parallel_residual=residual)
    layers = writer.neox(wanted.state_dict(), wanted.config)
    home = writer.save(tmp_path / "in", layers, NEOX_CLIENT, tp, pp=2, summed=True)
    neox_args(home, residual=residual)
    assert_same(converted(home, tmp_path / "out", "gpt-neox", "neox"), wanted)


@pytest.mark.parametrize("tp", [1, 2])
def test_neox_in_one_file_per_rank(tp: int, tmp_path: Path) -> None:
    wanted = gpt_neox()
    layers = writer.neox(wanted.state_dict(), wanted.config)
    state = {f"sequential.{n}.{name}": tensor for n, layer in layers.items() for name, tensor in layer.items()}
    home = writer.save(tmp_path / "in", state, NEOX_CLIENT, tp, summed=True)
    neox_args(home)
    assert_same(converted(home, tmp_path / "out", "gpt-neox", "neox" if tp > 1 else None), wanted)


@pytest.mark.parametrize("key", [4, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_neox_llama(tp: int, key: int, tmp_path: Path) -> None:
    wanted = llama(key=key)
    layers = writer.neox(wanted.state_dict(), wanted.config)
    home = writer.save(tmp_path / "in", layers, NEOX_CLIENT, tp)
    neox_args(home, residual=False, norm="rmsnorm")
    path = home / "global_step3" / "configs" / "model.yml"
    path.write_text(path.read_text().replace("5000", "10000").replace("0.5", "1.0"))
    assert_same(converted(home, tmp_path / "out", "llama", "neox"), wanted)


@pytest.mark.parametrize("key", [4, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_newer_neox_llama(tp: int, key: int, tmp_path: Path) -> None:
    """Since late 2024 the MLP is `linear1` and `linear2`, and fewer key heads lie rank by rank."""
    wanted = llama(key=key)
    layers = writer.neox(wanted.state_dict(), wanted.config)
    for block in range(3):
        layer, old = layers[block + 2], f"model.layers.{block}."
        layer["mlp.linear1.weight"] = torch.cat([layer.pop("mlp.w3.weight"), layer.pop("mlp.w1.weight")])
        layer["mlp.linear2.weight"] = layer.pop("mlp.w2.weight")
        if key == 2:
            parts = [wanted.state_dict()[f"{old}self_attn.{n}_proj.weight"] for n in "qkv"]
            layer["attention.query_key_value.weight"] = torch.cat(parts)
    home = writer.save(tmp_path / "in", layers, NEOX_CLIENT, tp, halves=True, stacked=key == 2)
    neox_args(home, residual=False, norm="rmsnorm")
    path = home / "global_step3" / "configs" / "model.yml"
    path.write_text(path.read_text().replace("5000", "10000").replace("0.5", "1.0"))
    assert_same(converted(home, tmp_path / "out", "llama", "neox"), wanted)
    if tp == 2:
        rules = json.loads(
            (Path(zckpt.__file__).parent / "layouts" / "joining" / "rule_files" / "neox.json").read_text()
        )
        (tmp_path / "rules.json").write_text(json.dumps(rules))
        with pytest.raises(UnsupportedError, match="joined by other rules"):
            converted(home, tmp_path / "other", "llama", str(tmp_path / "rules.json"))


def test_tied_embeddings_of_both_ends_are_one(tmp_path: Path) -> None:
    wanted = gpt_neox(tie_word_embeddings=True)
    layers = writer.neox(wanted.state_dict(), wanted.config)
    layers[3 + 4] = {"word_embeddings.weight": layers[0]["word_embeddings.weight"]}
    home = writer.save(tmp_path / "in", layers, NEOX_CLIENT, pp=2)
    neox_args(home)
    assert_same(converted(home, tmp_path / "out", "gpt-neox"), wanted)
    last = torch.load(home / "global_step3" / "layer_07-model_00-model_states.pt")
    last["word_embeddings.weight"][5, 5] += 1
    torch.save(last, home / "global_step3" / "layer_07-model_00-model_states.pt")
    with pytest.raises(InconsistentError, match="embed_in"):
        converted(home, tmp_path / "other", "gpt-neox")


@pytest.mark.parametrize(("order", "version"), [("groups", 3.0), ("groups", 2.0), ("elements", 1.0), ("stacked", 0)])
@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_gpt2(tp: int, order: str, version: float, tmp_path: Path) -> None:
    wanted = gpt2()
    state = writer.megatron(wanted.state_dict(), wanted.config, order)
    client = writer.megatron_client(wanted.config, version)
    home = writer.save(tmp_path / "in", state, client, tp, stacked=order == "stacked")
    assert_same(converted(home, tmp_path / "out", "gpt2", "megatron" if tp > 1 else None), wanted)


@pytest.mark.parametrize(("tp", "first"), [(1, 2), (2, 2), (1, 4)])
def test_megatron_gpt2_pipeline(tp: int, first: int, tmp_path: Path) -> None:
    wanted = gpt2()
    layers = writer.as_pipeline(writer.megatron(wanted.state_dict(), wanted.config), first)
    home = writer.save(tmp_path / "in", layers, writer.megatron_client(wanted.config), tp, pp=2)
    assert_same(converted(home, tmp_path / "out", "gpt2", "megatron"), wanted)


@pytest.mark.parametrize("key", [4, 2])
@pytest.mark.parametrize(("tp", "pipeline"), [(1, False), (2, False), (2, True)])
def test_megatron_llama(tp: int, pipeline: bool, key: int, tmp_path: Path) -> None:
    wanted = llama(key=key)
    states: Any = writer.megatron(wanted.state_dict(), wanted.config)
    if pipeline:
        states = writer.as_pipeline(states)
    client = writer.megatron_client(wanted.config, use_rotary_position_embeddings=True, swiglu=True)
    home = writer.save(tmp_path / "in", states, client, tp, halves=True)
    assert_same(converted(home, tmp_path / "out", "llama", "megatron-swiglu" if tp > 1 else None), wanted)


@pytest.fixture
def gpt2_home(tmp_path: Path) -> tuple[Path, Any]:
    wanted = gpt2()
    state = writer.megatron(wanted.state_dict(), wanted.config)
    return writer.save(tmp_path / "in", state, writer.megatron_client(wanted.config)), wanted


def test_a_given_config_is_taken_and_padding_is_cut_off(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, wanted = gpt2_home
    config = {**wanted.config.to_dict(), "vocab_size": 29, "attn_pdrop": 0.25}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    found = converted(home, tmp_path / "out", "gpt2", config=str(tmp_path / "mine.json"))
    assert found.config.attn_pdrop == 0.25
    assert torch.equal(found.transformer.wte.weight, wanted.transformer.wte.weight[:29])
    (home / "config.json").write_text(json.dumps(config))
    assert converted(home, tmp_path / "beside", "gpt2").config.vocab_size == 29


def test_the_dtype_asked_for(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    """Transposed, cast and in shards at once."""
    home, wanted = gpt2_home
    zckpt.convert(
        home, tmp_path / "out", dtype="bf16", options=zckpt.Options(form=Form("hf:gpt2"), max_shard_size=3000)
    )
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for name, tensor in wanted.state_dict().items():
        assert same_bits(found.state_dict()[name], tensor.bfloat16()), name


@pytest.mark.parametrize("given", [False, True])
def test_verify_looks_for_the_same(given: bool, gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, wanted = gpt2_home
    (tmp_path / "mine.json").write_text(json.dumps({**wanted.config.to_dict(), "vocab_size": 29}))
    form = Form("hf:gpt2", config=str(tmp_path / "mine.json") if given else None)
    zckpt.convert(home, tmp_path / "out", dtype="bf16", options=zckpt.Options(form=form))
    (tmp_path / "mine.json").unlink()
    found = zckpt.verify(home, tmp_path / "out")
    assert found.ok and found.deletable[0], found
    store = tmp_path / "out" / "model.safetensors"
    store.write_bytes(store.read_bytes()[:-2] + b"\x01\x02")
    assert not zckpt.verify(home, tmp_path / "out").ok


def refused(kind: type[Exception], home: Path, tmp_path: Path, to: str = "gpt2", **form: Any) -> Any:
    with pytest.raises(kind) as caught:
        zckpt.convert(home, tmp_path / "out", options=zckpt.Options(form=Form(f"hf:{to}", **form)))
    assert not (tmp_path / "out").exists()
    return caught.value


def test_what_does_not_fit_is_named(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, wanted = gpt2_home
    assert "hf:llama" in refused(UsageError, home, tmp_path, "berta").expected
    assert "position_embeddings" in refused(UnsupportedError, home, tmp_path, "llama").found
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**wanted.config.to_dict(), "n_layer": 4}))
    assert "n_layer 4, but 3" in refused(InconsistentError, home, tmp_path, config=str(path)).found
    path.write_text(json.dumps({**wanted.config.to_dict(), "n_head": 3}))
    assert "3 query heads" in refused(InconsistentError, home, tmp_path, config=str(path)).expected
    path.write_text(json.dumps({**wanted.config.to_dict(), "model_type": "opt"}))
    assert "opt" in refused(InconsistentError, home, tmp_path, config=str(path)).found
    path.write_text("{")
    refused(CorruptError, home, tmp_path, config=str(path))


def change(home: Path, key: str, value: object) -> None:
    path = home / "global_step3" / "mp_rank_00_model_states.pt"
    root = torch.load(path, weights_only=False)
    root[key] = value
    torch.save({k: v for k, v in root.items() if v is not ...}, path)


def test_nothing_is_guessed(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, _ = gpt2_home
    args = writer.megatron_client(gpt2().config, swiglu=True)["args"]
    change(home, "args", args)
    assert "swiglu True (a gated MLP)" in refused(UnsupportedError, home, tmp_path).found
    args = writer.megatron_client(gpt2().config, normalization="RMSNorm", apply_layernorm_1p=True)["args"]
    change(home, "args", args)
    found = refused(UnsupportedError, home, tmp_path).found
    assert "counted from one" in found and "RMSNorm (not layernorm or LayerNorm)" in found
    change(home, "args", {})
    assert "--config" in refused(UsageError, home, tmp_path).remedy
    change(home, "checkpoint_version", ...)
    change(home, "args", {"num_attention_heads": 4})
    assert "checkpoint_version" in refused(UnsupportedError, home, tmp_path).found


def test_a_block_that_lacks_a_tensor(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, _ = gpt2_home
    module = torch.load(home / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    del module["language_model.encoder.layers.1.mlp.dense_4h_to_h.bias"]
    change(home, "module", module)
    assert "block 1 lacks 'transformer.h.mlp.c_proj.bias'" in refused(InconsistentError, home, tmp_path).found


def test_a_model_without_embeddings(tmp_path: Path) -> None:
    wanted = gpt2()
    layers = writer.as_pipeline(writer.megatron(wanted.state_dict(), wanted.config))
    del layers[1]
    home = writer.save(tmp_path / "in", layers, writer.megatron_client(wanted.config))
    assert "transformer.wte.weight" in refused(IncompleteError, home, tmp_path).found


def test_what_has_no_place_can_be_left_out(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, wanted = gpt2_home
    module = torch.load(home / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    change(home, "module", {**module, "language_model.pooler.dense": torch.zeros(3)})
    error = refused(UnsupportedError, home, tmp_path)
    assert "pooler" in error.found and "--exclude" in error.remedy
    options = zckpt.Options(form=Form("hf:gpt2"), exclude=["*pooler*"])
    zckpt.convert(home, tmp_path / "out", options=options)
    assert_same(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out"), wanted)


def test_a_broken_config_of_neox(tmp_path: Path) -> None:
    wanted = gpt_neox()
    home = writer.save(tmp_path / "in", writer.neox(wanted.state_dict(), wanted.config), NEOX_CLIENT)
    neox_args(home)
    (home / "global_step3" / "configs" / "broken.yml").write_text("{")
    assert "broken.yml" in refused(CorruptError, home, tmp_path, "gpt-neox").file


def test_architectures_are_those_in_the_help() -> None:
    assert {"gpt-neox", "gpt2", "llama"} <= set(families())


# -- runs of real DeepSpeed ------------------------------------------------------------------------------------------

HOMES = sorted(
    path.parent for path in (Path(__file__).parents[2] / "fixtures" / "megatron").glob("*/how_megatron.json")
)
ASKED = {"neox": ("gpt-neox", "neox"), "llama": ("llama", "megatron-swiglu")}


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_runs_of_deepspeed(home: Path, tmp_path: Path) -> None:
    """Turned back by the writer, which knows nothing of the converter, every slice is the live master of its rank."""
    how = json.loads((home / "how_megatron.json").read_text())
    model = converted(home / "checkpoint", tmp_path / "out", *ASKED[how["kind"]])
    wanted = json.loads((home / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "rope_parameters", "vocab_size"):
        assert getattr(model.config, key) == wanted[key], key
    states: Any = writer.neox if how["kind"] == "neox" else writer.megatron
    native = states(model.state_dict(), model.config)
    if how["kind"] == "neox":
        native = {f"{layer}.{name}": tensor for layer, state in native.items() for name, tensor in state.items()}
    truth = load_file(home / "truth.safetensors")
    assert {name.split(".", 1)[1] for name in truth} == native.keys()
    for name, tensor in native.items():
        slices = [truth[f"{rank}.{name}"] for rank in range(how["tp"])]
        if how["kind"] == "neox" and name.endswith(("attention.dense.bias", "dense_4h_to_h.bias")):
            assert same_bits(tensor, slices[0] + slices[1]), name
            continue
        for rank, own in enumerate(slices):
            part = writer.sliced(
                name, tensor, rank, how["tp"], summed=False, halves=how["kind"] == "llama", stacked=False
            )
            assert same_bits(part, own), name
    with torch.no_grad():
        assert model(input_ids=torch.arange(6)[None]).logits.isfinite().all()
    assert zckpt.verify(
        home / "checkpoint", tmp_path / "out", read_options=ReadOptions(tp_rules=ASKED[how["kind"]][1])
    ).ok


def test_there_are_fixtures() -> None:
    assert [home.name for home in HOMES] == ["llama_zero2_tp2_dp2", "neox_pp2_tp2_dp2"]


# -- names for layers ------------------------------------------------------------------------------------------------

LAYER_NAMES = {"1": "embed", "2-4": "blocks.{}", "5": "final"}


def test_layers_get_names(tmp_path: Path) -> None:
    wanted = gpt2()
    layers = writer.as_pipeline(writer.megatron(wanted.state_dict(), wanted.config))
    home = writer.save(tmp_path / "in", layers, {}, pp=2)
    (tmp_path / "names.json").write_text(json.dumps(LAYER_NAMES))
    form = Form(layer_names=str(tmp_path / "names.json"))
    zckpt.convert(home, tmp_path / "out.bin", options=zckpt.Options(form=form))
    found = torch.load(tmp_path / "out.bin", weights_only=True)
    where = {1: "embed", 2: "blocks.0", 3: "blocks.1", 4: "blocks.2", 5: "final"}
    expected = {f"{where[n]}.{name}": tensor for n, layer in layers.items() for name, tensor in layer.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor)


def test_tied_layers_get_names(tmp_path: Path) -> None:
    home = Path(__file__).parents[2] / "fixtures" / "pipeline" / "zero1_pp2_dp2"
    (tmp_path / "names.json").write_text(json.dumps({"tied_modules.embed": "", "1-2": "h.{}", "3": "ln"}))
    form = Form(layer_names=str(tmp_path / "names.json"))
    report = zckpt.convert(home / "checkpoint", tmp_path / "out.bin", options=zckpt.Options(form=form))
    found = torch.load(tmp_path / "out.bin", weights_only=True)
    assert {"weight", "h.0.up.weight", "h.1.down.bias", "ln.norm.weight"} <= found.keys()
    assert report.tensors == len(found)
    assert zckpt.verify(home / "checkpoint", tmp_path / "out.bin").ok


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"x": "a"}', '{"1": 2}', '{"1-3": "a", "2": "b"}', '{"7": "a"}', '{"1-2": "same"}']
)
def test_wrong_files_of_layer_names(text: str, tmp_path: Path) -> None:
    home = Path(__file__).parents[2] / "fixtures" / "pipeline" / "zero0_pp2"
    (tmp_path / "names.json").write_text(text)
    with pytest.raises((UsageError, InconsistentError)) as caught:
        zckpt.convert(
            home / "checkpoint", tmp_path / "out.bin",
            options=zckpt.Options(form=Form(layer_names=str(tmp_path / "names.json"))),
        )  # fmt: skip
    assert not (tmp_path / "out.bin").exists() and caught.value.found


def test_wishes_that_contradict_each_other(gpt2_home: tuple[Path, Any], tmp_path: Path) -> None:
    home, _ = gpt2_home
    refused(UsageError, home, tmp_path, layer_names="x.json")
    with pytest.raises(UsageError, match="onnx"):
        Form("onnx")
    for form in (Form(config="x.json"), Form(layer_names=str(tmp_path / "none.json"))):
        with pytest.raises(UsageError):
            zckpt.convert(home, tmp_path / "out", options=zckpt.Options(form=form))
    shutil.rmtree(home)
