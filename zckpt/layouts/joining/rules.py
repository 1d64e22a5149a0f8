"""The rule by which each parameter of a tensor-parallel checkpoint is joined.

For `parallel`. Rules are looked for in this order: what the user gave (`--tp-rules`), the affine map of newer
DeepSpeed versions, then the regular expressions of universal-checkpoint information. Names are matched as `re.match` does.

[Note: rule files] A JSON object {"rules": [..]}; the first rule with a "match" that fits a name is taken. A rule has
a "join":
a dimension (0, 1, ..) in which slices follow each other; "replicated"; "mean" or "sum"; and perhaps "parts": how many equal
tensors are stacked in that dimension (3 for a fused QKV), or the list of their widths over all ranks; or "widths", which
lists for each of them what every rank holds; "keep": rows of the first dimension that are real, where a vocabulary was padded.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from operator import index
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, list_at, mapping_at, value_at
from zckpt.containers.tensor_ref import MAX_FRAGMENTS
from zckpt.core.fragments import Block
from zckpt.layouts.joining.patterns import Patterns
from zckpt.layouts.joining.slices import Joint, SliceRows, join_along, join_replicas, join_sums, parts
from zckpt.layouts.save.module_states import ModelStates, Shape
from zckpt.layouts.save.state_names import WRAPPERS

BUILT_IN = os.path.join(os.path.dirname(__file__), "rule_files")

_CATEGORIES = ("tp_replicated_", "parameter_to_average_", "parameter_with_", "vocabulary_parameter_")


@dataclass(frozen=True, slots=True)
class FileRules:
    """Rules of a file; see [Note: rule files]."""

    path: str
    rules: tuple[tuple[re.Pattern[str], Mapping[str, object]], ...]

    def joint(self, name: str, shapes: Sequence[Shape]) -> Joint | None:
        """The way in which the slices of a parameter are joined; None if no rule covers it."""
        for pattern, rule in self.rules:
            if pattern.match(name) or pattern.match(WRAPPERS.sub("", name)):
                return self._joint(name, shapes, rule)
        return None

    def _joint(self, name: str, shapes: Sequence[Shape], rule: Mapping[str, object]) -> Joint:
        how, count, widths = rule["join"], rule.get("parts", 1), rule.get("widths")
        try:
            if how == "replicated":
                joint = join_replicas(shapes)
            elif how == "mean" or how == "sum":
                joint = join_sums(shapes, "mean" if how == "mean" else "sum")
            elif isinstance(how, int) and isinstance(widths, list):
                joint = parts(shapes, how, widths)
            elif isinstance(how, int) and count != 1:
                joint = parts(shapes, how, _widths(shapes, how, count))
            elif isinstance(how, int):
                joint = join_along(shapes, how)
            else:
                raise ValueError(f"no way of joining is called {how!r}")
        except (ValueError, TypeError, IndexError) as error:
            raise InconsistentError(
                f"the rule does not fit tensor {name!r}", file=self.path, found=str(error),
                expected=json.dumps(dict(rule)),
            ) from error  # fmt: skip
        keep = rule.get("keep")
        return replace(joint, keep=keep) if isinstance(keep, int) else joint


def _widths(shapes: Sequence[Shape], dim: int, count: object) -> list[list[int]]:
    """widths[part][rank] of equal parts, or of parts of known widths that are split evenly."""
    extent = sum(shape[dim] for shape in shapes)
    if isinstance(count, int) and count > 0 and extent % count == 0:
        widths = [extent // count] * count
    elif isinstance(count, list | tuple) and all(isinstance(width, int) for width in count):
        widths = [int(width) for width in count]
    else:
        raise ValueError(f"{extent} rows in {count!r} parts")
    if any(width % len(shapes) for width in widths):
        raise ValueError(f"parts of {widths} rows that {len(shapes)} ranks cannot share evenly")
    return [[width // len(shapes)] * len(shapes) for width in widths]


def rules_of_file(name: str) -> FileRules:
    """Reads the rules called `megatron` or `neox`, or those of a file. Raises UsageError if there is no such file, or
    it is not of the form of [Note: rule files].
    """
    known = sorted(entry.removesuffix(".json") for entry in os.listdir(BUILT_IN) if entry.endswith(".json"))
    path = os.path.join(BUILT_IN, f"{name}.json") if name in known else name
    try:
        with open(path, "rb") as file:
            listed = json.load(file)["rules"]
        rules = tuple((re.compile(rule["match"]), {**rule, "join": rule["join"]}) for rule in listed)
    except OSError as error:
        raise UsageError(
            "no such rules", file=name, found=error.strerror or "", expected=f"{', '.join(known)}, or a JSON file",
            remedy="Pass one of these with --tp-rules.",
        ) from error  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError, re.error) as error:
        raise UsageError(
            "the file of rules cannot be read", file=path, found=f"{type(error).__name__}: {error}",
            expected='{"rules": [{"match": "REGEX", "join": 0}, ..]}',
            remedy="Write the rules in this form.",
        ) from error  # fmt: skip
    return FileRules(path, rules)


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """The universal-checkpoint information in a checkpoint."""

    file: str
    info: Mapping[str, object]
    patterns: Patterns = field(repr=False, compare=False)

    def joint(self, name: str, shapes: Sequence[Shape]) -> Joint:
        """As `FileRules.joint`: parameters of no category are put end to end in dimension 0, as DeepSpeed does. Raises
        UnsupportedError if the checkpoint itself says that it cannot be joined, InconsistentError if its information
        does not fit its slices.
        """
        reason = next(
            (
                why
                for pattern, why in mapping_at(self.info, "autotp_unsupported_parameter_patterns").items()
                if self.matches(pattern, name)
            ),
            None,
        )
        if reason is not None:
            raise UnsupportedError(
                f"tensor {name!r} cannot be joined", file=self.file, found=str(reason),
                remedy="Pass other rules with --tp-rules, or leave the tensor out with --exclude.",
            )  # fmt: skip
        if len(shapes) == 1 and self._ranks() > 1:  # it was joined since: what it says is of the run before
            return join_replicas(shapes)
        try:
            joint = self._affine(name, shapes) or self._by_category(name, shapes)
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InconsistentError(
                f"the universal-checkpoint information does not fit tensor {name!r}",
                file=self.file,
                found=f"{error}; the slices have shapes {examples(map(list, shapes))}",
            ) from error
        vocabulary = self.info.get("original_vocab_size")
        if isinstance(vocabulary, int) and self._names("vocabulary_parameter_patterns", name):
            joint = replace(joint, keep=vocabulary, words={**joint.words, "vocab_tensor": True})
        return joint

    def _ranks(self) -> int:
        """Tensor-parallel ranks that it records; 0 if it does not."""
        counts = [len(mapping_at(entry, "ranks")) for entry in mapping_at(self.info, "affine_map", "params").values()]
        for widths in mapping_at(self.info, "sub_param_shard_widths").values():
            counts += [len(list_at(part)) for part in list_at(widths)]
        return max(counts, default=0)

    def matches(self, pattern: object, name: str) -> bool:
        """Whether a pattern fits a name, with or without the parts that wrappers put into it (torch.compile's
        `_orig_mod`).
        """
        return any(self.patterns.match(pattern, one) for one in {name, WRAPPERS.sub("", name)})

    def all_patterns(self) -> list[object]:
        """The regular expressions of all categories."""
        lists = [list_at(self.info, key) for key in self.info if key.startswith(_CATEGORIES)]
        lists += [list_at(entry, "patterns") for entry in _entries(self.info.get("parameter_with_sub_params"))]
        found = [pattern for value in lists for pattern in value if isinstance(pattern, str)]
        return [*found, *mapping_at(self.info, "affine_map", "params")]

    def _names(self, key: str, name: str) -> bool:
        return any(self.matches(pattern, name) for pattern in list_at(self.info, key))

    def _by_category(self, name: str, shapes: Sequence[Shape]) -> Joint:
        if self._names("tp_replicated_parameter_patterns", name):
            return join_replicas(shapes)
        if self._names("parameter_to_average_patterns", name):
            return join_sums(shapes, "mean")
        if self._names("parameter_with_2_sub_params_cat_dim_0", name):
            joint = parts(shapes, 0, _halves(shapes))
            return replace(joint, words={"cat_dim": 0, "param_n_sub_params": 2})
        for entry in _entries(self.info.get("parameter_with_sub_params")):
            for pattern in entry["patterns"]:
                if self.matches(pattern, name):
                    return self._sub_params(pattern, entry, shapes)
        return join_along(shapes, 1 if self._names("parameter_with_row_parallelism_patterns", name) else 0)

    def _sub_params(self, pattern: str, entry: Mapping[str, object], shapes: Sequence[Shape]) -> Joint:
        """Joins stacked tensors of unlike width, perhaps with more dimensions than the slices have."""
        dim, view = entry["partition_dim"], entry["shape"]
        if not isinstance(dim, int) or not isinstance(view, list | tuple):
            raise TypeError("sub-parameters without shape")
        sizes = view[dim]
        if isinstance(sizes, int):  # before version 0.4: how many equal ones there are
            extent = sum(shape[dim] for shape in shapes)
            if sizes < 1 or extent % sizes or sizes > MAX_FRAGMENTS:
                raise ValueError(f"{extent} rows in {sizes} sub-parameters")
            sizes = (extent // sizes,) * sizes
            view = (*view[:dim], sizes, *view[dim + 1 :])
        widths = value_at(self.info, "sub_param_shard_widths", pattern)
        if widths is None:
            widths = [[size // len(shapes)] * len(shapes) for size in sizes]
        if not isinstance(widths, list | tuple) or any(sum(w) != s for w, s in zip(widths, sizes, strict=True)):
            raise ValueError(f"sub-parameters of {sizes} rows, cut into {widths}")
        views = _view_shapes(shapes, view, dim, widths)
        joint = parts(views, dim, widths)
        state = {"patterns": entry["patterns"], "shape": view, "partition_dim": dim}
        shape = Placeholder("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", (), state, True, new=True)
        words: dict[str, object] = {"sub_param_shape": shape}
        return replace(joint, words=words)

    def _affine(self, name: str, shapes: Sequence[Shape]) -> Joint | None:
        """Joins by the affine map: blocks of elements, each with its place in the whole and in the slices that hold it."""
        found = mapping_at(self.info, "affine_map")
        if not found:
            return None
        if found.get("version") != 1:
            raise ValueError(f"an affine map of version {found.get('version')!r}, where 1 is known")
        maps = found["params"]
        if not isinstance(maps, Mapping):
            raise TypeError("an affine map without parameters")
        entry = next((value for pattern, value in maps.items() if self.matches(pattern, name)), None)
        return None if entry is None else _joint_of_map(entry, shapes)


def _halves(shapes: Sequence[Shape]) -> list[list[int]]:
    """Joins slices that hold half of each of two tensors; of an odd one, the first half is larger, as by torch.chunk."""
    first = [-(-shape[0] // 2) for shape in shapes]
    return [first, [shape[0] - half for shape, half in zip(shapes, first)]]


def _entries(value: object) -> list[Mapping[str, list[str]]]:
    """`parameter_with_sub_params`: mappings, or pickled `SubparamShape`s."""
    listed = value if isinstance(value, list | tuple) else []
    return [item.state if isinstance(item, Placeholder) else item for item in listed]  # type: ignore[misc]


def _view_shapes(
    shapes: Sequence[Shape], view: Sequence[object], dim: int, widths: Sequence[Sequence[int]]
) -> list[Shape]:
    """The slices' shapes in a view with as many elements; one dimension of the view may be -1."""
    seen: list[Shape] = []
    for rank, shape in enumerate(shapes):
        dims = [sum(d) if isinstance(d, list | tuple) else d for d in view]
        dims[dim] = sum(width[rank] for width in widths)
        known = [d for d in dims if isinstance(d, int) and d >= 0]
        numel = 1
        for d in known:
            numel *= d
        free = [at for at, d in enumerate(dims) if not isinstance(d, int) or d < 0]
        if len(free) == 1 and numel:
            total = 1
            for d in shape:
                total *= d
            dims[free[0]] = total // numel
        seen.append(tuple(d for d in dims if isinstance(d, int)))
    return seen


