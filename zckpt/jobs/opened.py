"""A checkpoint that was opened: as it is stored, or with the numbers that quantised tensors stand for.

For `open` and every job that begins with it. `WorkingModel` is what the steps of a conversion make of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.base.words import count, join_words
from zckpt.core.catalog import Catalog, TensorEntry, alike
from zckpt.core.dtypes import BF16, DType
from zckpt.core.ledger import TrainedTensor
from zckpt.jobs.groups import Naming
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import companions, other_class, read_config, read_own_config
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from zckpt.quantized.configs import Quantization
    from zckpt.quantized.packed import Packed


_MOST_BYTES = 16 << 20
"""The most bytes of a config of quantised weights in a file of its own."""

_CODES = ("U8", "I8", "I32", "U32", "F8_E4M3")
"""Dtypes of quantised weights with such a config."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's catalog and the place it was found at.

    Attributes:
        catalog: its tensors; quantised ones (fp8 with scales) as the numbers that they stand for, unless they were to stay.
        place: where it is.
        quantization: what its config says of quantised weights; None for nothing.
        packed: what of it is packed in a form that zckpt does not read; None for nothing.
        is_plain: whether the config says that weights are quantised and they are not, or not any more.
    """

    catalog: Catalog
    place: Place
    quantization: Quantization | None = None
    packed: Packed | None = None
    is_plain: bool = False

    def config(self, given: Mapping[str, object] | None = None) -> Mapping[str, object] | None:
        """The config for weights that are written from the catalog, or `given`; None if there is none."""
        known = read_own_config(self.place.home, self.place.named) if given is None else given
        if other := other_class(known, self.catalog.tensors):
            known = {**(known or {}), "architectures": [other]}
        if known is None:
            return None
        from zckpt.layouts.save.tied import as_untied, untied_heads

        known = as_untied(known) if untied_heads(self.catalog, known) else known
        if not self.is_plain:
            return known
        from zckpt.quantized.configs import without

        return without(known)

    def companions(self) -> tuple[list[tuple[Location, str]], tuple[str, ...]]:
        """The files beside the checkpoint that an output gets, and sentences on those that are not the checkpoint's own, and on
        what the output's config says otherwise.
        """
        from zckpt.layouts.save.tied import note_on, untied_heads

        files, notes = companions(self.place.home, self.place.named)
        return files, (*notes, *note_on(untied_heads(self.catalog, config_beside(self.place))))

    @property
    def other_class(self) -> str:
        """The transformers class of the weights, if the config beside them names another; else empty."""
        return other_class(config_beside(self.place), self.catalog.tensors)

    def check_read(self, entries: Iterable[TensorEntry]) -> None:
        """Makes sure that none of these tensors holds packed numbers of a quantisation that zckpt does not read.
        `entries`: tensors of the catalog, under any names, or what is computed from them. Raises UnsupportedError if
        one does; it names the quantisation.
        """
        if self.packed is not None or self.quantization is not None:
            from zckpt.quantized.packed import check_unpacked

            check_unpacked(entries, self.packed, self.quantization, self.catalog.source.path)

    def without_packed(self, catalog: Catalog) -> Catalog:
        """The tensors of a catalog, which has this one's tensors under any names, without packed ones."""
        if self.packed is None:
            return catalog
        places = self.packed.places
        return catalog.select(lambda entry: not entry.fragments or entry.fragments[0] not in places)


def config_beside(place: Place) -> dict[str, object] | None:
    """The config beside a checkpoint; None if there is none that can be read, which is an error where it is written."""
    try:
        return read_config(place.home)
    except ZckptError:
        return None


def opened_as_stored(catalog: Catalog, place: Place) -> Opened:
    """A checkpoint that was read, with what config and tensors say of quantised weights."""
    quantization: Quantization | None = None
    if (config := config_beside(place)) is not None:
        from zckpt.quantized.configs import quantization_of

        quantization = quantization_of(config)
    if quantization is None and any(entry.dtype.name in _CODES for entry, _ in alike(catalog.tensors)):
        quantization = _said_beside(place)
    if quantization is not None and quantization.method == "gptq":
        quantization = replace(quantization, otherwise=_other_version(quantization, _said_beside(place)))
    may_be_packed = any(_may_be_packed(entry) for entry, _ in alike(catalog.tensors))
    if quantization is None and not may_be_packed and not any(map(_is_of_packed, catalog.tensors)):
        return Opened(catalog, place, quantization)
    from zckpt.quantized.packed import find_packed

    return Opened(catalog, place, quantization, find_packed(catalog, quantization))


