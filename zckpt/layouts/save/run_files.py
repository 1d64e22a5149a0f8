"""The files that a Trainer and Accelerate keep beside a save, without which a run does not go on as it was.

For `reshard`, `to-universal` and `to-dcp`, which copy them byte for byte; nothing in them is ever unpickled. Random states are
files of ranks, so those of ranks that the new run does not have are left out.
[Note: names of random states] transformers' Trainer looks for `rng_state_{rank}.pth`, and alone for `rng_state.pth`; both hold
the same entries. Accelerate looks for `random_states_{rank}.pkl`, alone too.
Source: transformers 5.23, trainer.py `_save_checkpoint`, `_load_rng_state`; accelerate 1.15, checkpointing.py,
utils/constants.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from zckpt.base import words
from zckpt.base.patterns import compile_late
from zckpt.layouts.save import trainers
from zckpt.layouts.save.companions import is_own, note_of_links
from zckpt.storage.location import Location

_OF_RUN = compile_late(
    r"trainer_state\.json|training_args\.bin|adapter_config\.json|sc(?:heduler|aler)\.pt"
    r"|scheduler(?:_\d+)?\.bin|sampler(?:_\d+)?\.bin|dl_state_dict(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
)
_OF_RANK = compile_late(r"(?P<stem>rng_state_|random_states_)(?P<rank>\d+)(?P<end>\.pth|\.pkl)")
_OF_ONE = "rng_state.pth"
_OF_FIRST = "rng_state_0.pth"

Copies = list[tuple[Location, str]]
"""(where a file is, its name in the output)."""


def run_files(
    home: Location, also: Iterable[Location] = (), world_size: int | None = None, named: Location | None = None
) -> tuple[Copies, tuple[str, ...]]:
    """The files to copy, and sentences on ranks that have no random states, and on links that lead out of the checkpoint.

    Args:
        home: the directory beside the tags, or the save itself.
        also: the same on other nodes' disks, or what is above it there; of files of one name the first counts.
        world_size: ranks of the run that goes on; None where it may be any number.
        named: as in `companions.is_own`.
    """
    homes = [home.absolute().parent if trainers.FSDP_MODEL.fullmatch(home.name) else home]
    for root in also:
        homes.append(inner if (inner := root / homes[0].name).is_dir() else root)
    there: dict[str, Location] = {}
    others: set[str] = set()
    for home in homes:
        for name in sorted(home.file_names()):
            if _OF_RUN.fullmatch(name) or _OF_RANK.fullmatch(name) or name == _OF_ONE:
                if is_own(home / name, home, named):
                    there.setdefault(name, home / name)
                else:
                    others.add(name)
    left_out = note_of_links(others - there.keys())
    copies = [(place, name) for name, place in there.items() if _OF_RUN.fullmatch(name)]
    if world_size is None:
        return [(place, name) for name, place in there.items()], left_out
    if world_size == 1 and _OF_ONE not in there and _OF_FIRST in there:
        copies.append((there[_OF_FIRST], _OF_ONE))
    elif world_size > 1 and _OF_FIRST not in there and _OF_ONE in there:
        copies.append((there[_OF_ONE], _OF_FIRST))
    elif world_size == 1 and _OF_ONE in there:
        copies.append((there[_OF_ONE], _OF_ONE))
    dropped: set[int] = set()
    known: set[int] = {0} if {_OF_ONE, _OF_FIRST} & there.keys() else set()
    for name, place in there.items():
        if match := _OF_RANK.fullmatch(name):
            rank = int(match["rank"])
            known.add(rank)
            if rank >= world_size:
                dropped.add(rank)
            elif world_size > 1 or match["stem"] != "rng_state_":
                copies.append((place, name))
    return copies, _notes_on_random(dropped, known, world_size) + left_out


def _notes_on_random(dropped: set[int], known: set[int], world_size: int) -> tuple[str, ...]:
    notes: list[str] = []
    if dropped:
        whom = words.ranks(sorted(dropped))
        notes.append(f"The random states of {whom} are left out: the new run has {words.count(world_size, 'rank')}.")
    if known and (new := sorted({*range(world_size)} - known)):
        notes.append(
            f"No random states were saved for {words.ranks(new)}: they begin with the seed of the script, "
            "so dropout and other random numbers differ from a run that never stopped."
        )
    return tuple(notes)
