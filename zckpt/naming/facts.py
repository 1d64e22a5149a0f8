"""Facts of a model that its tensors' names do not show: how many heads, experts and words, and what the run said of itself.

For `decompose`, `compose` and `families`. They come from a config.json, from the arguments that a run kept in its checkpoint
(Megatron's `args`, GPT-NeoX's `args` and `configs/`, a `run_config`), and from tensors' shapes, which are believed first.
Source: GPT-NeoX, megatron/checkpointing.py `save_ds_checkpoint`, megatron/neox_arguments; Megatron-LM, training/arguments.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, UsageError, ZckptError
from zckpt.containers import Placeholder, enum_value
from zckpt.core.catalog import Catalog
from zckpt.naming.parts import parse_part_name
from zckpt.storage.json_files import read_table
from zckpt.storage.location import locate

_PLAIN = (str, int, float, bool, type(None))

_MOST_BYTES = 1 << 20
"""The most bytes of a GPT-NeoX config file; real ones have a few thousand."""

_TABLES = read_table(__file__)

_KEYS: Mapping[str, Sequence[str]] = _TABLES["keys"]
"""Fact -> the keys for it in a config, or in the arguments of a run."""

SHAPES: Mapping[str, tuple[str, int]] = _TABLES["shapes"]
"""Fact -> a part, and the dimension of the part that equals the fact."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model.

    Attributes:
        values: fact -> its value: query_heads, key_heads, head_size, blocks, experts, vocabulary, hidden, intermediate, tied,
            gated, ranks (tensor-parallel ones), version (Megatron's, of checkpoints), model_type (of the config), ...
        arguments: of the run, by its own names with `_`; plain values.
        config: transformers' config of the model, where there is one, with the text model's keys at the top.
        path: the checkpoint, for errors.
    """

    values: Mapping[str, object] = field(default_factory=dict[str, object])
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    config: Mapping[str, Any] | None = None
    path: str = ""

    def get(self, name: str) -> object:
        """A fact; None if it is not known."""
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        """A fact that is a positive whole number; None if it is not known."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else None

    def number(self, name: str) -> int:
        """A fact that is a positive whole number. Raises UsageError if it is not known."""
        value = self.whole(name)
        if value is None:
            raise UsageError(
                f"the number of {_SAID.get(name, name.replace('_', ' '))} is not recorded", file=self.path,
                found="no arguments of the run and no config that say it",
                remedy="Pass the model's config.json with --config.",
            )  # fmt: skip
        return value

    def meet(self, when: Mapping[str, tuple[object, ...]]) -> bool:
        """Whether every fact has one of the given values; an unknown fact has none."""
        return all((self._said(name) or False) in values for name, values in when.items())

    def contradict(self, when: Mapping[str, tuple[object, ...]]) -> bool:
        """Whether a known fact has none of the given values."""
        return any(self._said(name) is not None and self._said(name) not in values for name, values in when.items())

    def _said(self, name: str) -> object:
        """The value of a fact, of a key of the config, or of an argument of the run, in this order; None if there is
        none.
        """
        for where in (self.values, self.config or {}, self.arguments):
            if (value := where.get(name)) is not None:
                return value
        return None

    def having(self, **more: object) -> Facts:
        """The facts with these values changed; None leaves a value as it is."""
        return replace(self, values={**self.values, **{k: v for k, v in more.items() if v is not None}})


_SAID = {"query_heads": "attention heads", "key_heads": "key heads"}


def facts_of(
    catalog: Catalog,
    config: Mapping[str, Any] | None = None,
    directory: str | None = None,
    rules: str = "",
    *,
    home: str | None = None,
    vocab_size: int | None = None,
) -> Facts:
    """The facts that a checkpoint and a config record, before the tensors are taken apart.

    Args:
        catalog: the checkpoint.
        config: transformers' config of the model, if there is one.
        directory: of the save, in which GPT-NeoX keeps its configs.
        rules: the rules that joined tensor-parallel slices; empty for the checkpoint's own.
        home: the directory that has config and tokenizer files.
        vocab_size: words of the vocabulary, if the user says it.

    Raises:
        CorruptError: one of GPT-NeoX's config files cannot be read.
    """
    arguments = run_arguments(catalog, directory)
    version = catalog.extras.get("checkpoint_version")
    given = flat_config(config or {})
    values: dict[str, object] = {name: _number(keys, given, arguments) for name, keys in _KEYS.items()}
    values["key_heads"] = _key_heads(given, arguments)
    values["tied"] = _is_head_tied(config or {}, given, arguments)
    values["rotary_form"] = _rotary_form(config)
    scale = given.get("query_pre_attn_scalar", values["head_size"])
    values["scaled_by_head_size"] = scale == values["head_size"] if config else None
    values["window"] = _window(arguments)
    tower = (config or {}).get("vision_config")
    values["tower_heads"] = _number(("num_heads", "num_attention_heads"), tower if isinstance(tower, Mapping) else {})
    values["model_type"] = kind if isinstance(kind := (config or {}).get("model_type"), str) else None
    values["version"] = float(version) if isinstance(version, int | float) else None
    values["parallel"] = _parallel(given, arguments)
    if _is_of_megatron_llm(arguments):
        values |= {"up_first": True, "rotary_pairs": arguments.get("position_embedding_type") == "rope"}
    values["ranks"] = catalog.topology.tp
    values["rules"] = rules
    vocabulary = given.get("vocab_size")
    if vocab_size is not None:
        values |= {"vocabulary": vocab_size, "vocabulary_from": "--vocab-size"}
    elif isinstance(vocabulary, int):
        values |= {"vocabulary": vocabulary, "vocabulary_from": "the config"}
    values["homes"] = tuple(dict.fromkeys(filter(None, (home, directory))))
    return Facts(
        {name: value for name, value in values.items() if value is not None}, arguments,
        None if config is None else given, catalog.source.path,
    )  # fmt: skip


def _rotary_form(config: Mapping[str, Any] | None) -> str | None:
    """What a config says of how rotary frequencies are stretched: "default" where they are not; None without a config."""
    said = (config or {}).get("rope_parameters") or (config or {}).get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default")) if isinstance(said, Mapping) else "default"
    return kind if config and isinstance(kind, str) else None


def with_parts(facts: Facts, parts: Catalog) -> Facts:
    """The facts, with what the parts' names and shapes show: sizes, numbers of blocks and experts, heads, gates."""
    first: dict[str, tuple[int, ...]] = {}
    blocks, experts = -1, -1
    dense, routed, linear, mamba, indexed = (set[int]() for _ in range(5))
    most = -1  # with those of other stacks, such as a tower of images
    for name, entry in parts.tensors.items():
        part, block, expert = parse_part_name(name)
        most, experts = max(most, block), max(experts, expert)
        blocks = blocks if part.startswith("blocks.{b}.own.") else max(blocks, block)
        if part.startswith("blocks.{b}.mlp."):
            dense.add(block)
        elif part == "blocks.{b}.router.weight":
            routed.add(block)
        elif part == "blocks.{b}.linear.output.weight":
            linear.add(block)
        elif part == "blocks.{b}.mamba.output.weight":
            mamba.add(block)
        elif part == "blocks.{b}.index.key.weight":
            indexed.add(block)
        first.setdefault(part, entry.shape)
    blocks = most if blocks < 0 else blocks
    found: dict[str, object] = {
        fact: first[part][dim] for fact, (part, dim) in SHAPES.items() if part in first and len(first[part]) > dim
    }
    found |= {"blocks": blocks + 1 or None, "experts": experts + 1 or None, "dense_blocks": len(dense)}
    found["blocks_without_experts"] = sorted(dense) if routed else []
    found["later_dense_blocks"] = max(dense, default=-1) > min(routed, default=blocks)
    found["shared_experts"] = _times(found.get("shared_intermediate"), found.get("expert_intermediate"))
    found["further_layers"] = (
        sum(name.startswith("own.") and name.endswith(".eh_proj.weight") for name in first) or None
    )
    found["gated"] = any(f"blocks.{{b}}.{where}.gate.weight" in first for where in ("mlp", "experts.{e}", "shared"))
    if linear:
        found["linear_attention"] = True
        found["linear_blocks"] = [int(block in linear) for block in range(blocks + 1)]
        found["layer_types"] = [f"{'linear' if block in linear else 'full'}_attention" for block in range(blocks + 1)]
    if mamba:  # in the letters of Megatron-Core and of the hub
        found["hybrid"] = True
        kinds = ((mamba, "M"), (routed, "E"), (dense, "-"))
        found["hybrid_pattern"] = "".join(
            next((letter for own, letter in kinds if block in own), "*") for block in range(blocks + 1)
        )
    else:
        found["full_attention"] = ["full_attention"] * (blocks + 1)
    found["index_kinds"] = (
        ["full" if block in indexed else "shared" for block in range(blocks + 1)] if indexed else None
    )
    found["attention_output_gate"] = "blocks.{b}.attention.output_gate.weight" in first or None
    found["two_norms"] = "blocks.{b}.mlp_norm.weight" in first
    if dense and not mamba and not found["two_norms"] and "blocks.{b}.mlp_output_norm.weight" not in first:
        found["parallel"] = True  # attention and MLP share a norm
    found["biased_norms"] = "final_norm.bias" in first
    tied = "head.weight" in parts.aliases or (
        "head.weight" not in parts.tensors and "embedding.weight" in parts.tensors
    )
    found["tied"] = True if tied and facts.get("tied") is not False else None
    query, size = facts.whole("query_heads"), facts.whole("head_size")
    rows, key_rows = found.pop("query_rows", None), found.pop("key_rows", None)
    found["whole_norms"] = found.pop("query_norm_rows", -1) == rows and (query or 1) > 1
    if query and isinstance(rows, int) and isinstance(key_rows, int) and rows % query == 0:
        size = rows // query
        found |= {"head_size": size, "key_heads": key_rows // size if key_rows % size == 0 else None}
    return _with_falcon(facts.having(**found, **_latent(first, query)))


def _with_falcon(facts: Facts) -> Facts:
    """The facts with those by which transformers tells the forms of Falcon apart, unless a config has them.

    Source: transformers 5.23, models/falcon/modeling_falcon.py `FalconAttention`, `FalconDecoderLayer`.
    """
    query, key, parallel = facts.whole("query_heads"), facts.whole("key_heads"), facts.get("parallel")
    if query is None or key is None or not isinstance(parallel, bool) or "multi_query" in (facts.config or {}):
        return facts
    grouped = 1 < key < query
    newer = parallel and (grouped or facts.get("two_norms") is True)
    return facts.having(
        new_decoder_architecture=newer, multi_query=key == 1 and not newer, groups_in_sequence=grouped and not parallel,
        own_key_heads=key if newer else query, parallel_norms=(2 if facts.get("two_norms") else 1) if newer else None,
    )  # fmt: skip


def _latent(shapes: Mapping[str, tuple[int, ...]], heads: int | None) -> dict[str, object]:
    """Sizes of a head of attention through low ranks (MLA): of its keys without and with positions, and of its values."""
    parts = [f"blocks.{{b}}.attention.{name}.weight" for name in ("key_value_up", "key_value_down", "output")]
    if heads is None or any(len(shapes.get(part, ())) != 2 for part in parts):
        return {}
    up, down, output = (shapes[part] for part in parts)
    value = output[1] // heads
    return {"value_size": value, "key_size": up[0] // heads - value, "rotary_size": down[0] - up[1]}


def _times(whole: object, part: object) -> int | None:
    """How many times one size is in another; None if that is not a whole number."""
    if not isinstance(whole, int) or not isinstance(part, int) or part == 0 or whole % part:
        return None
    return whole // part


def run_arguments(catalog: Catalog, directory: str | None) -> dict[str, object]:
    """The arguments of the run, as far as the checkpoint kept them, with `_` in their names. Raises CorruptError if one
    of GPT-NeoX's config files cannot be read.
    """
    arguments: dict[str, object] = {}
    for key in ("run_config", "args"):
        kept = catalog.extras.get(key)
        state = kept.state if isinstance(kept, Placeholder) else kept
        if isinstance(state, Mapping):
            inner = next((state[n] for n in ("model", "config") if key == "run_config" and n in state), None)
            arguments.update(inner if isinstance(inner, Mapping) else state)
    configs = os.path.join(directory, "configs") if directory else ""
    if configs and locate(configs).is_dir():
        import yaml

        for name in sorted(locate(configs).names()):
            path = os.path.join(configs, name)
            if not name.endswith((".yml", ".yaml", ".json")) or not locate(path).is_file():
                continue
            try:
                found = yaml.safe_load(locate(path).read(_MOST_BYTES))
            except ZckptError:
                raise
            except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
                raise CorruptError("cannot be read", file=path, found=str(error), remedy=COPY_AGAIN) from error
            arguments = {**(found if isinstance(found, dict) else {}), **arguments}
    plain = {str(name).replace("-", "_"): enum_value(value) for name, value in arguments.items()}
    if plain.get("position_embedding_type") == "rope":  # Megatron's newer word; beside it the older one may be False
        plain["use_rotary_position_embeddings"] = True
    if plain.get("parallel_attn") is True:
        plain["gpt_j_residual"] = True
    if _is_of_megatron_llm(plain):
        plain |= _of_megatron_llm(plain)
    return {name: value for name, value in plain.items() if _is_plain(value)}


def _is_of_megatron_llm(arguments: Mapping[str, object]) -> bool:
    """Whether arguments are those of EPFL's Megatron-LLM, which has rotary pairs side by side, and rows of `up` first."""
    return "num_attention_heads_kv" in arguments


def _of_megatron_llm(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of Megatron-LLM, under the names that other programs have for them.

    Source: Megatron-LLM, megatron/arguments.py, megatron/model/{glu_activations,positional_embeddings}.py.
    """
    gate, window, stretch = (arguments.get(n) for n in ("glu_activation", "sliding_window_size", "rope_scaling_factor"))
    found: dict[str, object] = {"position_embedding_type": "learned_absolute"}
    if arguments.get("position_embedding_type") in (1, "rotary", None):
        found = {"position_embedding_type": "rope", "use_rotary_position_embeddings": True}
    if gate is not None:
        found |= {"swiglu": gate == "swiglu", **({} if gate == "swiglu" else {"activation": gate})}
    if isinstance(window, int):
        found["window_size"] = [window - 1, 0]
    if stretch not in (None, 1):
        found["rotary_seq_len_interpolation_factor"] = stretch
    if arguments.get("use_post_ln") is True:
        found["apply_residual_connection_post_layernorm"] = True
    return found


def _parallel(config: Mapping[str, object], arguments: Mapping[str, object]) -> bool | None:
    """Whether attention and MLP of a block are parallel, as far as a config or the arguments record it.

    Of programs that can have them so, only those that have them so say it; other programs have one after the other. Falcon and
    GPT-NeoX of transformers have them so where their config lacks the key.
    """
    for key, usual in (("parallel_attn", "falcon"), ("use_parallel_residual", "gpt_neox")):
        if isinstance(said := config.get(key, True if config.get("model_type") == usual else None), bool):
            return said or config.get("new_decoder_architecture") is True
    return arguments.get("gpt_j_residual") is True if arguments else None


def _window(arguments: Mapping[str, object]) -> int | None:
    """The tokens in a window of attention; Megatron's `window_size` counts those before the token itself."""
    said = arguments.get("window_size")
    before = said[0] if isinstance(said, list | tuple) and said else None
    return before + 1 if isinstance(before, int) else None


def _is_plain(value: object) -> bool:
    """Whether a value is one that a config may have, or a list of these."""
    if isinstance(value, list | tuple):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def flat_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with the keys of its nested text model at the top."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _number(keys: Sequence[str], *places: Mapping[str, object]) -> int | None:
    """The first positive whole number under one of the keys, in one of the mappings."""
    values = (place.get(key) for place in places for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _key_heads(config: Mapping[str, object], arguments: Mapping[str, object]) -> int | None:
    """The number of key heads, where a config or the arguments record it for certain.

    Falcon says it by `multi_query` and `new_decoder_architecture`; Megatron's `num_query_groups` counts only with
    `group_query_attention`.
    """
    if config.get("model_type") == "falcon" and config.get("new_decoder_architecture") is not True:
        return 1 if config.get("multi_query", True) else _number(("num_attention_heads", "n_head"), config)
    if (said := _number(("num_key_value_heads", "num_kv_heads"), config)) is not None:
        return said
    if arguments.get("group_query_attention") is False:
        return None
    return _number(("num_query_groups", "num_attention_heads_kv", "num_kv_heads"), arguments)


def _is_head_tied(
    config: Mapping[str, object], text: Mapping[str, object], arguments: Mapping[str, object]
) -> bool | None:
    """Whether the head is the embedding; None if nothing records it. A whole model says it before its text model."""
    for one in (config, text):
        if isinstance(said := one.get("tie_word_embeddings"), bool):
            return said
    if isinstance(said := arguments.get("share_embeddings_and_output_weights"), bool):
        return said
    if isinstance(said := arguments.get("tie_embed_logits"), bool):
        return said
    untied = arguments.get("untie_embeddings_and_output_weights")
    return not untied if isinstance(untied, bool) else None
