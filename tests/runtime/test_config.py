"""Reading configs: what is understood, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.runtime.config.read import BatchSizes, batch_of, read_config

NVME = {"device": "nvme", "nvme_path": "/x"}
SMALLEST: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


def refused(config: Any, kind: type[UsageError] | type[UnsupportedError] = UsageError, **options: Any) -> Any:
    with pytest.raises(kind) as caught:
        read_config(config, **options)
    return caught.value


def test_a_path_a_dict_and_text_are_the_same(tmp_path: Path) -> None:
    raw = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(raw))
    read = [read_config(form) for form in (raw, json.dumps(raw), tmp_path / "ds.json", str(tmp_path / "ds.json"))]
    assert all(one.config == read[0].config and one.raw == raw for one in read)
    assert read[2].file == str(tmp_path / "ds.json")
    assert (read[0].zero.stage, read[0].config.precision, read[0].config.gradient_clipping) == (3, "bf16", 1.0)


def test_the_callers_dict_stays_as_it_is() -> None:
    raw = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": "auto"}}
    read_config(raw, auto={"bf16.enabled": True})
    assert raw["bf16"] == {"enabled": "auto"}


def test_what_is_no_config(tmp_path: Path) -> None:
    assert "line 1, column" in refused('{"a": }').found
    assert refused(tmp_path / "none.json").found == "No such file or directory"
    assert refused('{"fp16": {"enabled": true, "enabled": false}}').found == "'enabled'"
    (tmp_path / "list.json").write_text("[1]")
    assert refused(tmp_path / "list.json").found == "a list"
    assert "object" in refused({"train_batch_size": object()}).found


@pytest.mark.parametrize(
    ("wrong", "path", "nearest"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_clipp1ng": 0.25}, "gradient_clipp1ng", "gradient_clipping"),
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge", "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "zero_optimization.offload_optimizer.devise",
         "zero_optimization.offload_optimizer.device"),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"fp16": {"initial_scale_pow": 3}}, "fp16.initial_scale_pow", "fp16.initial_scale_power"),
        ({"wandb": {"enabledd": True}}, "wandb.enabledd", "wandb.enabled"),
        ({"loss_scale": 3}, "loss_scale", "fp16.loss_scale"),
        ({"optimizer": {"type": "Adam", "parms": {}}}, "optimizer.parms", "optimizer.params"),
        ({"aio": {"thread_count": 1}}, "aio.thread_count", "aio.intra_op_parallelism"),
        ({"bfp16": {"enabled": True}}, "bfp16", "bf16"),
    ],
)  # fmt: skip
def test_an_unknown_key_at_any_depth(wrong: dict[str, Any], path: str, nearest: str) -> None:
    error = refused(SMALLEST | wrong)
    assert error.what == f"unknown key '{path}'; did you mean '{nearest}'?" and "allow_unknown" in error.remedy
    settings = read_config(SMALLEST | wrong, allow_unknown=True)
    assert (path, "not known, left out as asked") in settings.unused


def test_all_unknown_keys_at_once() -> None:
    error = refused(SMALLEST | {"fp15": {}, "bf16": {"on": True}})
    assert error.found == "'fp15', 'bf16.on'" and "'fp16'" in error.expected


def test_keys_without_use_are_listed_with_the_reason() -> None:
    zero = {"stage": 2, "overlap_comm": True, "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": 7}
    settings = read_config(SMALLEST | {"zero_optimization": zero, "disable_allgather": False})
    reasons = dict(settings.unused)
    assert reasons.keys() == {
        "zero_optimization.overlap_comm", "zero_optimization.allgather_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size", "disable_allgather",
    }  # fmt: skip
    assert all(reasons.values())


def test_keys_that_ask_for_what_is_not_shown_are_listed_apart() -> None:
    asked = read_config(SMALLEST | {"comms_logger": {"enabled": True, "verbose": True}})
    assert [key for key, _ in asked.missed] == ["comms_logger"] and asked.unused == ()
    assert read_config(SMALLEST | {"comms_logger": {"enabled": False}}).missed == ()


def test_auto() -> None:
    raw = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                              "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": "auto"},
    }  # fmt: skip
    missing = refused(raw)
    assert missing.found == (
        "'bf16.enabled', 'gradient_clipping', 'optimizer.params.lr', 'optimizer.params.betas', "
        "'scheduler.params.warmup_num_steps'"
    )
    values = {
        "bf16.enabled": True, "gradient_clipping": 0.5, "scheduler": {"params": {"warmup_num_steps": 7}},
        "optimizer": {"params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "train_micro_batch_size_per_gpu": 3,
    }  # fmt: skip
    settings = read_config(raw, auto=values, hidden_size=10)
    assert settings.config.optimizer.params == {"lr": 1e-4, "betas": [0.9, 0.95]}
    assert settings.config.scheduler.params == {"warmup_num_steps": 7} and settings.config.precision == "bf16"
    zero = settings.zero
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (100, 90, 100)
    assert read_config(raw, auto=values).zero.reduce_bucket_size == 500_000_000
    assert "stage3_max_live_parameters" not in settings.raw["zero_optimization"]
    assert batch_of(settings, 4) == BatchSizes(24, 3, 2)
    early = read_config(raw, early=True)  # zero.Init, before the Trainer knows them
    assert early.zero.stage == 3 and early.config.optimizer.params == early.config.scheduler.params == {}


def test_offload_param_below_stage_3_is_left_out() -> None:
    """As DeepSpeed does; accelerate's plugin writes it for every stage."""
    settings = read_config(SMALLEST | {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert not settings.zero.offloads_param and "zero_optimization.offload_param" in dict(settings.unused)
    assert read_config(SMALLEST | {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}).unused == ()


def test_accelerate_never_prints() -> None:
    assert read_config({"train_batch_size": 1, "steps_per_print": float("inf")}).config.steps_per_print is None


@pytest.mark.parametrize(
    ("given", "world", "batch"),
    [
        ((16, 2, None), 4, (16, 2, 2)),
        ((16, None, 2), 4, (16, 2, 2)),
        ((None, 2, 2), 4, (16, 2, 2)),
        ((16, None, None), 4, (16, 4, 1)),
        ((None, 3, None), 4, (12, 3, 1)),
        ((16, 2, 2), 4, (16, 2, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(given: tuple[int | None, ...], world: int, batch: tuple[int, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    raw = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    assert batch_of(read_config(raw), world) == BatchSizes(*batch)


@pytest.mark.parametrize(
    ("total", "micro", "steps"), [(16, 2, 3), (15, 2, None), (3, None, 1), (16, 5, None), (2, 4, None)]
)
def test_batch_sizes_that_contradict_each_other(total: int, micro: int | None, steps: int | None) -> None:
    raw = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    with pytest.raises(UsageError) as caught:
        batch_of(read_config({k: v for k, v in raw.items() if v is not None}), 4)
    assert f"{total}" in caught.value.found and "world size 4 =" in caught.value.expected


def test_no_batch_size() -> None:
    with pytest.raises(UsageError, match="has no batch size"):
        batch_of(read_config({"gradient_accumulation_steps": 2}), 1)


ZERO3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled"),
        ({"bf16": {}, "bfloat16": {}}, "old name"),
        ({"data_types": {"param_dtype": "bf16"}}, "param_dtype bf16 and the precision fp32"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "stage 0 and offload_optimizer"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "mics_shard_size"),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}},
            "mics_shard_size and",
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}}, "cpu_offload and"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        (ZERO3 | {"gradient_allreduce_op": "sum"}, "'sum'"),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "gradient_clipping 1"),
        ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}, "gradient_clipping": 0}, "stage 3 (1 or 2)"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "no offload_param.nvme_path"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": NVME}}, "stage 0 and offload_optimizer"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": NVME}, "checkpoint": {"async_save": True}},
            "async_save",
        ),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "max_grad_norm and gradient_clipping"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "scale 4"),
    ],
)
def test_contradictions(more: dict[str, Any], words: str) -> None:
    error = refused(SMALLEST | more)
    assert error.what == "keys contradict each other" and words in error.found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"sparse_gradients": True}, "sparse_gradients"),
    ],
)
def test_what_is_not_built(more: dict[str, Any], words: str) -> None:
    assert words in refused(SMALLEST | more, UnsupportedError).found


