"""The table of families in docs/huggingface.md says what the schemes say. `ZCKPT_GOLDEN=rewrite` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

from zckpt.naming.schemes import Scheme, families, scheme, schemes

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
TITLES = {
    "megatron-core": "Megatron-Core",
    "megatron": "Megatron-DeepSpeed, older Megatron-LM",
    "gpt-neox": "GPT-NeoX",
    "torchtitan": "torchtitan",
}


def has_place(writer: Scheme, family: Scheme) -> bool:
    """Whether a program's names have a place for every part that the family needs, and it is known to compute such models."""
    if "cannot" in (family.megatron or {}) or (writer.name != "megatron-core" and "rank" not in family.recognised):
        return False
    if writer.name == "megatron-core":
        writer = scheme((family.megatron or {}).get("scheme", writer.name))
    taken = {part for rule in writer.rules for part in rule.parts or ()}
    needed = {part for rule in family.rules if not rule.optional for part in rule.parts or ()}
    return needed - {"head.weight"} <= taken


def table() -> str:
    writers = sorted(
        (name for name in schemes() if not name.startswith("hf-") and not scheme(name).has_own_job),
        key=lambda name: (list(TITLES).index(name) if name in TITLES else len(TITLES), name),
    )
    rows = [["`--to`", "result", *(TITLES.get(name, name) for name in writers)]]
    rows.append(["---"] * len(rows[0]))
    for name in families():
        family = scheme(f"hf-{name}")
        has = ["yes" if has_place(scheme(writer), family) else "" for writer in writers]
        rows.append([f"`hf:{name}`", f"`{family.config['fixed']['architectures'][0]}`", *has])
    return "\n" + "".join("| " + " | ".join(row) + " |\n" for row in rows) + "\n"


def test_the_table_is_that_of_the_schemes() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("ZCKPT_GOLDEN") == "rewrite":
        PAGE.write_text(before + BEGIN + table() + END + after)
        return
    assert found == table(), "write the table with ZCKPT_GOLDEN=rewrite"


def test_every_family_has_a_program_or_says_why_not() -> None:
    for family in (scheme(f"hf-{name}") for name in families()):
        programs = any(has_place(scheme(writer), family) for writer in schemes() if writer[:3] != "hf-")
        assert programs is ("cannot" not in (family.megatron or {})), family.name
