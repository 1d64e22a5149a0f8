"""LoRAs as other programs than PEFT keep them, as PEFT has them: names of torchtune and Megatron Bridge, the config of verl.

For `jobs.adapters`. In torchtune's `adapter_N.pt` and `adapter_model.pt` the rows of queries and keys are in pairs, as in its
model, but for Qwen and Phi. Bridge has one LoRA for queries, keys and values: the rows of its B are in groups, one for each key
head, and its A is that of each; so for gate and up, one after the other. Its layers are stacked or numbered, its experts stacked;
what all experts share has no axis for them. The magnitudes of a DoRA's gate and up lie rank after rank, each with rows of both.
verl writes `lora_train_meta.json` beside its rank files: `{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}`; Bridge has such
facts in `run_config.yaml`. Which modules have a LoRA, which are trained whole, and whether it is a DoRA, the tensors show.
Source: torchtune 0.6.1, models/convert_weights.py `tune_to_peft_adapter_weights`, models/qwen2/_convert_weights.py; Megatron
Bridge 0.6.2, models/conversion/peft_bridge.py, peft/utils.py `ParallelLinearAdapter.sharded_state_dict`; verl 0.9.1,
utils/checkpoint/fsdp_checkpoint_manager.py `_get_lora_train_meta`; PEFT 0.21.2, tuners/lora/config.py. What LoRA, CanonicalLoRA
and DoRA of Bridge 0.3.1 save of Megatron-Core's models was read, with Transformer Engine replaced by an empty module; what its
`GroupedExpertLinearAdapter` and `SharedOuterGroupedExpertAdapter` save, of a commit of August 2026.
"""

from __future__ import annotations

import re
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
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<home>self_attention|mlp(?:\.experts\.experts|\.shared_experts)?)\."
    r"(?P<part>linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:down|up)_proj|fc[12])|router)\.adapter\."
    r"(?:adapter_(?P<one>q|k|v|gate|up)\.)?(?:linear_(?P<kind>in|out)\.weight|weight_(?P<length>magnitude))"
)
_BRIDGES = compile_late(r".*\.adapter\.(?:adapter_\w+\.)?(?:linear_(?:in|out)\.weight|weight_magnitude)")
_KINDS = {
    "lora_a.weight": "lora_A.weight", "lora_b.weight": "lora_B.weight", "magnitude": "lora_magnitude_vector",
    "in": "lora_A.weight", "out": "lora_B.weight",
}  # fmt: skip
_MODULES = {
    "output_proj": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
}  # fmt: skip
_OF_BRIDGE = {
    "linear_qkv": "q_proj k_proj v_proj", "linear_proj": "o_proj", "linear_fc1": "gate_proj up_proj", "linear_fc2": "down_proj",
    "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj", "router": "gate",
}  # fmt: skip
_STAYS = "Use it with Megatron Bridge, on as many ranks as trained it."
_OF_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "gate": "gate"}
_EXPERTS, _SHARED = "mlp.experts.experts", "mlp.shared_experts"
_MIXTRAL = compile_late(r"(?i)mixtral|minimax")
_LAYERS = "base_model.model.model.layers."
_HALVES = ("qwen", "phi")
META = "lora_train_meta.json"
_TUNED = compile_late(r"(?P<module>.+)\.(?:lora_A\.weight|lora_embedding_A)")


def is_foreign(catalog: Catalog) -> bool:
    """Whether these are the tensors of an adapter of torchtune or Megatron Bridge."""
    return bool(catalog.tensors) and (all(map(_TUNE.fullmatch, catalog)) or all(map(_BRIDGES.fullmatch, catalog)))