def _joint_of_map(entry: Mapping[str, Any], shapes: Sequence[Shape]) -> Joint:
    """The joint of a saved `ParamAffineMap`. Raises UnsupportedError if a block is scaled."""
    ranks, shape = entry["ranks"], tuple(map(index, entry["logical_shape"]))
    if not isinstance(ranks, Mapping):
        raise TypeError("an affine map without ranks")
    own: list[SliceRows] = []
    copied: dict[int, list[SliceRows]] = {}  # rank -> blocks that an earlier rank holds too
    held_by: dict[int, set[tuple[int, ...]]] = {}  # rank -> which blocks of the whole these are
    for key, held in sorted(ranks.items(), key=lambda item: int(item[0])):
        rank = int(key)
        if math.prod(map(index, held["shard_shape"])) != math.prod(shapes[rank]):
            raise ValueError(f"slice {rank} of shape {held['shard_shape']}")
        for piece in held["pieces"]:
            if float(piece.get("scale", 1.0)) != 1.0:
                raise UnsupportedError(
                    "slices are scaled", found=f"scale {piece['scale']}", expected="slices with scale 1",
                    remedy="Pass other rules with --tp-rules, or leave the tensor out with --exclude.",
                )  # fmt: skip
            blocks = _blocks(rank, piece)
            if min(int(r) for r in piece["locations"]) == rank:
                own += blocks
            else:
                copied.setdefault(rank, []).extend(blocks)
                held_by.setdefault(rank, set()).update(_where(block) for block in blocks)
    copies = {
        rank: (*blocks, *(block for block in own if _where(block) not in held_by[rank]))
        for rank, blocks in copied.items()
    }
    return Joint(shape, tuple(own), copies)


