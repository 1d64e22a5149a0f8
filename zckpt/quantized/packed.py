"""Packed weights in a catalog: which tensors are codes, scales and tables of a quantisation.

For `jobs.opened`, which asks once for each checkpoint. No config is needed: `forms` is the table, and two rules for what is in no
table are here. One is for bytes of 4 bits without scales, as FSDP and DeepSpeed gather the frozen base of a QLoRA. The other is
for integers that are called a weight and have scales beside them, whatever wrote them.
Source: bitsandbytes 0.50, functional.py `quantize_4bit` (the bytes are a column of `quant_storage` numbers, two codes a byte).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.words import count, examples, join_words
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F8_E8M0, U8
from zckpt.core.fragments import Fragment
from zckpt.core.recipes import DerivedStore
from zckpt.quantized.configs import Quantization
from zckpt.quantized.forms import BESIDE_MODULE, FLOATS, FORMS, WHOLE, PackedForm, forms_of_packages
from zckpt.quantized.plain import is_fp8

_WHOLE = frozenset(WHOLE.split())
_Row = tuple[PackedForm, set[str], list[tuple[list[str], set[str]]]]


def _row(form: PackedForm) -> _Row:
    return form, {*form.dtypes.split()}, [(ends.split("|"), {*dtypes.split()}) for ends, dtypes in form.beside]


_TABLE = list(map(_row, FORMS))
_FLOATS = {*FLOATS.split()}
_CODES = frozenset(dtype for form in FORMS for dtype in form.dtypes.split() if dtype not in _FLOATS)
_NAMED = (".absmax", "W_q")
"""Ends of the names of codes and tables that can be floats."""

_COLUMNS = PackedForm("4 bits of bitsandbytes without their scales", "weight", "")
_INTEGERS = PackedForm("packed integers with scales", "weight", "", by="the library that wrote it")

_PART = PackedForm("codes without scales, or scales without codes", "", "", by="the library that wrote it")
_SMOOTHED = PackedForm(
    "weights that were scaled or split before (pre_quant_scale, act_pre_scale, svdquant)", "", "",
    by="the library that wrote it",
)  # fmt: skip
_LOST = re.compile(
    r"(.*?)(?:(weight_packed|weight_global_scale|weight_scale_2)|_?weight_(?:scale|scale_inv|shape|zero_point|g_idx|qdata)"
    r"|qweight|qzeros|qscale_weight|SCB|weight\.absmax|weight\.quant_map|(?<=_proj)_(?:blocks|scales))"
)
"""The names of parts of quantised weights; the first ones mean nothing beside a plain weight."""
_BEFORE = (".pre_quant_scale", "_act_pre_scale", ":act_pre_scale", ".svdquant_lora_a", ".svdquant_lora_b")

_WEIGHT = re.compile(r"(?:.*\.)?(?:q_?|packed_|int_|quantized_)?weight(?:_packed|_q|_quantized|_int[48])?")
_INTO = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "qkv", "gate", "up", "gate_up"))
_OUT_OF = tuple(f".{name}_proj.weight" for name in ("o", "out", "down"))
_FEWEST = 8
"""The fewest numbers in a column of packed bytes. bitsandbytes has blocks of 64 elements, which are 8 numbers of fp32.
"""


class Part(NamedTuple):
    """A tensor that is packed.

    Attributes:
        form: how.
        stem: what the names of its tensors begin with.
        codes: the tensor by which it is known.
        beside: those that must be there, in the order of the form.
        others: those that may be, by the ends of their names.
    """

    form: PackedForm
    stem: str
    codes: TensorEntry
    beside: tuple[TensorEntry, ...] = ()
    others: Mapping[str, TensorEntry] = {}

    @property
    def names(self) -> set[str]:
        """Names of all tensors of the weight."""
        return {self.codes.name, *(entry.name for entry in (*self.beside, *self.others.values()))}


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed tensors of a catalog.

    Attributes:
        parts: each tensor that is packed.
        members: names of all tensors that belong to them: codes, scales, tables.
        places: where each of these begins.
        has_adapter: whether there are matrices of a LoRA too.
    """

    parts: tuple[Part, ...]
    members: frozenset[str]
    places: frozenset[Fragment]
    has_adapter: bool

    @property
    def about(self) -> str:
        """The forms, for a person."""
        return join_words(list(dict.fromkeys(part.form.about for part in self.parts)))

    def without(self, names: Collection[str], tensors: Mapping[str, TensorEntry]) -> Packed | None:
        """The packed weights without those with these codes; None if there are no others."""
        return _packed_of([part for part in self.parts if part.codes.name not in names], tensors)


