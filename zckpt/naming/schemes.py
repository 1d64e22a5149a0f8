"""Schemes: how one writer names, fuses, stacks and orders the parts of a model, as data that works in both directions.

`decompose` takes a writer's tensors apart into `parts`, `compose` puts parts together as another writer has them. So any writer's
names become any other's, and no pair of writers is written down. Writers are the files in `scheme_files`, Hugging Face families
those in `family_files`, one each; `add_family` adds a user's.

[Note: how to write a scheme] A JSON object: "scheme" (the file's name without .json; "family" for a Hugging Face family),
"about", and "tensors", a table: each line is [name, parts, how], where "how" may be left out.
- name: the tensor's name, or a list of spellings that are read; the first is written. `{b}` and `{e}` are the numbers
  of a block and of an expert, `{r}` that of a block in a row of some, `{kind}` is `weight` or `bias`, `*` is anything.
- parts: the part in it, or a list of the parts (`naming.parts` lists them), or null if it is left out; "=" for a part
  that no other program has, which is the tensor as it is. With a name that ends in `*`, it is all such tensors.
"how" is an object with any of these:
- "note": of a tensor that is left out: the sentence that is said. With "=", it is left out where names of another program are
  written.
- "rows": how several parts lie in the first dimension: "joined" (one after the other; it is so where nothing is said), "groups:N"
  (N groups of rows, with rows of each part in every group; N is a fact such as key_heads), "alternating" (a row of each in turn).
- "widths": for several parts that have not as many rows each: facts, or products of facts with *, that the rows are as.
- "transpose": true for a tensor with the last two dimensions of the parts, exchanged. All else is meant after that.
- "pairs": "query" or "key", or "both" in a tensor with values too: a head's rows are rotary pairs side by side; the part has them
  as two halves.
- "shape": facts that are the extents in which its elements lie, null for what is left, where the tensor's own shape is another.
- "stack": ["b"], ["e"] or ["b", "e"]: leading axes, in that order, for numbers that are not in the name.
- "inputs", "axis", "root", "over", "rounded", "every", "first": see [Note: arrays of Flax] in `decompose`.
- "vocabulary": true where rows may be padding behind the vocabulary: those beyond the fact `vocabulary` are cut off when it is
  read, and rows of zeros are added up to the fact `padded_vocabulary`, if there is one, when it is written.
- "when": facts and the values (or lists of values) that they must have for the rule to count.
- "beside": another tensor's name: the rule counts only where that tensor is there, with the same numbers.
- "tied": true if the tensor is written, as another name of the embedding, for a model with that as its head too.
- "zeros": with parts null: the fact that is the length of a vector of zeros, which is written for every block with a router.
- "plus": what is added to the parts' elements in the tensor, as fp32: 1 for norms that the parts have counted from one.
- "refused": for tensors in a form that cannot be taken apart, with parts null: what the form is; "note" says what to do.
- "some": true for a tensor that only some blocks of a kind have.
- "varies": true for a tensor that has not the same shape in all blocks.
- "optional": true if a model of this kind may be without it; biases of a `{kind}` are always optional.
Of two rules with names that fit, the first with facts that fit is taken; a fact is looked up in the config and in the run's
arguments too, and one that is not known is false. When it is written, a rule makes a tensor if all of its parts are there; a
part is used once, by the first such rule. Further keys: "prefixes" are beginnings of names that are taken off when all tensors
have them; "local_names" reads names without what wraps them, and a pipeline's layers by their numbers, "flax_names" as Flax's
NNX has them too (`local_names`); "written" gives facts their values for writing; "together" lists parts that a model has all of
or none of; "kinds" lists beginnings of parts that tell kinds of blocks apart, several of one kind as a list; "own_job" is true
for names that only a command of its own writes, since files with them need more than tensors. A family or a writer with "like"
has all that another one has, where it says nothing else: objects are joined key by key (null takes a key away, but in "fixed"),
lines of "tensors" replace those with the same first part (a name that is null takes them away); "under" says where its names
are here: a beginning there -> the one here. "memory" says where a family's tensors are in memory, in any version of
transformers: a beginning of names on the hub -> one or several; "also" says it of other names that files on the hub have.
"stacks" tells the stacks of blocks of a model with several: a beginning of names -> the key of the config that says how many
blocks, perhaps with `-1` behind it, or that lists one thing for each. "config" and "recognised" are explained in `families`,
"rotary" in `rotary`, "megatron" in `megatron_arguments`, "defaults" and "names" in `config_keys`; docs/families.md shows how to
add one.

Example: ["h.{b}.qkv.{kind}", ["blocks.{b}.attention.query.{kind}", "blocks.{b}.attention.key.{kind}",
"blocks.{b}.attention.value.{kind}"], {"rows": "groups:query_heads"}].
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
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.extensions import Extension, extensions
from zckpt.base.words import count, examples
from zckpt.naming.local_names import flax_names, local_names, local_template
from zckpt.naming.parts import KINDS, is_part, own_part
from zckpt.naming.scheme_tables import add_to_table, other_spellings, parts_of_line

FILES = os.path.join(os.path.dirname(__file__), "scheme_files")
FAMILIES = os.path.join(os.path.dirname(__file__), "family_files")
_MOST_BYTES = 1 << 20
"""The most bytes of a user's file of a family; zckpt's own have some thousand."""

_PLACES = {"{b}": r"(?P<b>\d{1,9})", "{e}": r"(?P<e>\d{1,9})", "{r}": r"(?P<r>\d{1,9})", "*": ".*"}
_OF_MANY = "own."
"""The beginning of the parts that are all tensors with names that begin alike."""
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
        widths: facts that the rows of the parts are as; empty where these are as many, or as the heads.
        some: whether only some blocks of a kind have it.
        inputs, axis, root, over, rounded, every, first: how it lies in an array of Flax, with `inputs` of 0 or more; see [Note:
            arrays of Flax] in `decompose`.
        varies: whether its shape is not the same in all blocks.
        on_the_hub: how many of the names, from the first on, are ones that files on the hub have.
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
    widths: tuple[str, ...] = ()
    some: bool = False
    inputs: int = -1
    axis: int = 0
    root: str = ""
    over: str = ""
    rounded: bool = False
    every: int = 1
    first: int | str = 0
    varies: bool = False
    on_the_hub: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is one part, as it is."""
        return (
            self.parts is not None
            and len(self.parts) == 1
            and not (
                self.stack or self.transpose or self.pairs or self.vocabulary or self.plus or self.root or self.over
            )
            and self.inputs < 0
        )

    @property
    def is_of_many(self) -> bool:
        """Whether it takes all tensors with names that begin alike, each as a part of its own."""
        return self.parts is not None and self.parts[0].endswith("*")

    def part_of_many(self, name: str) -> str:
        """The part of one of these tensors: its name on the hub."""
        match = next(filter(None, (_pattern(text[:-1]).match(name) for text in self.names)))
        return _OF_MANY + _with_numbers(self.names[0][:-1], match) + name[match.end() :]

    def name_of_many(self, part: str) -> str | None:
        """The tensor's name for the part of one of these; None for any other part."""
        name = part.removeprefix(_OF_MANY)
        return name if self.is_of_many and name != part and _pattern(self.names[0][:-1]).match(name) else None


