"""Schemes: how one writer names, fuses, stacks and orders the parts of a model, as data that works in both directions.

`decompose` takes a writer's tensors apart into `parts`, `compose` puts parts together as another writer has them. So any writer's
names become any other's, and no pair of writers is written down. Schemes are the files in `scheme_files`.

[Note: how to write a scheme] A JSON object: "scheme" (the file's name without .json), "version" (1), "about", and "tensors", a
list of rules. A rule has
- "name": the tensor's name, or a list of spellings that are read; the first is written. `{b}` and `{e}` are the numbers
  of a block and of an expert, `{kind}` is `weight` or `bias`, `*` is anything.
- "parts": the names of the parts in it (`naming.parts` lists them), or null if it is left out; with "note", a sentence is said.
- "rows": how several parts lie in the first dimension: "joined" (one after the other; it is so where nothing is said), "groups:N"
  (N groups of rows, with rows of each part in every group; N is a fact such as key_heads), "alternating" (a row of each in turn).
- "transpose": true for a tensor with the last two dimensions of the parts, exchanged. All else is meant after that.
- "pairs": "query" or "key", or "both" in a tensor with values too: a head's rows are rotary pairs side by side; the part has them
  as two halves.
- "shape": facts that are the extents in which its elements lie, null for what is left, where the tensor's own shape is another.
- "stack": ["b"], ["e"] or ["b", "e"]: leading axes, in that order, for numbers that are not in the name.
- "vocabulary": true where rows may be padding behind the vocabulary: those beyond the fact `vocabulary` are cut off when it is
  read, and rows of zeros are added up to the fact `padded_vocabulary`, if there is one, when it is written.
- "when": facts and the values (or lists of values) that they must have for the rule to count.
- "beside": another tensor's name: the rule counts only where that tensor is there, with the same numbers.
- "tied": true if the tensor is written, as another name of the embedding, for a model with that as its head too.
- "zeros": with parts null: the fact that is the length of a vector of zeros, which is written for every block with a router.
- "plus": what is added to the parts' elements in the tensor, as fp32: 1 for norms that the parts have counted from one.
- "refused": for tensors in a form that cannot be taken apart, with parts null: what the form is.
- "optional": true if a model of this kind may be without it; biases of a `{kind}` are always optional.
Of two rules with names that fit, the first with facts that fit is taken; a fact is looked up in the config and in
the run's arguments
too, and one that is not known is false. When it is written, a rule makes a tensor if all of its parts are there; a part is
used once, by the first such rule. Further keys: "prefixes" are beginnings of names that are taken off when all tensors have
them; "local_names" reads names without what wraps them, and a pipeline's layers by their numbers (`local_names`); "written"
gives facts their values for writing; "together" lists parts that a model has all of or none of; "own_job" is true
for names that
only a command of its own writes, since files with them need more than tensors. "config" and "recognised" of
transformers' families are explained in `families`.

Example: {"name": "h.{b}.qkv.{kind}", "parts": ["blocks.{b}.attention.query.{kind}", "blocks.{b}.attention.key.{kind}",
"blocks.{b}.attention.value.{kind}"], "rows": "groups:query_heads"}.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.extensions import extensions
from zckpt.base.words import count, examples
from zckpt.naming.local_names import local_names, local_template
from zckpt.naming.parts import KINDS

FILES = os.path.join(os.path.dirname(__file__), "scheme_files")

_PLACES = {"{b}": r"(?P<b>\d{1,9})", "{e}": r"(?P<e>\d{1,9})", "*": ".*"}
_PLACE = re.compile(f"({'|'.join(map(re.escape, _PLACES))})")


@dataclass(frozen=True, slots=True)
class NamingRule:
    """One rule of a scheme; see [Note: how to write a scheme].

    Attributes:
        number: its place in the scheme.
        names: spellings of the tensor's name; the first is written; without `{kind}`.
        parts: names of the parts; None if the tensor is left out.
        kind: what `{kind}` stands for in them; empty where it is not used.
        rows: "joined", "alternating" or the fact that is the number of groups.
        transpose: whether the last two dimensions are exchanged.
        pairs: "query", "key", "both" or empty.
        shape: facts that are the extents in which the elements lie, None for what is left; empty for the tensor's own.
        stack: leading axes.
        vocabulary: whether rows may be padding.
        when: facts that must have one of these values.
        optional: whether a model may be without it.
        note: what is said if the tensor is left out.
        beside: the name of a tensor that must be there for the rule to count; empty for none.
        refused: the form of a tensor that cannot be taken apart; empty for none.
        tied: whether it is written for a model that ties it.
        zeros: the fact that is the number of zeros that are written; empty for none.
        plus: what is added to the parts' elements.
    """

    number: int
    names: tuple[str, ...]
    parts: tuple[str, ...] | None
    kind: str = ""
    rows: str = "joined"
    transpose: bool = False
    pairs: str = ""
    shape: tuple[str | None, ...] = ()
    stack: tuple[str, ...] = ()
    vocabulary: bool = False
    when: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, "tuple[object, ...]"])
    optional: bool = False
    note: str = ""
    beside: str = ""
    refused: str = ""
    tied: bool = False
    zeros: str = ""
    plus: float = 0

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is one part, as it is."""
        return (
            self.parts is not None
            and len(self.parts) == 1
            and not (self.stack or self.transpose or self.pairs or self.vocabulary or self.plus)
        )


