"""The steps of a conversion that take a base model or adapters: imported only where these are asked for.

For `steps`. `merged` and `base_model` say what the model is made from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.jobs.base_model import complete, refuse_no_base
from zckpt.jobs.groups import LoraMerge
from zckpt.jobs.merged import lora_again, merged_with
from zckpt.jobs.working_model import WorkingModel, with_form
from zckpt.naming.adapter_names import found_in


@dataclass(frozen=True, slots=True)
class Merge:
    """Merges adapters into the weights.

    Attributes:
        lora: which, on which base.
        recorded: the facts in the manifest of an output that was made so; None for one that a job will make.
    """

    lora: LoraMerge | None
    recorded: Mapping[str, object] | None = None

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        opened, bare = model.opened, model.catalog
        lora = self.lora or LoraMerge()
        if self.recorded is not None:
            lora = lora_again(opened, self.recorded, self.lora)
        merge = merged_with(opened, bare, lora)
        given_up = {**merge.given_up} | {name: "original" for name in bare if ".original_module." in name}
        if opened.packed is not None:
            given_up |= dict.fromkeys(bare.tensors.keys() - opened.without_packed(bare).tensors.keys(), "packed")
        return replace(
            model, catalog=merge.catalog, place=merge.place, config=merge.config, notes=(*model.notes, *merge.notes),
            recorded=with_form(model.recorded, {"form": {"lora": dict(merge.recorded)}}),
            given_up={**model.given_up, **given_up},
            left_out=(*model.left_out, *(name for name in bare if found_in(name))),
            made_from=merge.made_from, sources=merge.sources, copies=merge.copies, trained=merge.trained, is_merged=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Complete:
    """Takes what the checkpoint lacks from the model that the run began with. `base`: where that is; None for nobody
    knows, which is an error.
    """

    base: str | os.PathLike[str] | None

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        if self.base is None:
            raise refuse_no_base(model.place.listing.directory)
        found = complete(model.catalog, self.base)
        return replace(
            model, catalog=found.catalog, notes=(*model.notes, *found.notes),
            recorded={**model.recorded, **found.recorded}, made_from=(found.base,),
        )  # fmt: skip
