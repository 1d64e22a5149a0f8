"""`zckpt to-mlx`: a model in MLX's form, which mlx-lm loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.base.words import count
from zckpt.cli.arguments import Checkpoint, DryRun, OutDirectory, ShownProgress
from zckpt.cli.convert import name_of
from zckpt.cli.declare import command
from zckpt.cli.written import Words, finish
from zckpt.jobs.declarations import TO_MLX

if TYPE_CHECKING:
    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.own_groups import Mlx


@command(
    "to-mlx",
    about="Write a model that mlx-lm loads on Apple's machines: what mlx_lm.convert writes, from any checkpoint.",
    job=TO_MLX,
    example="zckpt to-mlx out/checkpoint-500 mlx/ --bits 4",
)
def to_mlx(
    ckpt: Checkpoint, out: OutDirectory, asked: Asked[Mlx], dry_run: DryRun = False, *, shown: ShownProgress
) -> None:
    """Writes the model in MLX's form."""
    planned = TO_MLX.prepare(ckpt, out, asked)
    dtype = name_of(planned.asked.casting.dtype)
    form = dtype if asked.own.bits is None else f"{asked.own.bits} bits and {dtype}"
    what = f"{count(len(planned.catalog), 'tensor')} as {form}"
    facts: dict[str, object] = {"dtype": dtype, "bits": asked.own.bits}
    place = planned.out.rstrip("/") or "/"
    words = Words(what, lambda files: f"run it with mlx_lm.generate --model {place}", facts)
    finish(planned, words, shown, dry_run=dry_run)
