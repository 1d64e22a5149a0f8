"""LoRAs as other programs than PEFT keep them, as PEFT has them: names of torchtune and Megatron Bridge, the config of verl.

For `jobs.adapters`. In torchtune's `adapter_N.pt` and `adapter_model.pt` the rows of queries and keys are in pairs, as in its
model, but for Qwen and Phi. Bridge has one LoRA for queries, keys and values: the rows of its B are in groups, one for each key
head, and its A is that of each; so for gate and up, one after the other. Its layers are stacked or numbered.
verl writes `lora_train_meta.json` beside its rank files: `{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}`; Bridge has such
facts in `run_config.yaml`. Which modules have a LoRA, which are trained whole, and whether it is a DoRA, the tensors show.
Source: torchtune 0.6.1, models/convert_weights.py `tune_to_peft_adapter_weights`, models/qwen2/_convert_weights.py; Megatron
Bridge 0.6.2, models/conversion/peft_bridge.py, peft/utils.py `ParallelLinearAdapter.sharded_state_dict`; verl 0.9.1,
utils/checkpoint/fsdp_checkpoint_manager.py `_get_lora_train_meta`; PEFT 0.21.2, tuners/lora/config.py. What LoRA and
CanonicalLoRA of Bridge 0.3.1 save of Megatron-Core's Llama was read, with Transformer Engine replaced by an empty module; a
DoRA's magnitudes of gate and up alternate there by ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples, join_words
from zckpt.containers import brief
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.claims import ByteSpan
from zckpt.naming.adapter_weights import ROOT
from zckpt.naming.facts import Facts
from zckpt.naming.rows import rows_of, split_rows, swap_head_halves

_TUNE = compile_late(
    r"(?:layers\.(?P<layer>\d+)\.(?:attn|mlp)\.(?P<part>q_proj|k_proj|v_proj|output_proj|w[123])|output)"
    r"\.(?P<kind>lora_a\.weight|lora_b\.weight|magnitude)"
)
_BRIDGE = compile_late(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<part>self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.adapter\."
    r"(?:adapter_(?P<one>q|k|v|gate|up)\.)?linear_(?P<kind>in|out)\.weight"
)
_BRIDGES = compile_late(r".*\.adapter\.(?:adapter_\w+\.)?(?:linear_(?:in|out)\.weight|weight_magnitude)")
_KINDS = {
    "lora_a.weight": "lora_A.weight", "lora_b.weight": "lora_B.weight", "magnitude": "lora_magnitude_vector",
    "in": "lora_A.weight", "out": "lora_B.weight",
}  # fmt: skip
_MODULES = {
    "output_proj": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
    "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up")}, **{name: f"self_attn.{name}_proj" for name in "qkv"},
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
}  # fmt: skip
_HALVES = ("qwen", "phi")
META = "lora_train_meta.json"
_TUNED = compile_late(r"(?P<module>.+)\.(?:lora_A\.weight|lora_embedding_A)")


def is_foreign(catalog: Catalog) -> bool:
    """Whether these are the tensors of an adapter of torchtune or Megatron Bridge."""
    return bool(catalog.tensors) and (all(map(_TUNE.fullmatch, catalog)) or all(map(_BRIDGES.fullmatch, catalog)))


def in_peft_form(catalog: Catalog, facts: Facts) -> Catalog:
    """The tensors of such an adapter with the names and shapes that PEFT gives them.

    Args:
        catalog: its tensors.
        facts: what is known of the model: how many heads of queries and keys there are, and its type.

    Raises:
        UnsupportedError: it changes modules for which there is no rule. IncompleteError: the number of heads is not known.
    """
    tensors: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        parts = _of_torchtune(entry, facts) if _TUNE.fullmatch(entry.name) else _of_bridge(entry, facts)
        tensors |= {name: replace_name(part, name) for name, part in parts}
    stores = {id(one.store): one.store for entry in catalog.tensors.values() for one in entry.fragments}
    views = tuple(ByteSpan(store, 0, store.size) for store in stores.values())  # several modules share one A of Bridge
    return replace(catalog, tensors=tensors, aliases={}, padding=(), views=views)


def _heads(facts: Facts, name: str) -> int:
    number = facts.whole(name)
    if number is None:
        raise IncompleteError(
            "the adapter does not say how many heads its model has", file=facts.path, found="no config of the model beside it",
            expected="config.json", remedy="Copy the model's config.json into the adapter's directory.",
        )  # fmt: skip
    return number


def _peft_name(layer: object, module: str, kind: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_MODULES[module]}.{_KINDS[kind]}"


def _of_torchtune(entry: TensorEntry, facts: Facts) -> Iterator[tuple[str, TensorEntry]]:
    match = _TUNE.fullmatch(entry.name)
    assert match is not None
    kind, part = match["kind"], match["part"]
    if part is None:
        yield f"base_model.model.lm_head.{_KINDS[kind]}", entry
        return
    if part in ("q_proj", "k_proj") and kind != "lora_a.weight":
        heads = _heads(facts, "query_heads" if part == "q_proj" else "key_heads")
        if not str(facts.get("model_type")).startswith(_HALVES):
            entry = swap_head_halves(entry, heads, apart=True)
    yield _peft_name(match["layer"], part, kind), entry


def _of_bridge(entry: TensorEntry, facts: Facts) -> Iterator[tuple[str, TensorEntry]]:
    match = _BRIDGE.fullmatch(entry.name)
    if match is None:
        is_dora = entry.name.endswith(".weight_magnitude")
        raise UnsupportedError(
            "a DoRA of Megatron Bridge is not read" if is_dora
            else "a LoRA of Megatron Bridge has no name in PEFT that is known here", file=facts.path,
            found=examples([entry.name]), expected="LoRAs of linear_qkv, linear_proj, linear_fc1 and linear_fc2",
            remedy="Merge it with Megatron Bridge, and convert the model." if is_dora
            else "Export it with Megatron Bridge: AutoBridge.export_adapter_ckpt.",
        )  # fmt: skip
    layers = [(match["layer"], entry)]
    if match["layer"] is None:
        pieces = [(f"{number}", entry.shape[1:]) for number in range(entry.shape[0])]
        layers = [(one.name, one) for one in split_rows(entry, pieces)]
    kind, part = match["kind"], match["part"]
    for layer, one in layers:
        if match["one"] or part in _MODULES:
            yield _peft_name(layer, match["one"] or part, kind), one
            continue
        groups, widths = 1, [one.shape[0] // 2] * 2
        modules: tuple[str, ...] = ("gate", "up")
        if part.endswith("qkv"):
            modules, groups, heads = ("q", "k", "v"), _heads(facts, "key_heads"), _heads(facts, "query_heads")
            size = one.shape[0] // (heads + 2 * groups)
            widths = [heads // groups * size, size, size]
        for number, module in enumerate(modules):
            name = _peft_name(layer, module, kind)
            yield name, one if kind == "in" else rows_of(one, name, groups, widths, number)


def config_of_meta(
    meta: object, file: str, adapter: Mapping[str, TensorEntry], whole: Iterable[str], model: Iterable[str]
) -> dict[str, object]:
    """Makes the fields of `adapter_config.json` from what verl says of a LoRA adapter.

    Args:
        meta: what `lora_train_meta.json` says.
        file: its path, for errors.
        adapter: the adapter's tensors, by their names in `adapter_model.safetensors`.
        whole: names in the model of the adapter's modules that are trained whole.
        model: names of all tensors of the model.

    Raises:
        CorruptError: `meta` does not give a rank and an alpha.
        InconsistentError: the tensors are of another rank.
    """
    r, alpha = (meta.get("r"), meta.get("lora_alpha")) if isinstance(meta, Mapping) else (None, None)
    if type(r) is not int or r < 1 or type(alpha) not in (int, float):
        raise CorruptError(
            "does not say the rank and the alpha of a LoRA", file=file, found=brief(meta),
            expected='{"r": ..., "lora_alpha": ...}', remedy=COPY_AGAIN,
        )  # fmt: skip
    modules = {match["module"].removeprefix(ROOT): name for name in adapter if (match := _TUNED.fullmatch(name))}
    ranks = sorted({adapter[name].shape[0] for name in modules.values() if adapter[name].shape})
    if ranks != [r]:
        raise InconsistentError(
            "gives a rank that the adapter does not have", file=file, found=f"r {r}",
            expected=f"r {join_words([str(own) for own in ranks])}, as its tensors have" if ranks else "LoRA matrices",
            remedy=OTHER_SAVE,
        )  # fmt: skip
    assert isinstance(meta, Mapping)
    task = meta.get("task_type")
    saved = sorted({name.partition(".modules_to_save.")[0].rpartition(".")[2] for name in whole})
    return {
        "peft_type": "LORA",
        "task_type": task if isinstance(task, str) and task != "None" else None,
        "base_model_name_or_path": None,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": any(name.endswith(".lora_magnitude_vector") for name in adapter),
        "target_modules": _targets(modules, model),
        "modules_to_save": saved or None,
        "inference_mode": True,
    }


def _targets(modules: Iterable[str], model: Iterable[str]) -> list[str]:
    """Names of the adapted modules as PEFT finds them: their last parts, where no other module of the model ends so."""
    tuned = set(modules)
    others = {
        module.removeprefix(ROOT).removesuffix(".base_layer")
        for module in (name.rpartition(".")[0] for name in model)
        if ".lora_" not in module
    } - tuned
    ends = {module.rpartition(".")[2] for module in tuned}
    taken = {module.rpartition(".")[2] for module in others}
    return sorted(ends if not ends & taken else tuned)