class Fit(NamedTuple):
    """A tensor's name and the rules that take it.

    Attributes:
        rules: in their order.
        block, expert: their numbers in the name; -1 without one.
        place: that of a block in a row of some.
    """

    rules: tuple[NamingRule, ...]
    block: int
    expert: int
    place: int = 0


@dataclass(frozen=True, slots=True)
class Scheme:
    """One writer's scheme.

    Attributes:
        name: of its file.
        about: what it is, for a person.
        rules: in the order in which they are asked.
        prefixes: beginnings of names that may be taken off.
        has_local_names: whether names are read without what wraps them.
        has_flax_names: whether names are read as Flax's NNX has them too.
        written: fact -> its value, or the fact that it equals, when tensors are written.
        together: parts that a model has all of or none of, such as the biases that one setting switches on.
        kinds: beginnings of parts that tell kinds of blocks apart; several of one kind.
        has_own_job: whether only a command of its own writes these names.
        config: how transformers' config is made; empty for other writers.
        recognised: what says that a model is of this family.
        rotary: how its rotary positions are, where they are not as in most models.
        megatron: what Megatron-Core's arguments say of it; None if nobody has said it.
        defaults: what its class in transformers takes where a config says nothing.
        spellings: other names of keys of its config -> the class's own.
        stacks: beginnings of names -> the key of the config that says how many blocks are there.
    """

    name: str
    about: str
    rules: tuple[NamingRule, ...]
    prefixes: tuple[str, ...] = ()
    has_local_names: bool = False
    has_flax_names: bool = False
    written: Mapping[str, object] = field(default_factory=dict[str, object])
    together: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    has_own_job: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recognised: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rotary: Mapping[str, Any] = field(default_factory=dict[str, Any])
    megatron: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_of_transformers(self) -> bool:
        """Whether its tensors are those of a Hugging Face model."""
        return bool(self.config)

    def fits(self, names: Iterable[str]) -> dict[str, Fit | None]:
        """Every tensor's name with the rules that take it; None if no rule does."""
        plain = list(names)
        fit = self.fitter(plain)
        return {name: fit(name) for name in plain}

    def fitter(self, names: list[str]) -> Callable[[str], Fit | None]:
        """A function that returns the rules for one of the names, which are those of all tensors; None if no rule takes
        it.
        """
        if self.has_flax_names:
            local = flax_names(names, self.prefixes)
        else:
            prefix = next((p for p in self.prefixes if names and all(name.startswith(p) for name in names)), "")
            local = local_names(names) if self.has_local_names else {name: name[len(prefix) :] for name in names}
        fit = _fitter(self, frozenset(local.values()))
        return lambda name: fit(local[name])


