"""What was trained beside adapters is in the merged model, or an error names it; copies of the base's tensors do not count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import synth
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import zckpt
from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.cli import app
from zckpt.jobs.options import LoraMerge, Options

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

QV = {"target_modules": ["q_proj", "v_proj"], "r": 2}
PROJECTOR = "model.projector"
WEIGHTS = "model.safetensors"


def tiny(**more: Any) -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **more))


def run(home: Path, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A base model on disk, the live PEFT model with a projector that the base lacks, and the tensors that it trains."""
    torch.manual_seed(3)
    base = tiny()
    base.save_pretrained(home / "base")
    base.model.projector = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    model = peft.get_peft_model(base, peft.LoraConfig(**{**QV, "init_lora_weights": False, **config}))
    for name, parameter in model.named_parameters():
        if "projector" in name:
            parameter.requires_grad_(True)
    return model, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def saved(home: Path, how: str, model: Any, trained: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of the run, without frozen parameters where its form allows that."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if "projector" in name}
    if how == "zero2":
        synth.zero12(home / "run", [trained], 2, buffers=buffers)
    elif how == "zero3":
        synth.zero3(home / "run", [trained], 2, buffers=buffers)
    else:
        state = model.state_dict() if how == "whole state" else {**trained, **buffers}
        torch.distributed.checkpoint.save({"model": state}, checkpoint_id=home / "run")
    model.peft_config["default"].save_pretrained(home / "run")
    return home / "run"


@pytest.mark.parametrize("how", ["zero2", "zero3", "trained alone", "whole state"])
def test_a_module_that_the_base_lacks(how: str, tmp_path: Path) -> None:
    model, trained = run(tmp_path)
    lora = LoraMerge(base=tmp_path / "base")
    checkpoint = saved(tmp_path, how, model, trained)
    report = zckpt.convert(checkpoint, tmp_path / "out", dtype="fp32", options=Options(lora=lora))
    assert any(PROJECTOR in note and "trained beside" in note for note in report.notes)
    assert not any("tied" in note for note in report.notes)
    found = load_file(tmp_path / "out" / WEIGHTS)
    merged = model.merge_and_unload().state_dict()
    assert found.keys() == merged.keys() - {"lm_head.weight"} | ({"lm_head.weight"} & found.keys())
    for name, tensor in merged.items():
        if name.startswith(PROJECTOR):
            assert torch.equal(found[name], tensor.float() if tensor.is_floating_point() else tensor), name
    assert zckpt.verify(checkpoint, tmp_path / "out", lora=lora).ok


def test_verify_names_what_an_output_lacks(tmp_path: Path) -> None:
    model, trained = run(tmp_path)
    lora = LoraMerge(base=tmp_path / "base")
    checkpoint = saved(tmp_path, "zero2", model, trained)
    zckpt.convert(checkpoint, tmp_path / "out", dtype="fp32", options=Options(lora=lora, exclude=["*projector*"]))
    manifest = json.loads((tmp_path / "out" / "zckpt.json").read_text())
    del manifest["options"]["exclude"]  # as a program would write it that forgot them
    (tmp_path / "out" / "zckpt.json").write_text(json.dumps(manifest))
    found = zckpt.verify(checkpoint, tmp_path / "out", lora=lora)
    text = "\n".join(found.lines())
    assert not found.ok and all(
        name.removeprefix("base_model.model.") in text for name in trained if "projector" in name
    )


def test_a_tensor_of_the_base_under_another_name(tmp_path: Path) -> None:
    """Written beside it, it would leave the base's untrained one where loaders look."""
    model, trained = run(tmp_path)
    weights = load_file(tmp_path / "base" / WEIGHTS)
    weights |= {f"projector.0.{end}": torch.zeros(size) for end, size in (("weight", (16, 16)), ("bias", (16,)))}
    save_file(weights, tmp_path / "base" / WEIGHTS, {"format": "pt"})
    options = Options(lora=LoraMerge(base=tmp_path / "base"))
    checkpoint = saved(tmp_path, "zero2", model, trained)
    with pytest.raises(InconsistentError, match=rf"{PROJECTOR}\.0\.(.*\n)*.*'projector\.0\."):
        zckpt.convert(checkpoint, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def test_other_numbers_in_a_checkpoint_of_everything(tmp_path: Path) -> None:
    """Such a checkpoint does not say what was frozen; that is told by its numbers, in whatever precision."""
    model, trained = run(tmp_path)
    lora = Options(lora=LoraMerge(base=tmp_path / "base"))
    checkpoint = saved(tmp_path, "whole state", model.bfloat16().float(), trained)
    with pytest.raises(InconsistentError, match="does not say whether it trained"):
        zckpt.convert(checkpoint, tmp_path / "out", options=lora)
    shutil.rmtree(checkpoint)
    half = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "base" / WEIGHTS).items()}
    save_file(half, tmp_path / "base" / WEIGHTS, {"format": "pt"})
    saved(tmp_path, "whole state", model, trained)
    zckpt.convert(checkpoint, tmp_path / "out", options=lora)
    shutil.rmtree(checkpoint)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.norm.weight")[3] += 1
    saved(tmp_path, "whole state", model, trained)
    with pytest.raises(InconsistentError, match=r"'model\.norm\.weight'"):
        zckpt.convert(checkpoint, tmp_path / "other", options=lora)


