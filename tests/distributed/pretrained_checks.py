"""What the ranks do in `test_pretrained.py`: transformers loads and makes models, each rank its own part."""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zckpt.runtime

zckpt.runtime.as_deepspeed()  # before transformers looks for DeepSpeed

import transformers as t
from harness import check, main, rank, world
from safetensors.torch import save_file
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from zckpt.runtime import zero
from zckpt.runtime.sharding.deferred import rows_held_by

t.utils.logging.set_verbosity_error()
t.utils.logging.disable_progress_bar()
HOME = Path(sys.argv[1])
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
LOADS_PARTS = int(t.__version__.partition(".")[0]) >= 5
WAYS = ("Init", "HfDeepSpeedConfig") if LOADS_PARTS else ("HfDeepSpeedConfig",)
"""How models are made in parts. transformers 4 makes them so only because it knows the config."""
SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@contextlib.contextmanager
def way(name: str, config: dict[str, Any] | None = None) -> Iterator[None]:
    """Inside, models are made in parts: by our context manager, or because transformers knows the config."""
    settings = CONFIG if config is None else config
    if name == "Init":
        with zero.Init(config_dict_or_path=settings):
            yield
        return
    known = HfDeepSpeedConfig({**settings, "train_batch_size": dist.get_world_size()})
    try:
        yield
    finally:
        del known
        unset_hf_deepspeed_config()


def saved(name: str, model: nn.Module, **options: Any) -> Path:
    """A model on disk; rank 0 writes."""
    if rank() == 0:
        model.save_pretrained(HOME / name, **options)  # type: ignore[operator]
    dist.barrier()
    return HOME / name


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ in bits, dtype or tying, and of parameters that are not deferred."""
    whole = [n for n, p in model.named_parameters() if rows_held_by(p) is None]
    with zero.GatheredParameters(list(model.parameters())):
        mine = {n: p.detach().clone() for n, p in model.named_parameters()}
    wanted = {n: p.detach() for n, p in plain.named_parameters()}
    mine |= dict(model.named_buffers())
    wanted |= dict(plain.named_buffers())
    if mine.keys() != wanted.keys():
        return sorted(mine.keys() ^ wanted.keys())
    return whole + [
        n for n, v in wanted.items() if v.dtype != mine[n].dtype or v.is_meta or not torch.equal(v, mine[n])
    ]


def models() -> dict[str, tuple[Any, Path, dict[str, Any]]]:
    """By what is special: the class to load with, the files, and options of `from_pretrained`."""
    torch.manual_seed(3)
    llama = t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=False))
    t5 = t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    mixtral = t.MixtralForCausalLM(
        t.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=False)
    )
    resnet = t.ResNetModel(t.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], num_channels=3))
    for name, buffer in resnet.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    shards = saved("shards", llama, max_shard_size="4KB")
    torch_file = saved("bin", llama)
    if rank() == 0:
        (torch_file / "model.safetensors").unlink()
        torch.save(llama.state_dict(), torch_file / "pytorch_model.bin")
    dist.barrier()
    return {
        "shards": (t.AutoModelForCausalLM, shards, {}),
        "base": (t.AutoModel, shards, {}),
        "dtype": (t.AutoModelForCausalLM, shards, {"dtype": torch.float16}),
        "bin": (t.AutoModelForCausalLM, torch_file, {}),
        "tied": (t.AutoModelForSeq2SeqLM, saved("t5", t5), {}),
        "experts": (t.AutoModelForCausalLM, saved("mixtral", mixtral), {}),
        "buffers": (t.AutoModel, saved("resnet", resnet), {}),
    }


@check(2)
def loaded() -> dict[str, list[str]]:
    """Every parameter and buffer is what `from_pretrained` gives without sharding."""
    out = {}
    for name, (kind, path, options) in models().items():
        plain = kind.from_pretrained(path, **options)
        for how in WAYS:
            with way(how):
                model = kind.from_pretrained(path, **options)
            out[f"{name} {how}"] = differences(model, plain)
    return out


@check(2)
def missing_and_mismatched() -> dict[str, Any]:
    """What the files lack, or have in another shape, is initialised, alike on all ranks; the rest is loaded."""
    out: dict[str, Any] = {}
    plain = t.AutoModel.from_pretrained(HOME / "shards")
    for how in WAYS:
        torch.manual_seed(50 + rank())
        with way(how):
            model, said = t.AutoModelForSequenceClassification.from_pretrained(
                HOME / "shards", num_labels=500, output_loading_info=True
            )
            other, told = t.AutoModelForCausalLM.from_pretrained(
                HOME / "shards", vocab_size=41, ignore_mismatched_sizes=True, output_loading_info=True
            )
        with zero.GatheredParameters([model.score.weight, other.lm_head.weight]) as (score, head):
            both = [score.detach().clone(), head.detach().clone()]
        spread = [round(float(one.std()), 2) for one in both]
        for one in both:
            first = one.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, one)
        mismatched = sorted(key if isinstance(key, str) else key[0] for key in told["mismatched_keys"])
        out[how] = [sorted(said["missing_keys"]), mismatched, spread, differences(model.model, plain)]
    return out


@check(2)
def made_from_a_config() -> dict[str, list[float]]:
    """`from_config`: a model in parts, initialised, the same on all ranks, and it trains."""
    out = {}
    config = t.AutoConfig.from_pretrained(HOME / "shards")
    for how in WAYS:
        torch.manual_seed(20 + rank())
        with way(how):
            model = t.AutoModelForCausalLM.from_config(config)
        assert all(rows_held_by(p) is not None for p in model.parameters())
        with zero.GatheredParameters(model.lm_head.weight) as (head,):
            spread = float(head.std())
        losses = trained(model)
        out[how] = [round(spread, 2), losses[0], losses[-1]]
    return out


@check(2)
def resized() -> dict[str, list[Any]]:
    """`resize_token_embeddings`, tied and not; the model trains afterwards."""
    out = {}
    for name, kind in {"shards": t.AutoModelForCausalLM, "t5": t.AutoModelForSeq2SeqLM}.items():
        plain = kind.from_pretrained(HOME / name)
        old = plain.get_input_embeddings().weight.detach()
        with way("HfDeepSpeedConfig"):
            model = kind.from_pretrained(HOME / name)
            model.resize_token_embeddings(43)
            embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
            with zero.GatheredParameters([embeddings.weight, head.weight]):
                kept = torch.equal(embeddings.weight[:37], old)
                rest = bool(embeddings.weight[37:].isfinite().all())
                shapes = [list(embeddings.weight.shape), list(head.weight.shape)]
            tied = embeddings.weight is head.weight
            losses = trained(model)
        out[name] = [kept, rest, shapes, tied == (name == "t5"), losses[-1] < losses[0]]
    return out


def trained(model: nn.Module) -> list[float]:
    """The losses of four steps; the words are those that a resize has added, where there are any."""
    words = model.config.vocab_size - 1 - torch.arange(8).view(1, 8)  # type: ignore[union-attr,operator]
    optimizer = {"type": "Adam", "params": {"lr": 0.01}}
    engine, *_ = zckpt.runtime.initialize(model=model, config={**CONFIG, "optimizer": optimizer})
    losses = []
    for _ in range(4):
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@check(2)
def inference_as_documented() -> list[bool]:
    """transformers' example of ZeRO inference without the Trainer: every rank has an input of its own."""
    width = 16
    settings = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": 0.9 * width * width,
            "stage3_param_persistence_threshold": 10 * width,
        },
        "steps_per_print": 2000,
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    dschf = HfDeepSpeedConfig(settings)
    model = t.AutoModelForSeq2SeqLM.from_pretrained(HOME / "t5")
    engine = zckpt.runtime.initialize(model=model, config_params=settings)[0]
    engine.module.eval()
    words = torch.arange(3, 9 + 5 * rank()).view(1, -1)  # other lengths, so that ranks end at other times
    with torch.no_grad():
        found = engine.module.generate(words, synced_gpus=True, max_new_tokens=4 + 6 * rank(), min_length=3)
        by_itself = engine.module.generate(words, max_new_tokens=5)  # transformers finds out that ranks must keep step
    del dschf
    unset_hf_deepspeed_config()
    plain = t.AutoModelForSeq2SeqLM.from_pretrained(HOME / "t5").eval()
    wanted = plain.generate(words, max_new_tokens=4 + 6 * rank(), min_length=3)
    return [torch.equal(found, wanted), torch.equal(by_itself, plain.generate(words, max_new_tokens=5))]