def _fitter(scheme: Scheme, there: frozenset[str]) -> Callable[[str], Fit | None]:
    """A function from a name to its `Fit`, which asks the rules once for all names that differ in numbers only; `there`:
    all names.
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
        if near is None or not any(pattern.fullmatch(name) for pattern, _ in near):  # or has other numbers of its own
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
        block, expert, place = (int(numbers.get(key, usual)) for key, usual in (("b", -1), ("e", -1), ("r", 0)))
        return Fit(tuple(rules[n] for n in sorted(rules)), block, expert, place)

    return fit


def _skeleton(name: str) -> str:
    """A name with every number replaced by 0."""
    return ".".join(["0" if word.isdecimal() else word for word in name.split(".")])


def _with_numbers(template: str, match: re.Match[str]) -> str:
    """A template with the numbers that a name has."""
    for key, number in match.groupdict().items():
        template = template.replace(f"{{{key}}}", number)
    return template


@functools.cache
def _ends(template: str) -> tuple[str, str]:
    """The beginning and the end of a template, outside its places."""
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
    """The names of all schemes, with those of other packages (entry points of the group `zckpt.schemes`) and of the user."""
    own = (name.removesuffix(".json") for name in os.listdir(FILES) if name.endswith(".json"))
    return tuple(sorted({*own, *(f"hf-{name}" for name in _own_families()), *_added, *_extensions()}))


@functools.cache
def _own_families() -> tuple[str, ...]:
    return tuple(name.removesuffix(".json") for name in os.listdir(FAMILIES) if name.endswith(".json"))


def _extensions() -> dict[str, Extension]:
    return {one.name: one for one in extensions("zckpt.schemes")}


def families() -> tuple[str, ...]:
    """The names of Hugging Face families, as `--to hf:NAME` takes them."""
    return tuple(name.removeprefix("hf-") for name in schemes() if name.startswith("hf-"))


def family_of(model_type: object) -> Scheme | None:
    """The family with configs that have this `model_type`; None if it is none of those known."""
    if not isinstance(model_type, str):
        return None
    if (
        f"hf-{model_type}" in schemes()
        and (own := scheme(f"hf-{model_type}")).config["fixed"]["model_type"] == model_type
    ):
        return own  # most are named so: the others need not be read
    name = _by_type(len(_added)).get(model_type)
    return None if name is None else scheme(name)


@functools.lru_cache(maxsize=1)
def _by_type(_: int) -> dict[str, str]:
    """`model_type` -> the scheme, for each number of families that users added."""
    found: dict[str, str] = {}
    for name in families():
        own = scheme(f"hf-{name}")
        for kind in (own.config["fixed"]["model_type"], *own.recognised.get("model_type", ())):
            found.setdefault(kind, own.name)
    return found


_added: dict[str, Mapping[str, Any]] = {}
"""Schemes of users' families by name -> what their files say."""


