"""How a command is declared: the options of its job arrive as one value, and help shows them in groups.

For the modules of commands. A parameter called `asked` stands for what the command's job can be asked, by `jobs.groups`. One with
a dataclass as its type stands for its fields, which are declared as those of jobs are. Others are declared as typer has it. At
the end are arguments and options that many commands share, beside those of their jobs: input, output, and what is printed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.cli.commands import COMMANDS
from zckpt.cli.output import Console
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.jobs.declarations import Job
from zckpt.jobs.groups import OUTPUT, option


def split_rename(text: str) -> tuple[str, str]:
    r"""`REGEX=REPL` at its first `=`; one that is escaped (`\=`) or opens a lookaround (`(?=`, `(?<=`) does not count.

    Raises:
        UsageError: there is no such `=`.
    """
    found = re.fullmatch(r"((?:\(\?<?=|\\.|[^\\=])*)=(.*)", text, re.DOTALL)
    if not found:
        remedy = r"Put '=' between pattern and replacement: --rename '^model\.='."
        raise UsageError(f"--rename {text!r} has no '='", expected="REGEX=REPL", remedy=remedy)
    return found[1], found[2]


def size_in_bytes(text: str | int) -> int:
    """A typer parser of sizes: `8MiB`, `500MB`, `1.5G`, `1GB/s` or a plain number, as bytes."""
    from zckpt.base.sizes import to_bytes

    try:
        nbytes = to_bytes(str(text).strip().upper().removesuffix("/S"))
    except UsageError:
        nbytes = 0
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is not a size; use bytes or a form such as 12GB")
    return nbytes


def positive(value: int | None) -> int | None:
    """A typer callback for whole numbers."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is less than 1")
    return value


def split_numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.5,0.3,0.2") from error


_SHORT = ("fp32", "fp16", "bf16")


def named_dtype(text: str) -> DType:
    """A typer parser of dtypes, by any of their names: `bf16`, `torch.bfloat16`."""
    from zckpt.jobs.casting import to_dtype

    try:
        return to_dtype(text)
    except UsageError as error:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, _SHORT))}.") from error


DTYPE: dict[str, Any] = {"parser": named_dtype, "metavar": f"<{'|'.join(_SHORT)}>"}
"""What typer is told of an option that takes a dtype."""

DONE = "0 done, 2 error"
"""The exit status of commands that write something."""


class Command(TyperCommand):
    """A command with a help that shows arguments, then options under the `rich_help_panel` that each declares."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What the usage line shows after the command's name."""
        params: list[Any] = self.get_params(ctx)
        arguments = [param.metavar for param in params if param.param_type_name == "argument"]
        return [*arguments, "[OPTIONS]"] if ctx.allow_interspersed_args else ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the groups, in the order in which the command declares them; --help is in the last one."""
        groups: dict[str, list[tuple[str, str]]] = {}
        params: list[Any] = self.get_params(ctx)
        for param in params:
            if param.param_type_name == "argument":
                groups.setdefault("Arguments", []).append((param.metavar, param.help))
            elif (record := param.get_help_record(ctx)) is not None:
                last = list(groups)[-1] if groups else "Options"
                groups.setdefault(param.rich_help_panel or last, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


_DECLARED: dict[str, tuple[Callable[..., None], Job[Any] | None, frozenset[str], dict[str, Any]]] = {}
"""Name of a command -> its function, its job, options of the job that it does not have, and what typer is told of it."""


def command(
    name: str,
    *,
    about: str,
    example: str,
    job: Job[Any] | None = None,
    hidden: frozenset[str] = frozenset(),
    status: str = DONE,
    passes_on: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command; a decorator.

    Args:
        name: of the command, which `commands.COMMANDS` lists.
        about: what it does, in a sentence or two.
        example: one call, with a comment if needed.
        job: the one with the options that it has, as its parameter `asked`.
        hidden: options of the job that it does not have.
        status: what each exit status means.
        passes_on: everything after the first argument is an argument too, also what looks like an option.
    """
    epilog = f"Exit status: {status}\n\nExample: {example}"
    told = {"help": about, "epilog": epilog, "context_settings": {"allow_interspersed_args": not passes_on}}

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        _DECLARED[name] = function, job, hidden, told
        return function

    return declare


