"""Tells scripts and tests that ask `deepspeed.ops` what they may use: device nvme, too, without DeepSpeed's library."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from zckpt.runtime.names.unbuilt import OWN_FILES, refuse

COMPATIBLE_OPS = {
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
"""DeepSpeed's names of its C++ and CUDA parts -> whether their function is available here, by any means."""


class AsyncIOBuilder:
    """DeepSpeed's builder of I/O for device nvme; ours needs no libaio. `NAME`: its key in `COMPATIBLE_OPS`."""

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a run may use device nvme: True."""
        del verbose
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuses to load DeepSpeed's library, which is not here. Raises UnsupportedError always."""
        del verbose
        refuse("AsyncIOBuilder.load", OWN_FILES)
