"""GGUF against llama.cpp's own converter, the gguf package and transformers.

What the converter writes of each model in fixtures/gguf is recorded there, tensor by tensor and key by key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.naming import gguf_keys
from zckpt.naming.gguf_keys import filled_in
from zckpt.naming.gguf_metadata import ARCHITECTURES
from zckpt.naming.gguf_vision import vision_of
from zckpt.naming.gguf_vocabulary import Tokens, tokens_of
from zckpt.naming.schemes import scheme

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gguf"
FAMILIES = sorted(home.name for home in FIXTURES.iterdir())
TOKENS = torch.arange(24).reshape(2, 12)


def facts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file holds, in the form of `truth.json`."""
    reader = GGUFReader(path)
    tensors = {
        t.name: [t.tensor_type.name, [int(n) for n in reversed(t.shape)], hashlib.sha256(t.data.tobytes()).hexdigest()[:16]]
        for t in reader.tensors
    }  # fmt: skip
    metadata = {}
    for key, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and len(value) > 20:
            digest = hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
            value = {"length": len(value), "sha256": digest}
        if not key.startswith("GGUF."):
            metadata[key] = [[kind.name for kind in field.types], value]
    return tensors, metadata


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    """A model's name, its directory (with the name that it had for the converter), and the converter's truth."""
    home = FIXTURES / request.param
    model = tmp_path_factory.mktemp("gguf") / "tiny-model"
    shutil.copytree(home / "model", model)
    yield request.param, model, json.loads((home / "truth.json").read_text())
    shutil.rmtree(model)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_it_is_what_the_converter_writes(family: tuple[str, Path, Any], kind: str, tmp_path: Path) -> None:
    _, model, truth = family
    zckpt.to_gguf(model, tmp_path / "x.gguf", type=kind, pre_tokenizer=truth["pre"], progress=False)
    tensors, metadata = facts_of(tmp_path / "x.gguf")
    assert tensors == truth["tensors"][kind]
    assert metadata == {**truth["metadata"]["all"], **truth["metadata"][kind]}


SEEING = FIXTURES.parent / "mmproj"


@pytest.mark.parametrize("name", sorted(home.name for home in SEEING.iterdir()))
def test_the_images_side_is_what_the_converter_writes(name: str, tmp_path: Path) -> None:
    """Names, shapes, types, metadata and bytes; verify finds an element that is another one, and the text model is left out."""
    truth, out = json.loads((SEEING / name / "truth.json").read_text()), tmp_path / "x.gguf"
    model = Path(shutil.copytree(SEEING / name / "model", tmp_path / "tiny-model"))
    for kind in truth["tensors"]:
        zckpt.to_gguf(model, out, type=kind, mmproj=True, progress=False, options=zckpt.Options(overwrite=True))
        tensors, said = facts_of(out)
        assert tensors == truth["tensors"][kind]
        own = (
            (lambda key: key.startswith("clip.")) if name.startswith("llava") else bool
        )  # the older script names no model
        assert {k: v for k, v in said.items() if own(k)} == {k: v for k, v in truth["metadata"][kind].items() if own(k)}
        assert zckpt.verify(model, out, progress=False).ok
    wrong = bytearray(out.read_bytes())
    wrong[-5] ^= 1
    out.write_bytes(wrong)
    assert not zckpt.verify(model, out, progress=False).ok
    with pytest.raises(zckpt.UnsupportedError, match="no projector file"):
        zckpt.to_gguf(FIXTURES / "llama" / "model", tmp_path / "y.gguf", mmproj=True, progress=False)
    needed, words = ("params.json", "the sizes of the model") if name.endswith("_own") else (
        "preprocessor_config.json", "how images are prepared"
    )  # fmt: skip
    (model / needed).unlink()
    with pytest.raises(zckpt.IncompleteError, match=words):
        zckpt.to_gguf(model, tmp_path / "y.gguf", mmproj=True, progress=False)


