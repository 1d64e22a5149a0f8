"""Whether a push may begin: the token, its rights, the name, and what the repository holds. Asked before any work.

For `transfer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import AccessError, OutputError, UsageError
from zckpt.base.words import examples
from zckpt.hub.client import Hub, Page, valid_name

if TYPE_CHECKING:
    from zckpt.hub.cargo import Cargo

MESSAGE = "Upload weights with zckpt"
_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)(?:(?:-[0-9a-f]{8})?-\d{5}-of-\d{5})?\.(?:safetensors|bin)(?:\.index\.json)?|tf_model\.h5|flax_model\.msgpack"
)
_EMPTY = (".gitattributes", ".gitignore", "README.md")
_AT_THE_HUB = re.compile(
    r"(?i:hf)://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/pr/\d+|[^/]+))?/+(?P<path>.+)", re.DOTALL
)
_PULL_REQUEST = re.compile(r"refs/pr/\d+")


@dataclass(frozen=True, slots=True)
class PageTarget:
    """Where to, and how.

    Attributes:
        repo_id: "owner/name", or a name of one's own.
        revision: branch, or refs/pr/N.
        path_in_repo: directory in the repository; empty for its top.
        private: visibility of a repository that is made; None for private, and for whatever an existing one is.
        create_pr: as a pull request.
        message: of the commit.
        yes: go on where the repository holds files.
        token: None for the one that is logged in.
        endpoint: None for the usual one.
        scratch: directory for shards on their way; None for one beside the hub's cache.
        max_scratch: most bytes of shards there at a time; None for two of the largest.
        card: whether to write a model card where there is no README.
        license: for the card.
        base_model: for the card.
    """

    repo_id: str
    revision: str = "main"
    path_in_repo: str = ""
    private: bool | None = None
    create_pr: bool = False
    message: str = MESSAGE
    yes: bool = False
    token: str | None = None
    endpoint: str | None = None
    scratch: str | None = None
    max_scratch: int | None = None
    card: bool = True
    license: str | None = None
    base_model: str | None = None

    def place(self, name: str) -> str:
        """A file's path in the repository."""
        return f"{self.path_in_repo.strip('/')}/{name}".lstrip("/")


def check(hub: Hub, target: PageTarget, *, ask: bool = True) -> tuple[PageTarget, Page]:
    """The target under its full name, and what is there now.

    Args:
        hub: the hub.
        target: where to.
        ask: False asks the hub nothing where there is no token.

    Raises:
        AccessError: there is no token, or it may not write there. UsageError: the name or path is none.
    """
    valid_name(target.repo_id)
    if any(part in ("", ".", "..") for part in target.path_in_repo.strip("/").split("/")) and target.path_in_repo.strip(
        "/"
    ):
        raise UsageError(
            "a path that no repository can have", file=target.path_in_repo, remedy="Example: --path-in-repo fp32."
        )
    if not hub.token and not ask:
        hub.tell("There is no token: the hub was not asked.")
        return target, Page(exists=False)
    who = hub.who()
    if "/" not in target.repo_id:
        target = replace(target, repo_id=f"{who['name']}/{target.repo_id}")
    page = hub.page(target.repo_id, target.revision)
    _check_rights(hub, target, page, who)
    if page.exists and target.private is not None and page.private is not None and page.private != target.private:
        is_now = "private" if page.private else "public"
        raise UsageError(
            "another visibility than the repository has", file=target.repo_id, found=f"it is {is_now}",
            remedy=f"Leave --{'private' if target.private else 'public'} out, or change it in the repository's settings.",
        )  # fmt: skip
    if not page.exists and target.create_pr:
        raise UsageError(
            "a pull request to a repository that is not there", file=target.repo_id, remedy="Leave --create-pr out."
        )
    if page.exists and not page.head and _PULL_REQUEST.fullmatch(target.revision):
        raise UsageError("a pull request that is not there", file=f"{target.repo_id}@{target.revision}")
    return target, page


