"""Jobs whose elements are computed on their way, each in two ways, for tests that end them or change things in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zckpt
from zckpt.jobs.options import LoraMerge, Options

FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA = FIXTURES / "transformers" / "llama_zero3" / "checkpoint"
MERGED = FIXTURES / "peft" / "dora_zero1"
TWO = (FIXTURES / "zero2" / "bf16_w2" / "checkpoint", FIXTURES / "zero3" / "bf16_w2" / "checkpoint")

Make = Callable[..., zckpt.Report]
"""Takes the sources, an output and options; further settings by name."""


@dataclass(frozen=True)
class ComputedJob:
    """One job.

    Attributes:
        sources: the directories that it reads.
        job: what makes the output.
        out: the output's name.
        before: settings of one way, by name; those called "options" are of `Options`.
        after: of another, which gives other bytes.
    """

    sources: tuple[Path, ...]
    job: Make
    out: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def single(self) -> bool:
        """Whether the output is one file."""
        return "." in self.out

    def make(self, out: object, way: str, sources: tuple[object, ...] = (), **more: Any) -> zckpt.Report:
        """Makes it.

        Args:
            out: where.
            way: "before" or "after".
            sources: other places of the same.
            more: further options.
        """
        chosen = dict(getattr(self, way))
        options = Options(**{"overwrite": True, "threads": 1, **chosen.pop("options", {}), **more})
        return self.job(sources or self.sources, out, options, chosen)


def _quantised(sources: Any, out: Any, options: Options, chosen: dict[str, Any]) -> zckpt.Report:
    return zckpt.to_fp8(sources[0], out, options=options, progress=False, **chosen)


def _gguf(sources: Any, out: Any, options: Options, chosen: dict[str, Any]) -> zckpt.Report:
    return zckpt.to_gguf(sources[0], out, tokenizer="none", model_name="m", options=options, progress=False, **chosen)


def _states(sources: Any, out: Any, options: Options, _: dict[str, Any]) -> zckpt.Report:
    return zckpt.to_states(sources[0], out, options=options, progress=False)


def _average(sources: Any, out: Any, options: Options, chosen: dict[str, Any]) -> zckpt.Report:
    return zckpt.average(list(sources), out, options=options, progress=False, **chosen)


def _merged(sources: Any, out: Any, options: Options, chosen: dict[str, Any]) -> zckpt.Report:
    from dataclasses import replace

    with_base = replace(options, lora=LoraMerge(base=sources[1]))
    return zckpt.convert(sources[0], out, options=with_base, progress=False, **chosen)


def _shards(size: int) -> dict[str, Any]:
    return {"options": {"max_shard_size": size}}


COMPUTED = {
    "Quantised": ComputedJob(
        (LLAMA,), _quantised, "out", {"scheme": "tensor", **_shards(4000)}, {"scheme": "block128", **_shards(4000)}
    ),
    "Gguf": ComputedJob((LLAMA,), _gguf, "out.gguf", {"type": "f16"}, {"type": "q8_0"}),
    "GgufParts": ComputedJob(
        (LLAMA,), _gguf, "out", {"type": "f16", "split_max_size": 8000}, {"type": "q8_0", "split_max_size": 6000}
    ),
    "States": ComputedJob(
        (TWO[1],), _states, "out", {"options": {"max_shard_size": 9000, "include": ["exp_avg/*"]}}, _shards(9000)
    ),
    "Averaged": ComputedJob(
        TWO, _average, "out", {"dtype": "fp16", **_shards(6000)}, {"dtype": "bf16", "slerp": 0.3, **_shards(5000)}
    ),
    "MergedLora": ComputedJob(
        (MERGED / "checkpoint", MERGED / "base"), _merged, "out", {"dtype": "bf16", **_shards(3000)},
        {"dtype": "fp32", **_shards(3000)},
    ),
}  # fmt: skip