def large(name: str, layers: int) -> int:
    """A model of bf16 on disk, in shards with an index. Returns its bytes."""
    config = t.LlamaConfig(
        **{**SIZES, "vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2048}, dtype="bfloat16"
    )
    config.num_hidden_layers, config.num_attention_heads = layers, 8
    config.num_key_value_heads, config.head_dim, config.tie_word_embeddings = 8, 128, False
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in t.LlamaForCausalLM(config).named_parameters()}
    if rank() == 0:
        (HOME / name).mkdir()
        config.save_pretrained(HOME / name)
        number, index, shard, size = 0, {}, {}, 0
        for place, (tensor, shape) in enumerate(shapes.items()):
            shard[tensor] = torch.full(shape, place / 64, dtype=torch.bfloat16)
            size += shard[tensor].nbytes
            if size > 40 << 20 or place == len(shapes) - 1:
                number, file = number + 1, f"model-{number}.safetensors"
                save_file(shard, HOME / name / file, metadata={"format": "pt"})
                index |= dict.fromkeys(shard, file)
                shard, size = {}, 0
        (HOME / name / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    dist.barrier()
    return 2 * sum(shape.numel() for shape in shapes.values())


def memory(line: str) -> int:
    """Bytes, by the name of the line in `/proc/self/status`."""
    lines = dict(one.split(":", 1) for one in Path("/proc/self/status").read_text().splitlines())
    return int(lines[line].split()[0]) * 1024


def peak(job: Callable[[], Any]) -> tuple[Any, int]:
    """What a job gives, and the bytes that it needed at most, above those that were there before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin anew with VmHWM
    given = job()
    return given, memory("VmHWM") - before


@check(*((2, 4) if LOADS_PARTS else ()))
def memory_of_a_load() -> dict[str, list[float]]:
    """Peak memory of a rank that loads its part of a model, in MiB: the part, and the peak."""
    out = {}
    path = saved("small", t.LlamaForCausalLM(t.LlamaConfig(**SIZES)))
    with way("Init"):  # what is imported and set up once is there before
        t.AutoModelForCausalLM.from_pretrained(path)
    for layers in (4, 12) if world() == 2 else (12,):
        total = large(f"large{layers}", layers)
        for how in WAYS:
            with way(how):
                model, needed = peak(lambda: t.AutoModelForCausalLM.from_pretrained(HOME / f"large{layers}"))  # noqa: B023
            part = sum(rows_held_by(p).values.nbytes for p in model.parameters())  # type: ignore[union-attr]
            assert part * world() == total
            names = list(enumerate(model.named_parameters()))
            for place, (_, parameter) in names:
                rows = rows_held_by(parameter)
                assert rows is not None and rows.values.dtype == torch.bfloat16 and (rows.values == place / 64).all()
            out[f"{layers} {how}"] = [part / 2**20, needed / 2**20]
            del model, parameter, names, rows
    return out


if __name__ == "__main__":
    main()
