"""Whether the files of a save belong together, by what they record of it.

For the readers, which refuse what would make the tensors wrong, and for `verify`, which reports everything that disagrees.
DeepSpeed's files record the step, the world size and DeepSpeed's version; the modification time of any file says when it was
written, or copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OTHER_SAVE, InconsistentError
from zckpt.base.words import examples
from zckpt.containers import Container, TensorRef, brief, list_at, mapping_at, value_at
from zckpt.layouts.save.family import RankFacts
from zckpt.layouts.save.listing import SHARD_NAME, Listing
from zckpt.layouts.save.module_states import label_of, root_of

APART_S = 600
"""Ranks write at the same time: a file ten minutes older or younger than the rest was not written with them."""

_SHAPES = ("param_shapes", "frozen_param_shapes")
_MOST = 4
"""The most values that a sentence names."""


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """What one file records of its save.

    Attributes:
        file: its name.
        step: optimizer steps, or None.
        world_size: data-parallel ranks, or None.
        version: DeepSpeed's, or None.
        written_s: modification time, in seconds; None behind an address, where it is that of the upload.
        shapes: `param_shapes` and `frozen_param_shapes` of a model file of stage 3, which every data-parallel rank has; None
            elsewhere.
        mp_rank: its model-parallel rank.
    """

    file: str
    step: int | None
    world_size: int | None
    version: str | None
    written_s: float | None
    shapes: list[object] | None = None
    mp_rank: int = 0


def origin(listing: Listing, name: str, container: Container) -> FileOrigin:
    """What a file of a save records, with its modification time."""
    root = mapping_at(container.root)
    version = root.get("ds_version") or value_at(root, "optimizer_state_dict", "ds_version")
    rank = SHARD_NAME.fullmatch(name)
    has_experts = root.get("num_experts") or root.get("ds_autoep_layers")  # of which each rank has its own
    return FileOrigin(
        name,
        _whole(root.get("global_steps")),
        _whole(root.get("dp_world_size")),
        version if isinstance(version, str) else None,
        listing.files[name].written_s(),
        [root.get(key) for key in _SHAPES]
        if rank is not None and rank["kind"] == "model" and not has_experts
        else None,
        int(rank["mp"]) if rank is not None else 0,
    )


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def rank_facts(listing: Listing, name: str) -> RankFacts:
    """What a file of one rank says of its save; of a model file that is not open yet, only what is cheap to read.
    Raises ZckptError if the file is damaged.
    """
    if not name.endswith("_optim_states.pt"):
        numbers = listing.numbers(name, "dp_world_size", "global_steps")
        return RankFacts(numbers.get("dp_world_size"), numbers.get("global_steps"))
    state = mapping_at(root_of(listing, name), "optimizer_state_dict")
    count = state.get("partition_count")
    if isinstance(count, list | tuple):  # groups of experts, which come last, have others
        count = next(iter(count), None)
    return RankFacts(_whole(count), None, tuple(_find_swap_files(listing, name, state)))


def _find_swap_files(listing: Listing, name: str, state: Mapping[str, object]) -> Iterator[str]:
    """The names of the swap files that hold elements which an optimizer file lacks, or has only in a buffer."""
    match = SHARD_NAME.fullmatch(name)
    states = mapping_at(state, "optimizer_state_dict", "state")
    for number, vector in enumerate(list_at(state, "fp32_flat_groups")):
        labels = {key: label_of(value) for key, value in mapping_at(states, number).items()}
        swapped = [label for key, label in labels.items() if label.startswith(f"{key}-")]
        label = label_of(vector)
        if match is None or not label:
            continue
        master = listing.swap_file(int(match["dp"]), int(match["mp"]), label)
        if swapped or (isinstance(vector, TensorRef) and not vector.numel and master in listing.files):
            yield master
        yield from (listing.swap_file(int(match["dp"]), int(match["mp"]), label) for label in swapped)


def contradictions(origins: Sequence[FileOrigin]) -> Iterator[str]:
    """Sentences on facts on which the files disagree."""
    facts: dict[str, dict[str, int | str | None]] = {
        "the step": {origin.file: origin.step for origin in origins},
        "the world size": {origin.file: origin.world_size for origin in origins},
        "the DeepSpeed version": {origin.file: origin.version for origin in origins},
    }
    for fact, said in facts.items():
        if words := disagreement(fact, {file: value for file, value in said.items() if value is not None}):
            yield words
    first: dict[int, FileOrigin] = {}
    for origin in origins:
        known = first.setdefault(origin.mp_rank, origin) if origin.shapes is not None else origin
        for key, own, other in zip(_SHAPES, origin.shapes or (), known.shapes or (), strict=False):
            if own is not other and own != other:
                yield f"they do not agree on the parameters' shapes: {key} of {origin.file!r} and of {known.file!r} differ"


def disagreement(fact: str, said: Mapping[str, int | str | None]) -> str:
    """What files do not agree on, and which file says what, the most frequent first; empty where they agree.

    Args:
        fact: what they say something about, in words.
        said: file -> what it says; None for nothing.
    """
    counts = Counter(said.values())
    if len(counts) < 2:
        return ""
    files = {value: [file for file, own in said.items() if own == value] for value, _ in counts.most_common(_MOST)}
    said_by = (
        f"{examples(names)} say{'s' * (len(names) == 1)} {'nothing' if value is None else value}"
        for value, names in files.items()
    )
    return f"they do not agree on {fact}: {'; '.join(said_by)}"


def check_alike(listing: Listing, fact: str, said: Mapping[str, int | str | None]) -> None:
    """Makes sure that files say the same; arguments as in `disagreement`. Raises InconsistentError if they do not."""
    if words := disagreement(fact, said):
        usual, count = Counter(said.values()).most_common(1)[0]
        odd = examples(file for file, value in said.items() if value != usual)
        raise InconsistentError(
            "holds files of different saves",
            file=listing.directory,
            found=words,
            remedy=f"Copy {odd if 2 * count > len(said) else 'the files of one save'} again, or choose another tag.",
        )


def of_other_ages(origins: Sequence[FileOrigin]) -> Iterator[str]:
    """Sentences on files that were written long before or after the others."""
    written = {origin.file: origin.written_s for origin in origins if origin.written_s is not None}
    if len(written) < 2:
        return
    middle = sorted(written.values())[len(written) // 2]
    for names, word in (
        ([name for name, at in written.items() if at < middle - APART_S], "older"),
        ([name for name, at in written.items() if at > middle + APART_S], "younger"),
    ):
        if names:
            by = max(abs(written[name] - middle) for name in names)
            yield (
                f"{examples(names)} {'is' if len(names) == 1 else 'are'} up to {_span(by)} {word} than the rest: "
                "copied apart from it, or of another save"
            )


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


def other_kind(name: str, file: str, value: object, tensor_file: str) -> InconsistentError:
    """The error for a name that is a tensor in one rank's file and something else in another's."""
    kind = "a mapping or list" if isinstance(value, Mapping | list | tuple) else brief(value)
    return InconsistentError(
        f"{name!r} is not a tensor, and it is one in another rank's file", file=file, found=kind,
        expected=f"a tensor, as in {tensor_file!r}", remedy=OTHER_SAVE,
    )  # fmt: skip
