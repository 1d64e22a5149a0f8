"""What a script calls to save a run and to go on from where it was: DeepSpeed's methods of an engine.

For `engine`. `saving` and `loading` do the work.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from zckpt.base.errors import InconsistentError
from zckpt.base.words import ranges
from zckpt.layouts.places import has_saves, latest_of
from zckpt.team.meeting import ENTRY_S, LOAD_S, Meetings

if TYPE_CHECKING:
    from zckpt.hub import PushReport
    from zckpt.runtime.background import Saving
    from zckpt.runtime.engine import Engine

_log = logging.getLogger("zckpt.runtime")
_numbers = iter(range(1 << 62))


class Checkpoints:
    """The part of an engine that saves and loads."""

    _series: dict[str, Meetings] | None = None
    _saving: Saving | None = None
    _engine_number = -1
    known_to_saves: object = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything that the run needs to go on, in the files that DeepSpeed would write. Every rank calls it.

        Args:
            save_dir: directory of the tags; it is made where it is not there.
            tag: name of this save; `global_step<N>` where not given.
            client_state: whatever the caller wants to find again: dicts, lists, numbers, text, tensors.
            save_latest: let `latest` name this save.
            exclude_frozen_parameters: leave out parameters that are not trained; a load leaves them as they are.

        Returns:
            True.

        Raises:
            ZckptError: one of its kinds says what is wrong; what was saved before is as it was.
        """
        from zckpt.runtime.saving import SaveOptions, save

        self.wait_for_checkpoint()
        engine = cast("Engine", self)
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        wishes = SaveOptions(os.fspath(save_dir), name, save_latest, exclude_frozen_parameters)
        self._saving = save(engine, self._meetings("save"), wishes, client_state or {})
        return True

    def wait_for_checkpoint(self) -> None:
        """Waits until the last save is done, where saves are made in the background.

        Raises:
            ZckptError: it failed; what was saved before is as it was.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        load_module_strict: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from a checkpoint: of this trainer or of DeepSpeed, of any stage and world size. Every rank calls it.

        Args:
            load_dir: directory of the tags, a tag directory, or any other form of a checkpoint.
            tag: which save; the one that `latest` names where not given.
            load_optimizer_states: take up the optimizer's states, its settings and the loss scale.
            load_lr_scheduler_states: take up the schedule.
            load_module_only: nothing but weights.
            load_module_strict: refuse a checkpoint that lacks tensors of the model; otherwise these stay as they are.

        Returns:
            The directory of the save and the client state; (None, None) where `load_dir` holds no save at all.

        Raises:
            ZckptError: one of its kinds says what is wrong, here or on another rank, and whether anything was changed.
        """
        from zckpt.runtime.loading import load
        from zckpt.runtime.saved_run import LoadOptions

        self.wait_for_checkpoint()
        path = os.fspath(load_dir)
        chosen = self._agree_on_save(path, None if tag is None else str(tag))
        if chosen is None:
            _log.warning("No checkpoint in %r: the run begins anew.", path)
            return None, None
        wishes = LoadOptions(
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            strict=load_module_strict,
        )
        return load(cast("Engine", self), self._meetings("load"), path, chosen or None, wishes)

    def push_to_hub(
        self, repo_id: str, dtype: str | None = None, *, scratch: str | None = None, **options: Any
    ) -> PushReport | None:
        """Makes a model page of the run as it is now, between two steps. Every rank calls it.

        Args:
            repo_id: "owner/name", or a name of one's own.
            dtype: "fp32", "fp16" or "bf16"; that of the computation where not given.
            scratch: directory, best one that all ranks share, in which the weights lie until they are sent.
            options: of `zckpt.push_to_hub`: `private`, `revision`, `create_pr`, `message`, `token`, `license`, ...

        Returns:
            On rank 0 what was sent, elsewhere None.

        Raises:
            ZckptError: one of its kinds says what is wrong; nothing is published then.
        """
        from zckpt.hub import push_to_hub
        from zckpt.live import save_pretrained

        engine, meetings = cast("Engine", self), self._meetings("push")
        meetings.begin(f"{engine.micro_steps}")
        place = None
        if engine.global_rank == 0:
            if scratch is not None:
                os.makedirs(scratch, exist_ok=True)
            place = tempfile.mkdtemp(prefix="zckpt-push-", dir=scratch)
        try:
            home = meetings.meet("push_to_hub", place, within_s=ENTRY_S)[0]
            save_pretrained(engine, home, dtype or engine.settings.config.precision)
            report: PushReport | None = None
            error: Exception | None = None
            if engine.global_rank == 0:
                try:
                    report = push_to_hub(home, repo_id, scratch=scratch, **options)
                except Exception as caught:
                    error = caught
            meetings.agree("push_to_hub", error)
            meetings.part()
            return report
        finally:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)

    def _agree_on_save(self, path: str, tag: str | None) -> str | None:
        """The tag that every rank will load; empty where `path` alone says which; None where no rank sees a save.

        Raises:
            InconsistentError: some ranks see a save and others do not, or they were told different tags.
        """
        engine = cast("Engine", self)
        meetings = self._meetings("load")
        meetings.begin(f"{engine.micro_steps}")
        word: list[Any] = []
        error: Exception | None = None
        try:
            word = [tag, has_saves(path) or tag is not None, latest_of(path)]
        except Exception as caught:
            error = caught
        said = meetings.agree("load_checkpoint", error, word, within_s=LOAD_S, state="Nothing was changed.")
        tags = list(dict.fromkeys(one[0] for one in said))
        blind = [rank for rank, one in enumerate(said) if not one[1]]
        if len(tags) > 1:
            raise InconsistentError("ranks that disagree on the tag", found=", ".join(map(repr, tags)))
        if len(blind) == len(said):
            return None
        if engine.settings.config.checkpoint.use_node_local_storage:
            return tag or ""
        if blind:
            raise InconsistentError(
                "a checkpoint that not every rank sees", file=path, found=f"ranks {ranges(blind)} see no save there",
                remedy="Nothing was changed. Where nodes share no disk, say checkpoint.use_node_local_storage: true.",
            )  # fmt: skip
        return tag or said[0][2] or ""

    def _meetings(self, kind: str) -> Meetings:
        """The meetings of one kind of work.

        Each kind has a series of its own: a save in the background meets while the run pushes or loads.
        """
        if self._series is None:
            self._series, self._engine_number = {}, next(_numbers)
        if kind not in self._series:
            engine = cast("Engine", self)
            name = f"engine {self._engine_number} {kind}"
            self._series[kind] = Meetings(name, engine.global_rank, engine.world_size)
        return self._series[kind]