def _other_version(quantization: Quantization, other: Quantization | None) -> str:
    """How a file beside config.json contradicts it on the zero points of GPTQ; empty if it does not."""
    version = other.version_of_gptq if other is not None and other.is_explicit else ""
    return f"{version!r} in a file beside it" if version not in ("", quantization.version_of_gptq) else ""


def _is_of_packed(name: str) -> bool:
    """Whether a tensor has a name of `quantized.forms`."""
    return name.endswith((".absmax", "W_q"))


def _may_be_packed(entry: TensorEntry) -> bool:
    """Whether a tensor may be packed, as `quantized.forms` knows it: integers, fp8, or a column."""
    kind = entry.dtype.name
    return (
        (entry.dtype.kind != "float" and kind != "BOOL" and (kind != "I64" or bool(entry.shape)))
        or kind.startswith("F8")
        or (len(entry.shape) == 2 and entry.shape[1] == 1)
    )


def _said_beside(place: Place) -> Quantization | None:
    """The quantisation in a file of its own; None if there is none that can be read."""
    from zckpt.quantized.configs import OWN_FILES

    for name, meaning in OWN_FILES.items():
        path = place.home / name
        with suppress(ZckptError):
            if path.is_file() and (found := meaning(read_json(path.path, _MOST_BYTES, "a config"))) is not None:
                return found
    return None


def numbers_in(opened: Opened, dtype: DType | None = None) -> dict[str, TensorEntry]:
    """The tensors that quantised ones stand for, of a checkpoint that was opened as stored: name of what is stored -> the tensor.

    Args:
        opened: the checkpoint.
        dtype: that numbers are rounded to; None for fp32.

    Raises:
        InconsistentError, IncompleteError: scales do not fit, or are missing.
    """
    packed = opened.packed
    if packed is None and not any(entry.dtype.name.startswith("F8") for entry, _ in alike(opened.catalog.tensors)):
        return {}
    members = () if packed is None else packed.members
    from zckpt.quantized.plain import find_scaled, product

    found = {
        name: product(each, dtype) for name, each in find_scaled(opened.catalog, opened.quantization, members).items()
    }
    if packed is None or not any(part.form.read for part in packed.parts):
        return found
    from zckpt.quantized.unpack import unpack

    return found | unpack(opened.catalog, packed, opened.quantization, dtype)


def dequantise(opened: Opened, *, keeps_dtypes: bool = False) -> Opened:
    """A checkpoint that was opened as stored, with the numbers that quantised tensors stand for.

    Raises:
        InconsistentError, IncompleteError: scales do not fit, or are missing.
    """
    found = numbers_in(opened, BF16 if keeps_dtypes else None)
    if not found:  # a config that speaks of fp8 where all is plain is from before the training
        stale = opened.quantization is not None and opened.quantization.is_read
        return replace(opened, is_plain=True) if stale else opened
    packed = opened.packed
    rest = None if packed is None else packed.without(found.keys(), opened.catalog.tensors)
    gone = set() if packed is None else packed.members - (rest.members if rest is not None else set())
    from zckpt.quantized.plain import plain

    catalog = plain(opened.catalog, found, gone)
    note = f"The weights are quantised, {about(opened, found)}; here they are the numbers that these stand for."
    source = replace(catalog.source, notes=(*catalog.source.notes, note))
    return replace(opened, catalog=replace(catalog, source=source), packed=rest, is_plain=rest is None)


def about(opened: Opened, found: Collection[str]) -> str:
    """The quantisation of a checkpoint's weights, in words; empty if there is none.

    Args:
        opened: as stored.
        found: names of the tensors that stand for others.
    """
    packed = opened.packed
    known = set() if packed is None else packed.members
    from zckpt.quantized.plain import about as about_fp8

    fp8 = about_fp8(opened.quantization if packed is None else None, set(found) - known)
    texts = [] if packed is None else [f"{packed.about} ({count(len(packed.members), 'tensor')})"]
    return join_words([*texts, *([fp8] if fp8 else [])])


@dataclass(frozen=True, slots=True)
class WorkingModel:
    """What is known so far of the model that is written.

    Attributes:
        catalog: its tensors.
        place: where its config is.
        opened: the checkpoint.
        source: the tensors of the checkpoint, as the model names them; the ledger is about these.
        config: what its `config.json` says, where a step says it; None for the one that is there, and in the end for none.
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
    source: Catalog
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


def working_model(opened: Opened) -> WorkingModel:
    """A checkpoint as a model to which no step was applied."""
    return WorkingModel(opened.catalog, opened.place, opened, opened.catalog)


def with_form(recorded: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Facts for the manifest, with further facts of the output's form."""
    both = [form for facts in (more, recorded) if isinstance(form := facts.get("form"), Mapping)]
    form = {key: value for one in both for key, value in one.items()}
    return {**recorded, **more, **({"form": form} if form else {})}
