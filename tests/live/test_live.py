"""Loading into live models: whatever their dtypes, strides, ties and devices, they end up with the cast truth."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import proofs
import pytest
import torch
from bits import same_bits
from hangs import HANG_S
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from truths import how_of, kept_of

from zckpt import live
from zckpt.base.errors import InconsistentError, OutputError, UnsupportedError, UsageError
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.live.carry import fill

FIXTURES = [
    how.parent
    for how in sorted(Path(__file__).parents[2].joinpath("fixtures").glob("*/*/how.json"))
    if (how.parent / "truth.safetensors").exists()
]


def named(value):
    return (
        f"{value.parent.name}/{value.name}"
        if isinstance(value, Path)
        else {True: "strided", False: "dense"}.get(value, str(value))
    )


fixtures = pytest.mark.parametrize("fixture", FIXTURES, ids=named)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def blank(tensor, dtype, strided):
    """A tensor of the same shape with other numbers and, if asked for, elements that are not in row-major order."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if not strided or not tensor.dim():
        return torch.full(tensor.shape, 1, dtype=dtype)
    roomy = [2 * dim + 1 for dim in tensor.shape]
    return torch.full(roomy, 1, dtype=dtype)[tuple(slice(1, None, 2) for _ in roomy)]


def model_of(truth, buffers=(), dtype=torch.float32, strided=False):
    model = torch.nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        value = blank(tensor, dtype, strided)
        if name in buffers or not tensor.is_floating_point():
            module.register_buffer(leaf, value)
        else:
            module.register_parameter(leaf, torch.nn.Parameter(value))
    return model


def assert_loaded(model, truth):
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, truth[name].to(tensor.dtype)), name


@pytest.fixture
def plain(tmp_path):
    """Loads a state dict that was saved as plain weights."""

    def save(state):
        save_file(state, tmp_path / "model.safetensors")
        return open_catalog(str(tmp_path)).catalog

    return save


@pytest.fixture
def state():
    return {
        "a.weight": torch.randn(33, 17),
        "a.bias": torch.randn(33),
        "conv.weight": torch.randn(4, 3, 5, 2),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "steps": torch.arange(9),
        "mask": torch.tensor([True, False, True]),
    }


@proofs.MORE
@pytest.mark.parametrize(
    ("fixture", "dtype", "strided"), proofs.in_turn(FIXTURES, tuple(FLOATS), (False, True)), ids=named
)
def test_fixtures(fixture, dtype, strided):
    how = how_of(fixture)
    truth = kept_of(fixture)
    truth |= {dropped: truth[kept] for dropped, kept in (how.get("aliases") or {}).items() if kept in truth}
    buffers = [name for name, role in (how.get("roles") or {}).items() if role == "buffer"]
    model = model_of(truth, buffers, dtype, strided)
    with warnings.catch_warnings():
        if dtype == torch.float16:
            warnings.filterwarnings("ignore", "Numbers too large")
        report = live.load_into(model, open_catalog(str(fixture / "checkpoint"), Reading(tag=how.get("tag"))).catalog)
    assert report == live.LoadReport((), ())
    assert_loaded(model, truth)


@pytest.mark.parametrize("path", ["dense", "strided", "device"])
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_casts(plain, state, monkeypatch, source, target, path):
    if path == "device":
        monkeypatch.setattr(live.loading, "is_direct", lambda tensor: False)
        monkeypatch.setattr(live.loading, "BUFFER_BYTES", 256)
    state = {name: tensor.to(source) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    model = model_of(state, dtype=target, strided=path == "strided")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert live.load_into(model, plain(state)) == live.LoadReport((), ())
    assert_loaded(model, state)
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def test_casts_that_only_torch_does(plain):
    catalog = plain({"a": torch.tensor([1.0, 2.5, 3.0]), "n": torch.tensor([3, 0, 1])})
    model = torch.nn.Module()
    model.register_buffer("a", torch.zeros(3, dtype=torch.float8_e4m3fn))
    model.register_buffer("n", torch.zeros(3, dtype=torch.float32))
    live.load_into(model, catalog)
    assert model.a.float().tolist() == [1.0, 2.5, 3.0]
    assert model.n.tolist() == [3.0, 0.0, 1.0]


def test_channels_last_and_transposed(plain):
    state = {"conv": torch.randn(4, 3, 5, 2), "linear": torch.randn(6, 9)}
    model = torch.nn.Module()
    model.register_parameter("conv", torch.nn.Parameter(torch.zeros(4, 3, 5, 2).to(memory_format=torch.channels_last)))
    model.register_parameter("linear", torch.nn.Parameter(torch.zeros(9, 6).t()))
    live.load_into(model, plain(state))
    assert_loaded(model, state)
    assert model.conv.is_contiguous(memory_format=torch.channels_last)


def test_gradients_are_left_alone(plain):
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model.weight.grad.clone()
    live.load_into(model, plain({"weight": torch.randn(2, 3), "bias": torch.randn(2)}))
    assert model.weight.requires_grad
    assert torch.equal(model.weight.grad, gradient)


def test_tied_in_the_model(plain):
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    model.b.weight = model.a.weight
    truth = torch.randn(2, 3)
    assert live.load_into(model, plain({"a.weight": truth})) == live.LoadReport((), ())
    assert same_bits(model.b.weight, truth)


def test_tied_in_the_checkpoint(tmp_path):
    truth = torch.randn(2, 3)
    torch.save({"a.weight": truth, "b.weight": truth}, tmp_path / "pytorch_model.bin")
    catalog = open_catalog(str(tmp_path)).catalog
    assert len(catalog.aliases) == 1
    for name in ("a", "b"):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2, bias=False)})
        assert live.load_into(model, catalog) == live.LoadReport((), ())
        assert same_bits(model[name].weight, truth)


