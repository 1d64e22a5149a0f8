"""Which experts a save holds: its layers of experts, their files, which ranks hold which of them, and what model files say.

For `moe`. Two kinds of layers are known. DeepSpeed's own `MoE` names each expert's parameters by the expert's number on its
rank (`<layer>.deepspeed_moe.experts.deepspeed_experts.0.fc.weight`), in optimizer files; expert files and catalogs have its
number among all. AutoEP keeps the experts of a layer in one tensor per weight (`<layer>.experts.w1`, experts first); a
rank holds some, and records where.

[Note: expert-parallel ranks] Of W data-parallel ranks, e share a layer's experts (expert-parallel ranks); the W / e ranks that
hold the same experts are their expert data-parallel group, over which ZeRO cuts their masters. Rank D is expert-parallel rank
D mod e; with `use_data_before_expert_parallelism` it is D // (W / e). Example: W = 4, e = 2: groups 0, 2 and 1, 3; or 0, 1
and 2, 3.
Source: DeepSpeed 0.19.8, moe/layer.py, utils/groups.py `_create_expert_and_data_parallel`, runtime/engine.py
`_save_moe_checkpoint`, module_inject/auto_ep_layer.py, checkpoint/autoep_affine.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import examples, ranges
from zckpt.containers import TensorRef, brief
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.fragments import Block
from zckpt.core.overlaps import place
from zckpt.layouts.joining.slices import Joint, SliceRows
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import EXPERT_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, Shape, as_mapping, flatten, root_of


def records(model: ModelStates) -> dict[int, Mapping[str, object]]:
    """AutoEP's records, by the layer's number. Raises CorruptError if a record does not name its layer."""
    listed = model.root.get("ds_autoep_layers")
    if listed is None:
        return {}
    found: dict[int, Mapping[str, object]] = {}
    for entry in listed if isinstance(listed, list | tuple) else [listed]:
        entry = as_mapping(entry, "AutoEP's record of a layer", model.file)
        number, prefix = entry.get("moe_layer_id"), entry.get("expert_key_prefix")
        if not isinstance(number, int) or not isinstance(prefix, str):
            raise CorruptError(
                "AutoEP's record of a layer has no number or name", file=model.file, found=brief(entry),
                remedy=COPY_AGAIN,
            )  # fmt: skip
        found[number] = entry
    return found


def modules(name: str) -> Iterator[str]:
    """The modules that contain a parameter, from the outermost on."""
    return itertools.accumulate(name.split(".")[:-1], "{}.{}".format)


def second_routers(model: ModelStates) -> Iterator[tuple[str, str]]:
    """Pairs of a router's names: AutoEP saves a layer's router under its former name too, without recording it."""
    homes = {str(entry["expert_key_prefix"]).rpartition(".")[0] for entry in records(model).values()}
    for name, ref in model.module.items():
        for home in homes.intersection(modules(name)):
            child, _, rest = name.removeprefix(f"{home}.").partition(".")
            kept = model.module.get(f"{home}.router.{rest}")
            if kept is None or child in ("router", "experts", "shared_experts"):
                continue
            if (kept.shape, kept.dtype) == (ref.shape, ref.dtype):
                yield name, f"{home}.router.{rest}"


_OF_EXPERTS = frozenset(("num_experts", "ds_autoep_layers", "folding", "universal_checkpoint_info"))


def without_experts(training: Training) -> Training:
    """The run without its files' facts on experts, which are wrong once experts are ordinary parameters."""
    groups = (
        replace(group, settings={key: value for key, value in group.settings.items() if key != "moe"})
        for group in training.groups
    )
    model = {key: value for key, value in training.model.items() if key not in _OF_EXPERTS}
    return replace(training, groups=tuple(groups), model=model)


