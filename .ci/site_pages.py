"""Pages of the documentation site that are no files of docs/, for `mkdocs.yml`.

- reference/commands.md is made of the command line itself, reference/python.md of the names that the packages export.
- project/ has what lies beside docs/: links between these files and docs/ are made to fit the site.
"""

from __future__ import annotations

import ast
import contextlib
import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "RELEASE.md": "project/release.md",
    "AGENTS.md": "project/agents.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "README.md": "project/readme.md",
    "benchmarks/results_trainer.md": "project/results_trainer.md",
    "benchmarks/results_checkpoints.md": "project/results_checkpoints.md",
    "benchmarks/results_giants.md": "project/results_giants.md",
    "benchmarks/results_exchange.md": "project/results_exchange.md",
    "benchmarks/results_gpu.md": "project/results_gpu.md",
    "benchmarks/results_load_scale.md": "project/results_load_scale.md",
    "benchmarks/results_machines.md": "project/results_machines.md",
    "benchmarks/results_stops.md": "project/results_stops.md",
    "benchmarks/results_words.md": "project/results_words.md",
    "benchmarks/results_kernels.md": "project/results_kernels.md",
    "benchmarks/results_many_chunks.md": "project/results_many_chunks.md",
    "benchmarks/results_giant_families.md": "project/results_giant_families.md",
    "benchmarks/results_mounts.md": "project/results_mounts.md",
}
"""File of the repository -> page of the site."""
UNLISTED = {
    "project/agents.md",
    "project/code-of-conduct.md",
    "project/readme.md",
    *(page for page in PAGES.values() if "results" in page),
}
"""Pages that other pages point at, and the navigation does not."""
FIRST = ("convert", "open_checkpoint", "verify")
"""Where the reference of Python begins."""
PACKAGES = ("zckpt", "zckpt.live", "zckpt.integrations", "zckpt.runtime")

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    made = {"reference/commands.md": "\n".join(commands()), "reference/python.md": "\n".join(names())}
    made["project/modules.md"] = "\n".join(modules())
    made |= {page: (ROOT / file).read_text() for file, page in PAGES.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for page in UNLISTED:
        file = files.get_file_from_path(page)
        if file is not None:
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links fit the site. What is pointed at and is no page becomes a file of the site."""
    from mkdocs.structure.files import File

    here = {page: file for file, page in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def fitted(found: re.Match[str]) -> str:
        text, (path, mark, anchor) = found[1], found[2].partition("#")
        if "://" in path or not path:
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(here), path))
        wanted = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else target)
        if not target.startswith("docs/") and target not in PAGES:
            if not (ROOT / target).is_file():
                return f"{text[1:-1]}"
            if files.get_file_from_path(wanted) is None:
                files.append(File.generated(config, wanted, abs_src_path=str(ROOT / target)))
        return f"{text}({os.path.relpath(wanted, os.path.dirname(page.file.src_uri) or '.')}{mark}{anchor})"

    return _LINK.sub(fitted, markdown)


def commands() -> Iterator[str]:
    """The page of all commands: arguments and options in the groups of `--help`."""
    import typer

    from zckpt.cli import app

    group: Any = typer.main.get_command(app)
    yield "# Commands\n\n`zckpt COMMAND --help` prints the same. Groups of options mean the same everywhere.\n"
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        context = command.make_context(name, ["--help"], resilient_parsing=True)
        yield f"## zckpt {name}\n\n{command.help}\n"
        usage = " ".join(("zckpt", name, *command.collect_usage_pieces(context)))
        yield f"```text\n{usage}\n```\n"
        tables: dict[str, list[tuple[str, str]]] = {}
        for parameter in command.get_params(context):
            if parameter.param_type_name == "argument":
                tables.setdefault("Arguments", []).append((parameter.metavar, parameter.help))
            elif (record := parameter.get_help_record(context)) is not None:
                last = list(tables)[-1] if tables else "Options"
                tables.setdefault(parameter.rich_help_panel or last, []).append(record)
        for title, rows in tables.items():
            yield f"| {title} | |\n|---|---|"
            yield from (f"| <code>{cell(left)}</code> | {cell(right)} |" for left, right in rows)
            yield ""
        yield "\n\n".join(shown(line) for line in (command.epilog or "").split("\n\n")) + "\n"


def modules() -> Iterator[str]:
    """The page of all modules: what each is for, by the first line of its docstring."""
    yield "# Every module\n\nMade of the first lines of docstrings. [How zckpt is built](architecture.md) says where to begin.\n"
    for room in sorted({path.parent for path in (ROOT / "zckpt").rglob("*.py")}):
        yield f"## {'.'.join(room.relative_to(ROOT).parts)}\n\n| module | what it is for |\n|---|---|"
        for path in sorted(room.glob("*.py")):
            said = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            yield f"| `{path.stem}` | {cell(said)} |"
        yield ""


def cell(text: str) -> str:
    """Text as HTML in a cell of a table."""
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "&#124;")


def shown(line: str) -> str:
    """A line of an epilog; its example as code."""
    head, mark, example = line.partition("Example: ")
    return f"```sh\n{example}\n```" if mark and not head else line


def rank(name: str) -> tuple[int, str]:
    """What most people look for comes first, then functions, classes and errors, each by name."""
    kind = 3 if name.endswith("Error") else 2 if name[0].isupper() else 1
    return (0, str(FIRST.index(name))) if name in FIRST else (kind, name)


def tree(module: str) -> tuple[ast.Module, dict[str, Any]]:
    """A module's source, read without importing it, and those of its variables that are plain values."""
    path = ROOT.joinpath(*module.split("."))
    source = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    values: dict[str, Any] = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                values[node.targets[0].id] = ast.literal_eval(node.value)
    return source, values


def home_of(module: str, name: str) -> str | None:
    """The module that defines a function or class; None for anything else, and for names that zckpt does not define."""
    source, values = tree(module)
    for node in (one for top in source.body for one in (top.body if isinstance(top, ast.If) else [top])):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            ours = (node.module or "").startswith("zckpt.")
            return home_of(str(node.module), name) if ours else None
    found = values.get("_HOMES", {}).get(name)
    return home_of(f"{module}.{found}", name) if found else None


def names() -> Iterator[str]:
    """The page of all public names, for mkdocstrings, which reads a name where it is defined."""
    yield "# Python\n\nEvery name that the packages export. What else modules hold may change in any version.\n"
    for package in PACKAGES:
        yield f"## `{package}`\n"
        others: list[str] = []
        public = tree(package)[1]["__all__"]
        for name in sorted((name for name in public if not name.startswith("__")), key=rank):
            home = home_of(package, name)
            if home is not None:
                yield f"::: {home}.{name}\n"
            else:
                others.append(f"`{name}`")
        if others:
            yield f"Also there, and not described here: {', '.join(others)}.\n"