def _where(piece: SliceRows) -> tuple[int, ...]:
    return piece.start, piece.pitch, piece.rows.count, piece.rows.rows


def _blocks(rank: int, piece: Mapping[str, Any]) -> list[SliceRows]:
    """A block of any dimensions as rows: inner dimensions are folded as long as both sides are dense."""
    (source, source_strides), (dest, dest_strides) = piece["source"], piece["dest"]
    dims = list(zip(*(map(index, each) for each in (piece["shape"], source_strides, dest_strides)), strict=True))
    if any(extent == 0 for extent, _, _ in dims):
        return []
    count = 1
    while dims and (dims[-1][0] == 1 or (dims[-1][1] == count and dims[-1][2] == count)):
        count *= dims.pop()[0]
    rows, to_pitch, of_pitch = dims.pop() if dims else (1, count, count)
    if math.prod(extent for extent, _, _ in dims) > MAX_FRAGMENTS:
        raise ValueError(f"a slice of millions of pieces, of shape {piece['shape']}")
    places = [(int(source), int(dest))]
    for extent, to_step, of_step in dims:
        places = [(to + n * to_step, of + n * of_step) for to, of in places for n in range(extent)]
    return [SliceRows(rank, Block(of, count, rows, of_pitch, of_pitch, 1), to, to_pitch) for to, of in places]