def test_what_mistrals_own_form_must_say(tmp_path: Path) -> None:
    """A projector that llama.cpp does not have is named, a number that is left to the tokenizer is looked for there."""
    model = Path(shutil.copytree(SEEING / "mistral3_own" / "model", tmp_path / "model"))
    said = json.loads((model / "params.json").read_text())
    for key, value, words in (
        ("mm_projector_id", "another", "vision_config.mm_projector_id: 'another'"),
        ("num_hidden_layers", 2, "not the blocks that the config says"),
        ("rope_theta", None, "no rope_theta in vision_config"),
    ):
        (model / "params.json").write_text(
            json.dumps({**said, "vision_encoder": {**said["vision_encoder"], key: value}})
        )
        with pytest.raises(zckpt.ZckptError, match=words):
            zckpt.to_gguf(model, tmp_path / "x.gguf", mmproj=True, progress=False)
    with pytest.raises(zckpt.UnsupportedError, match="is a model that sees in Mistral's own form"):
        zckpt.convert(model, tmp_path / "x", options=zckpt.Options(form=zckpt.Form(to="hf")), progress=False)
    (model / "tekken.json").unlink()
    (model / "params.json").write_text(json.dumps(said))
    with pytest.raises(zckpt.IncompleteError, match="number of a token that the images' side needs"):
        zckpt.to_gguf(model, tmp_path / "x.gguf", mmproj=True, progress=False)