def in_the_way(page: Page, target: PageTarget) -> OutputError | None:
    """The refusal to push where there are files already, unless that is wanted; None where nothing is in the way."""
    there = sorted(path for path in page.files if path.startswith(target.place("")) and path not in _EMPTY)
    if not there or target.yes or target.create_pr:
        return None
    return OutputError(
        "a repository that is not empty", file=f"{target.repo_id}@{target.revision}",
        found=f"{len(there):,} files such as {examples(there)}",
        remedy="Nothing was changed. Pass --yes to go on, --create-pr to propose it, or choose --path-in-repo.",
    )  # fmt: skip


def input_replaced(cargo: Cargo, page: Page, removed: Iterable[str], target: PageTarget) -> OutputError | None:
    """The refusal to push over the very files that the checkpoint is read from; None where it touches none of them."""
    sources = {store.path for store in cargo.catalog.stores()}
    new = [target.place(name) for name in (*(s.name for s in cargo.shards), *(f.name for f in cargo.small))]
    hit = [path for path in (*new, *removed) if path in page.files and _is_one_of(path, target, sources)]
    if not hit or target.create_pr:
        return None
    return OutputError(
        "an output that would replace the input", file=f"{target.repo_id}@{target.revision}",
        found=f"the input is read from {examples(hit)}",
        remedy="Nothing was changed. Choose another repository, --revision or --path-in-repo, or pass --create-pr.",
    )  # fmt: skip


def _is_one_of(path: str, target: PageTarget, sources: Iterable[str]) -> bool:
    for source in sources:
        found = _AT_THE_HUB.fullmatch(source)
        if found and (found["repo"], found["revision"] or "main", found["path"]) == (
            target.repo_id,
            target.revision,
            path,
        ):
            return True
    return False


def _check_rights(hub: Hub, target: PageTarget, page: Page, who: Mapping[str, Any]) -> None:
    owner = target.repo_id.partition("/")[0]
    refusal = _refusal(who, owner, target.repo_id)
    if target.create_pr and page.exists and _role(who) != "read":
        return  # whoever may read may propose
    if not refusal and page.exists and hub.may_write(target.repo_id) is False:
        refusal = "the hub says that it may not write there"
    if refusal:
        raise AccessError(
            "a token that may not write there", file=target.repo_id, found=refusal,
            remedy="Nothing was done. Make a token with write access to it at huggingface.co/settings/tokens.",
        )  # fmt: skip


def _role(who: Mapping[str, Any]) -> str:
    token = (who.get("auth") or {}).get("accessToken") or {}
    return str(token.get("role", ""))


def _refusal(who: Mapping[str, Any], owner: str, repo_id: str) -> str:
    """Why the owner's token may not write, by what whoami tells; empty where nothing speaks against it."""
    orgs = {org.get("name"): org.get("roleInOrg") for org in who.get("orgs") or ()}
    if owner != who.get("name") and owner not in orgs:
        return f"it is {who.get('name')}'s, who is no member of {owner}"
    if owner in orgs and orgs[owner] == "read":
        return f"{who.get('name')} may only read in {owner}"
    role = _role(who)
    if role == "read":
        return "it is a token for reading"
    scopes = ((who.get("auth") or {}).get("accessToken") or {}).get("fineGrained", {}).get("scoped")
    if role == "fineGrained" and scopes is not None:
        writable = {(s.get("entity") or {}).get("name") for s in scopes if "repo.write" in (s.get("permissions") or ())}
        if not writable & {owner, repo_id}:
            return (
                f"it is a fine-grained token, and may write to {', '.join(sorted(filter(None, writable))) or 'nothing'}"
            )
    return ""


def mistakable(page: Page, names: Iterable[str], target: PageTarget) -> tuple[str, ...]:
    """Files of other weights in the same directory: left there, `transformers` might load them instead of the new ones."""
    new, top = {target.place(name) for name in names}, target.place("")
    old = (path for path in page.files if path.startswith(top) and _WEIGHTS.fullmatch(path[len(top) :]))
    return tuple(sorted(path for path in old if path not in new))
