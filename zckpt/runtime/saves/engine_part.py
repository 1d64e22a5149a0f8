"""The engine's methods to save a run and to continue it, under DeepSpeed's names.

For `engine`. `saving` and `loading` do the work.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from zckpt.base.errors import InconsistentError, UsageError, ZckptError
from zckpt.base.words import join_words, ranks
from zckpt.jobs.open import open_checkpoint
from zckpt.layouts.save.pointers import latest_of
from zckpt.layouts.search import is_begun
from zckpt.live import save_pretrained
from zckpt.runtime.init_context import GatheredParameters
from zckpt.runtime.saves.background import Saving
from zckpt.runtime.saves.loading import OpenedSame, load, open_same
from zckpt.runtime.saves.saved_run import LoadOptions
from zckpt.runtime.saves.saving import save
from zckpt.runtime.training_run import TrainingRun
from zckpt.storage.location import locate
from zckpt.team.meeting import ENTRY_S, LOAD_S, Attempt, Meetings

if TYPE_CHECKING:
    from zckpt.hub import PushReport

_log = logging.getLogger("zckpt.runtime")
_numbers = count()
_OF_THE_ENGINE = ("skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd")


class Saves(TrainingRun):
    """Saves, loads and publishes a run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._series: dict[str, Meetings] = {}
        self._number = next(_numbers)
        self._saving: Saving | None = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything that the run needs to continue, in the files that DeepSpeed would write. Every rank calls it.

        With `checkpoint.async_save` in the config it returns after a copy to host memory; see `wait_for_checkpoint`.

        Args:
            save_dir: directory of the tags; it is created if it does not exist.
            tag: name of this save; by default `global_step<N>`.
            client_state: whatever the script wants to find again: dicts, lists, numbers, text, tensors, numpy arrays.
            save_latest: let the file `latest` name this save.
            exclude_frozen_parameters: leave out parameters that are not trained; a load leaves them as they are.

        Returns:
            True.

        Raises:
            UsageError: the tag cannot name a save, `save_dir` is empty, `client_state` uses names of the checkpoint's own, or
                there is no optimizer.
            UnsupportedError: something in `client_state` cannot be saved.
            InconsistentError: some ranks did not call it, or the ranks disagree on the tag.
            OutputError: a file cannot be written, on this or on another rank. Earlier saves are unchanged after any error.
        """
        if not os.fspath(save_dir):
            raise UsageError("save_checkpoint needs a directory", found="an empty text", remedy="Name it in save_dir.")
        self.wait_for_checkpoint()
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._saving = save(
            self, self._meetings("save"), os.fspath(save_dir), name, client_state or {},
            latest=save_latest, only_trained=exclude_frozen_parameters,
        )  # fmt: skip
        return True

    def wait_for_checkpoint(self) -> None:
        """Waits until the last save is complete, if saves are made in the background; otherwise returns at once. Raises
        ZckptError if that save failed; earlier saves are unchanged.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continues from a checkpoint of this trainer or of DeepSpeed, of any stage and world size. Every rank calls it.

        Args:
            load_dir: directory of the tags, a tag directory, or any other form of a checkpoint that zckpt reads.
            tag: which save; by default the one that `latest` names.
            load_module_strict: refuse a checkpoint that lacks tensors of the model; False leaves these as they are.
            load_optimizer_states: load the optimizer's states, its settings and the loss scale.
            load_lr_scheduler_states: load the schedule.
            load_module_only: load nothing but weights and buffers.
            custom_load_fn: puts the weights into the module, whatever their names. Every rank calls it with `src`, a mapping
                with tensors that are read when they are asked for, fp32 and whole, and `dst`, the module with whole
                parameters.
                With `load_module_only` nothing else is read; otherwise all of the checkpoint is loaded before.

        Returns:
            The path that DeepSpeed returns, of the file with this rank's counters, or of another form the directory; and the
            client state, in which DeepSpeed's own entries are too, such as `ds_config`, but no weights and states. (None, None)
            if `load_dir` holds no save at all.

        Raises:
            InconsistentError: the checkpoint is of another model or optimizer, or the ranks see different ones.
            ZckptError: it is incomplete, corrupt or unreadable, here or on another rank. The error says whether anything was
                changed: nothing, unless elements could not be read half-way.
        """
        self.wait_for_checkpoint()
        path = os.fspath(load_dir)
        options = LoadOptions(
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            strict=load_module_strict,
        )
        chosen, same = self._agree_on_save(path, None if tag is None else str(tag), options)
        if chosen is None:
            _log.warning("There is no checkpoint in %s: the run begins from the start.", path)
            return None, None
        if custom_load_fn is not None and load_module_only:
            return self._load_by(path, chosen or None, custom_load_fn)
        try:
            found, client = load(self, self._meetings("load"), path, chosen or None, options, same)
        except ZckptError as error:  # whoever calls from Python has no option of a command line
            error.what, error.found, error.remedy = (
                text.replace("--tag", "the argument tag") for text in (error.what, error.found, error.remedy)
            )
            raise
        if custom_load_fn is not None:
            self._load_by(path, chosen or None, custom_load_fn)
        used = {"lr_scheduler": load_lr_scheduler_states, "optimizer": load_optimizer_states}
        used |= dict.fromkeys(_OF_THE_ENGINE, not load_module_only)
        return found, {key: value for key, value in client.items() if not used.get(key)}

    @torch.no_grad()
    def _load_by(
        self, path: str, tag: str | None, custom_load_fn: Callable[..., Any]
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Puts consolidated weights into the module by a function. Returns the save's directory and an empty state."""
        meetings = self._meetings("load")
        meetings.begin(f"{self.micro_steps}")
        self.reshard()
        whole = GatheredParameters([one.weight for one in self.sharded.parameters], modifier_rank=0)
        with whole, Attempt() as tried, open_checkpoint(path, tag=tag) as opened:
            custom_load_fn(src=opened, dst=self.module)
        state = "The weights may have been changed in part: load a checkpoint before you go on."
        meetings.agree("load_checkpoint with custom_load_fn", tried.error, within_s=LOAD_S, state=state)
        self.gather()
        return (path if tag is None else os.path.join(path, tag)), {}

    def push_to_hub(
        self, /, repo_id: str, dtype: str | None = None, *, scratch: str | None = None, **options: Any
    ) -> PushReport | None:
        """Publishes the model as it is now, between two steps, as a page on the hub. Every rank calls it.

        Args:
            repo_id: "owner/name", or a name under your own account.
            dtype: "fp32", "fp16" or "bf16"; by default that of the computation.
            scratch: directory for the weights until they are sent, if possible one that all ranks share; by default the
                system's temporary directory.
            options: those of `zckpt.push_to_hub`: `private`, `revision`, `create_pr`, `message`, `token`, `license`, ...

        Returns:
            On rank 0 what was sent, on other ranks None.

        Raises:
            ZckptError: the weights cannot be written or sent, here or on another rank; nothing is published then.
        """
        from zckpt.hub import push_to_hub

        meetings = self._meetings("push")
        meetings.begin(f"{self.micro_steps}")
        place = None
        if self.global_rank == 0:
            if scratch is not None:
                os.makedirs(scratch, exist_ok=True)
            place = tempfile.mkdtemp(prefix="zckpt-push-", dir=scratch)
        try:
            home = meetings.meet("push_to_hub", place, within_s=ENTRY_S)[0]
            save_pretrained(self, home, dtype or self.settings.config.precision)
            report: PushReport | None = None
            with Attempt() as tried:
                if self.global_rank == 0:
                    report = push_to_hub(home, repo_id, scratch=scratch, **options)
            meetings.agree("push_to_hub", tried.error)
            meetings.part()
            return report
        finally:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)

    def _agree_on_save(self, path: str, tag: str | None, options: LoadOptions) -> tuple[str | None, OpenedSame | None]:
        """The tag that every rank will load; empty if `path` alone determines the save; None if no rank sees a save. And the
        save, if every rank has opened the same one of this run's own layout.
        Raises InconsistentError if some ranks see a save and others do not, or they want different tags.
        """
        meetings = self._meetings("load")
        meetings.begin(f"{self.micro_steps}")
        word: list[Any] = []
        same: OpenedSame | None = None
        with Attempt() as tried:
            latest = latest_of(locate(path))
            if (name := latest if tag is None else tag) is not None:
                same = open_same(self, path, name, options)
            word = [tag, name is not None or is_begun(locate(path)), latest, same and [name, same[0]]]
        words = meetings.agree("load_checkpoint", tried.error, word, within_s=LOAD_S, state="Nothing was changed.")
        tags = list(dict.fromkeys(one[0] for one in words))
        blind = [rank for rank, one in enumerate(words) if not one[1]]
        if len(tags) > 1:
            raise InconsistentError(
                "the ranks disagree on the tag of load_checkpoint", found=join_words([repr(one) for one in tags]),
                expected="one tag", remedy="Nothing was changed. Pass the same tag on every rank, or none.",
            )  # fmt: skip
        if len(blind) == len(words):
            return None, None
        if self.settings.config.checkpoint.use_node_local_storage:
            return tag or "", None
        if blind:
            raise InconsistentError(
                "not every rank sees a checkpoint here", file=path, found=f"no checkpoint on {ranks(blind)}",
                expected="a directory that all ranks share",
                remedy="Nothing was changed. Copy the checkpoint to where every node sees it. If each node has the files of "
                "its own ranks, set checkpoint.use_node_local_storage to true.",
            )  # fmt: skip
        return tag or words[0][2] or "", same if all(one[3] == words[0][3] for one in words) else None

    def _meetings(self, kind: str) -> Meetings:
        """The meetings for one kind of work.

        Each kind has a series of its own: a save in the background meets while the run pushes or loads.
        """
        if kind not in self._series:
            name = f"engine {self._number} {kind}"
            self._series[kind] = Meetings(name, self.global_rank, self.world_size)
        return self._series[kind]