def build_command(name: str) -> Any:
    """The command of this name, in typer's form. Its module must be imported."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    function, job, hidden, told = _DECLARED[name]
    add = app.command(name, cls=Command, short_help=COMMANDS[name][1], **told)
    add(expand_groups(function, job, hidden))
    return typer.main.get_command(app)


_Option = tuple[type, inspect.Parameter, Callable[[Any], object]]
"""An option: the class with the field of its name, its declaration for typer, and what makes the field's value of typer's."""


def expand_groups(
    function: Callable[..., None], job: Job[Any] | None = None, hidden: frozenset[str] = frozenset()
) -> Callable[..., None]:
    """The same function with the options of its job and of its groups as keyword parameters, for typer."""
    hints = _hints_of(function)
    made: dict[str, tuple[Callable[..., object], list[_Option]]] = {}
    if job is not None:
        made["asked"] = job.ask, [_option_of(*one, job) for one in job.options() if one[1].name not in hidden]
    for name, kind in hints.items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            made[name] = kind, [_option_of(kind, one) for one in dataclasses.fields(kind) if one.metadata]
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in made:
            parameters += [own for _, own, _ in made[name][1]]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(**values: object) -> None:
        arguments = {name: value for name, value in values.items() if name in hints}
        for name, (make, options) in made.items():
            arguments[name] = make(**_fields_of(options, values))
        function(**arguments)

    call.__signature__ = inspect.Signature(_in_order(parameters))  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _hints_of(function: Callable[..., None]) -> dict[str, Any]:
    """The types of a function's parameters, without `asked`, which typer does not see."""
    scope = inspect.unwrap(function).__globals__
    return {
        name: eval(of, scope) if isinstance(of, str) else of
        for name, of in function.__annotations__.items()
        if name not in ("asked", "return")
    }


def _fields_of(options: list[_Option], values: Mapping[str, object]) -> dict[str, Any]:
    """The fields that these options give, by the values on the command line."""
    found: dict[str, Any] = {}
    parts: dict[type, dict[str, Any]] = {}
    for holder, parameter, read in options:
        own = parts.setdefault(holder, {}) if hasattr(holder, "as_fields") else found
        own[parameter.name] = read(values[parameter.name])
    for kind, its in parts.items():
        found |= kind(**its).as_fields()
    return found


_LATE = ("overflow", "layer_names", "dry_run", "overwrite", "allow_unknown_layout", "sign")
"""Options that come last under their heading, in this order; the options of printing come after them."""


