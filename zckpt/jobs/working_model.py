"""The model that the steps of a conversion work on, from the checkpoint's catalog to what is laid out.

For `steps`, and for `merge_steps`, which `steps` imports only where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.ledger import TrainedTensor
from zckpt.jobs.groups import Naming
from zckpt.jobs.open import Opened
from zckpt.layouts.places import Place
from zckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class WorkingModel:
    """What is known so far of the model that is written.

    Attributes:
        catalog: its tensors.
        place: where its config is.
        opened: the checkpoint.
        config: what its `config.json` is to say, where a step says it; None for the one that is there.
        notes: sentences for the user.
        recorded: facts for the manifest, beside the options themselves.
        given_up: tensor of the checkpoint -> the rule of the ledger by which the model does not have it.
        left_out: names that a step took out of the catalog, as they were then.
        earlier: names before the last change of form, which `exclude` may name too.
        selectable: the tensors from which the selection chose.
        made_from: what beside the checkpoint the model is made from.
        sources: catalogs with tensors that must not contradict themselves.
        copies: (location, name in the output) of tokenizer files and the like; None for those beside the checkpoint.
        trained: of a merge, the tensors that were trained.
        is_merged: whether tensors are computed of weights and adapters, and so keep the dtype of the weights where none is asked.
        naming: the options for names, with the prefix that was found.
    """

    catalog: Catalog
    place: Place
    opened: Opened
    config: Mapping[str, object] | None = None
    notes: tuple[str, ...] = ()
    recorded: Mapping[str, object] = field(default_factory=dict[str, object])
    given_up: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    selectable: Mapping[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])
    made_from: tuple[Opened, ...] = ()
    sources: tuple[Catalog, ...] = ()
    copies: tuple[tuple[Location, str], ...] | None = None
    trained: tuple[TrainedTensor, ...] = ()
    is_merged: bool = False
    naming: Naming = Naming()


def with_form(recorded: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Facts for the manifest, with further facts of the output's form."""
    both = [form for facts in (more, recorded) if isinstance(form := facts.get("form"), Mapping)]
    form = {key: value for one in both for key, value in one.items()}
    return {**recorded, **more, **({"form": form} if form else {})}
