"""Checks before any work: the token, its rights, the repository's name, and what it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from zckpt.base.errors import AccessError, OutputError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.hub.cargo import Cargo
from zckpt.hub.client import Hub, valid_name
from zckpt.hub.target import Page, PageTarget

_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)(?:(?:-[0-9a-f]{8})?-\d{5}-of-\d{5})?\.(?:safetensors|bin)(?:\.index\.json)?|tf_model\.h5|flax_model\.msgpack"
)
_EMPTY = (".gitattributes", ".gitignore", "README.md")
_AT_THE_HUB = re.compile(
    r"(?i:hf)://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/pr/\d+|[^/]+))?/+(?P<path>.+)", re.DOTALL
)
_PULL_REQUEST = re.compile(r"refs/pr/\d+")


def check(hub: Hub, target: PageTarget, *, ask: bool = True) -> tuple[PageTarget, Page]:
    """Checks whether a push may begin. `ask`: if False and there is no token, the hub is not asked. Returns the target with its
    repository's full name, and what is there now. Raises AccessError if there is no token, or it may not write there; UsageError
    if the repository cannot have this name, path, visibility or pull request.
    """
    valid_name(target.repo_id)
    inner = target.path_in_repo.strip("/")
    if inner and not {"", ".", ".."}.isdisjoint(inner.split("/")):
        raise UsageError(
            "no repository can have this directory", file=target.path_in_repo, expected="names separated by single slashes",
            remedy="Pass a directory such as --path-in-repo fp32.",
        )  # fmt: skip
    if not hub.token and not ask:
        hub.tell("There is no token: the hub was not asked.")
        return target, Page(exists=False)
    who = hub.who()
    if "/" not in target.repo_id:
        target = replace(target, repo_id=f"{who['name']}/{target.repo_id}")
    page = hub.page(target.repo_id, target.revision)
    _check_rights(hub, target, page, who)
    _check_page(target, page)
    return target, page


def _check_page(target: PageTarget, page: Page) -> None:
    """Checks the request for a repository against the repository."""
    if page.exists and target.private is not None and page.private is not None and page.private != target.private:
        is_now = "private" if page.private else "public"
        raise UsageError(
            "the repository has another visibility", file=target.repo_id, found=f"a {is_now} repository",
            remedy=f"Leave --{'private' if target.private else 'public'} out, or change it in the repository's settings.",
        )  # fmt: skip
    if not page.exists and target.create_pr:
        raise UsageError(
            "no such repository to open a pull request in", file=target.repo_id,
            remedy="Leave --create-pr out: the repository is then created.",
        )  # fmt: skip
    if page.exists and not page.head and _PULL_REQUEST.fullmatch(target.revision):
        raise UsageError(
            "no such pull request", file=target.label,
            remedy="Pass --create-pr without --revision to open one, or the number of one that is open.",
        )  # fmt: skip


def in_the_way(page: Page, target: PageTarget) -> OutputError | None:
    """The error for a push to a page that has files, without `yes` or `create_pr`; None if the push may go on."""
    there = sorted(path for path in page.files if path.startswith(target.place("")) and path not in _EMPTY)
    if not there or target.yes or target.create_pr:
        return None
    return OutputError(
        "the repository is not empty", file=target.label, found=f"{count(len(there), 'file')}: {examples(there)}",
        remedy="Pass --yes to push there all the same, --create-pr to propose it, or another --path-in-repo. "
        "Nothing was changed.",
    )  # fmt: skip


def input_replaced(cargo: Cargo, page: Page, removed: Iterable[str], target: PageTarget) -> OutputError | None:
    """The error for a push over files that the checkpoint is read from; None if it touches none of them."""
    sources = {store.path for store in cargo.catalog.stores()}
    changed = [*(target.place(file.name) for file in cargo.files), *removed]
    hit = [path for path in changed if path in page.files and _is_one_of(path, target, sources)]
    if not hit or target.create_pr:
        return None
    return OutputError(
        "the output would replace the input", file=target.label, found=f"input files {examples(hit)}",
        remedy="Choose another repository, --revision or --path-in-repo, or pass --create-pr. Nothing was changed.",
    )  # fmt: skip


def _is_one_of(path: str, target: PageTarget, sources: Iterable[str]) -> bool:
    """Whether a file of the target is one of these sources."""
    place = (target.repo_id, target.revision, path)
    matches = filter(None, map(_AT_THE_HUB.fullmatch, sources))
    return any((found["repo"], found["revision"] or "main", found["path"]) == place for found in matches)


def _check_rights(hub: Hub, target: PageTarget, page: Page, who: Mapping[str, Any]) -> None:
    owner = target.repo_id.partition("/")[0]
    refusal = _refusal(who, owner, target.repo_id)
    if target.create_pr and page.exists and _token_of(who).get("role") != "read":
        return  # the right to read is enough to propose a change
    if not refusal and page.exists and hub.may_write(target.repo_id) is False:
        refusal = f"a token of {who.get('name')} that the hub does not let write there"
    if refusal:
        mine = [name for name in _owners(who) if not _refusal(who, name, f"{name}/")]
        push = f"Push to {mine[0]}/{target.repo_id.partition('/')[2]}, or make" if mine else "Make"
        raise AccessError(
            "the token may not write there", file=target.repo_id,
            found=f"{refusal}; it may write to {f'repositories of {join_words(mine)}' if mine else 'none'}",
            remedy=f"{push} a token with write access to {target.repo_id} at huggingface.co/settings/tokens, and pass it with "
            "--token.",
        )  # fmt: skip


def _owners(who: Mapping[str, Any]) -> list[str]:
    """The account of a token, and the organisations that it is a member of."""
    return [str(one.get("name")) for one in (who, *(who.get("orgs") or ()))]


def _token_of(who: Mapping[str, Any]) -> Mapping[str, Any]:
    return (who.get("auth") or {}).get("accessToken") or {}


def _refusal(who: Mapping[str, Any], owner: str, repo_id: str) -> str:
    """A sentence on the token, if whoami says that it may not write to a repository of `owner`; empty otherwise."""
    mine, token = f"a token of {who.get('name')}", _token_of(who)
    orgs = {org.get("name"): org.get("roleInOrg") for org in who.get("orgs") or ()}
    if owner not in _owners(who):
        return f"{mine}, who is not a member of {owner}"
    if orgs.get(owner) == "read":
        return f"{mine}, who may only read in {owner}"
    if token.get("role") == "read":
        return f"{mine} for reading"
    scopes = token.get("fineGrained", {}).get("scoped")
    if token.get("role") == "fineGrained" and scopes is not None:
        writable = {(s.get("entity") or {}).get("name") for s in scopes if "repo.write" in (s.get("permissions") or ())}
        if not writable & {owner, repo_id}:
            names = ", ".join(sorted(filter(None, writable)))
            return f"a fine-grained token of {who.get('name')} that may write to {names or 'nothing'}"
    return ""


def mistakable(page: Page, names: Iterable[str], target: PageTarget) -> tuple[str, ...]:
    """Files of other weights in the page's directory that `transformers` might load instead of the new ones."""
    new, top = {target.place(name) for name in names}, target.place("")
    old = (path for path in page.files if path.startswith(top) and _WEIGHTS.fullmatch(path[len(top) :]))
    return tuple(sorted(path for path in old if path not in new))
