"""From cargo to a page: check, make and send shard by shard, one commit, read back.

For `zckpt push`, and for a live engine that has shards of its own. Nothing but an empty repository is to be seen until the
one commit at the end, which names every file by its hash.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.base.errors import RemoteError, UsageError
from zckpt.base.words import examples
from zckpt.hub import attributes, checks, scratch
from zckpt.hub.card import card
from zckpt.hub.cargo import Cargo, Progress, SmallFile
from zckpt.hub.checks import PageTarget
from zckpt.hub.client import Committed, Hub, Moved, Page, quietly
from zckpt.hub.operations import Sent, in_memory
from zckpt.hub.pipeline import Pipeline
from zckpt.hub.readback import differences, git_hash, read_back
from zckpt.output.checks import check_free

MOST_FILE_BYTES = 50_000_000_000
"""Of one file at the hub. Source: its documentation on repository limits."""

_ATTRIBUTES = ".gitattributes"
_GONE = "pointed to a file that does not exist"
"""What the hub says of a commit with a large file that it does not have."""

Wanted = dict[str, tuple[int, frozenset[str]]]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did.

    Attributes:
        url: the page's address.
        commit: its last commit.
        pull_request: address of the pull request; empty for none.
        files: (path, bytes, SHA-256 or git's SHA-1) as the hub holds them, compared with what was sent.
        bytes_sent: of shards that went up now; those that the hub had are not counted.
        bytes_made: of shards that were made now.
        seconds: wall time.
        notes: sentences a person should see.
        already_done: whether the page held all of this before, so that nothing was sent or committed.
    """

    url: str
    commit: str
    pull_request: str
    files: tuple[tuple[str, int, str], ...]
    bytes_sent: int
    bytes_made: int
    seconds: float
    notes: tuple[str, ...]
    already_done: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A push that is checked but not begun.

    Attributes:
        cargo: what goes up, the card among it.
        target: where to, under its full name.
        hub: the hub.
        page: what is there.
        removed: files there that would be mistaken for the new weights, and go.
        room: bytes of shards that may lie in the scratch directory.
        there: path -> what the page holds under it: "nothing", "the same", "another", or "perhaps the same", which nobody
            knows before a shard is made.
    """

    cargo: Cargo
    target: PageTarget
    hub: Hub
    page: Page
    removed: tuple[str, ...]
    room: int
    there: Mapping[str, str]

    @property
    def already_done(self) -> bool:
        """Whether the page holds all of this already, and nothing that would be mistaken for it."""
        return bool(self.there) and not self.removed and set(self.there.values()) == {"the same"}


def prepare(
    cargo: Cargo, target: PageTarget, tell: Callable[[str], None] = lambda text: None, *, dry_run: bool = False
) -> Ready:
    """Checks everything that can be checked before any work; writes nothing, here or there.

    Args:
        cargo: what goes up.
        target: where to.
        tell: is told, in sentences, of what takes long.
        dry_run: only to show what would be done: where there is no token, the hub is asked nothing, and files that are in
            the way are told, not refused.

    Raises:
        AccessError: no token, or one that may not write there. UsageError: the name, or the room, will not do.
        OutputError: the repository holds files, and `yes` is not set.
    """
    largest = max((shard.scratch_bytes for shard in cargo.shards), default=0)
    room = 2 * largest if target.max_scratch is None else target.max_scratch
    if room < largest:
        raise UsageError(
            "too little scratch room", found=f"{room:,} bytes", expected=f"the largest shard has {largest:,}",
            remedy="Raise --max-scratch, or make shards smaller with --max-shard-size.",
        )  # fmt: skip
    too_large = [shard.name for shard in cargo.shards if shard.nbytes > MOST_FILE_BYTES]
    if too_large:
        raise UsageError(
            "shards larger than the hub takes", found=examples(too_large), expected=f"at most {MOST_FILE_BYTES:,} bytes",
            remedy="Make them smaller with --max-shard-size.",
        )  # fmt: skip
    hub = Hub(target.token, target.endpoint, tell)
    with quietly():
        target, page = checks.check(hub, target, ask=not dry_run)
    if target.card and not any(file.name == "README.md" for file in cargo.small):
        text = card(cargo, target.repo_id, target.license, target.base_model)
        written = SmallFile("README.md", len(text), text, "", "the model card, written by zckpt")
        cargo = replace(cargo, small=(*cargo.small, written))
    names = [shard.name for shard in cargo.shards] + [file.name for file in cargo.small]
    removed = checks.mistakable(page, names, target)
    ready = Ready(cargo, target, hub, page, removed, room, _there(cargo, target, page, _known(hub, target)))
    refusals = [checks.input_replaced(cargo, page, removed, target), checks.in_the_way(page, target)]
    for refusal in () if ready.already_done else filter(None, refusals):
        if not dry_run:
            raise refusal
        tell(f"A push would be refused: {refusal}")
    return ready


def _place(hub: Hub, target: PageTarget) -> tuple[object, ...]:
    """What tells one page from another."""
    return (hub.endpoint, target.repo_id, target.revision, target.path_in_repo)


def _known(hub: Hub, target: PageTarget) -> Mapping[str, str]:
    return scratch.known(target.scratch or scratch.default_directory(), *_place(hub, target))


def _there(cargo: Cargo, target: PageTarget, page: Page, known: Mapping[str, str]) -> dict[str, str]:
    """Path -> what the page holds under it, as in `Ready`."""
    found: dict[str, str] = {}
    for shard in cargo.shards:
        old, sha256 = page.files.get(path := target.place(shard.name)), known.get(shard.identity)
        if old is None:
            found[path] = "nothing"
        elif sha256 is None and old.size == shard.nbytes:
            found[path] = "perhaps the same"
        else:
            found[path] = "the same" if old.oid == sha256 else "another"
    for file in cargo.small:
        old = page.files.get(path := target.place(file.name))
        is_same = old is not None and old.oid in (file.sha256(), git_hash(file.read()))
        found[path] = "nothing" if old is None else "the same" if is_same else "another"
    return found


def execute(ready: Ready, progress: Progress = None) -> PushReport:
    """Does what was prepared.

    Raises:
        ZckptError: one of its kinds says what is wrong; nothing is published then, and the same call goes on from there.
    """
    began = time.perf_counter()
    target, hub, shards = ready.target, ready.hub, ready.cargo.shards
    if ready.already_done:
        return _report(ready, Committed(ready.page.head), _as_listed(ready), began)
    with quietly(), scratch.opened(target.scratch or scratch.default_directory(), *_place(hub, target)) as room:
        check_free(room.path, min(ready.room, sum(shard.scratch_bytes for shard in shards)), room.path)
        page = _made_ready(ready)
        pipeline = Pipeline(shards, hub, target, page, room, ready.room, progress)
        found = _committed_if_there(ready, page, pipeline.run(), pipeline)
        if found is None:
            hub.tell("The hub has lost a file that it had: what it has not is sent again.")
            found = _commit(ready, page, pipeline.again())
        committed, wanted, notes = found
        headers = {target.place(shard.name): shard.header for shard in shards}
        files = read_back(hub, target.repo_id, committed.oid, wanted, headers)
        room.finish([shard.identity for shard in shards])
    report = _report(ready, committed, files, began, notes)
    return replace(
        report, bytes_sent=pipeline.sent, bytes_made=pipeline.made, already_done=committed.oid == ready.page.head
    )


def _report(
    ready: Ready, committed: Committed, files: tuple[tuple[str, int, str], ...], began: float, notes: Sequence[str] = ()
) -> PushReport:
    target, hub = ready.target, ready.hub
    return PushReport(
        url=f"{hub.endpoint}/{target.repo_id}" + ("" if target.revision == "main" else f"/tree/{target.revision}"),
        commit=committed.oid,
        pull_request=committed.pull_request,
        files=files,
        bytes_sent=0,
        bytes_made=0,
        seconds=time.perf_counter() - began,
        notes=(*ready.cargo.notes, *notes),
        already_done=ready.already_done,
    )


def _as_listed(ready: Ready) -> tuple[tuple[str, int, str], ...]:
    """(path, bytes, hash) of the push's files, as the hub lists them."""
    return tuple((path, ready.page.files[path].size, ready.page.files[path].oid) for path in ready.there)


