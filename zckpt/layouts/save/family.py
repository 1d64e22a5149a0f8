"""What zckpt asks of a family of saves: one value for each, which the family's package exports as `FAMILY`.

For `layouts`, which lists the families, and for everything that has to know one from another: `places` (is a directory a
save, and which family's), `jobs.rank_files` (which rank's part a file is), `jobs.inspection`, `checks.soundness` and
`checks.resumable`. A new family is a package with such a value, and a line in `layouts.FAMILIES`.

There is no field for writing: each writer takes a target of its own kind, so the jobs call `lay_out` of the family they write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog
from zckpt.layouts.save.listing import Listing
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from zckpt.layouts.run.training import Training
    from zckpt.layouts.save.second import SecondReader, UnprovedFamily

Found = TypeVar("Found", covariant=True)

Record = tuple[str, int, int, int]
"""A checksummed part of a file: name, byte offset, bytes, CRC-32 (0 where the writer stored none)."""


_DEEPEST = 24
"""The most directories within each other, in a save with directories that have the names of its parameters."""


class FileKind(NamedTuple):
    """The files of one kind that a save may have.

    Attributes:
        kind: what `inspect` calls them; `{group}` stands for what a named group of the pattern found.
        pattern: matches the whole name. Its groups are numbers of axes, but for `kind`: `dp` is the data-parallel rank, `mp`
            the model-parallel rank (both 0 where the pattern has no such group).
        of_rank: whether the file is one rank's part of the model or of the optimizer, and so belongs in the table of ranks
            that `inspect` prints. Others (of a layer, of an expert) are listed below the table.
    """

    kind: str
    pattern: re.Pattern[str]
    of_rank: bool = True


class NamedFile(NamedTuple):
    """A file of a save, and what its name says.

    Attributes:
        name: of the file.
        kind: as `inspect` calls it, such as "optim".
        of_rank: see `FileKind`.
        axes: number of each axis that the name has, such as {"dp": 3, "mp": 0}.
    """

    name: str
    kind: str
    of_rank: bool
    axes: Mapping[str, int]


class RankFacts(NamedTuple):
    """What one rank's file says of its save; None where it does not say.

    Attributes:
        world_size: data-parallel ranks.
        step: of the run.
        swapped: names of the files that hold elements which this file leaves out.
    """

    world_size: int | None = None
    step: int | None = None
    swapped: tuple[str, ...] = ()


class Read(Protocol[Found]):
    """A reader of a save's catalog, or of what a run needs beside the weights; `allow_unknown`: go on although files hold keys
    that the family does not know.
    """

    def __call__(self, listing: Listing, *, allow_unknown: bool = False) -> Found:
        """Reads the save; raises what is wrong with it."""


def later(module: str, name: str) -> Callable[..., Any]:
    """A function of a family's module, which is imported when the function is first called: most are never needed."""

    def call(*values: Any, **options: Any) -> Any:
        return getattr(import_module(f"zckpt.layouts.{module}"), name)(*values, **options)

    return call


def where_there(
    names: Iterable[re.Pattern[str]], match: Callable[[Listing], str | None] | None, refusal: str
) -> Callable[[Listing], str | None]:
    """A family's `match`, which is asked, and imported, only where a file has one of these names; elsewhere it is the refusal.

    Without one, the names say it alone.
    """
    patterns = tuple(names)

    def found(listing: Listing) -> str | None:
        if not any(listing.matching(pattern) for pattern in patterns):
            return refusal
        return None if match is None else match(listing)

    return found