_EXPERTS = "deepspeed_moe.experts.deepspeed_experts"
_OWN = re.compile(rf"(?P<prefix>.*{re.escape(_EXPERTS)})\.(?P<number>\d+)\.(?P<local>.+)", re.DOTALL)
_STACKED = re.compile(r"(?P<prefix>.*)\.(?P<local>[^.]+)\.(?P<number>\d+)", re.DOTALL)
_FOLDING = "folding"
_MOST = 1 << 20
"""The most experts in a layer: real layers have hundreds; a damaged number must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of experts.

    Attributes:
        number: among the model's layers of experts, as in file names.
        prefix: of the names of its parameters.
        experts: how many it has.
        held: expert-parallel rank -> numbers of its experts, in its own order; empty if not known.
        weights: expert -> local name -> module weight, from its file; empty where the save has no such files.
        stacked: whether all experts' weights are one tensor, as AutoEP keeps them.
    """

    number: int
    prefix: str
    experts: int
    held: tuple[tuple[int, ...], ...]
    weights: Mapping[int, Mapping[str, TensorRef]]
    stacked: bool = False

    @property
    def ep(self) -> int:
        """The number of expert-parallel ranks."""
        return len(self.held)

    @property
    def home(self) -> str:
        """The module with its experts and its gate."""
        return self.prefix.removesuffix(".deepspeed_experts").rpartition(".")[0]

    def spread(self, ep: int) -> Layer:
        """The layer, with its experts spread evenly over `ep` ranks."""
        share = self.experts // ep
        return replace(self, held=tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(ep)))

    def module(self) -> dict[str, TensorRef]:
        """The weights in the layer's files, under their names among all experts; empty for stacked experts."""
        if self.stacked:
            return {}
        return {
            f"{self.prefix}.{expert}.{local}": ref
            for expert, refs in sorted(self.weights.items())
            for local, ref in refs.items()
        }

    def stacks(self, role: Role, rank: int | None = None) -> dict[str, TensorEntry]:
        """Stacked weights of all experts, or of a rank's, from the experts' files."""
        if not self.stacked or not self.weights:
            return {}
        wanted = range(self.experts) if rank is None else self.held[rank]
        found: dict[str, TensorEntry] = {}
        for local, first in self.weights[0].items():
            numel, itemsize = first.numel, first.dtype.itemsize
            row = Block(0, numel, 1, 0, 0, 1)
            fragments = tuple(
                fragment
                for at, expert in enumerate(wanted)
                for fragment in place(self.weights[expert][local].fragments(), row, at * numel, 0, itemsize)
            )
            name, shape = f"{self.prefix}.{local}", (len(wanted), *first.shape)
            found[name] = TensorEntry(name, shape, first.dtype, role, fragments)
        return found

    def joint(self, shapes: Sequence[Shape]) -> Joint:
        """The joint that makes the whole stacked weights from those of the expert-parallel ranks. Raises ValueError if
        they do not have the experts of their ranks.
        """
        own = shapes[0][1:]
        if [(len(held), *own) for held in self.held] != list(shapes):
            raise ValueError(f"{self.experts} experts in stacks of shapes {examples(list(shape) for shape in shapes)}")
        numel = math.prod(own)
        pieces = [
            SliceRows(rank, Block(at * numel, numel, 1, 0, 0, 1), expert * numel, 0)
            for rank, held in enumerate(self.held)
            for at, expert in enumerate(held)
        ]
        return Joint((self.experts, *own), tuple(pieces))


class Layers:
    """All layers of experts of a model, with the names of their parameters."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.all = tuple(layers)
        self._by_prefix = {layer.prefix: layer for layer in layers}

    @property
    def ep(self) -> int:
        """The largest number of ranks that a layer's experts are spread over."""
        return max((layer.ep for layer in self.all), default=1)

    def owner(self, name: str) -> tuple[Layer, int, str] | None:
        """The layer that a parameter or buffer belongs to, the expert's number in its name, and what follows it.

        A stacked weight is that of all experts; its number is 0.
        """
        match = _OWN.fullmatch(name)
        if match is not None and (layer := self._by_prefix.get(match["prefix"])) is not None:
            return layer, int(match["number"]), match["local"]
        prefix, _, local = name.rpartition(".")
        layer = self._by_prefix.get(prefix)
        return (layer, 0, local) if layer is not None and layer.stacked else None

    def owned(self, names: Iterable[str], *, experts: bool) -> list[str]:
        """The names that belong to experts, or all other names."""
        return [name for name in names if (self.owner(name) is not None) == experts]

    def name_on(self, rank: int, name: str) -> str:
        """The name among all experts of a parameter that has this name on an expert-parallel rank. Raises
        InconsistentError if that rank has no such expert.
        """
        found = self.owner(name)
        if found is None or found[0].stacked:
            return name
        layer, number, local = found
        if number >= len(layer.held[rank]):
            raise InconsistentError(
                f"ranks hold more experts than layer {layer.number} of the model has", found=repr(name),
                expected=f"{len(layer.held[rank])} of {layer.experts} experts on each of {layer.ep} ranks",
                remedy=OTHER_SAVE,
            )  # fmt: skip
        return f"{layer.prefix}.{layer.held[rank][number]}.{local}"

    def names_everywhere(self, name: str) -> list[str]:
        """The names among all experts of the first rank's parameter `name`, one per expert-parallel rank."""
        found = self.owner(name)
        if found is None or found[0].stacked:
            return [name]
        return [self.name_on(rank, name) for rank in range(found[0].ep)]

    def spread(self, names: Iterable[str], ranks: Callable[[Layer], int]) -> Layers:
        """The layers, with ranks for those that have none yet.

        Args:
            names: of the first rank's parameters and buffers; they show how many experts a rank has.
            ranks: expert-parallel ranks of a layer that has no such names.

        Raises:
            InconsistentError: a layer's experts cannot be spread over these ranks.
        """
        held: dict[str, set[int]] = {}
        for name in names:
            if (found := self.owner(name)) is not None:
                held.setdefault(found[0].prefix, set()).add(found[1])
        spread: list[Layer] = []
        for layer in self.all:
            if layer.held:
                spread.append(layer)
                continue
            share = len(held.get(layer.prefix, ()))
            ep = layer.experts // share if share else ranks(layer)
            if ep < 1 or layer.experts % ep or (share and ep * share != layer.experts):
                raise InconsistentError(
                    f"experts of layer {layer.number} cannot be spread over the ranks",
                    found=f"{share or layer.experts // max(ep, 1)} of {layer.experts} experts on a rank",
                    remedy="Copy the files of one save again, or choose another tag.",
                )
            spread.append(layer.spread(ep))
        return Layers(spread)


