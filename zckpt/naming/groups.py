"""The groups of rows in which Megatron and GPT-NeoX write queries, keys and values, and the halves of a gated MLP.

For `decompose`, as the facts attention_groups and gated_groups of the schemes "megatron" and "gpt-neox".

[Note: the order of queries, keys and values] A fused weight is `groups` groups of rows, in each some rows of queries, then
of keys, then of values. The number of groups determines the order. GPT-NeoX has one per query head; with fewer
key heads than query heads, since November 2024, one per tensor-parallel rank. Megatron since checkpoint version 2 has one
per key head; version 1 one per element of a head (h, n, 3); version 0 one per tensor-parallel rank. Groups by ranks are
only known if the rules that joined the slices put them end to end, as the built-in ones do.
Source: GPT-NeoX, tools/ckpts/convert_neox_to_hf.py; Megatron-DeepSpeed, tools/hf2megads_weight_converter.py and
megatron/model/transformer.py; transformers 4, models/megatron_gpt2 `fix_query_key_value_ordering`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zckpt.base.errors import UnsupportedError
from zckpt.naming.facts import Facts


def with_groups(facts: Facts, local: Iterable[str]) -> Facts:
    """The facts with attention_groups and gated_groups; see [Note: the order of queries, keys and values].

    Args:
        facts: with query_heads, key_heads and head_size, and the checkpoint's version, ranks and rules.
        local: local names of all tensors.

    Raises:
        UnsupportedError: the checkpoint does not tell them.
    """
    local = [re.sub(r"^layers\.\d+\.", "", name) for name in local]
    version, ranks = facts.get("version"), facts.whole("ranks") or 1
    query, key = facts.number("query_heads"), facts.number("key_heads")
    gated = any(name.startswith("mlp.linear1.") for name in local)
    by_rank = False
    if isinstance(version, float):
        if version >= 2:
            attention = key
        elif version >= 1:
            attention = query * facts.number("head_size")
        else:
            attention, by_rank = ranks, True
    elif any(name.startswith("self_attention.") for name in local):
        raise UnsupportedError(
            "the order of the fused attention weights is unknown", file=facts.path, found="no checkpoint_version",
            remedy="Convert the checkpoint that Megatron itself wrote.",
            expected="a checkpoint_version, as Megatron writes",
        )  # fmt: skip
    elif key < query and gated:  # the newer names came with the newer order
        attention, by_rank = ranks, True
    else:
        attention = query
    rules = facts.get("rules")
    if ranks > 1 and (by_rank or gated) and rules not in ("neox", "megatron"):
        raise UnsupportedError(
            "stacked rows of several ranks were joined by other rules", file=facts.path,
            found=f"rules {rules}" if rules else "the checkpoint's own rules",
            remedy="Pass --tp-rules neox, or megatron for Megatron's checkpoints.",
        )  # fmt: skip
    return facts.having(attention_groups=attention, gated_groups=ranks)
