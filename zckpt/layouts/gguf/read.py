"""A model in GGUF files, as a catalog under their own names; `naming` knows what these mean in transformers.

Parts `NAME-00001-of-00003.gguf` belong together; the first has the metadata. What is quantised is read as fp32.
Source: llama.cpp, tools/gguf-split (names and `split.*` keys), src/llama-model-loader.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from zckpt.base.errors import IncompleteError, InconsistentError, NotACheckpointError
from zckpt.base.words import examples
from zckpt.containers import Container, TensorRef, mapping_at
from zckpt.containers.gguf_file import BLOCKS, BY_NAME, GgufValue
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.evidence import Evidence
from zckpt.layouts.gguf import METADATA, NAME
from zckpt.layouts.gguf.blocks import as_floats
from zckpt.layouts.plain import FAMILY as PLAIN
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import whole


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    names = listing.matching(NAME)
    if len(listing.files) > len(names) and any(PLAIN.owns(name) for name in listing.files):
        return "plain weights are there too"
    return None


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a GGUF file or its parts. Raises IncompleteError if parts are missing; InconsistentError if files
    are not parts of one model; CorruptError, UnsupportedError as of `containers.gguf_file`.
    """
    names = _parts(listing)
    containers = [_open_file(listing, name) for name in names]
    metadata = {key: value.value for key, value in _values(containers[0]).items()}
    tensors: dict[str, TensorEntry] = {}
    types: Counter[str] = Counter()
    for number, (name, container) in enumerate(zip(names, containers)):
        said = _values(container).get("split.no")
        if len(names) > 1 and (said is None or said.value != number):
            raise InconsistentError(
                "is not the part that its name says", file=listing.files[name], found=f"split.no {said and said.value}",
                expected=f"split.no {number}", remedy="Copy the parts of the model again, under their own names.",
            )  # fmt: skip
        for tensor, ref in _tensors(container).items():
            if tensor in tensors:
                raise InconsistentError(
                    f"two parts have a tensor {tensor!r}", file=listing.files[name],
                    remedy="Copy the parts of the model again, under their own names.",
                )  # fmt: skip
            stored = whole(tensor, ref, "parameter")
            blocks = (ref.attributes or {}).get(BLOCKS)
            tensors[tensor] = stored if blocks is None else as_floats(stored, BY_NAME[str(blocks)])
            types[str(blocks or ref.dtype)] += 1
    total = metadata.get("split.tensors.count")
    if len(names) > 1 and isinstance(total, int) and total != len(tensors):
        raise IncompleteError(
            "tensors are missing", file=listing.directory, found=f"{len(tensors):,} in {len(names):,} parts",
            expected=f"{total:,}, as the first part says", remedy="Copy the parts of the model again.",
        )  # fmt: skip
    details = [("architecture", str(metadata.get("general.architecture") or "not recorded"))]
    if isinstance(title := metadata.get("general.name"), str):
        details.append(("name", title))
    details.append(("types", ", ".join(f"{name} ({number:,})" for name, number in types.most_common())))
    source = Source("gguf", listing.directory.path, details=tuple(details))
    by = f"the count of parts in {names[0]!r}" if len(names) > 1 else "the file's own index"
    return Catalog(tensors, source, Evidence("metadata", by), extras={METADATA: metadata})


def _open_file(listing: Listing, name: str) -> Container:
    container = listing.open(name)
    if container.kind != "gguf":
        raise NotACheckpointError(
            "has the name of a GGUF file, and is not one", file=listing.files[name], found=f"a {container.kind} file",
            remedy="Give the file the suffix of what it is.",
        )  # fmt: skip
    return container


def _values(container: Container) -> Mapping[str, GgufValue]:
    return {key: value for key, value in container.values.items() if isinstance(value, GgufValue)}


def _tensors(container: Container) -> Mapping[str, TensorRef]:
    return {name: ref for name, ref in mapping_at(container.root).items() if isinstance(ref, TensorRef)}


def _parts(listing: Listing) -> list[str]:
    """The names of a model's files, in order."""
    names = listing.matching(NAME)
    found = {name: NAME.fullmatch(name) for name in names}
    parts = {name: match for name, match in found.items() if match and match["part"]}
    if not parts:
        if len(names) > 1:
            raise InconsistentError(
                "holds several models", file=listing.directory, found=examples(names), expected="one",
                remedy="Give one of the files.",
            )  # fmt: skip
        return names
    whole_files = [name for name in names if name not in parts]
    counts = {int(match["parts"]) for match in parts.values()}
    if whole_files or len(counts) > 1:
        raise InconsistentError(
            "holds parts of several models", file=listing.directory, found=examples(names),
            expected="the parts of one", remedy="Move the others to a directory of their own.",
        )  # fmt: skip
    there = {int(match["part"]): name for name, match in parts.items()}
    missing = sorted(set(range(1, counts.pop() + 1)) - there.keys())
    if missing:
        raise IncompleteError(
            "parts are missing", file=listing.directory, found=f"no part {', '.join(map(str, missing[:5]))}",
            expected="all parts that the names tell of", remedy="Copy them to this directory.",
        )  # fmt: skip
    return [there[number] for number in sorted(there)]
