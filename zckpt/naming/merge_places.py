"""Where the LoRAs of an adapter belong in a base model: which weight, how many experts, which way round.

For `merge`. Names say the module, and shapes whether its weight has a row for each output (a Linear's) or each input (a Conv1D's,
an embedding's, the experts' of some models).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.dtypes import BF16, F16, F32, F64
from zckpt.layouts.save.tied import HEADS, KEY, embedding_of, heads_of, is_tied
from zckpt.naming.adapter_weights import AdapterWeights, Factors, bare, version_of
from zckpt.naming.other_methods import CONV1D

_TRANSPOSED_SINCE = {"gpt_oss": (5, 0), "aria": (5, 23), "aria_text": (5, 23), "openai_privacy_filter": (5, 23)}
"""Models with experts that lie as (experts, in, out) and say so, and a version of transformers that has it so.

Source: transformers 5.0.0 and 5.23, `use_experts_implementation(is_transposed=True)`; 4.57 has no such mark.
"""
_SWAPS, _MAY_SWAP = (0, 19), (0, 18, 2)
"""The version of PEFT since which A is for the last dimension of experts without that mark, and the first that may do so.

Before, A was for the first dimension of all experts. Source: PEFT 0.17.1, 0.18.1, 0.19.1, tuners/lora/layer.py `ParamWrapper`.
"""

_MERGE_WITH_PEFT = "Merge this adapter with PEFT."
OTHER_BASE = "Pass with --base the model that the adapter was trained on."


class ModelTensors:
    """The tensors of the model while adapters are merged."""

    def __init__(self, base: Catalog, config: Mapping[str, object] | None) -> None:
        self.tensors = dict(base.tensors)
        self.aliases = dict(base.aliases)
        self.changed: dict[str, None] = {}
        self.untied: dict[str, None] = {}
        self.config = config or {}
        self.path = base.source.path
        self.has_other_head = False
        self.resized: list[str] = []
        self.leaves_out = (
            base.source.layout == "plain"
        )  # files of weights have tied ones once; a run's save names them all

    def find(self, name: str) -> TensorEntry | None:
        """A tensor of the base model, also if it is stored under another name."""
        if name in self.tensors or name in self.aliases:
            return self.tensors[self.aliases.get(name, name)]
        kept = self.stored(name)
        return replace_name(self.tensors[kept], name) if kept in self.tensors else None

    def stored(self, name: str) -> str:
        """The name under which a tensor is stored: its own, or that of the tensor it is tied to."""
        if name in self.tensors or name in self.aliases:
            return self.aliases.get(name, name)
        kept = embedding_of(self.config, name, self.tensors)
        return kept if kept is not None and is_tied(self.config) else name

    def put(self, name: str, entry: TensorEntry, *, tied: bool = False) -> None:
        """Replaces a tensor; tensors tied to it keep their old values, unless `tied` says that they follow. Raises
        UnsupportedError if it is not known whether another tensor is tied to it, or many are.
        """
        self.changed[name] = None
        if tied:
            self.tensors[self.aliases.get(name, name)] = replace_name(entry, self.aliases.get(name, name))
            return
        before = self.find(name)
        if name not in self.tensors and before is not None:
            self.aliases.pop(name, None)
            self.untied[name] = None
        followers = [dropped for dropped, kept in self.aliases.items() if kept == name]
        if not followers and before is not None:
            followers = self._heads_of(name)
        if followers and before is not None:
            first, *others = followers
            self.aliases.pop(first, None)
            self.tensors[first] = replace_name(before, first)
            self.untied[first] = None
            self.aliases.update(dict.fromkeys(others, first))
        self.tensors[name] = replace_name(entry, name)

    def _heads_of(self, name: str) -> list[str]:
        """The names of heads that are stored only as this embedding."""
        heads = heads_of(self.config, name)
        if not heads or any(own in heads or own.endswith(HEADS) for own in (*self.tensors, *self.aliases)):
            return []
        tied = is_tied(self.config)
        shared = name.split(".")[-2:-1] == ["shared"]
        if tied is False or (tied is None and not self.leaves_out):
            return []
        if tied and not shared:
            return list(heads)
        what = "is one weight with several others" if shared else "may be the head too"
        raise UnsupportedError(
            f"{name!r}, which is trained, {what}", file=self.path,
            found=f"no {heads[0]!r} among the weights, and no {KEY!r} in a config.json that tells it",
            expected=f"{heads[0]!r} among the weights, or {KEY} in config.json",
            remedy=_MERGE_WITH_PEFT if shared else f"Write {KEY}, as the model has it, into the config.json beside the base.",
        )  # fmt: skip


Place = tuple[str, Factors, int, int, int, bool]


def places(model: ModelTensors, adapter: AdapterWeights) -> Iterator[Place]:
    """(parameter, its factors, rank, experts, columns, whether the update is transposed) of all LoRAs of an adapter."""
    nested: dict[str, list[Factors]] = {}
    conv1d = _transposed_blocks(model, adapter)
    for module, factors in adapter.factors.items():
        if _parameters(model, adapter, bare(module)):
            nested.setdefault(bare(module), []).append(factors)
            continue
        name = f"{bare(module)}.weight"
        entry = base_tensor(model, adapter, name, factors.a.name)
        transposed = _is_transposed(model, adapter, factors, name, entry, conv1d)
        yield name, factors, factors.rank, 1, math.prod(entry.shape[1:]), transposed
    for module, several in nested.items():
        yield from _experts(model, adapter, module, several)


def _parameters(model: ModelTensors, adapter: AdapterWeights, module: str) -> list[str]:
    """The parameters of a module that the config's `target_parameters` names."""
    own = dict.fromkeys(f"{module}.{target.rpartition('.')[2]}" for target in adapter.targets)
    return [
        name
        for name in own
        if name in model.tensors and any(f".{name}".endswith(f".{target}") for target in adapter.targets)
    ]


