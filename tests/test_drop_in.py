"""DeepSpeed's functions give the truth's bits, and have DeepSpeed's signatures."""

import inspect
from pathlib import Path

import proofs
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file
from truths import how_of, kept_of

import zckpt
from zckpt import drop_in

FIXTURES = [
    how.parent
    for how in sorted(Path(__file__).parent.parent.joinpath("fixtures").glob("*/*/how.json"))
    if (how.parent / "truth.safetensors").exists()
]


def named(value):
    return f"{value.parent.name}/{value.name}" if isinstance(value, Path) else str(value)


fixtures = pytest.mark.parametrize("fixture", FIXTURES, ids=named)


def as_fp32(tensor, role="buffer"):
    lifted = tensor.is_floating_point() if role != "buffer" else tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if lifted else tensor


def assert_is_truth(state, fixture, without=()):
    how = how_of(fixture)
    truth = {name: as_fp32(tensor, how["roles"].get(name, "parameter")) for name, tensor in kept_of(fixture).items()}
    aliases = {d: k for d, k in (how.get("aliases") or {}).items() if k in truth}
    names = {*truth, *aliases} - set(without)
    assert set(state) == names
    for name in names:
        assert same_bits(state[name], truth[aliases.get(name, name)]), name
    return aliases


@fixtures
def test_state_dict(fixture):
    state = zckpt.get_fp32_state_dict_from_zero_checkpoint(fixture / "checkpoint", how_of(fixture).get("tag"))
    for dropped, kept in assert_is_truth(state, fixture).items():
        assert state[dropped] is state[kept]


@fixtures
def test_lazy_state_dict(fixture):
    tag = how_of(fixture).get("tag")
    lazy = zckpt.get_fp32_state_dict_from_zero_checkpoint(fixture / "checkpoint", tag, lazy_mode=True)
    state = {name: tensor.contiguous() for name, tensor in lazy.items()}
    assert_is_truth(state, fixture)
    for name, tensor in lazy.items():
        expected = (state[name].shape, state[name].dtype, state[name].numel())
        assert (tensor.shape, tensor.dtype, tensor.numel()) == expected


@fixtures
def test_without_frozen(fixture):
    how = how_of(fixture)
    frozen = [name for name, role in (how.get("roles") or {}).items() if role == "frozen"]
    frozen += [dropped for dropped, kept in (how.get("aliases") or {}).items() if kept in frozen]
    state = zckpt.get_fp32_state_dict_from_zero_checkpoint(
        fixture / "checkpoint", how.get("tag"), exclude_frozen_parameters=True
    )
    assert not set(state) & set(frozen)


@proofs.MORE
@pytest.mark.parametrize(("fixture", "safe"), proofs.in_turn(FIXTURES, (False, True)), ids=named)
def test_conversion(fixture, safe, tmp_path):
    out, tag = tmp_path / "out", how_of(fixture).get("tag")
    for _ in range(2):  # the second time over the first
        answer = zckpt.convert_zero_checkpoint_to_fp32_state_dict(
            fixture / "checkpoint", out, max_shard_size=None, safe_serialization=safe, tag=tag
        )
        assert answer is None
    if safe:
        state = load_file(out / "model.safetensors")
        aliases = {d: k for d, k in (how_of(fixture).get("aliases") or {}).items() if k in state}
        state |= {dropped: state[kept] for dropped, kept in aliases.items()}
    else:
        state = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert_is_truth(state, fixture)


@pytest.fixture
def plain(tmp_path):
    state = {"a": torch.randn(64, 32).bfloat16(), "b": torch.randn(64, 32).half(), "n": torch.arange(5)}
    home = tmp_path / "in"
    home.mkdir()
    save_file(state, home / "model.safetensors")
    return home, {name: as_fp32(tensor) for name, tensor in state.items()}