class Fit(NamedTuple):
    """A tensor's name and the rules that take it.

    Attributes:
        rules: in their order.
        block: its number in the name; -1 without one.
        expert: likewise.
    """

    rules: tuple[NamingRule, ...]
    block: int
    expert: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """One writer's scheme.

    Attributes:
        name: of its file.
        about: what it is, for a person.
        rules: in the order in which they are asked.
        prefixes: beginnings of names that may be taken off.
        has_local_names: whether names are read without what wraps them.
        written: fact -> its value, or the fact that it equals, when tensors are written.
        together: parts that a model has all of or none of, such as the biases that one setting switches on.
        has_own_job: whether only a command of its own writes these names.
        config: how transformers' config is made; empty for other writers.
        recognised: what says that a model is of this family.
    """

    name: str
    about: str
    rules: tuple[NamingRule, ...]
    prefixes: tuple[str, ...] = ()
    has_local_names: bool = False
    written: Mapping[str, object] = field(default_factory=dict[str, object])
    together: tuple[tuple[str, ...], ...] = ()
    has_own_job: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recognised: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_of_transformers(self) -> bool:
        """Whether its tensors are those of a Hugging Face model."""
        return bool(self.config)

    def fits(self, names: Iterable[str]) -> dict[str, Fit | None]:
        """All tensors' names with the rules that take them; None where none does."""
        plain = list(names)
        fit = self.fitter(plain)
        return {name: fit(name) for name in plain}

    def fitter(self, names: list[str]) -> Callable[[str], Fit | None]:
        """What looks up one of the names, which are those of all tensors: the rules that take it; None where none does."""
        prefix = next((p for p in self.prefixes if names and all(name.startswith(p) for name in names)), "")
        local = local_names(names) if self.has_local_names else {name: name[len(prefix) :] for name in names}
        fit = _fitter(self, frozenset(local.values()))
        return lambda name: fit(local[name])


def _fitter(scheme: Scheme, there: frozenset[str]) -> Callable[[str], Fit | None]:
    """A function from a name to its `Fit`, which asks the rules once for all names that differ in numbers only.

    Args:
        scheme: its rules are asked.
        there: the names of all tensors.
    """
    templates = [
        (*_ends(template), template, rule)
        for rule in scheme.rules
        for template in (map(local_template, rule.names) if scheme.has_local_names else rule.names)
    ]
    known: dict[str, list[tuple[re.Pattern[str], NamingRule]]] = {}

    def fit(name: str) -> Fit | None:
        skeleton = _skeleton(name)
        near = known.get(skeleton)
        if near is None:
            likely = [  # few begin and end as it does, and no other pattern needs to be compiled
                (_pattern(template), rule)
                for head, tail, template, rule in templates
                if (name.endswith(tail) and name.startswith(head))
                or (skeleton.endswith(tail) and skeleton.startswith(head))
            ]
            near = known[skeleton] = [(p, rule) for p, rule in likely if p.fullmatch(name) or p.fullmatch(skeleton)]
        rules: dict[int, NamingRule] = {}
        numbers: dict[str, str] = {}
        for pattern, rule in near:
            match = pattern.fullmatch(name)
            if match and (not rule.beside or _with_numbers(rule.beside, match) in there):
                rules[rule.number] = rule
                numbers = {**match.groupdict(), **numbers}
        if not rules:
            return None
        return Fit(tuple(rules[n] for n in sorted(rules)), int(numbers.get("b", -1)), int(numbers.get("e", -1)))

    return fit


def _skeleton(name: str) -> str:
    """A name with 0 for every number."""
    return ".".join(["0" if word.isdecimal() else word for word in name.split(".")])


def _with_numbers(template: str, match: re.Match[str]) -> str:
    """A template with the numbers that a name has."""
    for key, number in match.groupdict().items():
        template = template.replace(f"{{{key}}}", number)
    return template


@functools.cache
def _ends(template: str) -> tuple[str, str]:
    """What a template begins and ends with, outside its places."""
    pieces = _PLACE.split(template)
    return pieces[0], pieces[-1]


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a template; a number that is there twice must be the same."""
    pattern = ""
    for piece in _PLACE.split(template):
        text = _PLACES.get(piece, re.escape(piece))
        name = re.match(r"\(\?P(<\w>)", text)
        pattern += f"(?P={name[1][1]})" if name and f"(?P{name[1]}" in pattern else text
    return re.compile(pattern)


def schemes() -> tuple[str, ...]:
    """The names of all schemes, with those of other packages: entry points of the group `zckpt.schemes`."""
    own = (name.removesuffix(".json") for name in os.listdir(FILES) if name.endswith(".json"))
    return tuple(sorted({*own, *(one.name for one in extensions("zckpt.schemes"))}))


def families() -> tuple[str, ...]:
    """The names of transformers' families, as `--to hf:NAME` takes them."""
    return tuple(name.removeprefix("hf-") for name in schemes() if name.startswith("hf-"))