def is_own(name: str) -> bool:
    """Whether a parameter or buffer belongs to one of DeepSpeed's own experts."""
    return _OWN.fullmatch(name) is not None


def read_layers(listing: Listing, model: ModelStates, mp_ranks: range | None = None) -> Layers:
    """All layers of experts; their ranks are known only if AutoEP recorded them.

    Args:
        listing: all files.
        model: any model file of these ranks.
        mp_ranks: the model-parallel ranks with the files of experts that are read; None for all.

    Raises:
        IncompleteError: an expert's file is missing.
        InconsistentError: there are files of experts that the model does not have, or experts of a layer differ.
        CorruptError: a file does not hold what its name says.
        UnsupportedError: the files are of a DeepSpeed too old, or of a kind that zckpt does not know.
    """
    counts = model.root.get("num_experts")
    if not isinstance(counts, list | tuple) or not all(isinstance(n, int) and 0 < n <= _MOST for n in counts):
        raise UnsupportedError(
            "does not say how many experts its layers have", file=model.file, found=f"num_experts {brief(counts)}",
            expected="a number for each layer, as DeepSpeed 0.6 or later writes",
            remedy="Load it with the DeepSpeed that wrote it and save it with a newer one.",
        )  # fmt: skip
    recorded = records(model)
    files = _files(listing, mp_ranks)
    strange = [name for (number, expert), name in files.items() if not _is_one(counts, number, expert)]
    if strange:
        raise InconsistentError(
            "holds files of experts that the model does not have", file=listing.directory, found=examples(strange),
            expected=f"layers of experts 0-{len(counts) - 1}, of {examples(counts)} experts",
            remedy="Move them away if another save left them over; if not, copy all files of one save again.",
        )  # fmt: skip
    first = mp_ranks[0] if mp_ranks else 0
    layers = [_layer(listing, n, count, recorded.get(n), files, first) for n, count in enumerate(counts)]
    return Layers(layers)


def _is_one(counts: Sequence[int], number: int, expert: int) -> bool:
    return 0 <= number < len(counts) and expert < counts[number]


def _files(listing: Listing, mp_ranks: range | None) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    for name in listing.matching(EXPERT_NAME):
        match = EXPERT_NAME.fullmatch(name)
        assert match is not None
        if mp_ranks is not None and int(match["mp"]) not in mp_ranks:
            continue
        key = int(match["layer"]), int(match["expert"])
        if key in found:
            raise InconsistentError(
                f"two files hold expert {key[1]} of layer {key[0]}", file=listing.directory,
                found=f"{found[key]!r} and {name!r}", remedy="Move the one of another save away.",
            )  # fmt: skip
        found[key] = name
    return found


