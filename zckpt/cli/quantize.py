"""`zckpt quantize`: quantised weights; `zckpt to-fp8`: those of fp8, with scales of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.base.words import count
from zckpt.cli.arguments import Checkpoint, DryRun, OutDirectory, ShownProgress
from zckpt.cli.convert import name_of
from zckpt.cli.declare import command
from zckpt.cli.written import Words, finish
from zckpt.jobs.declarations import QUANTIZE, TO_FP8

if TYPE_CHECKING:
    from zckpt.cli.arguments import Shown
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Fp8, Quantize
    from zckpt.jobs.quantize import PlannedFp8


@command(
    "to-fp8",
    about="Write weights of fp8 (E4M3) with scales, which transformers, vLLM and compressed-tensors load. Weights of linear "
    "layers are quantised; embeddings, norms, biases, routers and the head are not.",
    job=TO_FP8,
    example="zckpt to-fp8 out/checkpoint-500 fp8/ --scheme block128",
)
def to_fp8(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Fp8], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes weights of fp8."""
    _write(TO_FP8.prepare(ckpt, out, asked), asked, f"fp8 ({asked.own.scheme})", dry_run, shown)


@command(
    "quantize",
    about="Write quantised weights, which vLLM, transformers and compressed-tensors load. Weights of linear layers are "
    "quantised; embeddings, norms, biases, routers and the head are not.",
    job=QUANTIZE,
    example="zckpt quantize out/checkpoint-500 nvfp4/ --to nvfp4",
)
def quantize(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Quantize], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes quantised weights."""
    _write(QUANTIZE.prepare(ckpt, out, asked), asked, asked.own.target, dry_run, shown)


def _write(planned: PlannedFp8, asked: Asked[Fp8 | Quantize], form: str, dry_run: bool, shown: Shown) -> None:
    scheme, dtype = asked.own.scheme, name_of(asked.casting.dtype)
    number = len(planned.quantisers) + planned.carried
    what = f"{count(number, 'matrix', 'matrices')} as {form}, {count(planned.others, 'other tensor')} as {dtype}"
    facts: dict[str, object] = {"dtype": dtype, "scheme": scheme, "quantized": number}
    words = Words(what, lambda files: f"{_lossless(planned)}load it with {_loader(planned)}", facts)
    finish(planned, words, shown, more=lambda report: _more(planned), dry_run=dry_run)


def _loader(planned: PlannedFp8) -> str:
    """The code with which a person loads the output."""
    from zckpt.cli.loading import loading_line

    place = planned.out.rstrip("/") or "/"
    if not planned.quantisers:
        return f"vllm serve {place}, or what loads the source"
    if any(name.endswith("_weight_scale_2") for name in planned.catalog.tensors):
        return f"trtllm-serve {place}, or another server that reads ModelOpt's experts"
    line = loading_line(planned.out, planned.catalog)
    return f"{line}, or vllm serve {place}" if ".from_pretrained(" in line else line


def _more(planned: PlannedFp8) -> dict[str, object]:
    return {
        "quantized_tensors": planned.tensors(),
        **({"lossless": list(found)} if (found := planned.lossless()) else {}),
    }


def _lossless(planned: PlannedFp8) -> str:
    """How many matrices of MXFP4 lost nothing; empty if there are none, or if others made a part of them."""
    found = planned.lossless()
    return f"without loss: {found[0]:,} of {count(found[1], 'matrix', 'matrices')} of MXFP4\n" if found else ""