def rules_of_checkpoint(model: ModelStates) -> CheckpointRules | None:
    """The universal-checkpoint information of a model file; None if the file has none."""
    info = model.root.get("universal_checkpoint_info")
    if info is None:
        return None
    if not isinstance(info, Mapping):
        raise CorruptError("its universal-checkpoint information is not a mapping", file=model.file, remedy=COPY_AGAIN)
    return CheckpointRules(model.file, info, Patterns(model.file))


def check_patterns(rules: CheckpointRules | None, names: Sequence[str]) -> CheckpointRules | None:
    """The rules of a checkpoint; at least one must fit a name: if none does, the names are not the run's. Raises
    InconsistentError if none fits.
    """
    patterns = [] if rules is None else rules.all_patterns()
    if rules is not None and patterns and not any(rules.matches(one, name) for one in patterns for name in names):
        raise InconsistentError(
            "no pattern of the universal-checkpoint information fits a name of the state dict", file=rules.file,
            found=f"patterns such as {examples(map(str, patterns))}, and names such as {examples(names)}",
            expected="patterns for the names of the run's parameters",
            remedy="The state dict may have other names than the parameters. Pass rules for its names with --tp-rules.",
        )  # fmt: skip
    return rules


def check_loads(rules: FileRules, names: Sequence[str]) -> None:
    """Checks that at least one rule of a file fits a name. Raises UsageError if no rule fits."""
    if not any(pattern.match(name) for pattern, _ in rules.rules for name in names):
        raise UsageError(
            "the rules fit no tensor of this checkpoint", file=rules.path, found=f"names such as {examples(names)}",
            remedy="Pass rules for these names with --tp-rules.",
        )  # fmt: skip


def unknown_rule(name: str, shapes: Sequence[Shape], file: str) -> UnsupportedError:
    """The error for slices that no rule covers."""
    return UnsupportedError(
        f"no rule says how to join the slices of tensor {name!r}",
        file=file,
        found=f"shapes {examples(list(shape) for shape in shapes)} on {len(shapes)} tensor-parallel ranks",
        remedy="Pass --tp-rules megatron, neox, or a JSON file with rules.",
    )