def find_packed(catalog: Catalog, quantization: Quantization | None) -> Packed | None:
    """Finds the packed tensors of a catalog as stored; None if there are none. What the config says is of use only for
    bytes that have no scales beside them.
    """
    tensors = catalog.tensors
    more = forms_of_packages(tensors.keys())
    own = tuple(form.codes for form in more)
    candidates = [name for name, entry in tensors.items() if _may_be_codes(name, entry) or (own and name.endswith(own))]
    if not candidates and quantization is None:
        return None
    parts: list[Part] = []
    members: set[str] = set()
    for form, dtypes, beside in (*map(_row, more), *_TABLE):
        for name in candidates:
            if name.endswith(form.codes) and tensors[name].dtype.name in dtypes and name not in members:
                stem = name.removesuffix(form.codes)
                found = [name, *(_find_beside(tensors, stem, ends, theirs) for ends, theirs in beside)]
                if all(found) and (form.fits is None or form.fits([tensors[one].shape for one in found])):
                    codes, *around = (_as_byte(tensors[one]) for one in found)
                    others = {end: tensors[stem + end] for end in form.others if stem + end in tensors}
                    parts.append(Part(form, stem, codes, tuple(around), others))
                    members |= parts[-1].names
    rest = [name for name in candidates if name not in members]
    parts += [Part(_COLUMNS, name, tensors[name]) for name in _find_columns(tensors, rest, quantization)]
    for name, scales in _find_integers(tensors, rest).items():
        parts.append(Part(_INTEGERS, name, tensors[name], tuple(tensors[one] for one in scales)))
    for name, form in _find_lost(tensors, members | {one for part in parts for one in part.names}):
        if (
            quantization is None or tensors[name].dtype.name in _FLOATS or form is _SMOOTHED
        ):  # else the config names its form
            parts.append(Part(form, name, tensors[name]))
    return _packed_of(parts, tensors)


def _find_lost(tensors: Mapping[str, TensorEntry], members: Set[str]) -> Iterator[tuple[str, PackedForm]]:
    """The tensors that belong to a quantised weight, and to none that was found: without codes, scales or of another dtype."""
    for name, entry in tensors.items():
        if name.endswith(_BEFORE):
            yield name, _SMOOTHED
        elif name not in members and (found := _LOST.fullmatch(name)):
            is_coded = bool(found[2]) or entry.dtype.name in ("U8", "F8_E4M3")
            plain = [tensors.get(one) for one in (f"{found[1]}weight", found[1])]
            if not any(
                one is not None and one.dtype.kind == "float" and (is_fp8(one.dtype) or not is_coded) for one in plain
            ):
                yield name, _PART
        elif name not in members and name.endswith(".scales"):  # MLX's scales and biases, without their codes
            biases = tensors.get(f"{name.removesuffix('scales')}biases")
            if (
                biases is not None
                and len(entry.shape) > 1
                and (biases.shape, biases.dtype) == (entry.shape, entry.dtype)
            ):
                yield name, _PART


def _packed_of(parts: Sequence[Part], tensors: Mapping[str, TensorEntry]) -> Packed | None:
    if not parts:
        return None
    members: set[str] = set().union(*(part.names for part in parts))
    known = [part.codes.name for part in parts]
    for module in {name[: name.find(".weight") + 1] or name[: name.rfind(".") + 1] for name in known}:
        members.update(module + end for end in BESIDE_MODULE if module + end in tensors)
    places = frozenset(tensors[name].fragments[0] for name in members if tensors[name].fragments)
    return Packed(tuple(parts), frozenset(members), places, any(".lora_" in name for name in tensors))


def _as_byte(entry: TensorEntry) -> TensorEntry:
    """The same tensor; a scale that is a power of two as the byte that other programs keep of it."""
    return replace(entry, dtype=U8) if entry.dtype == F8_E8M0 else entry


def _may_be_codes(name: str, entry: TensorEntry) -> bool:
    return entry.dtype.name in _CODES or (len(entry.shape) == 2 and entry.shape[1] == 1) or name.endswith(_NAMED)


def _find_beside(tensors: Mapping[str, TensorEntry], stem: str, ends: Iterable[str], dtypes: Collection[str]) -> str:
    """The name of the tensor with this stem and one of these ends; empty if there is none of such a dtype."""
    names = (stem + end for end in ends)
    return next((name for name in names if name in tensors and tensors[name].dtype.name in dtypes), "")