@pytest.mark.parametrize("file", ["", "module."])
@pytest.mark.parametrize("model_has", ["", "module", "_orig_mod"])
def test_wrappers(plain, file, model_has):
    truth = torch.randn(2, 3)
    inner = torch.nn.Linear(3, 2, bias=False)
    model = torch.nn.ModuleDict({model_has: inner}) if model_has else inner
    catalog = plain({f"{file}weight": truth})
    assert live.load_into(model, catalog) == live.LoadReport((), ())
    assert same_bits(inner.weight, truth)
    assert list(strip_wrappers(catalog)[0]) == ["weight"]


class WithModule(torch.nn.Module):
    """A model of which a real child is called `module`, beside a tensor whose name is the child's without it."""

    def __init__(self):
        super().__init__()
        self.module, self.weight = torch.nn.Linear(3, 3, bias=False), torch.nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize("file", ["", "module.", "_orig_mod.", "_forward_module.module."])
@pytest.mark.parametrize("model_has", ["", "module", "_orig_mod", "_checkpoint_wrapped_module"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_child_that_is_really_called_module(plain, file, model_has, whole):
    truth = {"module.weight": torch.randn(3, 3)} | ({"weight": torch.randn(3, 3)} if whole else {})
    inner = WithModule()
    model = torch.nn.ModuleDict({model_has: inner}) if model_has else inner
    if not whole and ("module" in file or model_has == "module"):
        return  # nothing tells then whose `module.` it is
    catalog = plain({f"{file}{name}": tensor for name, tensor in truth.items()})
    if whole:
        assert live.load_into(model, catalog) == live.LoadReport((), ())
    else:
        with pytest.warns(UserWarning, match="not in the checkpoint: 1 tensor of the model"):
            live.load_into(model, catalog)
    assert same_bits(inner.module.weight, truth["module.weight"])
    assert same_bits(inner.weight, truth.get("weight", torch.zeros(3, 3)))


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_blocks_that_are_wrapped(plain):
    def stack():
        return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))})

    truth = stack()
    names = {"blocks.0.": "blocks.0._orig_mod.", "blocks.1.": "blocks.1._checkpoint_wrapped_module._orig_mod."}
    catalog = plain({names.get(n[:9], n[:9]) + n[9:]: value for n, value in truth.state_dict().items()})
    model = stack()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[2] = torch.compile(checkpoint_wrapper(model.blocks[2]))
    assert live.load_into(model, catalog) == live.LoadReport((), ())
    found = live.consolidate(model)
    assert found.keys() == truth.state_dict().keys()
    assert all(same_bits(found[name], value) for name, value in truth.state_dict().items())


def test_names_without_partner(plain):
    model = torch.nn.Linear(3, 2)
    before = model.bias.detach().clone()
    with pytest.warns(
        UserWarning, match=r"1 tensor of the model .*'bias'.*4 tensors of the checkpoint .* and 1 more"
    ) as caught:
        report = live.load_into(
            model, plain({"weight": torch.ones(2, 3), **{f"x{n}": torch.ones(1) for n in range(4)}})
        )
    assert len(caught) == 1
    assert report == live.LoadReport(("bias",), ("x0", "x1", "x2", "x3"))
    assert torch.equal(model.bias, before)


def test_a_checkpoint_of_another_model_is_refused(plain):
    with pytest.raises(InconsistentError, match="no tensor of this model"):
        live.load_into(torch.nn.Linear(3, 2), plain({"transformer.weight": torch.ones(2, 3)}))


def test_buffers_that_are_not_saved_are_not_missing(plain):
    model = torch.nn.Linear(3, 2, bias=False)
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    assert live.load_into(model, plain({"weight": torch.ones(2, 3)})) == live.LoadReport((), ())


