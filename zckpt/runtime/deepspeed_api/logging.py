"""The trainer's logger, and messages of some ranks only. Source: DeepSpeed 0.19.8, utils/logging.py."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch.distributed as dist

from zckpt.base.errors import UsageError
from zckpt.base.words import join_words

logger = logging.getLogger("zckpt.runtime")

_NAMES = ("debug", "info", "warning", "error", "critical")
log_levels: dict[str, int] = {name: getattr(logging, name.upper()) for name in _NAMES}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks, with their number; [-1] means all, and without a process group every process logs."""
    if (text := _of_ranks(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints a message on some ranks."""
    if (text := _of_ranks(message, ranks)) is not None:
        print(text)  # noqa: T201


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """The same as `log_dist`, once per process and message."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(message: str) -> None:
    """Logs a warning once per process."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets which messages are logged. Raises UsageError for an unknown level."""
    chosen = custom_logger or logger
    chosen.setLevel(_level(log_level_str))
    for handler in chosen.handlers:
        handler.setLevel(_level(log_level_str))


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of this level are logged. Raises UsageError for an unknown level."""
    return logger.getEffectiveLevel() <= _level(max_log_level_str)


def _level(name: str) -> int:
    if name.lower() not in log_levels:
        known = join_words(_NAMES, "or")
        raise UsageError(f"there is no log level {name!r}", expected=known, remedy="Choose one of these.")
    return log_levels[name.lower()]


def _of_ranks(message: str, ranks: Sequence[int] | None) -> str | None:
    """The message with the rank's number, if this rank logs it; otherwise None."""
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    rank = dist.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None
