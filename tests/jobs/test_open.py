"""Opening: whole tensors and rows of them, as torch and as numpy, are the truth's bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import save_file
from scikit_build_core.metadata.regex import dynamic_metadata
from truths import how_of, kept_of

import zckpt

FIXTURES = [
    how.parent
    for how in sorted(Path(__file__).parents[2].joinpath("fixtures").glob("*/*/how.json"))
    if (how.parent / "truth.safetensors").exists()
]
fixtures = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: f"{path.parent.name}/{path.name}")


def as_fp32(tensor):
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def truth_of(fixture):
    """Every name of the truth, tied ones included."""
    truth = kept_of(fixture)
    return {**truth, **{dropped: truth[kept] for dropped, kept in how_of(fixture)["aliases"].items() if kept in truth}}


@fixtures
def test_every_tensor(fixture):
    truth = truth_of(fixture)
    with zckpt.open_checkpoint(fixture / "checkpoint", how_of(fixture)["tag"]) as checkpoint:
        assert set(checkpoint) == set(truth)
        assert len(checkpoint) == len(truth)
        for name, tensor in truth.items():
            assert same_bits(as_fp32(checkpoint[name]), as_fp32(tensor)), name


@fixtures
def test_as_numpy(fixture):
    truth = truth_of(fixture)
    checkpoint = zckpt.open_checkpoint(fixture / "checkpoint", how_of(fixture)["tag"], framework="np")
    for name, tensor in truth.items():
        if checkpoint.catalog[name].dtype.numpy:
            assert same_bits(as_fp32(torch.as_tensor(checkpoint[name])), as_fp32(tensor)), name
        else:
            with pytest.raises(zckpt.UsageError):
                checkpoint[name]


@fixtures
def test_rows(fixture):
    checkpoint = zckpt.open_checkpoint(fixture / "checkpoint", how_of(fixture)["tag"])
    for name, tensor in truth_of(fixture).items():
        if tensor.dim():
            part = checkpoint.get_slice(name)
            assert part.get_shape() == list(tensor.shape)
            for index in (slice(1, 3), slice(None, None, 2), slice(-1, None), slice(0, 0)):
                assert same_bits(as_fp32(part[index]), as_fp32(tensor[index])), (name, index)
            if tensor.shape[0]:
                assert same_bits(as_fp32(part[-1]), as_fp32(tensor[-1])), name


@pytest.mark.parametrize(
    "index", [0, -1, slice(2, 5), slice(None, None, 3), slice(9, 2), (slice(1, 4), 2), (3, slice(1, 3)), ..., (..., 1)]
)
def test_slices_of_plain_weights(tmp_path, index):
    tensor = torch.randn(7, 4)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    part = zckpt.open_checkpoint(tmp_path).get_slice("a")
    assert part.get_dtype() == "F32"
    assert same_bits(part[index], tensor[index])


def test_an_index_outside(tmp_path):
    save_file({"a": torch.randn(7, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(IndexError):
        zckpt.open_checkpoint(tmp_path).get_slice("a")[7]


def test_a_name_that_is_not_there(tmp_path):
    save_file({"model.a.weight": torch.ones(2), "model.b.weight": torch.ones(2)}, tmp_path / "w.safetensors")
    checkpoint = zckpt.open_checkpoint(tmp_path / "w.safetensors")
    for ask in (checkpoint.__getitem__, checkpoint.get_tensor, checkpoint.get_slice):
        with pytest.raises(KeyError) as error:
            ask("model.a.wieght")
        assert isinstance(error.value, zckpt.UsageError)
        assert "'model.a.wieght'" in str(error.value) and "'model.a.weight'" in str(error.value)
        assert "w.safetensors" in str(error.value)
    assert checkpoint.get("c") is None and "c" not in checkpoint


def test_importing_zckpt_imports_nothing_heavy():
    code = (
        "import sys, zckpt; print([m for m in ('torch', 'numpy', 'typer', 'tqdm', 'safetensors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_public_names():
    assert all(hasattr(zckpt, name) for name in zckpt.__all__)
    assert set(zckpt.__all__) <= set(dir(zckpt))
    # as the build does
    found = dynamic_metadata("version", {"input": str(Path(zckpt.__file__).parent / "base" / "version.py")})
    assert found == zckpt.__version__
    with pytest.raises(AttributeError):
        zckpt.nothing_of_this_name  # noqa: B018