def test_what_the_config_of_the_images_side_leaves_out(tmp_path: Path) -> None:
    def written(name: str, key: str) -> Path:
        shutil.copytree(SEEING / name / "model", tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["vision_config"].pop(key)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        zckpt.to_gguf(tmp_path / name, tmp_path / f"{name}.gguf", mmproj=True, progress=False)
        return tmp_path / f"{name}.gguf"

    found = GGUFReader(written("idefics3", "layer_norm_eps")).fields["clip.vision.attention.layer_norm_epsilon"]
    assert found.contents() == pytest.approx(1e-6)  # transformers' default
    with pytest.raises(zckpt.IncompleteError, match="no depth in vision_config"):
        written("qwen2_vl", "depth")


@pytest.mark.parametrize(
    ("model", "tower"),
    [("llava", "clip_vision_model"), ("llava", "pixtral"), ("mistral3", "pixtral"), ("qwen3_vl", "qwen3_vl_vision")],
)
def test_what_is_left_out_is_what_the_class_says(model: str, tower: str) -> None:
    """Configs on the hub leave out what their class has anyhow, as Pixtral's does with its sizes."""
    kind = {"llava": "Llava", "mistral3": "Mistral3", "qwen3_vl": "Qwen3VL"}[model]
    said = {
        "vision_config": {"model_type": tower, "num_hidden_layers": 24, "depth": 24},
        "text_config": {"hidden_size": 64},
    }
    images = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    bare = vision_of({"model_type": model, **said}, "", images)
    full = vision_of(getattr(transformers, f"{kind}Config")(**said).to_dict(), "", images)
    assert bare.said == full.said
    for key in bare.said["keys"]:
        try:
            value = bare.value(key)
        except zckpt.IncompleteError:
            assert model == "qwen3_vl"  # files on the hub say its sizes
            continue
        assert value == full.value(key) or key == "clip.vision.is_deepstack_layers", (
            key
        )  # tensors of layers not named are refused


def model_that_lies(name: str, tmp_path: Path, config: dict[str, Any], drop: str = "") -> Path:
    """A model of a fixture with other values in its config, and without the tensors of a name."""
    home = Path(shutil.copytree(SEEING / name / "model", tmp_path / "changed"))
    said = json.loads((home / "config.json").read_text())
    for path, value in config.items():
        *places, key = path.split(".")
        (said[places[0]] if places else said)[key] = value
    (home / "config.json").write_text(json.dumps(said))
    tensors = load_file(home / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not drop or drop not in n}
    save_file(kept, home / "model.safetensors", {"format": "pt"})
    return home


@pytest.mark.parametrize(
    ("name", "config", "drop", "error"),
    [
        ("llava", {}, "multi_modal_projector", "IncompleteError.*'mm.0.weight'"),
        ("llava", {}, "encoder.layers.1.mlp", "InconsistentError.*blocks"),
        ("llava", {"vision_config.num_hidden_layers": 9}, "", "InconsistentError.*8, each"),
        ("llava", {"vision_feature_layer": 7}, "", "InconsistentError.*vision_feature_layer: 7"),
        ("llava", {"vision_config.hidden_size": 24}, "", "InconsistentError.*other sizes"),
        ("llava", {"vision_config.model_type": "siglip_vision_model"}, "", "UnsupportedError.*siglip_vision_model"),
        ("llava", {"vision_feature_select_strategy": "full"}, "", "UnsupportedError.*'full'"),
        ("llava", {"vision_config.model_type": "pixtral"}, "", "(Unsupported|Incomplete)Error"),
        ("llava_next", {"image_grid_pinpoints": 7}, "", "InconsistentError.*image_grid_pinpoints"),
        ("pixtral", {"vision_config.num_hidden_layers": 2}, "", "InconsistentError.*3 blocks"),
        ("pixtral", {"vision_config.hidden_act": "relu"}, "", "UnsupportedError.*'relu'"),
        ("pixtral", {}, "embed_tokens", "IncompleteError.*img_break"),
        ("qwen3_vl", {"vision_config.deepstack_visual_indexes": [0]}, "", "InconsistentError.*fewer layers"),
        ("qwen2_5_vl", {"vision_config.fullatt_block_indexes": [1, 2]}, "", "InconsistentError.*fullatt"),
    ],
)  # fmt: skip
def test_an_images_side_that_is_not_what_its_config_says(
    name: str, config: dict[str, Any], drop: str, error: str, tmp_path: Path
) -> None:
    home = model_that_lies(name, tmp_path, config, drop)
    with pytest.raises(zckpt.ZckptError) as found:
        zckpt.to_gguf(home, tmp_path / "x.gguf", mmproj=True, progress=False)
    assert re.search(error, f"{type(found.value).__name__} {found.value}", re.DOTALL)
    assert not (tmp_path / "x.gguf").exists()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits  # type: ignore[no-any-return]


def test_it_comes_back(family: tuple[str, Path, Any], tmp_path: Path) -> None:
    """The logits are the same from the directory that zckpt makes of it again, and `verify` agrees in both directions."""
    name, model, truth = family
    kind = transformers.AutoModelForCausalLM
    wanted = logits(kind.from_pretrained(model, dtype=torch.float32))
    zckpt.to_gguf(model, tmp_path / "x.gguf", type="f32", pre_tokenizer=truth["pre"], progress=False)
    assert zckpt.verify(model, tmp_path / "x.gguf").ok
    zckpt.convert(tmp_path / "x.gguf", tmp_path / "back", progress=False)
    assert zckpt.verify(tmp_path / "x.gguf", tmp_path / "back").ok
    again, info = kind.from_pretrained(tmp_path / "back", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    if name.startswith("gemma"):  # a norm that one was added to and taken from lost bits
        assert torch.allclose(logits(again), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(again), wanted)
        before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
        assert {n: t.float().numpy().tobytes() for n, t in before.items()} == {
            n: t.numpy().tobytes() for n, t in after.items()
        }


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "gemma3"])
def test_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """By its own reader, which knows no biases and no scaled rotary embeddings of Llama, and no scale of Gemma's queries."""
    kind = transformers.AutoModelForCausalLM
    model = FIXTURES / name / "model"
    if name == "llama":
        config = transformers.AutoConfig.from_pretrained(model, attention_bias=False)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
        plain = kind.from_config(config)
        plain.load_state_dict(load_file(model / "model.safetensors"), strict=False)
        plain.save_pretrained(tmp_path / "plain")
        model = tmp_path / "plain"
    wanted = kind.from_pretrained(model, dtype=torch.float32)
    own = {"tokenizer": FIXTURES / name / "model", "pre_tokenizer": "llama-bpe" if name == "llama" else "qwen2"}
    zckpt.to_gguf(model, tmp_path / "x.gguf", type="f32", progress=False, **own)
    theirs = kind.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    if name.startswith("gemma"):
        held = theirs.state_dict()
        assert all(torch.allclose(held[n], t, rtol=0, atol=1e-6) for n, t in wanted.state_dict().items())
    else:
        assert torch.equal(logits(theirs), logits(wanted))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*.gguf")), ids=lambda path: path.name)