def in_peft_form(catalog: Catalog, facts: Facts) -> Catalog:
    """The tensors of such an adapter with the names and shapes that PEFT gives them, by the model's type and its numbers of
    heads. Raises UnsupportedError if it changes modules for which there is no rule, IncompleteError if the number of heads
    is not known.
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
    yield f"{_LAYERS}{match['layer']}.{_MODULES[part]}.{_KINDS[kind]}", entry


def _of_bridge(entry: TensorEntry, facts: Facts) -> Iterator[tuple[str, TensorEntry]]:
    match = _BRIDGE.fullmatch(entry.name)
    if match is None:
        raise UnsupportedError(
            "an adapter of Megatron Bridge has no name in PEFT that is known here", file=facts.path,
            found=examples([entry.name]), expected="adapters of attention, MLPs, experts and routers of a language model",
            remedy="Export it with Megatron Bridge: AutoBridge.export_adapter_ckpt.",
        )  # fmt: skip
    home, part, kind = match["home"], match["part"], match["kind"] or match["length"]
    _check_rows(match, kind, facts)
    is_mixtral = _MIXTRAL.search(f"{facts.get('model_type')} {facts.arguments.get('_target_')}") is not None
    if home == "self_attention":
        target = "self_attn"
    elif home == _SHARED:  # Qwen has one, with a gate
        target = "mlp.shared_expert" if facts.arguments.get("moe_shared_expert_gate") is True else _SHARED
    else:
        target = "block_sparse_moe" if is_mixtral and (home == _EXPERTS or part == "router") else "mlp"
    for layer, whole in [(match["layer"], entry)] if match["layer"] else _along(entry):
        for expert, one in _experts_of(whole, kind, facts) if home == _EXPERTS else [("", whole)]:
            at = f"{_LAYERS}{layer}.{target}.{f'experts.{expert}.' if expert else ''}"
            for module, rows in _modules_of(one, match, facts):
                yield f"{at}{_OF_MIXTRAL.get(module, module) if is_mixtral and expert else module}.{_KINDS[kind]}", rows


def _experts_of(entry: TensorEntry, kind: str, facts: Facts) -> list[tuple[str, TensorEntry]]:
    """What each expert has, with their numbers; what has no axis for them, all have."""
    if len(entry.shape) > (1 if kind == "magnitude" else 2):
        return _along(entry)
    return [(f"{n}", entry) for n in range(_argument(facts, "how many experts its model has", "num_moe_experts"))]


def _check_rows(match: re.Match[str], kind: str, facts: Facts) -> None:
    """Raises UnsupportedError if no adapter of PEFT computes what this one does; IncompleteError if its run does not say it."""
    part, said = match["part"], facts.arguments
    what, remedy = "", _STAYS
    if part == "linear_qkv" and kind != "in" and said.get("attention_output_gate") is True:
        what = "has rows of a gate among those of its queries (attention_output_gate)"
        remedy = "Export it with Megatron Bridge: AutoBridge.export_adapter_ckpt."
    elif kind == "magnitude" and part == "linear_qkv":
        biases = [said.get(key) for key in ("add_qkv_bias", "add_bias_linear")]
        if any(biases):
            what = "is a DoRA that scales the bias of linear_qkv too, as no merged weight and no DoRA of PEFT does"
        elif None in biases:
            raise _unsaid(facts, "whether linear_qkv has a bias", "add_qkv_bias or add_bias_linear")
    elif kind == "magnitude" and part in ("linear_proj", "linear_fc2") and (slices := _slices(match, facts)) > 1:
        what = f"is a DoRA that {slices} tensor-parallel ranks trained, each with the lengths of its own slices of rows"
        remedy = f"{_STAYS} On one rank, or of linear_qkv and linear_fc1 alone, a DoRA can be merged."
    if what:
        raise UnsupportedError(
            f"an adapter of Megatron Bridge has no equal in PEFT: it {what}", file=facts.path,
            found=examples([match.string]), remedy=remedy,
        )  # fmt: skip


def _along(entry: TensorEntry) -> list[tuple[str, TensorEntry]]:
    """The tensors that lie along the first axis, with their numbers."""
    return [(one.name, one) for one in split_rows(entry, [(f"{n}", entry.shape[1:]) for n in range(entry.shape[0])])]


def _argument(facts: Facts, what: str, *names: str) -> int:
    value = next((number for name in names if (number := facts.arguments.get(name)) is not None), None)
    if type(value) is not int or value < 1:
        raise _unsaid(facts, what, names[0])
    return value


def _unsaid(facts: Facts, what: str, name: str) -> IncompleteError:
    return IncompleteError(
        f"the adapter does not say {what}", file=facts.path, found=f"no {name} of its run",
        expected="run_config.yaml", remedy="Copy run_config.yaml of the run into the save's directory.",
    )  # fmt: skip


def _slices(match: re.Match[str], facts: Facts) -> int:
    """Between how many tensor-parallel ranks the matrices of a module were split."""
    axes = ["expert_tensor_parallel_size"] * (match["home"] == _EXPERTS) + ["tensor_model_parallel_size"]
    return _argument(facts, "between how many ranks its matrices were split", *axes)


def _modules_of(entry: TensorEntry, match: re.Match[str], facts: Facts) -> Iterator[tuple[str, TensorEntry]]:
    """The modules that one of Bridge is in PEFT, by their last names, and the rows of each."""
    part, kind = match["part"], match["kind"]
    names = [f"{match['one']}_proj"] if match["one"] else _OF_BRIDGE[part].split()
    if part == "linear_fc1" and facts.arguments.get("gated_linear_unit") is False:
        names = ["up_proj"]
    if kind == "in" or len(names) == 1:
        yield from ((name, entry) for name in names)
        return
    if part == "linear_qkv":
        groups, heads = _heads(facts, "key_heads"), _heads(facts, "query_heads")
        size = entry.shape[0] // (heads + 2 * groups)
        widths = [heads // groups * size, size, size]
    else:
        groups = _slices(match, facts) if match["length"] else 1  # a tensor-parallel rank's rows of both are together
        widths = [entry.shape[0] // (2 * groups)] * 2
    for number, name in enumerate(names):
        yield name, rows_of(entry, name, groups, widths, number)


def config_of_meta(
    meta: object, file: str, adapter: Mapping[str, TensorEntry], whole: Iterable[str], model: Iterable[str]
) -> dict[str, object]:
    """Makes the fields of `adapter_config.json` from what verl says of a LoRA adapter (`meta`, in `file`), from its
    tensors, and from names in the model: of modules that are trained `whole`, and of all tensors.

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
    assert isinstance(meta, Mapping)
    modules = {match["module"].removeprefix(ROOT): name for name in adapter if (match := _TUNED.fullmatch(name))}
    found = {module: adapter[name].shape[0] for module, name in modules.items() if adapter[name].shape}
    fewer = {rank for module, rank in found.items() if ".experts." in module and meta.get("normalize_moe_lora") is True}
    pattern = {r"experts\.\d+\.\w+": fewer.pop()} if len(fewer) == 1 else {}
    ranks = sorted({rank for module, rank in found.items() if not pattern or ".experts." not in module})
    if ranks != [r] and (ranks or not pattern):
        raise InconsistentError(
            "gives a rank that the adapter does not have", file=file, found=f"r {r}",
            expected=f"r {join_words([str(own) for own in ranks])}, as its tensors have" if ranks else "LoRA matrices",
            remedy=OTHER_SAVE,
        )  # fmt: skip
    task = meta.get("task_type")
    saved = sorted({name.partition(".modules_to_save.")[0].rpartition(".")[2] for name in whole})
    return {
        "peft_type": "LORA",
        "task_type": task if isinstance(task, str) and task != "None" else None,
        "base_model_name_or_path": None,
        "r": r,
        "lora_alpha": alpha,
        **({"rank_pattern": pattern} if pattern else {}),
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