@functools.cache
def scheme(name: str) -> Scheme:
    """Reads a scheme, one of `schemes`.

    Raises:
        UnsupportedError: it is another package's, and cannot be read, or its name is taken.
    """
    path = os.path.join(FILES, f"{name}.json")
    for one in extensions("zckpt.schemes"):
        if one.name != name:
            continue
        if os.path.exists(path):
            raise one.broken(f"there is a scheme {name!r} already")
        try:
            with open(one.file(f"{name}.json"), "rb") as file:
                found = parse_scheme(json.load(file))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise one.broken(f"{type(error).__name__}: {error}") from error
        if found.name != name:
            raise one.broken(f"the scheme in the file is called {found.name!r}")
        return found
    with open(path, "rb") as file:
        return parse_scheme(json.load(file))


def parse_scheme(data: Mapping[str, Any]) -> Scheme:
    """The scheme that a file's JSON says."""
    rules: list[NamingRule] = []
    for written in data["tensors"]:
        names = written["name"] if isinstance(written["name"], list) else [written["name"]]
        for kind in KINDS if any("{kind}" in text for text in (*names, *(written["parts"] or ()))) else ("",):
            rules.append(_rule(len(rules), written, names, kind))
    keys = {key: data.get(key, {}) for key in ("written", "config", "recognised")}
    return Scheme(
        data["scheme"], data["about"], tuple(rules), tuple(data.get("prefixes", ())), data.get("local_names", False),
        together=tuple(map(tuple, data.get("together", ()))), has_own_job=data.get("own_job", False), **keys,
    )  # fmt: skip


def _rule(number: int, written: Mapping[str, Any], names: Iterable[str], kind: str) -> NamingRule:
    parts = written["parts"]
    when = {
        fact: tuple(value) if isinstance(value, list) else (value,) for fact, value in written.get("when", {}).items()
    }
    return NamingRule(
        number,
        tuple(text.replace("{kind}", kind) for text in names),
        None if parts is None else tuple(text.replace("{kind}", kind) for text in parts),
        kind,
        written.get("rows", "joined").removeprefix("groups:"),
        written.get("transpose", False),
        written.get("pairs", ""),
        tuple(written.get("shape", ())),
        tuple(written.get("stack", ())),
        written.get("vocabulary", False),
        when,
        kind == "bias" or written.get("optional", False),
        written.get("note", ""),
        written.get("beside", ""),
        written.get("refused", ""),
        written.get("tied", False),
        written.get("zeros", ""),
        written.get("plus", 0),
    )


def scheme_of(names: Iterable[str], path: str, prefer: str = "") -> Scheme:
    """The scheme that takes all tensors of these names; of several, the one that lacks fewest, writers' before families'.

    Hugging Face families share names that mean other parts: what one of them needs, beside what is there, tells them apart.

    Args:
        names: of all tensors.
        path: of the checkpoint, for errors.
        prefer: a scheme that is taken if it fits.

    Raises:
        UnsupportedError: none does; says what the nearest one does not take.
    """
    names = list(names)
    alike = list({_skeleton(name): name for name in reversed(names)}.values())

    def asked(own: Scheme) -> list[str]:
        return names if own.has_local_names else alike

    found: list[tuple[bool, int, int, str]] = []
    order = sorted(schemes(), key=lambda name: name != prefer)
    for name in order:
        own = scheme(name)
        rules = _all_taken(own.fitter(names), asked(own))
        if rules is not None and name == prefer:
            return own
        if rules is not None:
            found.append((own.is_of_transformers, _lacking(own, rules), own.recognised.get("rank", 9), name))
    if found:
        return scheme(min(found)[3])
    nearest = min(order, key=lambda name: [*map(scheme(name).fitter(names), asked(scheme(name)))].count(None))
    left = [name for name, fit in scheme(nearest).fits(names).items() if fit is None]
    of_all = len(left) == len(names)
    writers = ", ".join(name for name in schemes() if not name.startswith("hf-"))
    raise UnsupportedError(
        "no scheme of names takes its tensors" if of_all else f"some tensors have no place in the scheme {nearest}",
        file=path, found=f"{count(len(left), 'tensor')} such as {examples(left)}" if of_all else examples(left),
        expected=f"names of one of these: {writers}, or of a Hugging Face family ({', '.join(families())})",
        remedy="Leave --to out to keep the names." if of_all else "Leave them out with --exclude, or leave out --to.",
    )  # fmt: skip


def _all_taken(fit: Callable[[str], Fit | None], names: Iterable[str]) -> set[int] | None:
    """The numbers of the rules that take tensors of these names; None if a tensor is taken by none."""
    used: set[int] = set()
    for name in names:
        taken = fit(name)
        if taken is None:
            return None
        used.update(rule.number for rule in taken.rules)
    return used


def _lacking(own: Scheme, used: set[int]) -> int:
    """How many rules took no tensor though every model of a scheme has it, whatever its facts."""
    needed = {rule.number for rule in own.rules if rule.parts and not (rule.optional or rule.when or rule.beside)}
    return len(needed - used)