def test_the_converters_own_files_are_read(path: Path, tmp_path: Path) -> None:
    """Every number is the one that the gguf package reads, under transformers' names."""
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    own = zckpt.open_checkpoint(path, framework="pt")
    for tensor in reader.tensors:
        wanted = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(own[tensor.name].shape))
        assert torch.equal(own[tensor.name].float(), wanted), tensor.name
    found = zckpt.inspect_checkpoint(path).as_json()
    assert found["layout"] == "gguf" and found["exportable"]["ok"], found
    zckpt.convert(path, tmp_path / "out", dtype="fp32", progress=False)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(path.parent / "model" / "model.safetensors")
    assert weights.keys() == truth.keys()
    for name, tensor in truth.items():
        error = (weights[name] - tensor.float()).abs().max() / tensor.float().abs().max()
        assert error < (0.005 if "q8_0" in path.name else 0.003), name
    assert zckpt.verify(path, tmp_path / "out").ok


def test_the_names_are_those_of_the_package() -> None:
    """The scheme's names against the package's tables, for the names that transformers has."""
    own = {r.names[0].removesuffix(".weight").removesuffix(".bias"): r.parts for r in scheme("gguf").rules if r.parts}
    seen = set()
    for kind, architecture in ARCHITECTURES.items():
        number = next(a for a, name in __import__("gguf").MODEL_ARCH_NAMES.items() if name == architecture)
        assert isinstance(number, MODEL_ARCH)
        table = get_tensor_name_map(number, 2)
        hub = "hf-" + {"gemma3_text": "gemma3"}.get(kind, kind.replace("_", "-"))
        for rule in scheme(hub).rules:
            for name in rule.names if rule.parts and len(rule.parts) == 1 else ():
                plain = (
                    name.replace("{b}", "1")
                    .replace(".experts.{e}.", ".experts.")
                    .removesuffix(".weight")
                    .removesuffix(".bias")
                )
                found = table.get_name(plain)
                if found is None:
                    continue
                template = found.replace("blk.1.", "blk.{b}.")
                assert {p.rpartition(".")[0] for p in rule.parts} == {p.rpartition(".")[0] for p in own[template]}, name
                seen.add(template)
    assert len(seen) == len(own) - 0, own.keys() - seen


# ---- what transformers would say, without it --------------------------------------------------------------------------