def test_shards(plain, tmp_path):
    home, state = plain
    zckpt.convert_zero_checkpoint_to_fp32_state_dict(home / "model.safetensors", tmp_path / "out", "9KB", True)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == 2
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    loaded = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert all(same_bits(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["all.bin", "all.pt", "all.safetensors"])
def test_one_file(plain, tmp_path, name):
    home, state = plain
    out = tmp_path / "out" / name
    zckpt.convert_zero_checkpoint_to_fp32_state_dict(home, out, max_shard_size=None, safe_serialization=True)
    loaded = load_file(out) if name.endswith("safetensors") else torch.load(out, weights_only=True)
    assert all(same_bits(loaded[name], tensor) for name, tensor in state.items())


def test_a_directory_with_the_suffix_of_a_file_stays_one(plain, tmp_path):
    out = tmp_path / "out" / "all.bin"
    out.mkdir(parents=True)
    zckpt.convert_zero_checkpoint_to_fp32_state_dict(plain[0], out)
    assert (out / "pytorch_model.bin").is_file()


def test_loading_gives_the_same_model(plain):
    home, state = plain
    model = torch.nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(64, 32)))
    model.register_buffer("n", torch.zeros(5, dtype=torch.int64))
    assert zckpt.load_state_dict_from_zero_checkpoint(model, home) is model
    assert all(same_bits(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_errors_are_those_deepspeed_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        zckpt.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")


NOT_PROVIDED = {"parse_model_states", "parse_optim_states"}
"""They return DeepSpeed's flat vectors, which mean nothing without the rest of its script."""


def test_signatures():
    theirs = pytest.importorskip("deepspeed.utils.zero_to_fp32", exc_type=ImportError)

    def signatures(module, names):
        return {
            name: [(p.name, p.default, p.kind) for p in inspect.signature(getattr(module, name)).parameters.values()]
            for name in names
        }

    public = [
        name for name, value in vars(theirs).items()
        if inspect.isfunction(value) and value.__module__ == theirs.__name__ and not name.startswith("_")
    ]  # fmt: skip
    assert set(public) > NOT_PROVIDED and all(name in drop_in.__doc__ for name in NOT_PROVIDED)
    names = sorted(set(public) - NOT_PROVIDED)
    assert signatures(drop_in, names) == signatures(theirs, names)


def test_small_functions_answer_as_deepspeeds(tmp_path):
    theirs = pytest.importorskip("deepspeed.utils.zero_to_fp32", exc_type=ImportError)
    tag = next(
        fixture / "checkpoint" for fixture in FIXTURES if fixture.parent.name == "zero3" and fixture.name == "w12"
    )
    tag = tag / (tag / "latest").read_text()
    for name in ("get_optim_files", "get_model_state_files"):
        assert getattr(drop_in, name)(str(tag)) == getattr(theirs, name)(str(tag))
    assert drop_in.get_model_state_file(str(tag), 3) == theirs.get_model_state_file(str(tag), 3)
    with pytest.raises(FileNotFoundError):
        drop_in.get_model_state_file(tag, 2)
    for numel, world_size in [(10, 4), (0, 3), (12, 4), (1, 5)]:
        info = drop_in.zero3_partitioned_param_info(numel, world_size)
        assert info == theirs.zero3_partitioned_param_info(numel, world_size)
    assert drop_in.natural_keys("rank_10_a") == theirs.natural_keys("rank_10_a")


def test_lazy_tensors_become_tensors():
    home = next(fixture / "checkpoint" for fixture in FIXTURES if fixture.name == "tied_w2")
    lazy = zckpt.get_fp32_state_dict_from_zero_checkpoint(home, lazy_mode=True)
    whole = zckpt.get_fp32_state_dict_from_zero_checkpoint(home)
    for dtype in (None, "bf16", torch.float16):
        made = drop_in.to_torch_tensor(lazy, dtype=dtype)
        empty = drop_in.to_torch_tensor(lazy, return_empty_tensor=True, dtype=dtype)
        for name, tensor in whole.items():
            wanted = {"bf16": torch.bfloat16}.get(dtype, dtype) if tensor.is_floating_point() else None
            assert same_bits(made[name], tensor.to(wanted or tensor.dtype))
            assert (empty[name].shape, empty[name].dtype) == (made[name].shape, made[name].dtype)
        assert len({id(tensor) for tensor in made.values()}) == len({id(tensor) for tensor in whole.values()})


@pytest.mark.parametrize("dtype", ["torch.BFloat16", "fp16", torch.float32])
def test_other_dtypes(plain, tmp_path, dtype):
    drop_in.convert_zero_checkpoint_to_state_dict(plain[0], tmp_path / "out", dtype, safe_serialization=True)
    wanted = {"torch.BFloat16": torch.bfloat16, "fp16": torch.float16}.get(dtype, dtype)
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].dtype == wanted
    with pytest.raises(ValueError):
        drop_in.convert_zero_checkpoint_to_state_dict(plain[0], tmp_path / "out", "int8")
