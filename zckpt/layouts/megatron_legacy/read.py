"""Legacy saves of Megatron-LM as one model: slices of tensor ranks joined, stages and experts put one after another.

Slices are joined by the rules `megatron` or `megatron-swiglu` of `joining`, or by `--tp-rules`. Masters are read where they can
be named and proved (`masters`): they are then the tensors, and the half-precision weights their copies. What several ranks hold
(a tensor that all tensor ranks have, those of other expert ranks, an embedding on the last stage) is a replica that checks
compare.
Source: Megatron-LM core_v0.12.3, megatron/core/tensor_parallel/layers.py, megatron/core/transformer; megatron/legacy/model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base import words
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, IncompleteError, InconsistentError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, Replica, Role, Source, TensorEntry, Topology
from zckpt.core.dtypes import F32
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.engine.elements import ElementReader
from zckpt.layouts.joining.rules import FileRules, check_loads, rules_of_file, unknown_rule
from zckpt.layouts.joining.slices import Joint, join, join_along, join_replicas, parts
from zckpt.layouts.megatron_legacy import files
from zckpt.layouts.megatron_legacy.files import ModelRank
from zckpt.layouts.megatron_legacy.masters import Masters, masters_of
from zckpt.layouts.megatron_legacy.stages import RankTensor, TensorsOfRank, tensors_of
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import Shape, root_of, views_of
from zckpt.layouts.save.origins import check_alike

_TIED = {
    "output_layer.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
}
"""Names of the copies of the embedding that the last stage of a model with tied weights has."""

_GATED = (("linear_fc1.weight", "linear_fc2.weight"), ("dense_h_to_4h.weight", "dense_4h_to_h.weight"))


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a legacy save; with `allow_unknown`, without masters where only some ranks' can be named.

    Raises:
        IncompleteError: ranks are missing, or masters of some. InconsistentError: their files are not of one save.
        UnsupportedError: the split is one that cannot be told, or no rule says how slices are joined.
    """
    return LegacySave(listing, allow_unknown=allow_unknown).catalog()


_Part = tuple[ModelRank, TensorEntry, TensorEntry | None]
"""What a rank holds of a tensor: its weight, and its master where it has one."""