SIZES = {"hidden_size": 96, "num_attention_heads": 6}
SAID: list[dict[str, Any]] = [
    {}, {"head_dim": 8, "num_key_value_heads": 3}, {"sliding_window": 77}, {"sliding_window": 77, "use_sliding_window": True},
    {"rope_theta": 5.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": None, "rope_parameters": None},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 7.0}, {"num_experts": 9}, {"rope_local_base_freq": 3.0},
    {"rope_parameters": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, {"final_logit_softcapping": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(kind: str) -> None:
    for said in SAID:
        own = {**SIZES, **json.loads(json.dumps(said))}
        theirs = transformers.AutoConfig.for_model(
            kind, **({"text_config": own} if kind == "gemma3" else own)
        ).to_dict()
        theirs = {**theirs, **theirs.get("text_config", {})}
        given = {**SIZES, **said}
        ours = filled_in({"model_type": kind, **({"text_config": given} if kind == "gemma3" else given)}, "x")
        for key in (gguf_keys._NUMBERS & theirs.keys()) | {"rope_parameters", "model_type"}:
            assert ours.get(key) == theirs.get(key), (said, key)
    with pytest.raises(zckpt.UnsupportedError, match="no usable hidden_size"):
        filled_in({"model_type": kind, "hidden_size": "x", "text_config": {"hidden_size": 0}}, "x")


def pieces(home: Path) -> None:
    """A sentencepiece vocabulary as a tokenizer.json, as Llama 2's or Mistral's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=numbers, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool> \u2581x"])
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    said = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "pad_token": None,
    }
    (home / "tokenizer_config.json").write_text(json.dumps(said))


def changed(home: Path, file: str, **more: Any) -> None:
    said = json.loads((home / file).read_text()) if (home / file).is_file() else {}
    (home / file).write_text(json.dumps({**said, **more}))


@pytest.mark.parametrize("kind", ["pieces", "llama", "qwen2"])
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.naming import gguf_vocabulary

    home, text = tmp_path / "model", "Hello  world, it's 1234 \U0001f600\n\n  <|im_start|>x! na\u00efve"
    pieces(home) if kind == "pieces" else shutil.copytree(FIXTURES / kind / "model", home)
    (home / "config.json").unlink(missing_ok=True)  # by which transformers takes Qwen2's own rules for what they are
    asked: list[Path] = []
    real = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda path, **more: (asked.append(path), real(path, **more))[1]
    )

    def both(*, by_itself: bool = True) -> None:
        asked.clear()
        ours = tokens_of(home)
        assert bool(asked) != by_itself
        compare(ours, tokens_of(home, alone=False))

    def compare(ours: Tokens, theirs: Tokens) -> None:
        assert ours.numbers == theirs.numbers and ours.base == theirs.base and ours.special == theirs.special
        told, wanted = (
            {number: [getattr(token, key) for key in gguf_vocabulary._TOLD] for number, token in side.added.items()}
            for side in (ours, theirs)
        )
        assert told == wanted
        assert kind == "pieces" or ours.encode(text) == theirs.encode(text)
        for token in ours.added.values():
            assert token.normalized or ours.shown(token.content) == theirs.shown(token.content)

    both()
    with monkeypatch.context() as patch:  # with all tokens at once
        patch.setattr(gguf_vocabulary, "_in_parts", lambda said, special: None)
        both()
    changed(home, "added_tokens.json", **{next(t.content for t in tokens_of(home).added.values()): 10_000})
    asked.clear()
    tokens_of(home)
    assert asked
    (home / "added_tokens.json").unlink()
    changed(home, "tokenizer_config.json", additional_special_tokens=["<new>"])
    both(by_itself=False)
    changed(home, "tokenizer_config.json", additional_special_tokens=[], tokenizer_class="Unheard")
    asked.clear()
    tokens_of(home)
    assert asked
    last = max(tokens_of(home).added)
    token = {
        "content": "<more>",
        "special": False,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    changed(
        home, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder={last + 1: token}
    )
    both(by_itself=False)


def test_neither_transformers_nor_torch_is_imported(tmp_path: Path) -> None:
    """They would take ten times the memory of everything else."""
    model = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama" / "model", model)
    program = (
        "import sys, zckpt\n"
        "zckpt.to_gguf(sys.argv[1], sys.argv[2], pre_tokenizer='llama-bpe', progress=False)\n"
        "zckpt.to_gguf(sys.argv[3], sys.argv[4], progress=False)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    arguments = [model, tmp_path / "x.gguf", FIXTURES / "mistral" / "model", tmp_path / "y.gguf"]
    subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True)
