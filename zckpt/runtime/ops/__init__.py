"""Optimizers by the names of `deepspeed.ops`: torch's kernels, or this package's where torch has none; and what may be used."""

from zckpt.runtime.ops import adagrad, adam, aio, lamb, lion

__all__ = ["adagrad", "adam", "aio", "lamb", "lion"]

__compatible_ops__ = {
    **dict.fromkeys(("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"), True),
    **dict.fromkeys(
        (
            "cutlass_ops", "dc", "deepspeed_ccl_comm", "deepspeed_not_implemented", "deepspeed_shm_comm",
            "evoformer_attn", "fp_quantizer", "gds", "inference_core_ops", "pin_memory", "quantizer",
            "ragged_device_ops", "ragged_ops", "random_ltd", "spatial_inference", "stochastic_transformer",
            "transformer", "transformer_inference", "utils",
        ),
        False,
    ),
}  # fmt: skip
"""DeepSpeed's names of its C++ and CUDA parts: whether what they do is here, by whatever means."""