def add_family(said: str | os.PathLike[str] | Mapping[str, Any]) -> str:
    """Makes a family of models known to this process: by its file (`docs/families.md`), or by what that says.

    Args:
        said: the path of the file, or the object in it.

    Returns:
        Its name, as `--to hf:NAME` takes it.

    Raises:
        UsageError: the file cannot be understood, or its name or `model_type` is taken.

    Example:
        >>> own = {"config": {"fixed": {"model_type": "example", "architectures": ["ExampleForCausalLM"]}}}
        >>> zckpt.add_family({"family": "example", "about": "Llama's names and rows", "like": "llama", **own})
        'example'
    """
    path = "" if isinstance(said, Mapping) else os.fspath(said)
    data: Any = said
    try:
        if path:
            with open(path, "rb") as file:
                data = json.loads(file.read(_MOST_BYTES))
        name = f"hf-{data['family']}"
        if _added.get(name) == data:
            return str(data["family"])
        if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,60}", data["family"]) is None:
            raise ValueError(f"the name {data['family']!r}: only small letters, digits, '.', '_' and '-'")
        own = parse_scheme(_whole_data(data))
        _check_family(own)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(path, f"no {error}" if isinstance(error, KeyError) else str(error)) from error
    known = family_of(own.config["fixed"]["model_type"])
    if name in schemes() or known is not None:
        taken = (
            f"the family {data['family']}" if name in schemes() else f"model_type {own.config['fixed']['model_type']!r}"
        )
        raise _unusable(path, f"{taken}, which zckpt has already")
    _added[name] = data
    return str(data["family"])


def recorded_family(name: str = "", *, model_type: object = None) -> dict[str, object]:
    """The manifest's record of a user's family, so that `verify` knows it too; empty for zckpt's families."""
    own = family_of(model_type)
    name = name or (own.name if own is not None else "")
    return {"family": dict(_added[name])} if name in _added else {}


def _check_family(own: Scheme) -> None:
    """Raises ValueError for a family's table that contradicts itself."""
    fixed = own.config["fixed"]
    if not isinstance(fixed["model_type"], str) or not isinstance(fixed["architectures"][0], str):
        raise ValueError("config, fixed: model_type and architectures are not text")
    for rule in own.rules:
        if unknown := {part for part in rule.parts or () if not is_part(part)}:
            raise ValueError(f"tensors, {rule.names[0]!r}: no part {examples(unknown)}")
        wanted = set(re.findall(r"\{(\w)\}", "".join(rule.parts or ())))
        for name in rule.names if rule.parts is not None else ():
            if wanted != set(re.findall(r"\{(\w)\}", name)) | set(rule.stack):
                raise ValueError(f"tensors, {name!r}: its numbers are not those of its parts")
    if not isinstance(own.config["facts"], dict) or not own.rules:
        raise ValueError("no tensors, or no facts of the config")


def _unusable(path: str, found: str) -> UsageError:
    return UsageError(
        "the file of a family of models cannot be used", file=path, found=found,
        expected="a JSON object with family, about, tensors and config", remedy="Write it as docs/families.md shows.",
    )  # fmt: skip


