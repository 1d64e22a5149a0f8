"""Every stored checkpoint of real DeepSpeed, in every output form, read back by the real libraries: equal to the truth."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import proofs
import pytest
import torch
from safetensors.torch import load_file
from truths import how_of, kept_of

import zckpt

FIXTURES = sorted(path.parent for path in (Path(__file__).parents[2] / "fixtures").glob("*/*/how.json"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.fixture(params=FIXTURES, ids=name_of)
def fixture(request: pytest.FixtureRequest) -> Path:
    return request.param


def expected(path: Path, dtype: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    how = how_of(path)
    out = {}
    for name, tensor in kept_of(path).items():
        if tensor.is_floating_point() and how["roles"].get(name) != "buffer":
            tensor = tensor.to(DTYPES[dtype])
        elif dtype == "fp32" and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        out[strip(name)] = tensor
    return out, {strip(dropped): strip(kept) for dropped, kept in how["aliases"].items()}


def strip(name: str) -> str:
    return name.replace("_orig_mod.", "")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def test_there_are_fixtures() -> None:
    families = {path.parent.name for path in FIXTURES}
    assert families >= {"zero0", "zero1", "zero2", "zero3", "bf16_optimizer", "transformers"}
    assert len(FIXTURES) >= 30


def named(value: object) -> str:
    return name_of(value) if isinstance(value, Path) else str(value)


@proofs.MORE
@pytest.mark.parametrize(("fixture", "dtype"), proofs.in_turn(FIXTURES, ("fp32", "bf16", "fp16")), ids=named)
def test_one_safetensors_file(fixture: Path, dtype: str, tmp_path: Path) -> None:
    wanted, aliases = expected(fixture, dtype)
    zckpt.convert(fixture / "checkpoint", tmp_path / "out.safetensors", dtype=dtype)
    assert_same(load_file(tmp_path / "out.safetensors"), wanted)
    import safetensors

    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert {k: v for k, v in metadata.items() if k != "format"} == aliases


@proofs.MORE
@pytest.mark.parametrize(("fixture", "dtype"), proofs.in_turn(FIXTURES, ("fp32", "bf16")), ids=named)
def test_one_torch_file(fixture: Path, dtype: str, tmp_path: Path) -> None:
    wanted, aliases = expected(fixture, dtype)
    zckpt.convert(fixture / "checkpoint", tmp_path / "out.bin", dtype=dtype)
    wanted.update({dropped: wanted[kept] for dropped, kept in aliases.items()})
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "out.bin", weights_only=True, mmap=mmap)
        assert_same(loaded, wanted)
        for dropped, kept in aliases.items():
            assert loaded[dropped].data_ptr() == loaded[kept].data_ptr()
    assert zipfile.ZipFile(tmp_path / "out.bin").testzip() is None


@proofs.MORE
@pytest.mark.parametrize(("fixture", "container"), proofs.in_turn(FIXTURES, ("safetensors", "bin")), ids=named)
def test_sharded_directory(fixture: Path, container: str, tmp_path: Path) -> None:
    wanted, aliases = expected(fixture, "fp32")
    options = zckpt.Options(format=container, max_shard_size=600)
    report = zckpt.convert(fixture / "checkpoint", tmp_path / "out", options=options)
    index = next((tmp_path / "out").glob("*.index.json"), None)
    shards = [path for path, _ in report.files if path.endswith((".safetensors", ".bin"))]
    assert (index is not None) == (len(shards) > 1)
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        path = tmp_path / "out" / shard
        found |= load_file(path) if container == "safetensors" else torch.load(path, weights_only=True)
    if index is not None:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map.keys() == found.keys()
    if container == "bin":
        wanted.update({dropped: wanted[kept] for dropped, kept in aliases.items()})
    assert_same(found, wanted)


def test_the_reference_engine_writes_the_same_bytes(fixture: Path, tmp_path: Path) -> None:
    from zckpt.engine.move import run
    from zckpt.jobs.convert import prepare
    from zckpt.jobs.declarations import CONVERT

    for engine in ("native", "reference"):
        (tmp_path / engine).mkdir()
        prepared = prepare(str(fixture / "checkpoint"), str(tmp_path / "out.bin"), CONVERT.ask())
        run(prepared.plan, str(tmp_path / engine), engine=engine)
    assert (tmp_path / "native" / "out.bin").read_bytes() == (tmp_path / "reference" / "out.bin").read_bytes()


TRANSFORMERS = [path for path in FIXTURES if path.parent.name == "transformers"]


@pytest.mark.parametrize("path", TRANSFORMERS, ids=name_of)
def test_from_pretrained_gives_the_live_logits(path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    how = json.loads((path / "how.json").read_text())
    classes = {
        "llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel,
        "t5": transformers.T5ForConditionalGeneration, "bert": transformers.BertForMaskedLM,
    }  # fmt: skip
    stored = load_file(path / "logits.safetensors")
    half = json.loads((path / "checkpoint" / "config.json").read_text())["dtype"] == "bfloat16"
    zckpt.convert(path / "checkpoint", tmp_path / "out", dtype="bf16" if half else "fp32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if half else "float32")
    model, info = classes[how["model"]].from_pretrained(tmp_path / "out", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = stored["input_ids"]
    extra = {"decoder_input_ids": tokens} if how["model"] == "t5" else {}
    # The same weights in a fresh model on this machine: equal to the last bit. The stored logits may come from a
    # processor with other kernels: equal within rounding.
    wanted, aliases = expected(path, "bf16" if half else "fp32")
    fresh = classes[how["model"]](type(model.config).from_pretrained(path / "checkpoint"))
    fresh = fresh.to(model.dtype).eval()
    fresh.load_state_dict(wanted | {dropped: wanted[kept] for dropped, kept in aliases.items()}, strict=False)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, **extra).logits.float()
        assert torch.equal(logits, fresh(input_ids=tokens, **extra).logits.float())
    assert torch.allclose(logits, stored["logits"], atol=2e-2 if half else 1e-5)


WITH_ZERO = [path for path in FIXTURES if path.parent.name in ("zero1", "zero2", "zero3")]


@pytest.mark.parametrize("path", WITH_ZERO, ids=name_of)
def test_same_as_deepspeeds_own_script(path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as theirs

        try:
            wanted = theirs(str(path / "checkpoint"))
        except (RuntimeError, AttributeError) as error:
            # Where theirs fails and ours does not: it maps torch's older file form into memory, and imports the classes
            # of the user's client state.
            failures = {"legacy_w2": "mmap", "client_state_w2": "Can't get attribute"}
            assert failures.get(path.name, "none is expected here") in str(error)
            return
    found = zckpt.get_fp32_state_dict_from_zero_checkpoint(str(path / "checkpoint"))
    how = json.loads((path / "how.json").read_text())
    for name, tensor in wanted.items():
        if how["stage"] == 1 and how["roles"].get(name) == "frozen":
            continue
        assert torch.equal(found[strip(name)], tensor.float() if tensor.is_floating_point() else tensor), name