def _layer(
    listing: Listing,
    number: int,
    experts: int,
    recorded: Mapping[str, object] | None,
    files: Mapping[tuple[int, int], str],
    mp_rank: int,
) -> Layer:
    """One layer, after a check that all of its experts' files exist and are alike."""
    held: tuple[tuple[int, ...], ...] = ()
    if recorded is not None:
        held = _placement(recorded, experts, listing.directory.path)
        if recorded.get("checkpoint_format") not in (None, "per_expert_files"):
            return Layer(number, str(recorded["expert_key_prefix"]), experts, held, {}, True)
    missing = [expert for expert in range(experts) if (number, expert) not in files]
    if missing:
        names = [f"layer_{number}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt" for expert in missing[:3]]
        raise IncompleteError(
            f"files of experts of layer {number} are missing",
            file=listing.directory,
            found=f"files of {experts - len(missing)} experts",
            expected=f"files of {experts} experts, with {ranges(missing)}: {examples(names)}",
            remedy="Copy them from the nodes that wrote them (--also DIR lays further directories over this one).",
        )
    weights: dict[int, dict[str, TensorRef]] = {}
    prefixes: dict[int, str] = {}
    for expert in range(experts):
        name = files[number, expert]
        prefixes[expert], weights[expert] = _expert(listing, name, expert, recorded is not None)
        if prefixes[expert] != prefixes[0] or _forms(weights[expert]) != _forms(weights[0]):
            raise InconsistentError(
                f"experts of layer {number} are not alike",
                file=listing.files[name].path,
                found=f"{prefixes[expert]!r} with {examples(weights[expert])}",
                expected=f"as in {files[number, 0]!r}: {prefixes[0]!r} with {examples(weights[0])}",
                remedy="Copy the layer's files of one save again, or choose another tag.",
            )
    return Layer(number, prefixes[0], experts, held, weights, recorded is not None)


def _forms(weights: Mapping[str, TensorRef]) -> dict[str, tuple[Shape, str]]:
    return {local: (ref.shape, ref.dtype.name) for local, ref in weights.items()}


def _expert(listing: Listing, name: str, expert: int, stacked: bool) -> tuple[str, dict[str, TensorRef]]:
    """The prefix of an expert's names, and its weights by local name."""
    file, root = listing.files[name].path, root_of(listing, name)
    notes: list[str] = []
    tensors = flatten({key: value for key, value in root.items() if key != _FOLDING}, notes)
    prefixes: set[str] = set()
    weights: dict[str, TensorRef] = {}
    for key, ref in tensors.items():
        match = (_STACKED if stacked else _OWN).fullmatch(key)
        if match is None or int(match["number"]) != expert:
            notes.append(f"{brief(key)} is not a name of expert {expert}")
            continue
        prefixes.add(match["prefix"])
        weights[match["local"]] = ref
    if notes or len(prefixes) != 1:
        raise CorruptError(
            "does not hold the expert of its name", file=file,
            found=notes[0] if notes else f"names of {len(prefixes)} layers", expected=f"the weights of expert {expert}",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    return prefixes.pop(), weights


def _placement(recorded: Mapping[str, object], experts: int, file: str) -> tuple[tuple[int, ...], ...]:
    """The experts of each expert-parallel rank, in its own order."""
    ep, placed = recorded.get("ep_size"), recorded.get("expert_placement")
    held: list[tuple[int, ...]] = []
    if isinstance(placed, Mapping):
        ranks = placed.get("ranks")
        entries = [entry for entry in ranks if isinstance(entry, Mapping)] if isinstance(ranks, list | tuple) else []
        for entry in sorted(entries, key=lambda entry: str(entry.get("rank")).zfill(9)):
            numbers = entry.get("experts")
            held.append(tuple(numbers) if isinstance(numbers, list | tuple) else ())
    elif isinstance(ep, int) and 0 < ep <= experts and experts % ep == 0:
        return Layer(0, "", experts, (), {}).spread(ep).held
    placed_experts = [number for numbers in held for number in numbers]
    if any(type(n) is not int for n in placed_experts) or sorted(placed_experts) != list(range(experts)):
        raise InconsistentError(
            "the placement of experts does not place each of them once", file=file, found=brief(held),
            expected=f"{experts} experts on {brief(ep)} ranks",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    return tuple(held)


def sharers(ep: int, rank: int, world_size: int, *, data_first: bool) -> range:
    """The data-parallel ranks that hold the experts of an expert-parallel rank; see [Note: expert-parallel ranks]."""
    size = world_size // ep
    return range(rank * size, (rank + 1) * size) if data_first else range(rank, world_size, ep)