def test_too_large_numbers_are_told(plain):
    model = torch.nn.Linear(2, 1, bias=False).half()
    with pytest.warns(UserWarning, match="infinite in 1 tensor: 'weight'"):
        live.load_into(model, plain({"weight": torch.tensor([[1e6, 1.0]])}))
    assert model.weight.tolist() == [[float("inf"), 1.0]]


def test_other_shapes_change_nothing(plain):
    model = torch.nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InconsistentError, match=r"2 tensors.*'weight' \[3, 2\].*'bias' \[3\]"):
        live.load_into(model, plain({"weight": torch.ones(3, 2), "bias": torch.ones(3)}))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("marked", [False, True])
def test_placeholders_of_zero_3(plain, marked):
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight.data = torch.empty(0)
    if marked:
        model.weight.ds_id, model.weight.ds_shape = 0, torch.Size((2, 3))
    with pytest.raises(UsageError, match=r"ZeRO-3 placeholders.*deepspeed\.initialize"):
        live.load_into(model, plain({"weight": torch.ones(2, 3)}))


def test_gathered_parameters_of_zero_3(plain):
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight.ds_id, model.weight.ds_shape = 0, torch.Size((2, 3))
    live.load_into(model, plain({"weight": torch.ones(2, 3)}))
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_meta_device(plain):
    with pytest.raises(UsageError, match="meta device"):
        live.load_into(torch.nn.Linear(3, 2, bias=False, device="meta"), plain({"weight": torch.ones(2, 3)}))


def test_sparse_tensors(plain):
    model = torch.nn.Module()
    model.register_buffer("a", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="not plain memory"):
        live.load_into(model, plain({"a": torch.ones(3, 3)}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(plain, state):
    model = model_of(state).cuda()
    live.load_into(model, plain(state))
    assert_loaded(model.cpu(), state)


@pytest.mark.parametrize("form", ["transposed", "channels last", "sliced", "expanded", "flipped", "scalar", "vector"])
def test_runs_of_elements_of_any_memory(form):
    base = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    tensor = {
        "transposed": base.transpose(0, 2), "channels last": base.contiguous(memory_format=torch.channels_last),
        "sliced": base[:, 1:, ::2], "expanded": base[:1].expand(4, 3, 4, 5), "flipped": base.permute(3, 2, 1, 0),
        "scalar": base[1, 1, 1, 1], "vector": base.view(-1)[::7],
    }[form]  # fmt: skip
    whole = tensor.reshape(-1)
    for first in range(whole.numel()):
        for count in {1, 2, 7, whole.numel() // 2, whole.numel()}:
            run = torch.empty(min(count, whole.numel() - first), dtype=tensor.dtype)
            fill(run, tensor, first)
            assert torch.equal(run, whole[first : first + count])


def test_weights_of_scattered_memory_are_exported_piece_by_piece(tmp_path):
    """256 MiB that no view makes dense are never there twice: they pass through three buffers of 8 MiB."""
    script = f"""
import torch, resource
from torch import nn
from zckpt import live
def status(key):
    return int([line.split()[1] for line in open("/proc/self/status") if line.startswith(key)][0]) // 1024
torch.set_num_threads(1)
model = nn.Module()
model.tied = nn.Parameter(torch.ones(8192, 8192).t())
live.save_pretrained(nn.Linear(2, 2), {str(tmp_path / "small")!r}, "bf16")
for dtype in ("bf16", None):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    live.save_pretrained(model, {str(tmp_path / "out")!r}, dtype)
    print(status("VmHWM") - before)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, timeout=HANG_S
    )
    growth = [int(line) for line in done.stdout.split()]
    assert max(growth) < 32, growth  # 24 of buffers, and what the allocator and the first import of a module keep
    assert load_file(tmp_path / "out" / "model.safetensors")["tied"].shape == (8192, 8192)


def test_one_form_of_weights_replaces_the_other(tmp_path):
    model = torch.nn.Linear(3, 3)
    live.save_pretrained(model, tmp_path)
    live.save_pretrained(model, tmp_path, file="pytorch_model.bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytorch_model.bin", "zckpt.json"]
    live.save_pretrained(model, tmp_path, max_shard_size=40)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "model.safetensors.index.json" in names and "pytorch_model.bin" not in names


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model-00001-of-00002.bin", "model.safetensors.index.json"]
)
def test_weights_that_somebody_else_wrote_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("mine")
    (tmp_path / "adapter_model.safetensors").write_text("mine")
    with pytest.raises(OutputError, match=f"'{name}'"):
        live.save_pretrained(torch.nn.Linear(3, 3), tmp_path, file="pytorch_model.bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["adapter_model.safetensors", name])
    assert (tmp_path / name).read_text() == "mine"
