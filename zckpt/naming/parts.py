"""The parts that a model consists of, by names of zckpt's own: unfused, unstacked, one block and one expert each.

For `schemes`: its files say how a writer names, fuses, stacks and orders them. `{b}` is a block's number, `{e}` an
expert's;
the name of each part but the bare ones ends in `.weight` or `.bias`. A matrix has one row for each output, as in torch. Rows of
queries and keys with rotary positions lie in halves: in each head first the first elements of all pairs, then the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zckpt.storage.json_files import read_table

_TABLES = read_table(__file__)

PARTS: Mapping[str, str] = _TABLES["parts"]
"""Parts that have a weight, and often a bias: name without that suffix -> what it is."""

BARE: Mapping[str, str] = _TABLES["bare"]
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
    return template_of(name).startswith(_OWN)


def own_part(name: str) -> str:
    """The part of one family for a tensor of this name, which has `{b}` and `{e}` for numbers."""
    home = _OWN[("{b}" in name) + ("{e}" in name)]
    return home + name.replace("{b}.", "").replace("{e}.", "")


OF_EXPERTS = ("blocks.{b}.router", "blocks.{b}.experts.", "blocks.{b}.shared")
"""Beginnings of parts of experts and of what chooses them."""


def is_in_block(part: str, *, routed: bool) -> bool:
    """Whether a part is in blocks with experts (`routed`), or in those without."""
    return not routed if part.startswith("blocks.{b}.mlp.") else routed or not part.startswith(OF_EXPERTS)


def template_of(name: str) -> str:
    """The template of a part's name, with `{b}` and `{e}` for its numbers: one of `ALL` if it is a part."""
    return parse_part_name(name)[0]


def parse_part_name(name: str) -> tuple[str, int, int]:
    """A part's name as its template, its block and its expert: -1 outside of blocks, or if it is not of one expert."""
    match = _NUMBERED.match(name)
    if match is None:
        return name, -1, -1
    block, expert = match.groups()
    if expert is None:
        return "blocks.{b}." + name[match.end() :], int(block), -1
    return "blocks.{b}.experts.{e}." + name[match.end() :], int(block), int(expert)


def fill_template(template: str, block: int, expert: int) -> str:
    """A template with its numbers."""
    if "{" not in template:
        return template
    return template.replace("{b}", str(block)).replace("{e}", str(expert))