def _in_order(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The options sorted by heading, headings in the order of their first options; `allow_unknown_layout` counts for no
    heading.
    """
    panels = [_panel_of(one) for one in parameters if one.name != "allow_unknown_layout"]

    def place(one: inspect.Parameter) -> tuple[int, int]:
        panel = _panel_of(one)
        rank = _LATE.index(one.name) + 1 if one.name in _LATE else (len(_LATE) + 1) * (panel == OUTPUT)
        return panels.index(panel), rank

    return sorted(parameters, key=place)


def _panel_of(parameter: inspect.Parameter) -> str:
    """The heading of an option; empty for an argument."""
    (info,) = getattr(parameter.annotation, "__metadata__", (None,))
    return getattr(info, "rich_help_panel", None) or ""


def _as_given(value: Any) -> object:
    return value


_KINDS: Mapping[str, tuple[Any, dict[str, Any], Callable[[Any], object]]] = {
    "text": (str, {}, _as_given),
    "texts": (list[str], {}, tuple),
    "flag": (bool, {}, _as_given),
    "number": (int, {}, _as_given),
    "positive": (int, {"callback": positive}, _as_given),
    "real": (float, {}, _as_given),
    "reals": (str, {}, lambda value: None if value is None else split_numbers(value)),
    "dtype": (str, DTYPE, _as_given),
    "size": (int, {"parser": size_in_bytes, "show_default": False}, _as_given),
    "renames": (list[str], {}, lambda value: tuple(map(split_rename, value))),
}
"""Kind of value -> its type, its declaration for typer, and the function that gives its value for the job."""


def _option_of(holder: type, field: dataclasses.Field[Any], job: Job[Any] | None = None) -> _Option:
    """An option as typer has it, with the default and the words that a job has of its own."""
    said, of = field.metadata, field.metadata["of"]
    own = () if job is None else job.words.get(field.name, ())
    text, panel = own[0] if own else said["help"], own[1] if len(own) > 1 else said["panel"]
    default: Any = field.default if job is None else job.usual.get(field.name, field.default)
    if of == "precision" or isinstance(of, tuple):
        kind, more, read, default = _choice(of, default)
    else:
        kind, more, read = _KINDS[of]
        if kind == list[str]:
            default = list(default)
        elif of == "dtype":
            default = default and SHORT_NAMES[default]
    if default is None:
        kind = kind | None
    told = {"metavar": said["metavar"], "help": text, "rich_help_panel": panel, **more, **said["more"]}
    annotated: Any = Annotated
    annotation = annotated[kind, typer.Option(*said["flag"].split(), **told)]
    empty = inspect.Parameter.empty if default is dataclasses.MISSING else default
    parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=empty)
    return holder, parameter, read


def _choice(of: Any, default: Any) -> tuple[Any, dict[str, Any], Callable[[Any], object], Any]:
    """As `_KINDS`, for an option that takes words: one of them, several if the last is `...`, or a dtype or "keep"."""
    literal: Any = Literal
    if of == "precision":
        return literal[("keep", *_SHORT)], {}, _precision, "keep"
    if of[-1] == "...":
        # typer has no lists of a Literal
        words: Any = Enum("Choice", {word: word for word in of[:-1]}, type=str)  # type: ignore[misc]
        return list[words] | None, {}, _distinct, None
    return literal[of], {}, _as_given, default


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.value for one in values or ()))


def _precision(value: str) -> DType | None:
    return None if value == "keep" else named_dtype(value)


output = partial(typer.Option, rich_help_panel=OUTPUT)

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CKPT", help="Checkpoint, tag or trainer output directory, or weights.", show_default=False),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="A file (.safetensors, .bin, .pt), a directory for shards, or an address (s3://..., hf://OWNER/NAME).",
        show_default=False,
    ),
]
OutDirectory = Annotated[
    str, typer.Argument(metavar="OUT", help="Directory for the output, or an address.", show_default=False)
]
DryRun = Annotated[bool, output("--dry-run", help="Print what would be written, and write nothing.")]


@dataclass(frozen=True, repr=False, eq=False)
class Shown:
    """What a command prints. It has no repr and no comparison, which would cost time whenever zckpt starts."""

    as_json: bool = option(False, "--json", "flag", "Print one JSON object on stdout.", OUTPUT)
    quiet: bool = option(False, "--quiet", "flag", "Print errors only.", OUTPUT)
    began: float = field(init=False, default_factory=lambda: time.perf_counter())

    @property
    def seconds(self) -> float:
        """Since the command began, its planning included."""
        return time.perf_counter() - self.began

    @property
    def console(self) -> Console:
        """Where the command prints."""
        return Console(as_json=self.as_json, quiet=self.quiet)


@dataclass(frozen=True, repr=False, eq=False)
class ShownProgress(Shown):
    """As `Shown`, for commands that run for long and show their progress."""

    progress_form: Literal["bar", "json"] = option(
        "bar", "--progress", ("bar", "json"), "A bar in a terminal, or JSON lines on stderr for programs.", OUTPUT
    )

    @property
    def console(self) -> Console:  # noqa: D102
        return Console(as_json=self.as_json, quiet=self.quiet, progress_lines=self.progress_form == "json")
