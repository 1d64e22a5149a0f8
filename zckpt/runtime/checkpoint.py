"""What a script calls to save a run and to go on from where it was: DeepSpeed's methods of an engine.

For `engine`. `saving` and `loading` do the work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from zckpt.layouts.places import has_saves
from zckpt.runtime.meeting import Meetings

if TYPE_CHECKING:
    from zckpt.runtime.engine import Engine
    from zckpt.runtime.saving import Thread

_log = logging.getLogger("zckpt.runtime")
_numbers = iter(range(1 << 62))


class Checkpoints:
    """The part of an engine that saves and loads."""

    _meetings: Meetings | None = None
    _saving: Thread | None = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Saves everything that the run needs to go on, in the files that DeepSpeed would write. Every rank calls it.

        Args:
            save_dir: directory of the tags; it is made where it is not there.
            tag: name of this save; `global_step<N>` where not given.
            client_state: whatever the caller wants to find again: dicts, lists, numbers, text, tensors.
            save_latest: let `latest` name this save.

        Returns:
            True.

        Raises:
            ZckptError: one of its kinds says what is wrong; what was saved before is as it was.
        """
        from zckpt.runtime.saving import save

        self.wait_for_checkpoint()
        engine = cast("Engine", self)
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        self._saving = save(engine, self._meet(), os.fspath(save_dir), name, client_state or {}, save_latest)
        return True

    def wait_for_checkpoint(self) -> None:
        """Waits until the last save is done, where saves are made in the background.

        Raises:
            ZckptError: it failed; what was saved before is as it was.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
            if saving.error is not None:
                raise saving.error

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from a checkpoint: of this trainer or of DeepSpeed, of any stage and world size. Every rank calls it.

        Args:
            load_dir: directory of the tags, a tag directory, or any other form of a checkpoint.
            tag: which save; the one that `latest` names where not given.
            load_optimizer_states: take up the optimizer's states, its settings and the loss scale.
            load_lr_scheduler_states: take up the schedule.
            load_module_only: nothing but weights.

        Returns:
            The directory of the save and the client state; (None, None) where `load_dir` holds no save at all.

        Raises:
            ZckptError: one of its kinds says what is wrong.
        """
        from zckpt.runtime.loading import Wishes, load

        self.wait_for_checkpoint()
        path = os.fspath(load_dir)
        if tag is None and not has_saves(path):
            _log.warning("No checkpoint in %r: the run begins anew.", path)
            return None, None
        wishes = Wishes(
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        return load(cast("Engine", self), path, None if tag is None else str(tag), wishes)

    def _meet(self) -> Meetings:
        if self._meetings is None:
            engine = cast("Engine", self)
            self._meetings = Meetings(f"engine {next(_numbers)}", engine.global_rank, engine.world_size)
        return self._meetings
