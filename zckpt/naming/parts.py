"""The parts that a model consists of, by names of zckpt's own: unfused, unstacked, one block and one expert each.

For `schemes`: its files say how a writer names, fuses, stacks and orders them. `{b}` is a block's number, `{e}` an
expert's;
the name of each part but the bare ones ends in `.weight` or `.bias`. A matrix has one row for each output, as in torch. Rows of
queries and keys with rotary positions lie in halves: in each head first the first elements of all pairs, then the second.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PARTS = {
    "embedding": "vectors of the vocabulary",
    "positions": "learned vectors of positions",
    "embedding_norm": "norm of the embeddings, before the first block",
    "final_norm": "norm after the last block",
    "head": "from hidden values to the vocabulary; absent where it is the embedding",
    "blocks.{b}.attention_norm": "norm before attention",
    "blocks.{b}.attention_output_norm": "norm after attention, before the residual is added",
    "blocks.{b}.mlp_norm": "norm before the MLP or the experts",
    "blocks.{b}.mlp_output_norm": "norm after the MLP, before the residual is added",
    "blocks.{b}.attention.query": "queries of all heads",
    "blocks.{b}.attention.key": "keys of all key heads",
    "blocks.{b}.attention.value": "values of all key heads",
    "blocks.{b}.attention.output": "from the heads back to hidden values",
    "blocks.{b}.attention.output_gate": "how much of each head's output counts, for each token",
    "blocks.{b}.attention.query_norm": "norm of each head's queries",
    "blocks.{b}.attention.key_norm": "norm of each head's keys",
    "blocks.{b}.attention.query_down": "queries of low rank (MLA)",
    "blocks.{b}.attention.query_down_norm": "norm of these",
    "blocks.{b}.attention.query_up": "from these to the queries of all heads",
    "blocks.{b}.attention.key_value_down": "keys and values of low rank, then the keys' rotary part (MLA)",
    "blocks.{b}.attention.key_value_down_norm": "norm of those of low rank",
    "blocks.{b}.attention.key_value_up": "from these to the keys and values of all heads",
    "blocks.{b}.index.query": "queries of an index of tokens to look at (DSA), from those of low rank",
    "blocks.{b}.index.key": "its keys",
    "blocks.{b}.index.key_norm": "norm of these",
    "blocks.{b}.index.heads": "how much each of its heads counts, for each token",
    "blocks.{b}.linear.query": "queries of attention without a softmax (gated delta rule)",
    "blocks.{b}.linear.key": "its keys",
    "blocks.{b}.linear.value": "its values",
    "blocks.{b}.linear.gate": "how much of its output counts",
    "blocks.{b}.linear.beta": "how much of a key's value is replaced, for each head of values",
    "blocks.{b}.linear.decay": "how much of the state is kept, for each head of values",
    "blocks.{b}.linear.query_filter": "convolution of the queries with those before",
    "blocks.{b}.linear.key_filter": "of the keys",
    "blocks.{b}.linear.value_filter": "of the values",
    "blocks.{b}.linear.norm": "norm of each head's output",
    "blocks.{b}.linear.output": "from the heads back to hidden values",
    "blocks.{b}.mamba.gate": "how much of the output of a layer of Mamba 2 counts",
    "blocks.{b}.mamba.input": "its inputs",
    "blocks.{b}.mamba.write": "what goes into its state (B)",
    "blocks.{b}.mamba.read": "what is read from its state (C)",
    "blocks.{b}.mamba.step": "how far its state moves, for each head (dt)",
    "blocks.{b}.mamba.input_filter": "convolution of the inputs with those before",
    "blocks.{b}.mamba.write_filter": "of what goes into the state",
    "blocks.{b}.mamba.read_filter": "of what is read from it",
    "blocks.{b}.mamba.norm": "norm of the output, by groups",
    "blocks.{b}.mamba.output": "from the heads back to hidden values",
    "blocks.{b}.mlp.gate": "the half of a gated MLP that goes through the activation function",
    "blocks.{b}.mlp.up": "the other half; alone in an MLP without a gate",
    "blocks.{b}.mlp.down": "from the MLP's values back to hidden values",
    "blocks.{b}.router": "scores of the experts",
    "blocks.{b}.latent.enter": "from hidden values to the fewer ones that routed experts take",
    "blocks.{b}.latent.leave": "from what they give back to hidden values",
    "blocks.{b}.experts.{e}.gate": "as mlp.gate, of one expert",
    "blocks.{b}.experts.{e}.up": "as mlp.up",
    "blocks.{b}.experts.{e}.down": "as mlp.down",
    "blocks.{b}.shared.gate": "as mlp.gate, of the experts that take every token",
    "blocks.{b}.shared.up": "as mlp.up",
    "blocks.{b}.shared.down": "as mlp.down",
    "blocks.{b}.shared_gate": "how much these experts count for a token",
}
"""Parts that have a weight, and often a bias: name without that suffix -> what it is."""

BARE = {
    "blocks.{b}.attention.sinks": "scores that each head's attention always has beside those of the tokens",
    "blocks.{b}.linear.log_decay": "logarithm of each head's decay",
    "blocks.{b}.linear.step_bias": "what is added to `decay` before it is used",
    "blocks.{b}.mamba.log_decay": "logarithm of each head's decay",
    "blocks.{b}.mamba.skip": "how much of each head's input goes past its state (D)",
    "blocks.{b}.mamba.step_bias": "what is added to `step` before it is used",
    "blocks.{b}.router.correction": "what is added to the router's scores to choose experts, and not to weigh them",
}
"""Parts without a suffix: name -> what it is."""

KINDS = ("weight", "bias")

_OWN = ("own.", "blocks.{b}.own.", "blocks.{b}.experts.{e}.own.")
"""Beginnings of parts that only one family has, followed by its own names."""

ALL = frozenset((*(f"{name}.{kind}" for name in PARTS for kind in KINDS), *BARE))
"""Every part's name, with `{b}` and `{e}` for numbers."""

_NUMBERED = re.compile(r"blocks\.(\d+)\.(?:experts\.(\d+)\.)?")


def is_part(template: str) -> bool:
    """Whether a template is one of `ALL`, or of a part that one family alone has."""
    return template in ALL or template.startswith(_OWN)


def is_own(name: str) -> bool:
    """Whether the part of this name is one that one family alone has."""
    return parse_part_name(name).part.startswith(_OWN)


def own_part(name: str) -> str:
    """The part of one family for a tensor of this name, which has `{b}` and `{e}` for numbers."""
    home = _OWN[("{b}" in name) + ("{e}" in name)]
    return home + name.replace("{b}.", "").replace("{e}.", "")


class Numbered(NamedTuple):
    """A part's name, taken apart.

    Attributes:
        part: with `{b}` and `{e}`, one of `ALL` if it is a part.
        block: its block; -1 outside of blocks.
        expert: its expert; -1 if it is not of one expert.
    """

    part: str
    block: int
    expert: int


def parse_part_name(name: str) -> Numbered:
    """A part's name as its template and its numbers."""
    match = _NUMBERED.match(name)
    if match is None:
        return Numbered(name, -1, -1)
    block, expert = match.groups()
    if expert is None:
        return Numbered("blocks.{b}." + name[match.end() :], int(block), -1)
    return Numbered("blocks.{b}.experts.{e}." + name[match.end() :], int(block), int(expert))


def fill_template(template: str, block: int, expert: int) -> str:
    """A template with its numbers."""
    if "{" not in template:
        return template
    return template.replace("{b}", str(block)).replace("{e}", str(expert))