def _find_columns(
    tensors: Mapping[str, TensorEntry], names: Iterable[str], quantization: Quantization | None
) -> list[str]:
    """The weights that are one column of packed bytes without scales, whatever dtype the bytes are kept in.

    A column is a sound weight for a module with one input. So there must be a reason against that: it is of integers, the config
    names bitsandbytes, a LoRA of the same module has more inputs, or what goes into a block and what comes out of it are both
    columns.
    """
    columns = [name for name in names if name.endswith("weight") and _is_column(tensors[name].shape)]
    if not columns:
        return []
    is_proved = quantization is not None and quantization.method == "bitsandbytes"
    is_proved |= any(tensors[name].dtype.name in _WHOLE for name in columns)
    is_proved |= any(name.endswith(_INTO) for name in columns) and any(name.endswith(_OUT_OF) for name in columns)
    if not is_proved:
        inputs = {
            name.partition(".lora_A.")[0]: entry.shape[1]
            for name, entry in tensors.items()
            if ".lora_A." in name and len(entry.shape) == 2
        }
        modules = (name.removesuffix(".weight").removesuffix(".base_layer") for name in columns)
        is_proved = any(inputs.get(module, 1) != 1 for module in modules)
    return columns if is_proved else []


def _is_column(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] == 1 and shape[0] >= _FEWEST


def _find_integers(tensors: Mapping[str, TensorEntry], names: Iterable[str]) -> dict[str, list[str]]:
    """The integers with the name of a weight, in a module that has scales -> these scales."""
    found = {
        name: name.rpartition(".")[0] for name in names
        if tensors[name].dtype.name in _WHOLE and len(tensors[name].shape) >= 2 and _WEIGHT.fullmatch(name)
    }  # fmt: skip
    scales: dict[str, list[str]] = {module: [] for module in found.values()}
    for name in tensors if found else ():
        module, _, last = name.rpartition(".")
        if module in scales and ("scale" in last or "zero" in last):
            scales[module].append(name)
    return {name: scales[module] for name, module in found.items() if any("scale" in one for one in scales[module])}


def check_unpacked(
    entries: Iterable[TensorEntry], packed: Packed | None, quantization: Quantization | None, path: str
) -> None:
    """Checks that no tensor that is written, such as those that zckpt reads as what they stand for, is packed or computed
    from a packed one. Raises UnsupportedError if one is; it names the form.
    """
    places: Set[Fragment] = frozenset() if packed is None else packed.places
    if quantization is None and not places:
        return
    found = [
        entry for entry in entries
        if (quantization is not None and (entry.dtype.name in _WHOLE or is_fp8(entry.dtype)))
        or (places and not places.isdisjoint(_begins_of(entry)))
    ]  # fmt: skip
    if not found:
        return
    if packed is not None:
        first = {part.codes.name for part in packed.parts}
        found.sort(key=lambda entry: entry.name not in first)
        how = f"as {packed.about}"
    else:
        how = "" if quantization is None else f"by {quantization.about}"
    raise UnsupportedError(
        f"its weights are quantised {how}, which zckpt does not read", file=path,
        found=f"{count(len(found), 'tensor')} such as {examples(entry.name for entry in found)}",
        expected="floating-point weights, or fp8 (E4M3) with weight_scale_inv or weight_scale",
        remedy=_remedy_for(packed),
    )  # fmt: skip


def _begins_of(entry: TensorEntry) -> Iterator[Fragment]:
    """The first fragments of a tensor, or of the tensors that it is computed from."""
    if entry.fragments and not isinstance(entry.fragments[0].store, DerivedStore):
        yield entry.fragments[0]
    recipes = {id(f.store): f.store.recipe for f in entry.fragments if isinstance(f.store, DerivedStore)}
    for recipe in recipes.values():
        for source in recipe.inputs:
            yield from _begins_of(source)


def _remedy_for(packed: Packed | None) -> str:
    if packed is None:
        return (
            "Dequantise the model with the library that wrote it (in transformers: model.dequantize()), save it, and convert "
            "that; or leave these tensors out with --exclude."
        )
    if packed.has_adapter:
        lost = (
            "There are no scales in the save, so nothing can dequantise it. "
            if any(part.form is _COLUMNS for part in packed.parts)
            else ""
        )
        return (
            f"{lost}Write the adapter alone with `zckpt to-peft`, or merge it into the model that was quantised: --merge-lora "
            "--base MODEL."
        )
    libraries = join_words(list(dict.fromkeys(part.form.by for part in packed.parts if part.form.by)), "or")
    first = f"Dequantise it with {libraries}, save it, and convert that; or convert" if libraries else "Convert"
    return f"{first} the model that was quantised. Leave these tensors out with --exclude if you do not want them."
