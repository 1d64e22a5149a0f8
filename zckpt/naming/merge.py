"""A model with its adapters merged: PEFT's `merge_and_unload`, as a catalog with changed weights that are computed.

For `jobs.merged`. [Note: the shape of an update] in `merged_matrix` says what is computed. A weight that is tied to another
one and gets an update of its own is tied no longer: in the unmerged model only one of the two has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.dtypes import F32
from zckpt.core.recipes import Recipe, derive_entry, weighted_sum_of
from zckpt.layouts.save.tied import EMBEDDINGS, HEADS
from zckpt.naming.adapter_names import found_in
from zckpt.naming.adapter_weights import AdapterWeights, Factors, bare
from zckpt.naming.merge_places import ModelTensors, base_tensor, not_in_base, other_shape, places
from zckpt.naming.merged_config import find_class, is_of_tokens, is_other_head, without_language_head
from zckpt.naming.merged_matrix import MergedMatrix, Update, replace_rows
from zckpt.naming.other_methods import CONV1D, SHARED, SUMS, add_product, add_vera, rotate_rows, scale_lines
from zckpt.naming.rows import transpose

_ENDS = (*HEADS, *EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model with adapters merged.

    Attributes:
        catalog: its tensors, by the base model's names; changed ones are computed.
        changed: names of those.
        untied: names that were tied, and are no longer.
        notes: sentences for the user.
        copies: a tensor of an adapter that is not used, and the one of equal shape that it must equal.
        kind: the class that an adapter was trained in, where its head is not the base's; empty for the base's own class.
        rows: of embeddings, where an adapter has another number of them than the base; None for the base's.
        dropped: tensors of the base that this class has no place for.
    """

    catalog: Catalog
    changed: tuple[str, ...]
    untied: tuple[str, ...]
    notes: tuple[str, ...]
    copies: tuple[tuple[TensorEntry, TensorEntry], ...] = ()
    kind: str = ""
    rows: int | None = None
    dropped: tuple[str, ...] = ()


def base_of(catalog: Catalog) -> Catalog:
    """The base model's tensors in a checkpoint of a PEFT model, by their own names."""
    tensors: dict[str, TensorEntry] = {}
    called: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        if found_in(name) or "trainable_tokens_original" in name:
            continue
        called[name] = own = bare(name)
        if own not in tensors or ".original_module." in name:
            tensors[own] = replace_name(entry, own)
    aliases = {bare(dropped): called[kept] for dropped, kept in catalog.aliases.items() if kept in called}
    aliases = {dropped: kept for dropped, kept in aliases.items() if dropped not in tensors and dropped != kept}
    return replace(catalog, tensors=tensors, aliases=aliases, padding=())


