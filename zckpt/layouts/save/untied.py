"""Heads that hold other numbers than the embedding, although a model's config says that both are one weight.

For `jobs.opened` and `naming`, which write configs, and for `dcp.ties`. Training may part the two: an adapter merged into one of
them, a framework that does not keep ties. Loaders that believe the config (transformers 4, vLLM, mlx-lm) then leave out the head.
transformers 5 keeps both where they differ, and so do outputs: their config says that the two are apart.
Source: transformers 5.23, modeling_utils.py `tie_weights` (`missing_keys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zckpt.base.errors import ZckptError
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.engine.elements import ElementReader, Wanted
from zckpt.engine.replicas import ends
from zckpt.layouts.save.tied import HEADS, KEY, embedding_of, is_tied

_BLOCKS = 64
_WIDTH = 16
"""Elements of each block that is compared."""


def samples(reader: ElementReader, a: TensorEntry, b: TensorEntry) -> Iterator[tuple[bytes, bytes]]:
    """The elements of two tensors of one shape and dtype at the ends of the first one's fragments, and spread over them."""
    last = max(a.numel - _WIDTH, 0)
    spread = {last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}
    for start, stop in [
        *ends(a.fragments),
        *((start, min(start + _WIDTH, a.numel)) for start in sorted(spread)),
    ]:
        one, other = (reader.read(Wanted(entry.fragments, entry.dtype, start, stop)) for entry in (a, b))
        yield one, other


def untied_heads(catalog: Catalog, config: Mapping[str, object] | None) -> list[str]:
    """The heads that differ, where they are compared, from the embedding that the config says they are."""
    heads = [name for name in catalog.tensors if name.endswith(HEADS)] if config is not None and is_tied(config) else []
    found: list[str] = []
    for name in heads:
        kept = embedding_of(config or {}, name, catalog.tensors)
        if kept is None or kept == name:
            continue
        head, embedding = catalog.tensors[name], catalog.tensors[kept]
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not head.numel:
            continue
        try:
            with ElementReader() as reader:
                if any(one != other for one, other in samples(reader, head, embedding)):
                    found.append(name)
        except (ZckptError, OSError):  # a file that is not here, or is damaged: who reads it says so
            continue
    return found


def as_untied(config: Mapping[str, object]) -> dict[str, object]:
    """The config of a model, saying that head and embedding are two weights."""
    text = config.get("text_config")
    return {**config, KEY: False, **({"text_config": {**text, KEY: False}} if isinstance(text, Mapping) else {})}


def note_on(heads: list[str]) -> tuple[str, ...]:
    """A sentence on heads that are not the embedding; none where there are none."""
    if not heads:
        return ()
    return (
        f"{examples(heads)}: holds other numbers than the embedding, although the config says that both are one weight ({KEY}). "
        "Both are kept, and the output's config says that they are apart.",
    )