def _made_ready(ready: Ready) -> Page:
    """Makes the repository and branch where there are none; what is there then."""
    target, hub, page = ready.target, ready.hub, ready.page
    if page.head:
        return page
    if not page.exists:
        hub.make(target.repo_id, private=target.private is not False)
    if target.revision != "main":
        hub.branch(target.repo_id, target.revision)
    return hub.page(target.repo_id, target.revision)


def _committed_if_there(
    ready: Ready, page: Page, sent: Sequence[Sent], pipeline: Pipeline
) -> tuple[Committed, Wanted, list[str]] | None:
    """As `_commit`; None where the hub does not have a file that was not sent, because it seemed to have it."""
    try:
        return _commit(ready, page, sent)
    except RemoteError as error:
        if _GONE not in str(error) or not (pipeline.skipped or pipeline.found):
            raise
        return None


def _commit(ready: Ready, page: Page, sent: Sequence[Sent]) -> tuple[Committed, Wanted, list[str]]:
    """The one commit, tried once more where the revision moved; with what it must hold, and what to tell of it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    target, hub, small = ready.target, ready.hub, ready.cargo.small
    contents = {target.place(file.name): file.content() for file in small}
    plain = not hub.speaks_xet(target.repo_id, sent[0].sha256, sent[0].size)
    wanted: Wanted = {file.path: (file.size, frozenset({file.sha256})) for file in sent}
    wanted |= {
        target.place(file.name): (file.nbytes, frozenset({file.sha256(), git_hash(file.read())})) for file in small
    }

    def adding() -> list[CommitOperationAdd]:
        given = {path: in_memory(content) if plain else content for path, content in contents.items()}
        return [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in given.items()]

    large = hub.sort(target.repo_id, target.revision, adding(), create_pr=target.create_pr)
    pulls = set(hub.pull_requests(target.repo_id)) if target.create_pr else set[int]()

    def made_already() -> Committed | None:
        if not target.create_pr:
            now = hub.page(target.repo_id, target.revision)
            there = not differences(now.files, wanted) and not any(path in now.files for path in ready.removed)
            return Committed(now.head) if there else None
        for number, title in hub.pull_requests(target.repo_id).items():
            now = hub.page(target.repo_id, f"refs/pr/{number}")
            if number not in pulls and title == target.message and not differences(now.files, wanted):
                return Committed(now.head, f"{hub.endpoint}/{target.repo_id}/discussions/{number}")
        return None

    def committed(page: Page) -> Committed:
        old = hub.read(target.repo_id, _ATTRIBUTES, page.head) if _ATTRIBUTES in page.files else b""
        marked = attributes.with_large(old, [*large, *(file.path for file in sent)])
        if marked is not None:
            contents[_ATTRIBUTES] = marked

        def operations() -> list[object]:
            removed = [CommitOperationDelete(path_in_repo=path) for path in ready.removed if path in page.files]
            return [*adding(), *(file.operation() for file in sent), *removed]

        return hub.commit(target, operations, page.head, made_already)

    with contextlib.suppress(Moved):
        return committed(page), wanted, []
    hub.tell(f"{target.repo_id}@{target.revision} moved meanwhile: the commit is tried once more on top of that.")
    note = f"Somebody else committed to {target.revision} during the push; this commit is on top of theirs."
    return committed(hub.page(target.repo_id, target.revision)), wanted, [note]