def test_what_is_switched_off_is_no_matter() -> None:
    off = {
        "torch_autocast": {"enabled": False, "dtype": "bf16"}, "amp": {"enabled": False}, "elasticity": {"enabled": False},
        "sparse_gradients": False, "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 0},
        "zero_optimization": {"stage": 2, "zero_quantized_gradients": False, "offload_optimizer": {"device": "none"}},
    }  # fmt: skip
    assert not read_config(SMALLEST | off).zero.offloads_optimizer


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale = True: a number"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window = 0"),
        ({"communication_data_type": "fp64"}, "communication_data_type = 'fp64'"),
        ({"train_batch_size": -1}, "train_batch_size = -1"),
    ],
)
def test_values_that_do_not_fit(more: dict[str, Any], words: str) -> None:
    assert words in refused(SMALLEST | more).found


def test_old_forms() -> None:
    assert read_config(SMALLEST | {"zero_optimization": True}).zero.stage == 1
    assert read_config(SMALLEST | {"bfloat16": {"enabled": True}}).config.precision == "bf16"
    old = read_config(SMALLEST | {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}})
    assert old.zero.offloads_optimizer and old.zero.offloads_param
    assert read_config(SMALLEST | {"communication_data_type": "FP32"}).config.communication_data_type == "fp32"


def test_numbers_that_are_written_as_text() -> None:
    """YAML reads 1e-3 as text; keys of sections have always taken it, and arguments of optimizers and schedules do too."""
    text = {"type": "AdamW", "params": {"lr": "1e-3", "betas": ["0.8", ".99"], "eps": "1E-8", "weight_decay": "0"}}
    config = read_config({**SMALLEST, "gradient_clipping": "1e-1", "optimizer": text}).config
    assert config.gradient_clipping == 0.1
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": 0}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "10", "warmup_type": "linear"}}
    config = read_config({**SMALLEST, "scheduler": schedule}).config
    assert config.scheduler.params == {"warmup_num_steps": 10, "warmup_type": "linear"}