@functools.cache
def scheme(name: str) -> Scheme:
    """Reads a scheme, one of `schemes`. Raises UnsupportedError if it is another package's, and cannot be read, or its
    name is taken.
    """
    if name in _added:
        return parse_scheme(_whole_data(_added[name]))
    is_family = name.startswith("hf-")
    path = os.path.join(FAMILIES if is_family else FILES, f"{name.removeprefix('hf-')}.json")
    one = _extensions().get(name)
    if one is None:
        return parse_scheme(_whole_data(_read(path)))
    if os.path.exists(path):
        raise one.broken(f"there is a scheme {name!r} already")
    try:
        found = parse_scheme(_whole_data(_read(one.file(f"{name}.json"))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise one.broken(f"{type(error).__name__}: {error}") from error
    if found.name != name:
        raise one.broken(f"the scheme in the file is called {found.name!r}")
    return found


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        data: dict[str, Any] = json.load(file)
    return data


def _whole_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The contents of a file, with those of the family, or of the writer, that it is like."""
    if "like" not in data:
        return data
    if "family" in data and data["like"] not in _own_families():
        raise ValueError(f"like {data['like']!r}, which is not a family of zckpt")
    home = FAMILIES if "family" in data else FILES
    return add_to_table(_whole_data(_read(os.path.join(home, f"{data['like']}.json"))), data)


def parse_scheme(data: Mapping[str, Any]) -> Scheme:
    """The scheme in a file's JSON."""
    rules: list[NamingRule] = []
    for line in data["tensors"]:
        written = line if isinstance(line, dict) else dict(zip(("name", "parts"), line), **(line[2:] or [{}])[0])
        names = written["name"] if isinstance(written["name"], list) else [written["name"]]
        also = other_spellings(names[:1], data.get("also", {}))
        names = [*names[:1], *also, *names[1:], *other_spellings(names, data.get("memory", {}))]
        written["parts"] = None if written["parts"] is None else parts_of_line(line)
        if written["parts"] == ["="]:
            written["parts"] = [_OF_MANY + names[0] if names[0].endswith("*") else own_part(names[0])]
        for kind in KINDS if any("{kind}" in text for text in (*names, *(written["parts"] or ()))) else ("",):
            rules.append(_rule(len(rules), written, names, kind, 1 + len(also)))
    keys = {key: data.get(key, {}) for key in ("written", "config", "recognised", "rotary", "defaults")}
    return Scheme(
        f"hf-{data['family']}" if "family" in data else data["scheme"], data["about"], tuple(rules),
        tuple(data.get("prefixes", ())), data.get("local_names", False), data.get("flax_names", False),
        together=tuple(map(tuple, data.get("together", ()))),
        kinds=tuple((one,) if isinstance(one, str) else tuple(one) for one in data.get("kinds", ())),
        has_own_job=data.get("own_job", False),
        megatron=data.get("megatron"), spellings=data.get("names", {}), stacks=data.get("stacks", {}), **keys,
    )  # fmt: skip


def _rule(number: int, written: Mapping[str, Any], names: Iterable[str], kind: str, on_the_hub: int) -> NamingRule:
    """A rule, with what its line says under its fields' own names; raises ValueError for a key that no rule has."""
    how: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in written.items()}
    parts = how.pop("parts")
    when = {fact: tuple(value) if isinstance(value, list) else (value,) for fact, value in how.pop("when", {}).items()}
    name = how.pop("name")
    if unknown := sorted(how.keys() - NamingRule.__dataclass_fields__.keys()):
        raise ValueError(f"tensors, {name!r}: no key {examples(unknown)}")
    how |= {
        "rows": how.get("rows", "joined").removeprefix("groups:"),
        "optional": kind == "bias" or how.get("optional", False),
        "names": tuple(text.replace("{kind}", kind) for text in names),
        "parts": None if parts is None else tuple(text.replace("{kind}", kind) for text in parts),
    }
    return NamingRule(number, kind=kind, when=when, on_the_hub=on_the_hub, **how)


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
    if any(name.startswith("vision_language_adapter.") for name in left):
        raise UnsupportedError(
            "is a model that sees in Mistral's own form, which zckpt does not rename", file=path, found=examples(left),
            expected="transformers' names, or the text model alone",
            remedy="Convert it with transformers' convert_mistral3_weights_to_hf.py or convert_pixtral_weights_to_hf.py. For the "
            "text model alone, pass its config.json with --config, and --exclude 'vision_*' --exclude 'patch_merger.*' "
            "--exclude 'pre_mm_*'. to-gguf --mmproj writes the images' side.",
        )  # fmt: skip
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
    """The number of rules that took no tensor, though every model of the scheme has it, whatever its facts."""
    needed = {rule.number for rule in own.rules if rule.parts and not (rule.optional or rule.when or rule.beside)}
    return len(needed - used)
