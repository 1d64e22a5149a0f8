"""The steps of a push: check, make and send shard by shard, commit once, read back.

For `zckpt push` and `zckpt.push_to_hub`. The page shows none of it until the one commit at the end, which names every file by
its hash; a repository that did not exist is empty until then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import CorruptError, RemoteError, UsageError
from zckpt.base.words import examples
from zckpt.hub import checks
from zckpt.hub.card import card, with_large
from zckpt.hub.cargo import Cargo, Progress, SmallFile
from zckpt.hub.client import Hub, MovedError, in_large_pieces, quietly
from zckpt.hub.pipeline import Pipeline, default_directory, open_scratch, read_known_shards
from zckpt.hub.target import Committed, Files, Page, PageTarget, SentFile, small_operations
from zckpt.output.checks import check_free
from zckpt.output.manifest import SIGNATURE

MOST_FILE_BYTES = 50_000_000_000
"""The largest file that the hub takes. Source: its documentation on repository limits."""

_ATTRIBUTES = ".gitattributes"
_GONE = "pointed to a file that does not exist"
"""A part of the hub's answer to a commit with a large file that it does not have."""


@public
@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did.

    Attributes:
        url: the page's address.
        commit: the page's last commit.
        pull_request: address of the pull request; empty for none.
        files: (path, bytes, SHA-256 or git's SHA-1) at the hub, equal to what was sent.
        bytes_sent: of the shards that were sent now; those that the hub had are not counted.
        bytes_made: of the shards that were made now.
        seconds: wall time.
        notes: sentences for the user.
        already_done: whether the page held all of this before, so that nothing was committed.
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
    """A push that is checked, and not begun.

    Attributes:
        cargo: what to send, with the card.
        target: where to send it, with the repository's full name.
        hub: the hub.
        page: what is there.
        removed: files there that a loader could take instead of the new weights; the commit removes them.
        room: the most bytes of shards in the scratch directory.
        there: path -> what the page holds under it: "nothing", "the same", "another", or "perhaps the same": that is known
            only when the shard is made.
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
        """Whether the page holds all of this already, and no file that must be removed."""
        return bool(self.there) and not self.removed and set(self.there.values()) == {"the same"}


def prepare(
    cargo: Cargo, target: PageTarget, tell: Callable[[str], None] = lambda text: None, *, dry_run: bool = False
) -> Ready:
    """Checks everything that can be checked before any work; writes nothing, here or at the hub. `tell`: called with a sentence
    when something takes long; `dry_run`: only to show what a push would do: without a token the hub is not asked, and a refusal
    is passed to `tell` instead of raised.

    Raises:
        AccessError: there is no token, or it may not write there.
        UsageError: the name, a shard's size or the scratch room does not fit.
        OutputError: the repository holds files and `yes` is not set, or the input would be replaced.
    """
    room = _scratch_room(cargo, target)
    hub = Hub(target.token, target.endpoint, tell)
    with quietly():
        target, page = checks.check(hub, target, ask=not dry_run)
    if not target.no_card and not any(file.name == "README.md" for file in cargo.files):
        text = card(cargo, target.repo_id, target.license, target.base_model)
        written = SmallFile("README.md", len(text), text, "the model card, written by zckpt")
        cargo = replace(cargo, small=(*cargo.small, written))
    removed = checks.mistakable(page, [file.name for file in cargo.files], target)
    known = read_known_shards(target.scratch or default_directory(), *_place(hub, target))
    there = _there(cargo, target, page, known)
    if cargo.signing is not None:
        signature = target.place(SIGNATURE)
        there[signature] = "perhaps the same" if signature in page.files else "nothing"
    ready = Ready(cargo, target, hub, page, removed, room, there)
    refusals = [checks.input_replaced(cargo, page, removed, target), checks.in_the_way(page, target)]
    for refusal in () if ready.already_done else filter(None, refusals):
        if not dry_run:
            raise refusal
        tell(f"A push would be refused: {refusal}")
    return ready


def _scratch_room(cargo: Cargo, target: PageTarget) -> int:
    """Bytes that shards may take in the scratch directory; checks the shards' sizes."""
    largest = max((shard.scratch_bytes for shard in cargo.shards), default=0)
    room = 2 * largest if target.max_scratch is None else target.max_scratch
    if room < largest:
        raise UsageError(
            "too little scratch room", found=f"{room:,} bytes", expected=f"{largest:,} bytes, for the largest shard",
            remedy="Raise --max-scratch, or make shards smaller with --max-shard-size.",
        )  # fmt: skip
    too_large = [shard.name for shard in cargo.shards if shard.nbytes > MOST_FILE_BYTES]
    if too_large:
        raise UsageError(
            "shards are larger than the hub takes", found=examples(too_large), expected=f"at most {MOST_FILE_BYTES:,} bytes each",
            remedy="Make them smaller with --max-shard-size.",
        )  # fmt: skip
    return room


def _place(hub: Hub, target: PageTarget) -> tuple[object, ...]:
    """The identity of a page."""
    return (hub.endpoint, target.repo_id, target.revision, target.path_in_repo)


def _there(cargo: Cargo, target: PageTarget, page: Page, known: Mapping[str, str]) -> dict[str, str]:
    """The value of `Ready.there`, by the hashes of shards that earlier pushes made (identity -> SHA-256)."""
    found: dict[str, str] = {}
    for file in cargo.files:
        old = page.files.get(path := target.place(file.name))
        if old is None:
            found[path] = "nothing"
            continue
        hashes = file.hashes() if isinstance(file, SmallFile) else {known.get(file.identity)}
        size, oid = old
        if None in hashes and size == file.nbytes:
            found[path] = "perhaps the same"
        else:
            found[path] = "the same" if oid in hashes else "another"
    return found


def execute(ready: Ready, progress: Progress = None) -> PushReport:
    """Makes, sends, commits and reads back what was prepared. `progress`: called with the bytes of shards that are done. Raises
    ZckptError: nothing is published then, and the same call resumes; or, for a page that differs from what was sent, the error
    says so.
    """
    began = time.perf_counter()
    target, hub, page, shards = ready.target, ready.hub, ready.page, ready.cargo.shards
    if ready.already_done:
        listed = tuple((path, *page.files[path]) for path in ready.there)
        return _report(ready, (page.head, ""), listed, began)
    directory = target.scratch or default_directory()
    with quietly(), in_large_pieces(), open_scratch(directory, *_place(hub, target)) as room:
        check_free(room.path, min(ready.room, sum(shard.scratch_bytes for shard in shards)), room.path)
        page = _made_ready(ready)
        pipeline = Pipeline(shards, hub, target, page, room, ready.room, progress)
        committed, wanted, notes = _send_and_commit(ready, page, pipeline)
        headers = {target.place(shard.name): shard.header for shard in shards}
        files = read_back(hub, target.repo_id, committed[0], wanted, headers)
        room.finish([shard.identity for shard in shards])
    return _report(ready, committed, files, began, pipeline.sent, pipeline.made, notes)


def _report(
    ready: Ready, committed: Committed, files: tuple[tuple[str, int, str], ...], began: float, sent: int = 0, made: int = 0,
    notes: Sequence[str] = (),
) -> PushReport:  # fmt: skip
    target, (commit, pull_request) = ready.target, committed
    return PushReport(
        url=f"{ready.hub.endpoint}/{target.repo_id}" + ("" if target.revision == "main" else f"/tree/{target.revision}"),
        commit=commit, pull_request=pull_request, files=files, bytes_sent=sent, bytes_made=made,
        seconds=time.perf_counter() - began, notes=(*ready.cargo.notes, *notes),
        already_done=commit == ready.page.head,
    )  # fmt: skip


def _made_ready(ready: Ready) -> Page:
    """Creates the repository and the branch, if they do not exist; returns the page."""
    target, hub, page = ready.target, ready.hub, ready.page
    if page.head:
        return page
    repo, branch = target.repo_id, target.revision
    if not page.exists:
        is_private = target.private is not False
        hub.do(f"making {repo}", lambda: hub.api.create_repo(repo, private=is_private, exist_ok=True))
    if branch != "main":
        hub.do(f"making the branch {branch}", lambda: hub.api.create_branch(repo, branch=branch, exist_ok=True))
    return hub.page(repo, branch)


def _send_and_commit(ready: Ready, page: Page, pipeline: Pipeline) -> tuple[Committed, Wanted, list[str]]:
    """As `_commit`, after sending all shards; shards that the hub had and then lost are sent again."""
    sent = pipeline.run()
    try:
        return _commit(ready, page, sent)
    except RemoteError as error:
        if _GONE not in str(error) or not pipeline.not_sent:
            raise
    ready.hub.tell("The hub has lost a file that it had: files that were not sent are sent now.")
    return _commit(ready, page, pipeline.again())


def _commit(ready: Ready, page: Page, sent: Sequence[SentFile]) -> tuple[Committed, Wanted, list[str]]:
    """Makes the one commit, retried once if the revision moved; returns it, its expected contents, and notes for the
    user.
    """
    from huggingface_hub import CommitOperationDelete

    target, hub = ready.target, ready.hub
    small_files, notes = _add_signature(ready, page, sent)
    contents = {target.place(file.name): file.content for file in small_files}
    wanted: dict[str, tuple[int, frozenset[str]]] = {file.path: (file.size, frozenset({file.sha256})) for file in sent}
    wanted |= {target.place(file.name): (file.nbytes, file.hashes()) for file in small_files}
    in_memory = not hub.speaks_xet(target.repo_id, sent[0].sha256, sent[0].size)
    small = small_operations(contents, in_memory=in_memory)
    large = hub.sort(target.repo_id, target.revision, small, create_pr=target.create_pr)
    known = set(hub.pull_requests(target.repo_id)) if target.create_pr else set[int]()

    def committed(page: Page) -> Committed:
        old = hub.read(target.repo_id, _ATTRIBUTES, page.head) if _ATTRIBUTES in page.files else b""
        marked = with_large(old, [*large, *(file.path for file in sent)])
        if marked is not None:
            contents[_ATTRIBUTES] = marked

        def operations() -> list[object]:
            removed = [CommitOperationDelete(path_in_repo=path) for path in ready.removed if path in page.files]
            return [*small_operations(contents, in_memory=in_memory), *(file.operation() for file in sent), *removed]

        return hub.commit(target, operations, page.head, lambda: _made_already(ready, wanted, known))

    with contextlib.suppress(MovedError):
        return committed(page), wanted, notes
    hub.tell(f"Somebody else committed to {target.label} meanwhile: the commit is tried once more, on top of theirs.")
    note = f"Somebody else committed to {target.revision} during the push; this commit is on top of theirs."
    return committed(hub.page(target.repo_id, target.revision)), wanted, [*notes, note]


def _add_signature(ready: Ready, page: Page, sent: Sequence[SentFile]) -> tuple[Sequence[SmallFile], list[str]]:
    """The small files of the commit, with the signature of all; and notes for the user."""
    cargo, target = ready.cargo, ready.target
    if cargo.signing is None:
        stale = "The page's model.sig signs what was there before: push with --sign, or delete it."
        return cargo.small, [stale] if target.place(SIGNATURE) in page.files else []
    known = {file.path: file.sha256 for file in sent}
    digests = {shard.name: known[target.place(shard.name)] for shard in cargo.shards}
    digests |= {file.name: file.sha256() for file in cargo.small}
    name = (target.path_in_repo or target.repo_id).rstrip("/").rpartition("/")[2]
    text = cargo.signing.bundle(name, digests, "")
    own = {target.place(file) for file in (*digests, SIGNATURE)} | {*ready.removed, _ATTRIBUTES}
    others = [path for path in page.files if path not in own and path.startswith(target.place(""))]
    note = f"The signature does not cover {examples(others)}: a verifier refuses a copy of the page that has them."
    return (*cargo.small, SmallFile(SIGNATURE, len(text), text, "the signature")), [note] if others else []


def _made_already(ready: Ready, wanted: Wanted, known: Collection[int]) -> Committed | None:
    """This push's commit, if the hub has made it; `known` are the pull requests that were there before."""
    target, hub = ready.target, ready.hub
    if not target.create_pr:
        now = hub.page(target.repo_id, target.revision)
        is_made = not differences(now.files, wanted) and not any(path in now.files for path in ready.removed)
        return (now.head, "") if is_made else None
    for number, title in hub.pull_requests(target.repo_id).items():
        now = hub.page(target.repo_id, f"refs/pr/{number}")
        if number not in known and title == target.message and not differences(now.files, wanted):
            return now.head, f"{hub.endpoint}/{target.repo_id}/discussions/{number}"
    return None


Wanted = Mapping[str, tuple[int, frozenset[str]]]
"""Path -> size, and the hashes that its bytes may have at the hub (SHA-256 as a large file, git's SHA-1 as a small one)."""


def differences(found: Files, wanted: Wanted) -> list[str]:
    """A line for each expected file that is missing at the hub, or has other bytes there."""
    wrong: list[str] = []
    for path, (nbytes, oids) in wanted.items():
        size, oid = found.get(path, (None, ""))
        if size is None:
            wrong.append(f"{path!r} is missing")
        elif size != nbytes:
            wrong.append(f"{path!r} has {size:,} bytes instead of {nbytes:,}")
        elif oid not in oids:
            wrong.append(f"{path!r} has the hash {oid}")
    return wrong


def read_back(
    hub: Hub, repo_id: str, revision: str, wanted: Wanted, headers: Mapping[str, bytes]
) -> tuple[tuple[str, int, str], ...]:
    """Compares a commit (`revision`) with what was sent. `headers`: path of a shard -> the bytes it begins with, which are
    fetched by a range request. Returns (path, bytes, hash) of each file, as the hub lists them. Raises CorruptError if a file is
    missing or has other bytes.
    """
    found = hub.tree(repo_id, revision)
    wrong = differences(found, wanted)
    for path, header in headers.items():
        if not wrong and hub.read(repo_id, path, revision, len(header)) != header:
            wrong.append(f"{path!r} begins with another header")
    if wrong:
        raise CorruptError(
            "the page differs from what was sent", file=f"{repo_id}@{revision[:12]}", found="; ".join(wrong[:5]),
            expected="the sizes, hashes and headers that were sent",
            remedy="Do not use this commit. Run the same command again with --yes.",
        )  # fmt: skip
    return tuple((path, *found[path]) for path in wanted)
