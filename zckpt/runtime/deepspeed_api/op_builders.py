"""What scripts and tests ask of `deepspeed.ops`: what may be used. Device nvme may be, without DeepSpeed's library."""

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
"""DeepSpeed's names of its C++ and CUDA parts: whether what they do is here, by whatever means."""


class AsyncIOBuilder:
    """Where DeepSpeed has what builds its reads and writes for device nvme. The trainer has its own, which need no libaio.

    Attributes:
        NAME: its key in `COMPATIBLE_OPS`.
    """

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a run may use device nvme: True."""
        del verbose
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """DeepSpeed's library itself, which is not here.

        Raises:
            UnsupportedError: always.
        """
        del verbose
        refuse("AsyncIOBuilder.load", OWN_FILES)
