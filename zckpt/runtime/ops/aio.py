"""The name by which scripts and tests ask whether a run may use device nvme: it may, without DeepSpeed's library."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from zckpt.base.errors import UnsupportedError


class AsyncIOBuilder:
    """Where DeepSpeed has what builds its reads and writes for device nvme. The trainer has its own, which need no libaio.

    Attributes:
        NAME: its key in `ops.__compatible_ops__`.
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
        raise UnsupportedError(
            "'AsyncIOBuilder.load' of DeepSpeed is not built here",
            remedy="Set device nvme in zero_optimization.offload_optimizer or offload_param of the config: the trainer reads and "
            "writes its files by itself.",
        )
