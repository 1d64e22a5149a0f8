"""Makes a model page at a hub from a sharded checkpoint, without a second copy on the disk.

For `zckpt push` and `zckpt.push_to_hub`. To push tensors from elsewhere, build a `Cargo` (`shards_of` takes any plan), and call
`prepare` and `execute`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from zckpt.base.progress import Progress, watch_progress
from zckpt.core.dtypes import BY_TORCH_NAME, CAST_TARGETS, F32, DType
from zckpt.hub.cargo import Cargo, cargo_of, shards_of
from zckpt.hub.target import PageTarget
from zckpt.hub.transfer import PushReport, Ready, execute, prepare
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.convert import PlannedConversion
from zckpt.jobs.convert import prepare as plan_conversion
from zckpt.jobs.declarations import PUSH, Asked
from zckpt.jobs.open import Opened, open_catalog
from zckpt.jobs.opened import dequantise
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import MESSAGE
from zckpt.layouts.save.companions import read_config

__all__ = [
    "MESSAGE", "Cargo", "PageTarget", "PushReport", "Ready", "cargo_of", "execute", "load", "prepare", "push_to_hub",
    "shards_of",
]  # fmt: skip


def push_to_hub(
    source: str | os.PathLike[str],
    repo_id: str,
    *,
    dtype: str | DType | None = None,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    revision: str = "main",
    private: bool | None = None,
    create_pr: bool = False,
    message: str = MESSAGE,
    path_in_repo: str = "",
    scratch: str | os.PathLike[str] | None = None,
    max_scratch: int | None = None,
    card: bool = True,
    license: str | None = None,  # noqa: A002  # the hub's own word
    base_model: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    yes: bool = False,
    progress: Progress = None,
    tell: Callable[[str], None] | None = None,
) -> PushReport:
    """Makes a model page of a checkpoint: shards are made one at a time, sent, and deleted; one commit at the end.

    Call it again after an interruption: it resumes, and sends nothing that the hub has.

    Args:
        source: a checkpoint in any form that `convert` reads, or a directory of weights.
        repo_id: "owner/name", or "name" under your own account.
        dtype: "fp32", "fp16" or "bf16"; None for what config.json says, and for plain weights' own.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: what is converted and how, such as `Options(max_shard_size="2GB")`; its dtype is overridden.
        revision: branch; it is created if it does not exist.
        private: visibility of a repository that is created; None for private.
        create_pr: open a pull request instead of committing to the branch.
        message: of the commit.
        path_in_repo: directory in the repository; empty for its top.
        scratch: directory for shards that are not sent yet; None for one beside the hub's cache.
        max_scratch: most bytes of shards in it; None for two of the largest.
        card: write a model card if the source has no README.md.
        license: for the card, e.g. "apache-2.0".
        base_model: for the card, e.g. "meta-llama/Llama-3.2-1B".
        token: None for the one that is logged in, or in HF_TOKEN.
        endpoint: address of the hub; None for HF_ENDPOINT, or huggingface.co.
        yes: go on where the repository holds files.
        progress: a function that is called with the bytes made and sent so far, and with the total if it takes a second
            argument; None shows a bar in a terminal or notebook, False shows none.
        tell: called with a sentence before each step that may take long; None for nobody.

    Returns:
        The page's address, the commit, the files, and the bytes that were sent.

    Raises:
        AccessError: there is no token, or it may not write there.
        RemoteError: the hub failed, or answered what it should not.
        ZckptError: another kind says what is wrong. Nothing is published then, and the same call resumes.

    Example:
        >>> zckpt.push_to_hub("run", "me/my-model", dtype="bf16").url  # doctest: +SKIP
    """
    target = PageTarget(
        repo_id, revision=revision, path_in_repo=path_in_repo, private=private, create_pr=create_pr, message=message, yes=yes,
        token=token, endpoint=endpoint, scratch=None if scratch is None else os.fspath(scratch), max_scratch=max_scratch,
        no_card=not card, license=license, base_model=base_model,
    )  # fmt: skip
    asked = (options or Options()).split(PUSH, tag=tag, also=also)
    prepared = load(os.fspath(source), dtype, asked)
    ready = prepare(cargo_of(prepared), target, tell or (lambda text: None))
    prepared.check()
    with watch_progress(progress, sum(shard.nbytes for shard in ready.cargo.shards), "push") as watch:
        return execute(ready, watch)


def load(source: str, dtype: str | DType | None, asked: Asked[None]) -> PlannedConversion:
    """Plans the conversion of a push; the arguments are those of `push_to_hub`."""
    opened = open_catalog(source, asked.reading, as_stored=True)
    chosen = _usual_dtype(opened) if dtype is None else to_dtype(dtype)
    if chosen is not None:
        opened = dequantise(opened)
    return plan_conversion(source, "", asked.having(dtype=chosen, format="safetensors"), opened=opened)


def _usual_dtype(opened: Opened) -> DType | None:
    """The dtype where none is given: None, to keep it, for plain weights, and that of config.json, or fp32, for a checkpoint."""
    if opened.catalog.source.layout == "plain":
        return None
    named = read_config(opened.place.home) or {}
    dtype = BY_TORCH_NAME.get(str(named.get("dtype") or named.get("torch_dtype")))
    return dtype if dtype in CAST_TARGETS else F32
