"""From a Hugging Face model, or any other that a scheme of names knows, to GGUF, which llama.cpp runs.

For `zckpt to-gguf`. Names and rows are `naming`'s, the types of tensors and the files are `layouts.gguf`'s, the metadata comes
from the `gguf` package. Whatever is computed on the way (blocks of Q8_0, Gemma's norms) is computed while it is moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.progress import Progress
from zckpt.base.sizes import to_bytes
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.ledger import names_unread
from zckpt.core.recipes import DerivedStore
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_GGUF, Asked
from zckpt.jobs.open import Opened, open_catalog, strip_wrappers
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Gguf
from zckpt.jobs.planned import Report, carry_out, find_left_out, protected_places
from zckpt.jobs.selection import check_wanted, select
from zckpt.layouts.gguf import METADATA
from zckpt.layouts.gguf.importance import read_importance
from zckpt.layouts.gguf.write import FILE_TYPES, as_written, lay_out, types_of
from zckpt.layouts.save.companions import companions, config_of
from zckpt.naming.gguf_keys import filled_in
from zckpt.naming.gguf_metadata import NO_VOCABULARY, GgufModel, architecture_of, library, metadata_of
from zckpt.naming.gguf_tensors import add_frequency_factors, digest_of, mixed_of, vocabulary_rows
from zckpt.naming.gguf_vision import config_of_vision, vision_of, vision_parameters, vision_tensors
from zckpt.naming.writers import GGUF, SchemeNames, name_for_writer
from zckpt.output.publish import check_output
from zckpt.storage.fsspec_io import is_page
from zckpt.storage.location import Location, locate

SUFFIX = ".gguf"


def to_gguf(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    type: str = "f16",  # noqa: A002 - as the option is called
    imatrix: str | os.PathLike[str] | None = None,
    split_max_size: int | str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    pre_tokenizer: str | None = None,
    model_name: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mmproj: bool = False,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a model as GGUF, in constant memory: what llama.cpp's own converter writes, from any checkpoint.

    Args:
        checkpoint: as for `zckpt.convert`: a Hugging Face model, or a checkpoint with names in which a scheme of
        zckpt finds one.
        out: a name ending in .gguf for one file; anything else is a directory for files named by llama.cpp's conventions.
        type: "f32", "f16", "bf16" or "q8_0" of the matrices; or "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_m", "q5_k_m", "q6_k" or
            "mxfp4", as llama.cpp's quantiser writes them, some matrices in other types. Norms, biases and routers are fp32.
        imatrix: the file of an importance matrix, as llama.cpp's llama-imatrix writes it; None for none.
        split_max_size: for a directory, the most bytes of tensors in one file, such as "40GB"; None for one file.
        tokenizer: the directory with the model's tokenizer, if it is not beside the checkpoint; "none" leaves it out.
        pre_tokenizer: llama.cpp's name for how the tokenizer splits text, such as "llama-bpe", if zckpt does not know it.
        model_name: what the file says that the model is called; None for what its directory is called.
        config: the model's config.json, if there is none beside the checkpoint.
        mmproj: write the images' side of a model that sees, as llama.cpp's converter does it with `--mmproj`.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(overwrite=True)`.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UnsupportedError: zckpt writes no GGUF of such a model, the tokenizer is not known, or `zckpt[gguf]` is not installed.
        UsageError: there is no tokenizer, or something is not recorded that must be known; pass `tokenizer` or `config`.
        CastError: numbers are too large for `type`; `Options(overflow="clamp")` or "inf" writes them all the same.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_gguf("model", "model.gguf", pre_tokenizer="llama-bpe", progress=False).tensors
        30
    """
    asked = (options or Options()).split(
        TO_GGUF, type=type, imatrix=imatrix, split_max_size=split_max_size, tag=tag, also=also, tokenizer=tokenizer,
        pre_tokenizer=pre_tokenizer, model_name=model_name, mmproj=mmproj, config=config,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to gguf")


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Gguf]) -> PlannedConversion:
    """Plans a conversion; arguments as for `to_gguf`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    single = _is_single(place)
    library()
    opened = open_catalog(source, asked.reading)  # quantised numbers in fp32: they are rounded once, to the type
    if METADATA in opened.catalog.extras:
        raise UnsupportedError(
            "is GGUF already",
            file=source,
            remedy="Use llama.cpp's llama-quantize, or write it as transformers has it (to-bf16).",
        )
    home = _tokenizer_of(opened, asked.own.tokenizer)
    tokenizer, left_out = ([], ()) if home is None else companions(home, opened.place.named)
    files = [file for file, _ in tokenizer]
    inputs = protected_places(
        opened, source, beside=asked.publishing.beside, named=(asked.own.config, asked.own.imatrix, *files)
    )
    check_output(place, single=single, overwrite=asked.publishing.overwrite, protected=inputs)
    stripped, notes = strip_wrappers(opened.catalog)
    check_wanted(opened, stripped, asked.selecting)
    if asked.own.mmproj:
        return _prepare_vision(opened, stripped, place, asked, single=single, notes=notes)
    model = name_for_writer(
        select(stripped, asked.selecting, asked.naming),
        opened.place,
        SchemeNames(GGUF, asked.own.config, by_own_job=True),
    )
    architecture_of(model.config, opened.catalog.source.path)
    filled_in(model.config, opened.catalog.source.path)  # which says what is not a usable config
    rows = vocabulary_rows(model.config, home)
    tensors = add_frequency_factors(model.catalog.tensors, model.config, rows)
    matrix = None if asked.own.imatrix is None else read_importance(asked.own.imatrix)
    types = types_of(tensors, asked.own.type, mixed_of(model.config, matrix))
    described = [(entry.name, entry.shape, types[entry.name].name) for entry in tensors]
    beside = GgufModel(
        model.config,
        home,
        asked.own.model_name or "",
        asked.own.pre_tokenizer or "",
        described,
        FILE_TYPES[asked.own.type],
        opened.place.named,
    )
    found, more, stem = metadata_of(beside)
    metadata = as_written(found, asked.own.type, matrix)
    most = None if asked.own.split_max_size is None else to_bytes(asked.own.split_max_size)
    name = os.path.splitext(place.resolved().name)[0] if single else stem
    plan = lay_out(tensors, types, metadata, name, most, matrix)
    if single and len(plan.files) > 1:
        raise UsageError(
            "the model does not fit into one file of that size", file=place, found=f"{len(plan.files):,} files",
            remedy="Give a directory as OUT, or a greater --split-max-size.",
        )  # fmt: skip
    catalog = replace(model.catalog, tensors={entry.name: entry for entry in tensors}, aliases={}, padding=())
    form = {**model.recorded["form"], "type": asked.own.type, **({} if rows is None else {"rows": rows})}
    if matrix is not None:
        form["imatrix"] = {"file": matrix.path, "digest": digest_of(locate(matrix.path))}
    fates = find_left_out(stripped, catalog.tensors, asked.selecting, selectable=stripped.tensors, rules=model.dropped)
    order = order_for(asked, plan, place, catalog, (), {"form": form}, fates, single=single)
    said = (*opened.catalog.source.notes, *notes, *model.notes, *more, *left_out)
    held = {id(entry) for entry in tensors}
    sources = (entry for entry in _sources(model.catalog.tensors.values()) if id(entry) not in held)
    read = replace(model.catalog, tensors={str(number): entry for number, entry in enumerate(sources)}, aliases={})
    return PlannedConversion(opened, order, said, asked, sources=(read,))


def _prepare_vision(
    opened: Opened, stripped: Catalog, place: Location, asked: Asked[Gguf], *, single: bool, notes: Sequence[str]
) -> PlannedConversion:
    """Plans the file of the images' side of a model."""
    own, path = asked.own, opened.place.home.path
    given = config_of(own.config) if isinstance(own.config, str) else own.config
    config = config_of_vision(stripped.tensors, opened.place.home, opened.config(given))
    vision_of(config, path)
    typed = list(
        vision_tensors(select(stripped, asked.selecting, asked.naming).tensors, config, own.type, opened.place.home)
    )
    tensors, types = [entry for entry, _ in typed], {entry.name: kind for entry, kind in typed}
    beside = GgufModel(
        config, opened.place.home, own.model_name or "", "", [(e.name, e.shape, types[e.name].name) for e in tensors],
        FILE_TYPES[own.type], opened.place.named, vision_parameters(config, FILE_TYPES[own.type]),
    )  # fmt: skip
    metadata, more, stem = metadata_of(beside)
    plan = lay_out(tensors, types, metadata, os.path.splitext(place.resolved().name)[0] if single else stem)
    catalog = replace(stripped, tensors={entry.name: entry for entry in tensors}, aliases={}, padding=())
    unread = dict.fromkeys(names_unread(stripped, catalog.tensors), "form")
    fates = find_left_out(stripped, catalog.tensors, asked.selecting, selectable=stripped.tensors, rules=unread)
    said: dict[str, object] = {"names": GGUF, "type": own.type, "mmproj": True}
    if own.config is not None:
        said["config"] = dict(config)
    order = order_for(asked, plan, place, catalog, (), {"form": said}, fates, single=single)
    sources = {str(number): entry for number, entry in enumerate(_sources(tensors))}
    read = replace(stripped, tensors=sources, aliases={})
    notes = (*opened.catalog.source.notes, *notes, *more)
    return PlannedConversion(opened, order, notes, asked, sources=(read,))