class LegacySave:
    """A save with its ranks' tensors and masters."""

    def __init__(self, listing: Listing, *, allow_unknown: bool = False) -> None:
        self.listing = listing
        self.allow_unknown = allow_unknown
        self.problems: list[str] = []
        self.split = files.split_of(listing)
        self.ranks = files.ranks_of(listing, self.split)
        files.check_own_ranks(listing, self.split, self.ranks)
        names = {rank: f"{directory}/model_optim_rng.pt" for rank, directory in self.ranks.items()}
        roots = {rank: (listing.files[name].path, root_of(listing, name)) for rank, name in names.items()}
        first = next(iter(names.values()))
        check_alike(listing, "the iteration", {names[rank]: _iteration(root) for rank, (_, root) in roots.items()})
        self.args = files.arguments(listing, first)
        self.root = root_of(listing, first)
        self.notes: list[str] = []
        self.tensors = tensors_of(roots, self.split, self.args, self.notes)
        self.masters = self._masters()
        self.rules = self._rules()

    def _masters(self) -> dict[ModelRank, Masters]:
        """The masters of every rank, if all can be named; if none can, a note. Raises InconsistentError if only some
        ranks' can; or a file contradicts itself.
        """
        found: dict[ModelRank, Masters] = {}
        unnamed: list[str] = []
        contradiction = ""
        with ElementReader() as reader:
            for held in self.tensors:
                name = f"{self.ranks[held.rank]}/distrib_optim.pt"
                optimizer = (self.listing.open(name).root or ()) if name in self.listing.files else None
                own = masters_of(held, optimizer, self.args, reader)
                if isinstance(own, str):
                    contradiction = own or contradiction
                    unnamed.append(name if name in self.listing.files else self.ranks[held.rank])
                    continue
                found[held.rank] = own
                self.problems += [f"in {name!r}, {problem}" for problem in own.problems]
        if not unnamed:
            return found
        if (contradiction or any(own.states for own in found.values())) and not self.allow_unknown:
            raise InconsistentError(
                f"the fp32 masters of {examples(unnamed)} cannot be found"
                + ("" if contradiction else ", those of other ranks can"),
                file=self.listing.directory,
                found=contradiction or "vectors or lists that no order of parameters makes this model's weights",
                expected="masters of every rank",
                remedy=f"{COPY_AGAIN} With --allow-unknown-layout, the half-precision weights of all ranks are written.",
            )
        self.notes.append(
            f"The fp32 masters of {examples(unnamed)} have no names, and no order of parameters that is known makes them this "
            "model's weights: all weights are in the precision of the model."
        )
        self.problems.clear()
        return {}

    def _rules(self) -> FileRules:
        given = self.listing.options.tp_rules
        rules = rules_of_file(given or ("megatron-swiglu" if _is_gated(self.tensors[0]) else "megatron"))
        if given:
            check_loads(rules, [held.name for held in self.tensors[0].tensors])
            self.notes.append(f"Slices were joined by the rules of {given!r}.")
        return rules

    # -- putting it together -----------------------------------------------------------------------------------------

    def catalog(self) -> Catalog:
        """The whole model; errors as in `read`."""
        tensors = self._tensors()
        without = [name for name, entry in tensors.items() if entry.role == "parameter" and entry.dtype.itemsize == 2]
        if without and any(own.states for own in self.masters.values()):
            lacking = [place for place in self.ranks.values() if f"{place}/distrib_optim.pt" not in self.listing.files]
            why = f"there is no distrib_optim.pt in {examples(lacking)}" if lacking else "no file has them"
            if not self.allow_unknown:
                raise IncompleteError(
                    f"the fp32 masters of {count(len(without), 'tensor')} are missing, such as {without[0]!r}",
                    file=self.listing.directory, found=why, expected="masters of every rank, since some ranks have them",
                    remedy="Copy the file from the node that wrote it (--also DIR lays further directories over this one). With "
                    "--allow-unknown-layout, the half-precision weights of all ranks are written.",
                )  # fmt: skip
            self.notes.append(
                f"The fp32 masters of {count(len(without), 'tensor')} such as {without[0]!r} are missing: {why}. "
                "All weights are in the precision of the model."
            )
            self.masters = {}
            tensors = self._tensors()
        if self.problems:
            self.notes.append(f"Optimizer states cannot be read, the fp32 masters can: {'; '.join(self.problems[:3])}.")
        split = self.split
        if split.ep > 1:
            self.notes.append(
                "The data ranks in the table of files are the expert ranks that directories are named by."
            )
        source = Source(
            "megatron-legacy", self.listing.directory.path, self.listing.tag, ("Megatron-LM", ""),
            global_steps=_iteration(self.root), details=_details(self.args), notes=tuple(self.notes),
            optimizer_states=tuple(self.state_names()),
        )  # fmt: skip
        extras = {key: value for key, value in self.root.items() if key in ("args", "checkpoint_version", "iteration")}
        padding = tuple(pad for own in self.masters.values() for pad in own.padding.get("param", ()))
        views = tuple(views_of(held.ref for rank in self.tensors for held in rank.tensors))
        data = self.args.get("data_parallel_size")
        dp = data if type(data) is int and data > 0 else split.ep
        return Catalog(
            tensors,
            source,
            self._evidence(),
            topology=Topology(dp, split.tp, split.pp, split.ep),
            extras=extras,
            padding=padding,
            views=views,
        )

    def _evidence(self) -> Evidence:
        """The evidence for the run's split: every file has Megatron's args, except those of a converter."""
        if self.args.get("tensor_model_parallel_size") or self.args.get("model_parallel_size"):
            return Evidence("metadata", "the parallel sizes in Megatron's args")
        if self.listing.options.tp or self.listing.options.pp:
            return Evidence("metadata", "--tp and --pp")
        return Evidence(
            "unknown", "the files do not say over how many ranks the model was split", "--tp and --pp of the run"
        )

    def _tensors(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for stage, entry in self.stage_tensors():
            name = self.kept_name(entry.name, found)
            first = found.get(name)
            found[name] = entry if first is None else _with_copy(first, entry, stage)
        return found

    def stage_tensors(self, state: str = "param") -> Iterator[tuple[int, TensorEntry]]:
        """(stage, whole tensor) in the order of the model: masters or weights, or another state where a tensor has it."""
        for stage, chunk in self._chunks():
            ranks = [held for held in self.tensors if held.rank.pp == stage]
            yield from ((stage, entry) for entry in self._tensors_of_chunk(ranks, chunk, state))

    def state_names(self) -> list[str]:
        """Names of the states that all parameters with masters have, other than the masters themselves."""
        held = [states.keys() - {"param"} for own in self.masters.values() for states in own.states.values()]
        return sorted(set.intersection(*map(set, held))) if held else []

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """(stage, virtual stage), in the order of the model."""
        for chunk in range(self.tensors[0].chunks):
            yield from ((stage, chunk) for stage in range(self.split.pp))

    def kept_name(self, name: str, tensors: Mapping[str, TensorEntry]) -> str:
        """The kept name of a tensor: that of the embedding for tensors tied to it."""
        kept = _TIED.get(name, name)
        tied = (
            name.startswith("word_embeddings_for_head") or self.args.get("untie_embeddings_and_output_weights") is False
        )
        return kept if kept in tensors and tied else name

    def _tensors_of_chunk(self, ranks: Sequence[TensorsOfRank], chunk: int, state: str) -> Iterator[TensorEntry]:
        """The whole tensors of one virtual stage, under their names."""
        held: dict[str, list[tuple[TensorsOfRank, int]]] = {}
        for rank in ranks:
            for index, each in enumerate(rank.tensors):
                if each.chunk == chunk:
                    held.setdefault(each.name, []).append((rank, index))
        for name, places in held.items():
            first = places[0][0].tensors[places[0][1]]
            by_expert_rank: dict[int, list[_Part]] = {}
            for rank, index in places:
                part = self._part(rank, index, state)
                by_expert_rank.setdefault(rank.rank.ep if first.expert else 0, []).append(part)
            units = [self._unit(first, own) for _, own in sorted(by_expert_rank.items())]
            entry = units[0]
            if first.grouped:
                entry = join(name, units, join_along([unit.shape for unit in units], 0))
                entry = replace(entry, shape=_as_saved(first, entry.shape))
            yield entry

    def _part(self, rank: TensorsOfRank, index: int, state: str) -> _Part:
        held = rank.tensors[index]
        shape = self._seen(held)
        role: Role = "buffer" if held.is_buffer else "parameter"
        weight = TensorEntry(held.name, shape, held.ref.dtype, role, held.ref.fragments())
        states = self.masters[rank.rank].states.get(index, {}) if self.masters else {}
        master = TensorEntry(held.name, shape, F32, role, states[state]) if state in states else None
        return rank.rank, weight, master

    def _seen(self, held: RankTensor) -> Shape:
        """The shape in which a slice is cut: (experts, rows, columns) for all experts in one tensor."""
        if not held.grouped:
            return held.ref.shape
        total = self.args.get("num_experts")
        experts = total // self.split.ep if type(total) is int and total > 0 else 0
        rows, columns = held.ref.shape if len(held.ref.shape) == 2 else (0, 0)
        if not experts or (rows if held.name.endswith("2") else columns) % experts:
            raise InconsistentError(
                f"tensor {held.name!r} is not that of so many experts", file=self.listing.directory,
                found=f"shape {list(held.ref.shape)}", expected=f"num_experts {total} on {self.split.ep} expert ranks",
                remedy=OTHER_SAVE,
            )  # fmt: skip
        return (experts, rows // experts, columns) if held.name.endswith("2") else (experts, rows, columns // experts)

    def _unit(self, held: RankTensor, own: Sequence[_Part]) -> TensorEntry:
        """A whole tensor: each tensor rank has a slice, and several expert ranks may have the same one."""
        is_cut = not held.expert or self.split.etp > 1
        slices: dict[int, list[_Part]] = {}
        for part in own:
            slices.setdefault(part[0].tp if is_cut else 0, []).append(part)
        wanted = self.split.tp if is_cut else 1
        if len(slices) < wanted:
            raise IncompleteError(
                f"tensor {held.name!r} is not in the files of all tensor-parallel ranks", file=self.listing.directory,
                found=f"slices of {words.ranks(sorted(slices))}", expected=count(wanted, "slice"),
                remedy="Copy the files of the other ranks again, or choose another save.",
            )  # fmt: skip
        by_rank = [slices[number] for number in sorted(slices)]
        weights = [
            [parts_[number if number < len(parts_) else 0][1] for parts_ in by_rank]
            for number in range(max(map(len, by_rank)))
        ]
        joint = self._joint(held, [weight.shape for weight in weights[0]])
        entry = join(held.name, weights[0], joint)
        copies = list(entry.replicas)
        for number, others in enumerate(weights[1:], 1):
            whose = " and ".join(
                dict.fromkeys(_whose(parts_[number][0], is_cut) for parts_ in by_rank if number < len(parts_))
            )
            copy = join(held.name, others, joint)
            copies.append(Replica(copy.dtype, copy.fragments, whose, True))
        masters = [next((master for _, _, master in parts_ if master is not None), None) for parts_ in by_rank]
        named = [master for master in masters if master is not None]
        if len(named) < len(masters):
            return replace(entry, replicas=tuple(copies))
        whole = join(held.name, named, joint)
        return replace(whole, replicas=(Replica(entry.dtype, entry.fragments), *whole.replicas, *copies))

    def _joint(self, held: RankTensor, shapes: Sequence[Shape]) -> Joint:
        if len(shapes) == 1:
            return join_replicas(shapes)
        if held.grouped:
            halves = 2 if held.name.endswith("1") and self.rules.path.endswith("swiglu.json") else 1
            dim = 1 if held.name.endswith("2") else 2
            return parts(shapes, dim, [[shape[dim] // halves for shape in shapes]] * halves)
        if held.is_buffer and len(set(shapes)) == 1:
            return join_replicas(shapes)
        if shapes[0] and shapes[0][0] * len(shapes) == self._down_projected(held.name):
            return join_along(shapes, 0)
        joint = self.rules.joint(held.name, shapes)
        if joint is None:
            raise unknown_rule(held.name, shapes, self.listing.directory.path)
        return joint

    def _down_projected(self, name: str) -> int | None:
        """Rows of a whole down projection of latent attention, which some versions cut and others do not; None for others."""
        sizes = ("kv_lora_rank", "qk_pos_emb_head_dim") if "linear_kv_down_proj." in name else ("q_lora_rank",)
        rows = [value for size in sizes if type(value := self.args.get(size)) is int]
        return sum(rows) if "_down_proj." in name and len(rows) == len(sizes) else None


_SIZES = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "query groups": "num_query_groups",
    "head size": "kv_channels", "ffn": "ffn_hidden_size", "experts": "num_experts", "vocabulary": "padded_vocab_size",
    "virtual stages": "virtual_pipeline_model_parallel_size", "context ranks": "context_parallel_size",
}  # fmt: skip


def _details(args: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """The row of sizes that `inspect` prints, from the run's arguments."""
    sizes = {said: args.get(name) for said, name in _SIZES.items()}
    texts = [f"{said} {value:,}" for said, value in sizes.items() if type(value) is int and value > 0]
    return (("model", ", ".join(texts)),) if texts else ()


def _iteration(root: Mapping[str, object]) -> int | None:
    number = root.get("iteration")
    return number if type(number) is int else None


def _is_gated(rank: TensorsOfRank) -> bool:
    """Whether the first matrix of MLPs is two stacked ones: it then has twice as many rows as the second one has
    columns.
    """
    shapes = {held.local: held.ref.shape for held in rank.tensors}
    for name, shape in shapes.items():
        for first, second in _GATED:
            other = shapes.get(name.removesuffix(first) + second, ())
            if name.endswith(first) and len(shape) == len(other) == 2:
                return shape[0] == 2 * other[1]
        if name.endswith(".experts.weight1"):
            return math.prod(shape) == 2 * math.prod(shapes.get(f"{name[:-1]}2", ()))
    return False


def _whose(rank: ModelRank, is_cut: bool) -> str:
    return f"expert-parallel rank {rank.ep}" if is_cut else f"tensor-parallel rank {rank.tp}"


def _as_saved(held: RankTensor, shape: Shape) -> Shape:
    """The shape of all experts in one tensor, as an unsharded model has it."""
    experts, rows, columns = shape
    return (experts * rows, columns) if held.name.endswith("2") else (rows, experts * columns)


def _with_copy(first: TensorEntry, other: TensorEntry, stage: int) -> TensorEntry:
    """One entry for a tensor that a further stage holds too, after a check that both are alike."""
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        raise InconsistentError(
            f"two pipeline stages hold tensor {first.name!r} differently",
            found=f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}", remedy=OTHER_SAVE,
        )  # fmt: skip
    label = f"pipeline stage {stage}"
    places: list[tuple[str, Sequence[Fragment], Replica | None]] = [(label, other.fragments, None)]
    places += [(f"{label}, {copy.rank}" if copy.rank else label, copy.fragments, copy) for copy in other.replicas]
    copies = (Replica(copy.dtype if copy else other.dtype, tuple(at), whose, True) for whose, at, copy in places)
    return replace(first, replicas=(*first.replicas, *copies))