def merge_adapters(
    base: Catalog,
    adapters: Sequence[AdapterWeights],
    config: Mapping[str, object] | None,
    trained: Mapping[str, TensorEntry] | None = None,
    checkpoint: str = "",
) -> MergedModel:
    """The base model with the adapters merged, in their order.

    Args:
        base: the base model's tensors, by their own names.
        adapters: each with its weight.
        config: the model's `config.json`.
        trained: tensors that were trained beside the adapters.
        checkpoint: where these are, for errors.

    Raises:
        IncompleteError: the base model has no tensor that an adapter changes.
        InconsistentError: shapes or ranks do not fit.
        UnsupportedError: the method, or the base's dtype, cannot be merged. UsageError: adapters exclude each other.
    """
    model = ModelTensors(base, config)
    for name, entry in (trained or {}).items():
        _put_trained(model, name, entry, checkpoint)
    ties = _ties(model, adapters)
    copies = [pair for adapter in adapters for pair in _copies(adapter, ties)]
    kind = find_class(adapters, config)
    _replace_whole(model, adapters, ties, kind)
    rows = _rows_of_tokens(model, adapters)
    updates: dict[str, list[Update]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    bases: dict[str, TensorEntry] = {}
    biases: dict[str, list[tuple[TensorEntry, float]]] = {}
    for adapter in adapters:
        for name, factors, rank, experts, columns, transposed in places(model, adapter):
            scaling = adapter.scaling(name.removesuffix(".weight"), rank, factors)
            if ties.get(name, name) != name:
                continue
            entry = base_tensor(model, adapter, name, factors.a.name)
            shapes[name], bases[name] = (columns, experts), entry
            update = Update(factors.a, factors.b, rank, scaling, transposed, factors.magnitude)
            _check_magnitude(adapter, update, entry, columns)
            updates.setdefault(name, []).append(update)
            if factors.bias is not None:
                biases.setdefault(f"{name.removesuffix('.weight')}.bias", []).append((factors.bias, scaling))
        if not any(name.endswith(".bias") for name in (*adapter.whole, *adapter.beside, *(trained or ()))):
            _check_biases(model, adapter)
    copies += _replace_tokens(model, adapters, updates)
    for name, found in updates.items():
        entry = bases[name]
        columns, experts = shapes[name]
        recipe = MergedMatrix(replace(entry, replicas=()), tuple(found), columns, experts)
        model.put(name, derive_entry(name, entry.shape, F32, recipe, entry.role), tied=name in ties)
    _merge_products(model, adapters, updates)
    for name, added in biases.items():
        if model.find(name) is None and model.find(f"{name.removesuffix('.bias')}.weight") is not None:
            raise UnsupportedError(
                "a LoRA with a bias cannot be merged into a layer without one", file=adapters[0].file,
                found=f"{added[0][0].name!r}, and no {name!r} in the base", expected="lora_bias false, or layers with biases",
                remedy="Use it unmerged, with PEFT, which does not merge it either; to-peft takes it out of a checkpoint.",
            )  # fmt: skip
        entry = base_tensor(model, adapters[0], name, added[0][0].name)
        inputs = replace(entry, replicas=()), *(bias for bias, _ in added)
        total = weighted_sum_of(inputs, (1.0, *(scaling for _, scaling in added)))
        model.put(name, derive_entry(name, entry.shape, F32, total, entry.role))
    notes = []
    if model.untied:
        notes.append(
            f"{examples(model.untied)}: tied in the base model, and stored apart now, since adapters do not change both alike."
        )
    if rows is not None:
        notes.append(f"The adapter has {rows:,} tokens, where the base has another number: vocab_size follows.")
    dropped = without_language_head((*model.tensors, *model.aliases)) if kind and model.has_other_head else []
    if dropped:
        notes.append(
            f"{examples(dropped)}: left out, since {kind}, which the adapter was trained in, has another head."
        )
    if skipped := _find_skipped(model, updates, adapters):
        notes.append(
            f"The adapter does not change {count(len(skipped), 'weight')}: {examples(skipped)}. It changes the same weights of "
            "other blocks, and its config chooses no blocks. If it was trained on all of them, a part of the adapter is lost."
        )
    tensors = {name: entry for name, entry in model.tensors.items() if name not in dropped}
    aliases = {name: kept for name, kept in model.aliases.items() if name not in dropped and kept in tensors}
    catalog = replace(base, tensors=tensors, aliases=aliases, padding=())
    return MergedModel(
        catalog, tuple(model.changed), tuple(model.untied), tuple(notes), tuple(copies),
        kind if model.has_other_head else "", rows, tuple(dropped),
    )  # fmt: skip


def _find_skipped(model: ModelTensors, changed: Collection[str], adapters: Sequence[AdapterWeights]) -> list[str]:
    """Weights that no LoRA changes, though one changes the same of other blocks; none where a config chooses blocks."""
    for adapter in adapters:
        said, targets = adapter.config, adapter.config.get("target_modules")
        if said.get("layers_to_transform") is not None or said.get("exclude_modules") or not isinstance(targets, list):
            return []
        if any(_NUMBER.search(f"{target}.") for target in targets):
            return []
    alike = {_NUMBER.sub("", name) for name in changed if _NUMBER.search(name)}
    return [name for name in model.tensors if name not in changed and _NUMBER.sub("", name) in alike]


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""Of a block or an expert, in a name."""


def _check_biases(model: ModelTensors, adapter: AdapterWeights) -> None:
    """Raises IncompleteError if biases were trained with an adapter that has none: PEFT 0.18 saves none of "lora_only"."""
    biases = [f"{bare(module)}.bias" for module in adapter.factors]
    lost = [name for name in biases if name in model.tensors]
    if lost and adapter.config.get("bias") in ("lora_only", "all") and not adapter.with_base:
        raise IncompleteError(
            f"adapter {adapter.name!r} lacks biases that were trained with it", file=adapter.config_file,
            found=f"bias {adapter.config['bias']!r}, and no bias in its file", expected=f"{examples(lost)}",
            remedy="Merge a checkpoint of the run, or save the adapter again with PEFT 0.19 or newer. If no bias was trained, "
            'change bias to "none" in the config.',
        )  # fmt: skip


def _merge_products(model: ModelTensors, adapters: Sequence[AdapterWeights], updates: Mapping[str, object]) -> None:
    """Merges what other methods than LoRA change.

    Raises:
        InconsistentError: shapes do not fit. UnsupportedError: PEFT merges no such weight.
        UsageError: several adapters change a weight, or one has a weight for which PEFT has no place.
    """
    owner: dict[str, str] = {}
    for adapter in adapters:
        shared = adapter.products.get(SHARED, {})
        for module, parts in adapter.products.items():
            if parts is shared:
                continue
            name = f"{bare(module)}.weight"
            first = next(iter(parts.values()))
            base = replace(base_tensor(model, adapter, name, first.name), replicas=())
            has_weight = adapter.config.get("peft_type") in SUMS
            if name in updates or name in owner or (not has_weight and adapter.weight != 1):
                raise UsageError(
                    f"what several adapters make of {name!r} is not a sum", file=adapter.file,
                    found=join_words([repr(owner.get(name, "a LoRA")), f"{adapter.name!r} with weight {adapter.weight:g}"])
                    if name in updates or name in owner
                    else f"{adapter.name!r} with weight {adapter.weight:g}",
                    expected="one adapter for each weight, and weight 1 unless it is a LoRA, a LoHa or a LoKr",
                    remedy="Merge them one after the other.",
                )  # fmt: skip
            owner[name] = adapter.name
            if "ia3_l" in parts:
                _scale(model, adapter, name, base, first)
                continue
            recipe = _recipe(model, adapter, name, base, {**shared, **parts})
            model.put(name, derive_entry(name, base.shape, F32, recipe, base.role))


def _recipe(
    model: ModelTensors, adapter: AdapterWeights, name: str, base: TensorEntry, parts: Mapping[str, TensorEntry]
) -> Recipe:
    """The recipe of a weight with a LoHa, LoKr, VeRA, OFT or BOFT."""
    kind = adapter.config.get("peft_type")
    odd = next(iter(parts.values()))
    if kind in SUMS:
        if (three := parts.get("lokr_w2")) is not None and len(three.shape) == 3:
            raise UnsupportedError(
                f"this LoKr of the convolution {name!r} is not merged", file=adapter.file,
                found=f"{three.name!r} of shape {list(three.shape)}, which PEFT multiplies in an order of its own",
                expected="a LoKr of Linear or Conv2d, or one of Conv1d of a lower rank",
                remedy="Merge this adapter with PEFT.",
            )  # fmt: skip
        parts = dict(sorted(parts.items()))
        odd = next(iter(parts.values()))
        if (product := add_product(base, parts, adapter.scaling_of_product(name[: -len(".weight")]))) is not None:
            return product
        raise other_shape(adapter, odd.name, odd.shape, name, base.shape)
    if len(base.shape) != 2:
        raise UnsupportedError(
            f"{kind} of the convolution {name!r} is not merged", file=adapter.file, found=f"shape {list(base.shape)}",
            remedy="Merge this adapter with PEFT.",
        )  # fmt: skip
    if kind == "VERA":
        return _recipe_of_vera(model, adapter, name, base, parts)
    if kind == "BOFT" and odd.shape[:1] != (1,):
        raise UnsupportedError(
            f"BOFT of several butterfly factors is not merged, as in {name!r}", file=adapter.file,
            found=f"shape {list(odd.shape)}", expected="boft_n_butterfly_factor 1", remedy="Merge this adapter with PEFT.",
        )  # fmt: skip
    if (turned := rotate_rows(adapter.config, base, parts)) is not None:
        return turned
    raise other_shape(adapter, odd.name, odd.shape, name, base.shape)


def _recipe_of_vera(
    model: ModelTensors, adapter: AdapterWeights, name: str, base: TensorEntry, parts: Mapping[str, TensorEntry]
) -> Recipe:
    needs = ("vera_A", "vera_B", "vera_lambda_d", "vera_lambda_b")
    if lacks := [part for part in needs if part not in parts]:
        raise IncompleteError(
            f"the VeRA of {name!r} has no {join_words(lacks)}", file=adapter.file, found=examples(parts),
            expected="the matrices that all modules share too, which PEFT saves with save_projection",
            remedy="Load the adapter with PEFT, set save_projection to True in its config, and save it again.",
        )  # fmt: skip
    a, b, of_ranks, of_outputs = (parts[part] for part in needs)
    is_square = base.shape[0] == base.shape[1]
    turned = model.config.get("model_type") in CONV1D if is_square else of_outputs.numel != base.shape[0]
    if (recipe := add_vera(base, a, b, of_ranks, of_outputs, turned=turned)) is not None:
        return recipe
    raise other_shape(adapter, of_outputs.name, of_outputs.shape, name, base.shape)


def _scale(model: ModelTensors, adapter: AdapterWeights, name: str, base: TensorEntry, factors: TensorEntry) -> None:
    """Multiplies a weight by an IA3's numbers, (1 x in) for a feed-forward layer or (out x 1), and in the latter case
    its bias.
    """
    is_input = len(factors.shape) == 2 and factors.shape[0] == 1 and factors.shape[1] != 1
    rows, columns = base.shape[0], math.prod(base.shape[1:])
    is_square = rows == columns
    turned = model.config.get("model_type") in CONV1D if is_square else factors.numel == (rows if is_input else columns)
    by_row = is_input == turned
    if factors.numel != (rows if by_row else columns):
        raise other_shape(adapter, factors.name, factors.shape, name, base.shape)
    model.put(name, derive_entry(name, base.shape, F32, scale_lines(base, factors, by_row=by_row), base.role))
    bias = model.find(f"{name.removesuffix('.weight')}.bias")
    if bias is not None and not is_input:
        own = replace(bias, replicas=())
        model.put(
            bias.name, derive_entry(bias.name, bias.shape, F32, scale_lines(own, factors, by_row=True), bias.role)
        )


def _put_trained(model: ModelTensors, name: str, entry: TensorEntry, file: str) -> None:
    """Puts in a tensor that was trained beside the adapters; the base model may lack it. Raises InconsistentError if
    the base model has the tensor under another name, so there would be two of it.
    """
    if name in model.tensors or name in model.aliases:
        model.put(name, entry, tied=name in model.tensors)  # a tie is one parameter, and that was trained
        return
    parts = name.split(".")
    for other, own in model.tensors.items():
        same = f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")
        if (
            own.shape == entry.shape
            and "." in name
            and "." in other
            and (same or sorted(other.split(".")) == sorted(parts))
        ):
            raise InconsistentError(
                f"the trained tensor {name!r} has another name in the base model", file=file, found=f"{other!r} there",
                expected=f"{name!r}, as in the model that was trained",
                remedy="Pass with --base the model as the run has it: saved with save_pretrained by the run's transformers.",
            )  # fmt: skip
    model.put(name, entry)


def _replace_whole(model: ModelTensors, adapters: Sequence[AdapterWeights], ties: Mapping[str, str], kind: str) -> None:
    """Puts in the modules, biases and embeddings that were trained whole; `kind` is the class that they were trained in."""
    owner: dict[str, str] = {}
    for adapter in adapters:
        for name, entry in (*adapter.whole.items(), *adapter.beside.items()):
            before = model.find(name)
            is_beside = adapter.beside.get(name) is entry
            if before is None and not is_beside:
                if not is_other_head(name):
                    raise not_in_base(model, adapter, name, entry.name)
                if not kind and "v_head." not in name:
                    raise _no_class(adapter, entry)
                model.has_other_head = True
            if before is not None and before.shape != entry.shape:
                if not is_of_tokens(name) or before.shape[1:] != entry.shape[1:]:
                    raise other_shape(adapter, entry.name, entry.shape, name, before.shape)
                model.resized.append(name)
            if adapter.weight != 1 or name in owner:
                raise UsageError(
                    f"{name!r} was trained whole, so there is no sum of it", file=adapter.file,
                    found=join_words([repr(owner.get(name, name)), f"{adapter.name!r} with weight {adapter.weight:g}"]),
                    expected="one adapter that trained it, with weight 1", remedy="Leave out the weight, or one of the adapters.",
                )  # fmt: skip
            owner[name] = adapter.name
            if is_beside:
                _put_trained(model, name, entry, adapter.file)
            elif ties.get(name, name) == name:
                model.put(name, entry, tied=name in ties)


def _no_class(adapter: AdapterWeights, entry: TensorEntry) -> IncompleteError:
    task = adapter.config.get("task_type")
    return IncompleteError(
        f"it is not said which class adapter {adapter.name!r} was trained in", file=adapter.config_file,
        found=f"{entry.name!r}, which the base lacks, task_type {task!r}, and no class in the base's config.json",
        expected="task_type (SEQ_CLS, TOKEN_CLS or QUESTION_ANS) in adapter_config.json, and architectures in the base's config",
        remedy="Write these two keys, as the run had them.",
    )  # fmt: skip


def _rows_of_tokens(model: ModelTensors, adapters: Sequence[AdapterWeights]) -> int | None:
    """The number of tokens, if an adapter has another number than the base. Raises InconsistentError if head and
    embedding have different ones: the run changed one that the adapter does not hold.
    """
    found = next(((one, name) for name in model.resized for one in adapters if name in one.whole), None)
    if found is None:
        return None
    adapter, name = found
    entry = adapter.whole[name]
    for other, own in model.tensors.items():
        if is_of_tokens(other) and own.shape[:1] != entry.shape[:1]:
            raise other_shape(adapter, entry.name, entry.shape, other, own.shape)
    return entry.shape[0]


def _loras(adapter: AdapterWeights) -> dict[str, Factors]:
    """The LoRAs of an adapter, by the names of the weights that they change."""
    return {f"{bare(module)}.weight": factors for module, factors in adapter.factors.items()}


def _ties(model: ModelTensors, adapters: Sequence[AdapterWeights]) -> dict[str, str]:
    """As `_trained_together`, for all adapters, without tensors that one of them changes apart."""
    each = [({*adapter.whole, *_loras(adapter)}, _trained_together(model, adapter)) for adapter in adapters]
    found = {name: kept for _, own in each for name, kept in own.items()}
    apart = {found[name] for changed, own in each for name in changed & found.keys() if name not in own}
    return {name: kept for name, kept in found.items() if kept not in apart}


def _copies(adapter: AdapterWeights, ties: Mapping[str, str]) -> Iterator[tuple[TensorEntry, TensorEntry]]:
    """The tensors of an adapter that are not used because they are copies, each with the tensor that it copies, in its
    shape.

    PEFT's LoRA of a tied head is the embedding's, turned round. Source: PEFT 0.21.2, tuners/lora/model.py `tied_adapter`.
    """
    loras = _loras(adapter)
    for name, entry in (*adapter.whole.items(), *adapter.twice.items()):
        own = adapter.whole[ties.get(name, name)] if ties.get(name, name) in adapter.whole else adapter.whole[name]
        if own.fragments != entry.fragments:
            yield entry, own
    for name, factors in loras.items():
        kept = loras.get(ties.get(name, name), factors)
        if kept is factors:
            continue
        pairs = (factors.a, kept.a), (factors.b, kept.b)
        if factors.embedding != kept.embedding:
            pairs = (factors.a, transpose(kept.b)), (factors.b, transpose(kept.a))
        yield from pairs


def _trained_together(model: ModelTensors, adapter: AdapterWeights) -> dict[str, str]:
    """Name -> stored name, for tensors that are tied in both the base model and the adapter."""
    same: dict[object, list[str]] = {}
    for name, entry in adapter.whole.items():
        same.setdefault(entry.fragments, []).append(name)
    groups = [names for names in same.values() if len(names) > 1]
    if adapter.config.get("ensure_weight_tying"):
        loras = [name for name, factors in _loras(adapter).items() if factors.magnitude is None]  # each has its own
        groups += [[name for name in names if name.endswith(_ENDS)] for names in (adapter.whole, loras)]
    found: dict[str, str] = {}
    for names in groups:
        kept = next((name for name in names if name in model.tensors), "")
        ties = [
            name for name in names if name != kept and (model.aliases.get(name) == kept or name not in model.tensors)
        ]
        found.update(dict.fromkeys([kept, *ties], kept) if kept and ties else {})
    return found


def _replace_tokens(
    model: ModelTensors, adapters: Sequence[AdapterWeights], updates: Mapping[str, object]
) -> Iterator[tuple[TensorEntry, TensorEntry]]:
    """Puts in the rows of tokens that were trained alone. Yields those of a tied layer, with the rows that they copy.

    In PEFT a tied layer takes the tokens too, unless it has tokens of its own.
    Source: PEFT 0.21.2, utils/other.py `set_additional_trainable_modules`.
    """
    found: dict[str, list[tuple[TensorEntry, tuple[tuple[int, int], ...]]]] = {}
    bases: dict[str, TensorEntry] = {}
    for adapter in adapters:
        for module, entry in adapter.tokens.items():
            name = f"{module}.weight"
            base = bases[name] = base_tensor(model, adapter, name, entry.name)
            rows = adapter.rows_of(module)
            if entry.shape != (len(rows), *base.shape[1:]):
                raise other_shape(adapter, entry.name, entry.shape, name, base.shape)
            if beyond := [row for row in rows if not 0 <= row < base.shape[0]]:
                raise InconsistentError(
                    f"adapter {adapter.name!r} trained tokens that the base model does not have", file=adapter.config_file,
                    found=f"token {beyond[0]:,} in trainable_token_indices",
                    expected=f"below {base.shape[0]:,}, the rows of {name!r}",
                    remedy="Pass with --base the model as it was trained: with its embedding resized, and saved.",
                )  # fmt: skip
            taken = {row for _, pairs in found.get(name, ()) for row, _ in pairs}
            if adapter.weight != 1 or name in updates or taken & set(rows):
                raise _no_tokens(name, adapter, entry)
            found.setdefault(name, []).append((entry, tuple((row, own) for own, row in enumerate(rows))))
    stored = {name: model.stored(name) for name in found}
    for name, others in found.items():
        base, kept = bases[name], stored[name]
        group = [found[other] for other in found if stored[other] == kept]
        are_alike = all([rows for _, rows in one] == [rows for _, rows in others] for one in group)
        if len(group) > 1 and not are_alike and len(adapters) > 1:
            raise _no_tokens(name, adapters[-1], others[0][0])
        if name != kept and kept in found and are_alike:
            yield from ((one, own) for (one, _), (own, _) in zip(others, found[kept], strict=True))
            continue
        recipe = replace_rows(replace(base, replicas=()), tuple(others))
        entry = derive_entry(name, base.shape, F32, recipe, base.role)
        model.put(name, entry, tied=name == kept and are_alike)


def _no_tokens(name: str, adapter: AdapterWeights, entry: TensorEntry) -> UnsupportedError:
    return UnsupportedError(
        f"the trained tokens of {name!r} cannot be merged", file=adapter.file,
        found=f"{entry.name!r} with weight {adapter.weight:g}",
        expected="weight 1, tokens each trained by one adapter, and no LoRA of the same matrix",
        remedy="Merge the adapters one after the other, or with PEFT.",
    )  # fmt: skip


def _check_magnitude(adapter: AdapterWeights, update: Update, entry: TensorEntry, columns: int) -> None:
    magnitude = update.magnitude
    wanted = columns if update.transposed else entry.numel // max(1, columns)
    if magnitude is not None and magnitude.numel != wanted:
        raise other_shape(adapter, magnitude.name, magnitude.shape, entry.name, entry.shape)
