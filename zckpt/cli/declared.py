"""How a command is declared: option groups that arrive as one frozen value each, and help that shows them as groups.

For the modules of commands. A parameter whose type is a dataclass stands for the dataclass's fields, each of which is declared as
typer has it: `Annotated[type, typer.Option(...)]`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from zckpt.cli.commands import COMMANDS

DONE = "0 done, 2 error"
"""The exit status of commands that write something."""


class Command(TyperCommand):
    """A command whose help shows arguments, then options under the `rich_help_panel` that each declares."""

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


def command(
    app: typer.Typer,
    name: str,
    *,
    about: str,
    example: str,
    status: str = DONE,
    passes_on: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function to the commands.

    Args:
        app: gets the command.
        name: of the command, which `commands.COMMANDS` lists.
        about: what it does, in a sentence or two.
        example: one call, with a comment if needed.
        status: what each exit status means.
        passes_on: everything after the first argument is an argument too, also what looks like an option.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        epilog = f"Exit status: {status}\n\nExample: {example}"
        settings = {"allow_interspersed_args": not passes_on}
        app.command(
            name, cls=Command, short_help=COMMANDS[name][1], help=about, epilog=epilog, context_settings=settings
        )(grouped(function))
        return function

    return register


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with the fields of its option groups as keyword parameters, for typer."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _fields(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(**values: object) -> None:
        arguments = {name: value for name, value in values.items() if name in hints}
        for name, kind in groups.items():
            arguments[name] = kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
        function(**arguments)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


@lru_cache
def _fields(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(kind):
        known = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = inspect.Parameter.empty if known is dataclasses.MISSING else known
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=default)
        )
    return found