def _sources(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """The tensors, with computed ones replaced by their inputs."""
    for entry in entries:
        recipes = {id(f.store): f.store.recipe for f in entry.fragments if isinstance(f.store, DerivedStore)}
        if not recipes:
            yield entry
        for recipe in recipes.values():
            yield from _sources(recipe.inputs)


def _is_single(out: Location) -> bool:
    """Whether OUT is one file. Raises UsageError if it has the suffix of something else, or is a page of the hub."""
    if is_page(out.path):
        raise UsageError(
            "OUT cannot be a page of the hub here",
            file=out,
            remedy="Write it here, and upload it with huggingface_hub.",
        )
    suffix = os.path.splitext(out.name)[1]
    if suffix in (".safetensors", ".bin", ".pt"):
        raise UsageError(
            "OUT has the suffix of another format", file=out, found=suffix, expected=SUFFIX,
            remedy="Give OUT a name that ends in .gguf, or a directory.",
        )  # fmt: skip
    return suffix == SUFFIX and not out.path.endswith("/")


def _tokenizer_of(opened: Opened, wanted: str | None) -> Location | None:
    """The directory with the tokenizer; None for no vocabulary. Raises UsageError if there is no such directory."""
    if wanted is None:
        return opened.place.home
    if wanted == NO_VOCABULARY:
        return None
    home = locate(wanted)
    if not home.is_dir():
        raise UsageError(
            "no such directory",
            file=home,
            remedy="Give --tokenizer the directory that holds tokenizer.json or tokenizer.model.",
        )
    return home
