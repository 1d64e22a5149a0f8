"""Draws what `zckpt reshard` would write: the same tensors in files of another number of ranks. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Plan
from zckpt.jobs.declarations import Asked
from zckpt.jobs.open import open_asked
from zckpt.jobs.own_groups import TargetWorld
from zckpt.jobs.reshard import laid_out
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import MODEL_NAME, SHARD_NAME
from zckpt.pictures.pieces import MODULE, WEIGHTS, PieceLayer, Purpose, contents_of, layer_of
from zckpt.pictures.rows import FileGrid, MappedFile


@dataclass(frozen=True, slots=True)
class Resharded:
    """A checkpoint after a resharding.

    Attributes:
        title: what it is, such as "ZeRO-3 for 4 ranks".
        stage: of ZeRO.
        world_size: data-parallel ranks.
        grid: its files.
        layers: what lies where in them; tensors are numbered as in the checkpoint.
    """

    title: str
    stage: int
    world_size: int
    grid: FileGrid
    layers: tuple[PieceLayer, ...]

    def contents(self) -> dict[str, int]:
        """Kind of contents of the files -> bytes, with `pieces.OTHER` at the end."""
        return contents_of(self.grid, self.layers)


def preview_reshard(path: str, asked: Asked[TargetWorld], numbers: Sequence[str]) -> Resharded:
    """The checkpoint that `zckpt reshard` would write for `asked`. `numbers`: names of the checkpoint's tensors as it has them,
    in the order in which they are numbered. Raises UnsupportedError if it has no optimizer states that zckpt reads; another kind
    of ZckptError says what is wrong.
    """
    opened = open_asked(path, asked)
    training = layouts.read_training(opened.place.listing, allow_unknown=asked.reading.allow_unknown_layout)
    target, laid = laid_out(opened, training, asked.own)
    grid = _grid(laid)
    number_of = {name: number for number, name in enumerate(numbers)}
    parts = _parts(laid, training, number_of)
    layers = [layer_of(name, _PURPOSES.get(name, "state"), held, grid) for name, held in parts.items()]
    title = f"ZeRO-{target.stage} for {count(target.world_size, 'rank')}"
    return Resharded(title, target.stage, target.world_size, grid, tuple(layer for layer in layers if layer.pieces))


_PURPOSES: Mapping[str, Purpose] = {WEIGHTS: "weight", MODULE: "module"}


def _parts(
    laid: Plan, training: Training, number_of: Mapping[str, int]
) -> dict[str, list[tuple[int, DType, Sequence[Fragment]]]]:
    """Layer -> the fragments of each tensor in it. Data of no tensor, such as step counters, is in no layer."""
    states = {
        id(entry): (f"optimizer: {state}", name)
        for name, own in training.states.items()
        for state, entry in own.items()
    }
    found: dict[str, list[tuple[int, DType, Sequence[Fragment]]]] = {WEIGHTS: [], MODULE: []}
    masters = {source.name for source, to in laid.pairs if id(source) not in states and not _is_model(to.fragments)}
    buffers: set[str] = set()
    for source, to in laid.pairs:
        layer, name = states.get(id(source), (WEIGHTS, source.name))
        if layer == WEIGHTS and _is_model(to.fragments) and name in masters:
            layer = MODULE
        if layer == WEIGHTS and _is_model(to.fragments) and isinstance(source, TensorEntry) and source.role == "buffer":
            if name in buffers:  # every rank has all buffers, and readers take the first
                continue
            buffers.add(name)
        if name in number_of:
            found.setdefault(layer, []).append((number_of[name], to.dtype, to.fragments))
    return found


def _is_model(fragments: Sequence[Fragment]) -> bool:
    return all(str(fragment.store).endswith("_model_states.pt") for fragment in fragments)


def _grid(laid: Plan) -> FileGrid:
    grid = FileGrid()
    ranks: dict[int, dict[str, int]] = {}
    for output, store in laid.files:
        name = output.path.rpartition("/")[2]
        match = SHARD_NAME.fullmatch(name)
        kind = "optimizer" if match and match["kind"] == "optim" else "model"
        number = grid.add(MappedFile(name, kind, output.size), store.path)
        if match or MODEL_NAME.fullmatch(name):
            ranks.setdefault(int(match["dp"]) if match else 0, {})[kind] = number
    columns = ("model", "optimizer")
    rows = ((f"rank {rank}", tuple(own.get(kind) for kind in columns)) for rank, own in sorted(ranks.items()))
    grid.add_group("Ranks", columns, rows)
    return grid
