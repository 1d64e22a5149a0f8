"""A checkpoint that was opened: as it is stored, or with the numbers that quantised tensors stand for.

For `open` and every job that begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16
from zckpt.jobs.opening import OpenOptions
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import other_class, read_config
from zckpt.quantized.configs import Quantization, without
from zckpt.quantized.plain import about, check_read, plain, scaled


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's catalog and the place it was found at.

    Attributes:
        catalog: its tensors; quantised ones (fp8 with scales) as the numbers that they stand for, unless they were to stay.
        place: where it is.
        quantization: what its config says of quantised weights; None for nothing.
        is_plain: whether the config says that weights are quantised and they are not, or not any more.
    """

    catalog: Catalog
    place: Place
    quantization: Quantization | None = None
    is_plain: bool = False

    def config(self, given: Mapping[str, object] | None = None) -> Mapping[str, object] | None:
        """The config for weights that are written from the catalog, or `given`; None where there is none."""
        known = read_config(self.place.home) if given is None else given
        if other := other_class(known, self.catalog.tensors):
            known = {**(known or {}), "architectures": [other]}
        return without(known) if known is not None and self.is_plain else known

    @property
    def other_class(self) -> str:
        """The class of transformers that the weights have, where the config beside them names another; else empty."""
        return other_class(config_beside(self.place), self.catalog.tensors)

    def check_read(self, entries: Iterable[TensorEntry]) -> None:
        """Makes sure that none of these tensors holds packed numbers of a quantisation that zckpt does not read.

        Raises:
            UnsupportedError: one does; it names the quantisation.
        """
        check_read(entries, self.quantization, self.catalog.source.path)


def config_beside(place: Place) -> dict[str, object] | None:
    """The config beside a checkpoint; None where there is none, or none that can be read, an error where it is written."""
    try:
        return read_config(place.home)
    except ZckptError:
        return None


def dequantised(opened: Opened, options: OpenOptions) -> Opened:
    """A checkpoint that was opened as stored, with the numbers that quantised tensors stand for.

    Args:
        opened: the checkpoint.
        options: as for `open_catalog`.

    Raises:
        InconsistentError, IncompleteError: scales do not fit, or are missing.
    """
    found = scaled(opened.catalog, opened.quantization)
    if not found:  # a config that speaks of fp8 where all is plain is from before the training
        stale = opened.quantization is not None and opened.quantization.is_read
        return replace(opened, is_plain=True) if stale else opened
    catalog = plain(opened.catalog, found, BF16 if options.keeps_dtypes else None)
    note = f"The weights are quantised, {about(opened.quantization, found)}; here they are the numbers that these stand for."
    source = replace(catalog.source, notes=(*catalog.source.notes, note))
    return replace(opened, catalog=replace(catalog, source=source), is_plain=True)