def _experts(model: ModelTensors, adapter: AdapterWeights, module: str, several: Sequence[Factors]) -> Iterator[Place]:
    """The LoRAs of a module's parameters. Names do not say which one each belongs to; shapes do, and the order in
    which PEFT nests them.
    """
    inner_first = sorted(several, key=lambda factors: -factors.module.count(".base_layer"))
    names = _parameters(model, adapter, module)
    found: list[tuple[bool, tuple[Place, ...]]] = []
    for order in itertools.permutations(names, len(inner_first)):
        pairs = list(zip(order, inner_first, strict=True))
        fits = [_fits(base_tensor(model, adapter, name, factors.a.name), factors) for name, factors in pairs]
        for transposed in (False, True):
            if all(transposed in ways for _, ways in fits):
                found_places = [
                    (name, one, one.rank // experts, experts, model.tensors[name].shape[-1], transposed and experts > 1)
                    for (name, one), (experts, _) in zip(pairs, fits, strict=True)
                ]
                if not any(places == tuple(found_places) for _, places in found):
                    found.append((transposed, tuple(found_places)))
    if {one[0] for one in found} == {False, True}:
        is_transposed = _is_for_first(model.config, adapter)
        if is_transposed is None:
            raise UnsupportedError(
                f"which way round the LoRA of {names[0]!r} lies cannot be told", file=adapter.file,
                found=f"square matrices, peft_version {adapter.config.get('peft_version')!r} of the adapter, and "
                f"transformers_version {model.config.get('transformers_version')!r} of the model",
                expected="versions that tell the order: it changed with PEFT 0.19 and transformers 5",
                remedy="Merge this adapter with PEFT, in the environment that trained it.",
            )  # fmt: skip
        found = [one for one in found if one[0] == is_transposed]
    if not found:
        a, name = inner_first[0].a, names[0]
        raise other_shape(adapter, a.name, a.shape, name, model.tensors[name].shape)
    if len(found) > 1:
        raise UnsupportedError(
            f"the adapters of parameters of {module!r} cannot be told apart", file=adapter.file,
            found=f"{examples(names)} of shapes that all fit {inner_first[0].a.name!r}",
            remedy=_MERGE_WITH_PEFT,
        )  # fmt: skip
    yield from found[0][1]


def _is_for_first(config: Mapping[str, object], adapter: AdapterWeights) -> bool | None:
    """Whether A is for the first dimension of a model's experts, as the versions say it; None if they do not.

    PEFT writes its version since 0.18. A model's config has the version of transformers that saved it: the run's in a
    checkpoint of the run, and in another base perhaps an older one.
    """
    peft = version_of(adapter.config.get("peft_version"))
    if peft is None:
        return True if "auto_mapping" in adapter.config and "peft_version" not in adapter.config else None
    if peft < _SWAPS:
        return True if peft < _MAY_SWAP else None
    text = config.get("text_config")
    kinds = [part.get("model_type") for part in (config, text) if isinstance(part, Mapping)]
    since = [_TRANSPOSED_SINCE[kind] for kind in kinds if isinstance(kind, str) and kind in _TRANSPOSED_SINCE]
    if not since:
        return False if any(kinds) else None
    transformers = version_of(config.get("transformers_version"))
    if transformers is not None and transformers >= min(since):
        return True
    return False if transformers is not None and transformers < (5,) and adapter.with_base else None


def _fits(entry: TensorEntry, factors: Factors) -> tuple[int, tuple[bool, ...]]:
    """The number of experts in a parameter, and whether it may have a row for each input: the answers that the factors'
    shapes allow.
    """
    a, b = factors.a.shape, factors.b.shape
    if len(entry.shape) not in (2, 3) or len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return 1, ()
    experts = entry.shape[0] if len(entry.shape) == 3 else 1
    if not experts or a[0] % experts:
        return 1, ()
    straight, turned = entry.shape[-2:] == (b[0], a[1]), entry.shape[-2:] == (a[1], b[0])
    if experts == 1:
        return 1, (False, True) if straight else ()  # it says nothing of the others
    return experts, (False,) * straight + (True,) * turned


def _sides(factors: Factors) -> tuple[int, int]:
    """(out, in) of a product of factors."""
    return factors.b.shape[0], math.prod(factors.a.shape[1:])


def _transposed_blocks(model: ModelTensors, adapter: AdapterWeights) -> bool | None:
    """Whether weights of the model's blocks are Conv1D's (in x out), by those that are not square: the adapter's, or
    others with a bias; else by the model's type. None if nothing tells it.

    An adapter's `fan_in_fan_out` does not: PEFT goes by the module's class, and whatever wrote the config may say otherwise.
    """
    for module, factors in adapter.factors.items():
        entry = model.find(f"{bare(module)}.weight")
        if entry is not None and not factors.embedding and _is_of_blocks(module, entry):
            return entry.shape == _sides(factors)[::-1]
    for name, entry in model.tensors.items():
        bias = model.tensors.get(f"{name.removesuffix('.weight')}.bias")
        if bias is not None and name.endswith(".weight") and _is_of_blocks(name, entry) and bias.numel in entry.shape:
            return entry.shape[0] != bias.numel
    kind = model.config.get("model_type")
    return kind in CONV1D if isinstance(kind, str) else None


def _is_of_blocks(name: str, entry: TensorEntry) -> bool:
    """Whether a weight is a matrix of a block, and no square."""
    return len(set(entry.shape)) == len(entry.shape) == 2 and any(part.isdigit() for part in name.split("."))


def _is_transposed(
    model: ModelTensors, adapter: AdapterWeights, factors: Factors, name: str, entry: TensorEntry, conv1d: bool | None
) -> bool:
    """Whether the update of a module's weight is transposed.

    Raises:
        InconsistentError: the factors do not fit the weight, or each other. UnsupportedError: a grouped convolution, or 4 bits.
    """
    a, b = factors.a, factors.b
    if len(a.shape) != len(b.shape) or len(a.shape) < 2 or b.shape[1] != a.shape[0] or math.prod(b.shape[2:]) != 1:
        if (
            len(a.shape) > 2
            and len(b.shape) > 2
            and b.shape[1]
            and a.shape[0] % b.shape[1] == 0
            and a.shape[0] != b.shape[1]
        ):
            raise UnsupportedError(
                "PEFT does not merge a LoRA of a convolution in groups", file=adapter.file,
                found=f"{a.name!r} of shape {list(a.shape)} and {b.name!r} of shape {list(b.shape)}",
                remedy="Run the model with PEFT, without merging it.",
            )  # fmt: skip
        raise InconsistentError(
            f"the two matrices of the LoRA of {name!r} do not fit each other", file=adapter.file,
            found=f"{a.name!r} of shape {list(a.shape)}, {b.name!r} of shape {list(b.shape)}", expected="one rank",
            remedy="Copy the adapter's files again, or use another save.",
        )  # fmt: skip
    if len(entry.shape) > 2 and (entry.shape[0], *entry.shape[1:]) == (b.shape[0], *a.shape[1:]):
        return False
    ways = [] if factors.embedding else [False] * (entry.shape == (b.shape[0], *a.shape[1:]))
    ways += [True] * (entry.shape == (*a.shape[1:], b.shape[0]))
    if not ways and entry.shape[1:] == (1,) and 2 * entry.numel * entry.dtype.itemsize == math.prod(_sides(factors)):
        raise UnsupportedError(
            f"the base weight {name!r} holds packed numbers of 4 bits, without what unpacks them", file=model.path,
            found=f"{entry.dtype} of shape {list(entry.shape)}, as FSDP with QLoRA stores them",
            expected=f"shape {list(_sides(factors))}",
            remedy="Only the adapter can be had from this save: write it with to-peft, or pass the model in half precision "
            "with --base.",
        )  # fmt: skip
    if not ways:
        raise other_shape(adapter, a.name, (b.shape[0], *a.shape[1:]), name, entry.shape)
    if len(ways) == 2:  # a square: a Conv1D, if the others of the model are
        return bool(adapter.config.get("fan_in_fan_out")) if conv1d is None else conv1d
    return ways[0]


def base_tensor(model: ModelTensors, adapter: AdapterWeights, name: str, of: str) -> TensorEntry:
    """A weight of the base model that an adapter changes.

    Raises:
        IncompleteError: it is not there. UnsupportedError: its numbers are quantised.
    """
    entry = model.find(name)
    if entry is None:
        raise not_in_base(model, adapter, name, of)
    if entry.dtype not in (F16, BF16, F32, F64):
        raise UnsupportedError(
            f"the base weight {name!r} is quantised", file=adapter.file, found=str(entry.dtype),
            expected="fp32, bf16 or fp16", remedy="Pass the model in half precision with --base.",
        )  # fmt: skip
    return entry


def not_in_base(model: ModelTensors, adapter: AdapterWeights, name: str, of: str) -> IncompleteError:
    """The error for a tensor `of` of an adapter that changes a weight `name` that the base model lacks."""
    there = (
        f"{count(len(model.tensors), 'other tensor')} such as {examples(list(model.tensors)[:3])}"
        if model.tensors
        else "no base weights"
    )
    end = ".".join(name.split(".")[-_SAME_END:])
    alike = [own for own in model.tensors if own.endswith(f".{end}")] if name.count(".") >= _SAME_END else []
    if alike:
        there = f"{alike[0]!r} in the base"
        remedy = (
            "The base may be the right one under other names: models of pictures are called otherwise on the hub and in memory. "
            "Load it with the class that was trained, save it with save_pretrained, and pass that with --base."
        )
    else:
        remedy = OTHER_BASE
    return IncompleteError(
        f"the base model has no tensor {name!r}, which adapter {adapter.name!r} changes", file=adapter.file,
        found=f"{of!r} in the adapter, and {there}", expected="the base model that the adapter was trained on, under its names",
        remedy=remedy,
    )  # fmt: skip


_SAME_END = 4
"""The number of equal parts at the end of two names that makes them one weight: `0.self_attn.q_proj.weight`."""


def other_shape(
    adapter: AdapterWeights, tensor: str, shape: tuple[int, ...], name: str, expected: tuple[int, ...]
) -> InconsistentError:
    """The error for a tensor of an adapter with a shape that does not fit the weight `name` of the base model."""
    return InconsistentError(
        f"adapter {adapter.name!r} does not fit the base model", file=adapter.file,
        found=f"{tensor!r} for a weight of shape {list(shape)}", expected=f"shape {list(expected)} of {name!r}",
        remedy=OTHER_BASE,
    )  # fmt: skip
