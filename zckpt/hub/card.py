"""The small files that a push writes itself: the model card, where the checkpoint has no README.md, and `.gitattributes`.

For `transfer`. The card is made with huggingface_hub's own classes, from facts of the checkpoint only; it has no path, user or
date. `git clone` fetches the large files of a page only if a line of `.gitattributes` matches them.
Source: git's gitattributes(5): a pattern without a slash matches a file's name in any directory.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator

from zckpt.base.patterns import compile_late
from zckpt.base.version import __version__
from zckpt.base.words import count
from zckpt.hub.cargo import Cargo

_WORD = compile_late(r"[A-Za-z0-9][\w.+-]*", re.ASCII)


def card(cargo: Cargo, repo_id: str, license_id: str | None, base_model: str | None) -> bytes:
    """Writes the text of a page's README.md. `license_id`: the hub's identifier, e.g. "apache-2.0"; `base_model`: the model that
    was trained, e.g. "meta-llama/Llama-3.2-1B".
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        license=license_id, base_model=base_model, library_name="transformers" if cargo.config else "safetensors",
        tags=list(_tags(cargo)), model_name=None,
    )  # fmt: skip
    text = "\n".join(_lines(cargo, repo_id, base_model))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n", ignore_metadata_errors=False)).encode()


def _tags(cargo: Cargo) -> Iterator[str]:
    if kind := _word(cargo.config.get("model_type")):
        yield kind
    if framework := _word(cargo.catalog.source.framework[0]):
        yield framework.lower()
    yield "zckpt"


def _lines(cargo: Cargo, repo_id: str, base_model: str | None) -> Iterator[str]:
    catalog, source = cargo.catalog, cargo.catalog.source
    kind = _architecture(cargo)
    yield f"# {repo_id.rpartition('/')[2]}"
    yield ""
    origin = f", trained from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    known = kind if kind not in ("", "AutoModel") else (_word(cargo.config.get("model_type")) or "Weights")
    yield f"{known} of {count(catalog.numel, 'parameter')}{f' in {cargo.dtype}' if cargo.dtype else ''}{origin}."
    yield ""
    yield "## Load it"
    yield ""
    yield from _snippet(repo_id, kind)
    yield ""
    yield "## Files"
    yield ""
    yield "| file | bytes |"
    yield "|---|---:|"
    for shard in cargo.shards:
        yield f"| `{shard.name}` | {shard.nbytes:,} |"
    total = sum(shard.nbytes for shard in cargo.shards)
    yield f"| {count(len(catalog), 'tensor')}, {count(catalog.numel, 'element')} | {total:,} |"
    if catalog.aliases:
        yield ""
        yield f"Tied weights are stored once, under the name they are tied to ({count(len(catalog.aliases), 'name')})."
    yield ""
    yield "## Where it comes from"
    yield ""
    yield f"- checkpoint: {' '.join(_checkpoint(cargo))}"
    if source.global_steps is not None:
        yield f"- training step: {source.global_steps:,}"
    kept = "every tensor in its own dtype"
    dtypes = f"floating parameters as {cargo.dtype}, rounded to nearest even" if cargo.dtype else kept
    yield f"- conversion: [zckpt](https://pypi.org/project/zckpt/) {__version__}; {dtypes}"


def _checkpoint(cargo: Cargo) -> Iterator[str]:
    source, world = cargo.catalog.source, cargo.catalog.topology.dp
    if source.layout == "plain":
        yield "plain weights"
        return
    yield " ".join(map(_word, source.framework)).strip() or "sharded"
    if source.zero_stage is not None:
        yield f"ZeRO stage {source.zero_stage},"
    yield f"{world} data-parallel rank{'s' * (world != 1)}"
    if _word(source.tag):
        yield f"(`{source.tag}`)"


def _word(found: object) -> str:
    """A save's own statement, if it is a single word: a page renders any Markdown and HTML."""
    return str(found) if isinstance(found, str) and _WORD.fullmatch(found) else ""


def _architecture(cargo: Cargo) -> str:
    """The `transformers` class that loads the model; AutoModel if only its type is known, empty without a config."""
    named = cargo.config.get("architectures")
    if isinstance(named, list) and named and str(named[0]).isidentifier():
        return str(named[0])
    return "AutoModel" if "model_type" in cargo.config else ""


def _snippet(repo_id: str, kind: str) -> Iterator[str]:
    yield "```python"
    if kind:
        yield f"from transformers import {kind}"
        yield ""
        yield f'model = {kind}.from_pretrained("{repo_id}", dtype="auto")'
    else:
        yield "from huggingface_hub import snapshot_download"
        yield "from safetensors.torch import load_file"
        yield ""
        yield f'directory = snapshot_download("{repo_id}")'
        yield 'weights = load_file(f"{directory}/model.safetensors")'
    yield "```"


_LARGE = "filter=lfs diff=lfs merge=lfs -text"


def with_large(text: bytes, paths: Iterable[str]) -> bytes | None:
    """The file, which is empty if it does not exist, with a line for each large file that lacks one; None if none does."""
    missing = [path for path in paths if not _is_large(text.decode(errors="replace"), path)]
    if not missing:
        return None
    kept = text if not text or text.endswith(b"\n") else text + b"\n"
    return kept + "".join(f"{pattern} {_LARGE}\n" for pattern in sorted({*map(_pattern, missing)})).encode()


def _pattern(path: str) -> str:
    """The pattern for a file: one for all weights, its own path for any other file."""
    if path.endswith(".safetensors"):
        return "*.safetensors"
    return "".join(f"[{c}]" if c in "*?[" else "?" if c.isspace() else c for c in path)


def _is_large(text: str, path: str) -> bool:
    large = False
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        pattern = words[0].lstrip("/")
        whole = "/" in words[0]
        if fnmatch.fnmatchcase(path if whole else path.rpartition("/")[2], pattern):
            if "filter=lfs" in words[1:]:
                large = True
            elif any(word in ("-filter", "!filter") or word.startswith("filter=") for word in words[1:]):
                large = False
    return large