@dataclass(frozen=True, slots=True)
class Family:
    """A family of saves.

    Attributes:
        name: what messages call it.
        files: the files of a save, by their names.
        match: None when the family reads these files, otherwise why not, in words. It is asked of every save, in the order
            of `layouts.FAMILIES`, until one answers None: look at names first, open a file only where names cannot tell
            (a damaged file raises its error there), and refuse what an earlier family leaves to a later one.
        read: the catalog of a save that `match` accepted.
        second: finds the same tensors again, for `verify`, without the modules of `read`; or why nothing does. It has no default.
        read_training: what a run needs beside the weights; None where zckpt reads weights only.
        directory: a directory of a save; its files, at any depth, belong to the save; empty for none.
        directories: names of directories of a save; there may be several: what they hold belongs to it by the patterns
            of `files`, which begin with the directory's name.
        mark: a file that every save of the family has, where its other names are too common to tell; what is in one of
            `directories` may then lie deeper. Empty for none.
        axes: the place of one of `files` in the table of ranks, where its name alone does not say it; may open it.
        raw_directory: a directory of a save that belongs to it as `directory` does, but does not tell that it is one; its files
            hold elements and nothing else. Empty for none.
        tagged: a save is one of several directories (tags) beside a file `latest`, which names the newest; config and
            tokenizer files are beside the tags. Otherwise they are in the save or beside it, and of saves that are numbered
            alike (`step-100`, `step-200`) the last is the newest.
        fallback: its files may be in a directory that holds other saves, which are then preferred.
        common: files of a save with names so common that they do not tell that they belong to one; as `files` otherwise.
        further: names of files that the trainer may put among them: they are checked, but are not part of the model.
        has_keys: a save may hold several state dicts; `--key` chooses one.
        resumes: how a run resumes from a save with optimizer states, after "resume yes:"; empty for DeepSpeed's own, where
            `inspect` derives it from the ranks.
        every_rank: a save has files of every rank, so that one without is not complete.
        facts: what a rank's file says of its save, by the file's name, as cheaply as possible; may raise what is wrong with
            the file. With it, `inspect` finds files of other saves, and the last ranks' files if they are missing. None where
            files say nothing.
        records: (path, checksummed parts or what is wrong) of each data file, where those are not containers of
            `zckpt.containers`; None where they are.
        named_data: the data files that a save says it has, in an index or in metadata, each with the names of tensors in it that
            nothing but that file describes; nothing where it does not say. Raises what is wrong with the index.
        reads_absent: `read` knows what the files in `Listing.absent` held, as far as the others say it.
        unread_states: optimizer states that are there and are not read, in words; empty where there are none.
        state_bytes: (file, bytes) of those states, where their files hold other tensors too.
        left_out: names of tensors that neither `read` nor `read_training` gives.
        beside: what a save holds beside the model that `read` gives and the optimizer's states, as names of tensors and files.
        holds_run: a save with optimizer states has a place for the schedules, counters and settings of the run too.
        apart: the group of the files' patterns that tells one save from others in the same directory, such as
            `checkpoint_last` of `checkpoint_last-shard0.pt`; empty where a directory is one save.
        about: what it is, in a line; empty where the first line of its package says it.
        alone: a save may be a single file, which is then the whole checkpoint, whatever lies beside it.
        digests: file name -> SHA-256 in hexadecimal, where the trainer recorded them in the save.
        keeps_model_files: a save made from another has its model files as they were.
    """

    name: str
    files: tuple[FileKind, ...]
    match: Callable[[Listing], str | None]
    read: Read[Catalog]
    second: SecondReader | UnprovedFamily
    read_training: Read[Training] | None = None
    directory: str = ""
    directories: re.Pattern[str] | None = None
    mark: str = ""
    axes: Callable[[Listing, str], Mapping[str, int]] | None = None
    raw_directory: str = ""
    tagged: bool = False
    fallback: bool = False
    common: tuple[FileKind, ...] = ()
    further: tuple[re.Pattern[str], ...] = ()
    has_keys: bool = False
    resumes: str = ""
    every_rank: bool = True
    facts: Callable[[Listing, str], RankFacts] | None = None
    records: Callable[[Listing], Iterator[tuple[str, list[Record] | ZckptError]]] | None = None
    named_data: Callable[[Listing], Mapping[str, list[str]]] = lambda listing: {}
    reads_absent: bool = False
    unread_states: Callable[[Listing], str] = lambda listing: ""
    state_bytes: Callable[[Listing], Iterator[tuple[str, int]]] | None = None
    left_out: Callable[[Listing], list[str]] = lambda listing: []
    beside: Callable[[Listing], list[str]] = lambda listing: []
    digests: Callable[[Listing], Mapping[str, str]] = lambda listing: {}
    holds_run: bool = True
    keeps_model_files: bool = False
    apart: str = ""
    about: str = ""
    alone: bool = False

    def owns(self, name: str) -> bool:
        """Whether a file of this name belongs to a save of the family."""
        for kind in self.files:
            if kind.pattern.fullmatch(name):
                return True
        above, slash, _ = name.partition("/")
        return bool(slash) and above in (self.directory, self.raw_directory)

    def is_raw(self, name: str) -> bool:
        """Whether a file of this name holds elements and nothing else."""
        return bool(self.raw_directory) and name.startswith(f"{self.raw_directory}/")

    def is_save(self, names: Iterable[str]) -> bool:
        """Whether a directory with entries of these names is a save of the family."""
        names = list(names)
        if self.mark and self.mark not in names:
            return False
        return any(name == self.directory or self.holds_files(name) or self.owns(name) for name in names)

    def holds_files(self, name: str, beside: Iterable[str] | None = None) -> bool:
        """Whether a directory of this name, in a save, holds files of it; see `directories`; `beside`: names there, if known."""
        if self.directories is None or (self.mark and beside is not None and self.mark not in beside):
            return False
        return self.directories.fullmatch(name) is not None

    def above_ranks(self, path: Location) -> Location | None:
        """The save that `path` belongs to, as a directory of its files or inside one; see `directories` and `directory`."""
        inner = path.absolute()
        below = [self.directory, self.raw_directory] if self.directory or self.raw_directory else []
        for within in (inner, inner.parent, inner.parent.parent) if below else ():
            if within.name and within.name in below and self._owns_beside(within.parent):
                return within.parent
        if self.mark:
            return self._above_mark(inner)
        if self.holds_files(inner.parent.name) and self.owns(f"{inner.parent.name}/{inner.name}") and path.is_file():
            return inner.parent.parent
        if self.holds_files(inner.name) and path.is_dir() and any(self.owns(f"{inner.name}/{n}") for n in path.names()):
            return inner.parent
        return None

    def _above_mark(self, inner: Location) -> Location | None:
        """The save that contains a path which is its mark, or lies in a directory of it."""
        if inner.name == self.mark and inner.is_file():
            return inner.parent
        for _ in range(_DEEPEST):
            if not inner.name or inner.path == inner.parent.path:
                break
            if self.holds_files(inner.name) and (inner.parent / self.mark).is_file():
                return inner.parent
            inner = inner.parent
        return None

    def _owns_beside(self, home: Location) -> bool:
        """Whether a directory holds files of a save beside the family's directories."""
        return home.is_dir() and any(kind.pattern.fullmatch(name) for kind in self.files for name in home.names())

    def named_files(self, names: Iterable[str]) -> Iterator[NamedFile]:
        """The files with a kind, and what their names say."""
        for name in names:
            for kind, pattern, of_rank in (*self.files, *self.common):
                if match := pattern.fullmatch(name):
                    found = match.groupdict()
                    axes = {axis: int(number) for axis, number in found.items() if (number or "").isdecimal()}
                    yield NamedFile(name, kind.format_map(found), of_rank, axes)
                    break

    def save_of(self, name: str) -> str | None:
        """The part of a file's name that tells its save from others in the directory; None for files of no save of its
        own.
        """
        for kind in self.files if self.apart else ():
            if match := kind.pattern.fullmatch(name):
                return match[self.apart] or ""
        return None

    def containers(self, listing: Listing) -> list[str]:
        """Names of the files of a save that open on their own, whether they hold tensors or not."""
        if self.records is not None or self.fallback:
            return []
        patterns = (*(kind.pattern for kind in self.files), *self.further)
        return [name for name in listing.files if any(pattern.fullmatch(name) for pattern in patterns)]