def beside(home: Path, model: Any, trained: dict[str, torch.Tensor], file: str) -> Path:
    model.save_pretrained(home / "adapter")
    tensors = {name: tensor for name, tensor in trained.items() if "projector" in name}
    (save_file if file.endswith(".safetensors") else torch.save)(tensors, home / "adapter" / file)
    return home / "adapter"


@pytest.mark.parametrize(
    "file", ["non_lora_trainables.bin", "vit.safetensors", "something.safetensors", "something.npz"]
)
def test_files_beside_an_adapter(file: str, tmp_path: Path) -> None:
    model, trained = run(tmp_path)
    adapter = beside(tmp_path, model, trained, file)
    for number, (path, lora) in enumerate(
        ((tmp_path / "base", LoraMerge(adapters=[adapter])), (adapter, LoraMerge(base=tmp_path / "base")))
    ):
        report = zckpt.convert(path, tmp_path / f"{number}", dtype="fp32", options=Options(lora=lora))
        found = load_file(tmp_path / f"{number}" / WEIGHTS)
        if "something" in file:
            assert any(file in note and "not read" in note for note in report.notes)
            assert not any("projector" in name for name in found)
            continue
        for name, tensor in trained.items():
            if "projector" in name:
                assert torch.equal(found[name.removeprefix("base_model.model.")], tensor)
        assert zckpt.verify(path, tmp_path / f"{number}", lora=lora).ok
    if "something" in file:
        return
    with pytest.raises(UsageError, match="trained whole"):
        lora = LoraMerge(adapters=[f"{adapter}:0.5"])
        zckpt.convert(tmp_path / "base", tmp_path / "half", options=Options(lora=lora))
    tensors = {"base_model.model.model.vision.lora_A.weight": torch.ones(2, 16)}
    (save_file if file.endswith(".safetensors") else torch.save)(tensors, adapter / file)
    with pytest.raises(UnsupportedError, match="vision"):
        zckpt.convert(adapter, tmp_path / "more", options=Options(lora=LoraMerge(base=tmp_path / "base")))


def test_directories_below_an_adapter(tmp_path: Path) -> None:
    """PEFT's further adapters are named; weights that were trained beside one are not left out."""
    model, trained = run(tmp_path)
    model.add_adapter("policy", peft.LoraConfig(**QV, init_lora_weights=False))
    adapter = beside(tmp_path, model, trained, "vit.safetensors")
    assert (adapter / "policy" / "adapter_model.safetensors").is_file()
    for path, lora in (
        (tmp_path / "base", LoraMerge(adapters=[adapter])),
        (adapter, LoraMerge(base=tmp_path / "base")),
    ):
        report = zckpt.convert(path, tmp_path / "out", options=Options(lora=lora, overwrite=True))
        assert any("'policy/'" in note and "--adapter" in note for note in report.notes), report.notes
        (adapter / "more").mkdir(exist_ok=True)
        shutil.copy(adapter / "vit.safetensors", adapter / "more")
        with pytest.raises(UnsupportedError, match=r"more/vit\.safetensors"):
            zckpt.convert(path, tmp_path / "other", options=Options(lora=lora))
        shutil.rmtree(adapter / "more")
    merged = zckpt.convert(
        tmp_path / "base", tmp_path / "two", options=Options(lora=LoraMerge(adapters=[adapter / "policy"]))
    )
    assert "'policy'" in merged.notes[0]


@pytest.mark.parametrize(
    ("tool", "initial", "converted"),
    [("llamafactory", "out/pissa_init", "out/pissa_converted"), ("swift", "initial_model", "out/converted/default")],
)
def test_trees_of_pissa(tool: str, initial: str, converted: str, tmp_path: Path) -> None:
    """Only the converted adapter belongs to the base; the others, whose configs may not say so, lead to it."""
    torch.manual_seed(0)
    base = tiny()
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**QV, init_lora_weights="pissa"))
    out, config = tmp_path / "out", model.peft_config["default"]

    def save(path: Path, **more: Any) -> None:
        config.init_lora_weights = True
        model.save_pretrained(path, **more)
        config.init_lora_weights = "pissa"

    save(tmp_path / initial)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(out)
    if tool == "llamafactory":
        save(out / "pissa_backup")
    model.save_pretrained(tmp_path / converted, path_initial_model_for_weight_conversion=str(tmp_path / initial))
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(tmp_path / converted, tmp_path / "merged", dtype="fp32", options=Options(lora=lora))
    found = load_file(tmp_path / "merged" / WEIGHTS)
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    others = [out, *(home for home in (tmp_path / initial, out / "pissa_backup") if home.is_dir())]
    for other in others:
        with pytest.raises(UnsupportedError, match="changed when it was made") as error:
            zckpt.convert(other, tmp_path / "no", options=Options(lora=lora))
        leads = other.name != "initial_model"
        assert (converted in error.value.remedy) == leads


