"""Which files a legacy save of Megatron-LM has, and which rank's part each is.

[Note: directories of ranks] A rank writes `mp_rank_{tensor rank:02d}/model_optim_rng.pt`; if the run has several pipeline stages,
`_{stage:03d}` follows the number, and if it has several expert ranks, `_{expert rank:03d}` follows. So the second of two numbers
may be either; the run's `args` tell, which every file has. Of ranks that hold the same, one writes: those in the first group of
`expert data parallelism`. Where experts are not cut by the tensor rank (`expert_tensor_parallel_size` 1), tensor and expert rank
count up together: two of each leave `mp_rank_00_000` and `mp_rank_01_001` only.
Source: Megatron-LM core_v0.12.3, megatron/training/checkpointing.py `get_checkpoint_name`, `save_checkpoint`;
megatron/core/parallel_state.py `RankGenerator` (order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, enum_value, mapping_at
from zckpt.layouts.megatron_legacy import MODEL
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import flatten, root_of


class ModelRank(NamedTuple):
    """A model-parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, slots=True)
class RunSplit:
    """How a run was split.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks.
        etp: tensor-parallel ranks that share an expert: 1, or `tp`.
    """

    tp: int
    pp: int
    ep: int
    etp: int

    def rank_of(self, numbers: Sequence[int]) -> ModelRank | None:
        """The rank with the directory of these numbers; None if this split has no such rank."""
        rest = list(numbers[1:])
        pp = rest.pop(0) if self.pp > 1 and rest else 0
        ep = rest.pop(0) if self.ep > 1 and rest else 0
        rank = ModelRank(numbers[0], pp, ep)
        fits = len(numbers) == 1 + (self.pp > 1) + (self.ep > 1) and not rest
        return rank if fits and rank.tp < self.tp and rank.pp < self.pp and rank.ep < self.ep else None

    def directory_of(self, rank: ModelRank) -> str:
        """The directory of a rank."""
        name = f"mp_rank_{rank.tp:02d}"
        name += f"_{rank.pp:03d}" if self.pp > 1 else ""
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")

    def writers(self) -> list[ModelRank]:
        """The ranks that a whole model takes; see [Note: directories of ranks]."""
        if self.etp == self.tp:
            pairs = {(tp, ep) for tp in range(self.tp) for ep in range(self.ep)}
        else:
            pairs = {(number % self.tp, number % self.ep) for number in range(max(self.tp, self.ep))}
        return [ModelRank(tp, pp, ep) for pp in range(self.pp) for tp, ep in sorted(pairs)]


def arguments(listing: Listing, name: str) -> dict[str, object]:
    """Megatron's `args` in a file: plain values, enumerations by their values; empty where there are none."""
    kept = listing.entry(name, "args")
    state = kept.state if isinstance(kept, Placeholder) else kept
    return {str(key): enum_value(value) for key, value in mapping_at(state).items()}


def split_of(listing: Listing) -> RunSplit:
    """How the run was split, as its files say. Raises UnsupportedError if they do not say it, or it is a split with
    directories that do not hold all parts.
    """
    name = listing.matching(MODEL)[0]
    args, file = arguments(listing, name), listing.files[name].path
    given = listing.options
    numbers = [_numbers(each) for each in listing.matching(MODEL)]
    if not args and not (given.tp or given.pp) and _is_unclear(listing, name, max(map(len, numbers))):
        raise UnsupportedError(
            "does not say what the numbers of its directories count", file=file, found="no 'args'",
            expected="Megatron's args with its parallel sizes", remedy="Pass --tp and --pp as the run had them.",
        )  # fmt: skip
    tp = given.tp or _size(args, "tensor_model_parallel_size", "model_parallel_size") or 1 + max(n[0] for n in numbers)
    pp = given.pp or _size(args, "pipeline_model_parallel_size")
    ep = _size(args, "expert_model_parallel_size") or 1
    if pp is None:
        pp = 1 + max(each[1] for each in numbers if len(each) > 1) if any(len(each) > 1 for each in numbers) else 1
    etp = _size(args, "expert_tensor_parallel_size") or tp
    if max(tp, pp, ep, etp) > limits.RANKS or tp * pp * ep > limits.RANKS:
        raise UnsupportedError(
            "records an impossible number of ranks", file=file, found=f"{tp:,} x {pp:,} x {ep:,}",
            expected=f"at most {limits.RANKS:,}", remedy=limits.REMEDY,
        )  # fmt: skip
    if not args.get("num_experts"):
        etp = tp
    if etp not in (1, tp) or args.get("moe_extended_tp"):
        raise UnsupportedError(
            "has experts that are cut in a way that its directories do not tell apart", file=file,
            found=f"tensor parallelism {tp}, of experts {etp}"
            + (", moe_extended_tp" if args.get("moe_extended_tp") else ""),
            expected="experts that are whole, or cut like the rest of the model",
            remedy="Load it with Megatron-LM, and save it with --ckpt-format torch_dist.",
        )  # fmt: skip
    return RunSplit(tp, pp, ep, etp)


def _is_unclear(listing: Listing, name: str, numbers: int) -> bool:
    """Whether a second number in the directories' names may be an expert rank's."""
    return numbers > 2 or (numbers == 2 and any("experts." in own for own in flatten(root_of(listing, name), [])))


def ranks_of(listing: Listing, split: RunSplit) -> dict[ModelRank, str]:
    """Finds the directory of each rank.

    Raises:
        InconsistentError: a directory is of another split. IncompleteError: a rank's is missing.
    """
    found: dict[ModelRank, str] = {}
    for name in listing.matching(MODEL):
        rank = split.rank_of(_numbers(name))
        if rank is None:
            raise InconsistentError(
                "is of no rank of this save", file=listing.files[name].path,
                found=f"{name.partition('/')[0]!r} in a run of {_describe_split(split)}",
                expected=f"directories such as {split.directory_of(ModelRank(0, 0, 0))!r}",
                remedy="Move the directory away if it is of another save; if not, pass --tp and --pp as the run had them.",
            )  # fmt: skip
        found[rank] = name.partition("/")[0]
    missing = [rank for rank in split.writers() if rank not in found]
    if missing:
        names = [split.directory_of(rank) for rank in missing]
        raise IncompleteError(
            "directories of ranks are missing", file=listing.directory,
            found=f"{examples(sorted(found.values()))} of a run of {_describe_split(split)}", expected=f"{examples(names)} too",
            remedy=f"Copy {examples(names, 8)} from the nodes that wrote them "
            "(--also DIR lays further directories over this one).",
        )  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: (item[0].pp, item[0].ep, item[0].tp)))


def check_own_ranks(listing: Listing, split: RunSplit, ranks: Mapping[ModelRank, str]) -> None:
    """Makes sure that each rank's file was written by that rank, as far as Megatron's args in it say.

    Tensor ranks count innermost and pipeline stages outermost, unless a run maps stages inside of the data ranks;
    expert ranks count up between them. Files without `rank` and `world_size` say nothing. Raises InconsistentError if a
    file says that another rank wrote it, or two say the same.
    """
    writers: dict[int, str] = {}
    last: dict[tuple[int, int], int] = {}
    for rank, directory in ranks.items():
        name = f"{directory}/model_optim_rng.pt"
        args = arguments(listing, name)
        number, world = args.get("rank"), args.get("world_size")
        if type(number) is not int or type(world) is not int or not 0 <= number < world or world % split.pp:
            continue
        stage = rank.pp if args.get("use_tp_pp_dp_mapping") else number // (world // split.pp)
        other = writers.setdefault(number, name)
        fits = number % split.tp == rank.tp and stage == rank.pp and number > last.get((rank.tp, rank.pp), -1)
        last[rank.tp, rank.pp] = number
        if other != name or not fits:
            raise InconsistentError(
                "was written by another rank", file=listing.files[name].path, found=f"rank {number} of {world} in its args"
                + (f", as in {other!r}" if other != name else ""), expected=f"a rank that writes to {directory!r}",
                remedy="Copy the directories of all ranks again, each under its own name.",
            )  # fmt: skip


def axes_of(listing: Listing, name: str) -> Mapping[str, int]:
    """The place of a file in the table of ranks: `mp` counts tensor ranks within stages, `dp` is the expert rank."""
    numbers = _numbers(name)
    try:
        split = split_of(listing)
    except ZckptError:  # which the reader reports
        return {"mp": numbers[0], "dp": 0}
    rank = split.rank_of(numbers)
    return {"mp": numbers[0], "dp": 0} if rank is None else {"mp": rank.pp * split.tp + rank.tp, "dp": rank.ep}


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name.partition("/")[0])]


def _size(args: Mapping[str, object], *keys: str) -> int | None:
    values = (args.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _describe_split(split: RunSplit) -> str:
    sizes = {"tensor": split.tp, "pipeline": split.pp, "expert": split.ep}
    said = [f"{axis} parallelism {size}" for axis, size in sizes.items() if size > 1]
    return ", ".join(said) or "one rank"