def test_what_a_run_of_another_checkpoint_trained(tmp_path: Path) -> None:
    model, trained = run(tmp_path)
    checkpoint = saved(tmp_path, "zero2", model, trained)
    lora = LoraMerge(adapters=[checkpoint])
    zckpt.convert(tmp_path / "base", tmp_path / "out", dtype="fp32", options=Options(lora=lora))
    found = load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in trained.items():
        if "projector" in name:
            assert torch.equal(found[name.removeprefix("base_model.model.")], tensor)


COPIES: list[tuple[list[list[str]], list[float], bool]] = [
    ([["q_proj", "lm_head"]], [0.5], False),
    ([["q_proj", "lm_head"]], [0.5], True),
    ([["embed_tokens", "v_proj"]], [-2], False),
    ([["lm_head", "q_proj"], ["lm_head"]], [1, 1], False),
]


@pytest.mark.parametrize(("targets", "weights", "tied"), COPIES)
def test_copies_of_the_base_beside_a_lora(
    targets: list[list[str]], weights: list[float], tied: bool, tmp_path: Path
) -> None:
    """PEFT saves `lm_head.base_layer.weight` with a LoRA of the head; merged as PEFT merges, for any weights."""
    torch.manual_seed(0)
    base = tiny(tie_word_embeddings=tied)
    base.bfloat16().save_pretrained(tmp_path / "base")
    names = [f"adapter{number}" for number in range(len(targets))]
    model: Any = None
    for name, modules in zip(names, targets, strict=True):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
        if model is None:
            model = peft.get_peft_model(base.float(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model.save_pretrained(tmp_path)
    for name, weight in zip(names, weights, strict=True):
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer) and name in module.scaling:
                module.set_scale(name, weight)
    wanted = model.merge_and_unload(adapter_names=names).state_dict()
    if tied:  # there PEFT changes both, and the head alone was trained
        wanted["model.embed_tokens.weight"] = load_file(tmp_path / "base" / WEIGHTS)[
            "model.embed_tokens.weight"
        ].float()
    lora = LoraMerge(adapters=[f"{tmp_path / name}:{weight}" for name, weight in zip(names, weights, strict=True)])
    zckpt.convert(tmp_path / "base", tmp_path / "out", dtype="fp32", options=Options(lora=lora))
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-6, atol=1e-7) for name in found)
    file = tmp_path / names[-1] / "adapter_model.safetensors"
    other = load_file(file)
    [copy] = [name for name in other if "base_layer" in name]
    other[copy][1, 2] += 1
    save_file(other, file)
    if weights == [1, 1]:  # of two, the one that is not a copy counts
        zckpt.convert(tmp_path / "base", tmp_path / "other", dtype="fp32", options=Options(lora=lora))
        return
    with pytest.raises(UsageError, match="trained whole"):
        zckpt.convert(tmp_path / "base", tmp_path / "other", options=Options(lora=lora))


def test_a_dry_run_says_what_becomes_of_each_trained_tensor(tmp_path: Path) -> None:
    """A LoRA is merged, a module is written, tokens replace rows, a copy of the base's is left out; nothing is written."""
    model, trained = run(tmp_path, trainable_token_indices=[3, 1], modules_to_save=["model.norm"])
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if "norm.modules_to_save" in name).add_(1)
    adapter = beside(tmp_path, model, trained, "vit.safetensors")
    file = adapter / "adapter_model.safetensors"
    copy = "base_model.model.lm_head.weight"
    save_file({**load_file(file), copy: load_file(tmp_path / "base" / WEIGHTS)["lm_head.weight"]}, file)
    words = [
        "to-fp32",
        str(adapter),
        str(tmp_path / "out"),
        "--merge-lora",
        "--base",
        str(tmp_path / "base"),
        "--dry-run",
    ]
    rows = {one["name"]: one for one in json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["trained"]}
    names = {*load_file(file), *(name.removeprefix("base_model.model.") for name in trained if "projector" in name)}
    assert rows.keys() == names
    for name, row in rows.items():
        own = name.removeprefix("base_model.model.")
        module = own.partition(".lora_")[0].partition(".token_adapter")[0].removesuffix(".weight")
        use = "merged" if ".lora_" in own else "rows" if "tokens" in own else "left out" if name == copy else "whole"
        into = [] if name == copy else [own if "projector" in own else f"{module}.weight"]
        assert (row["use"], row["to"], row["adapter"]) == (use, into, "adapter"), row
    said = CliRunner().invoke(app, words, env={"COLUMNS": "300"}).stdout.splitlines()
    [line] = [line for line in said if line.startswith(f"  {copy}  ")]
    assert line.endswith("is left out, since the run did not train it, and the base model has it")
    assert not (tmp_path / "out").exists()
