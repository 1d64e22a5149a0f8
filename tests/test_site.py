"""Every page of docs/ is in the site's navigation, and the reference names every command, option and public name."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import zckpt
from zckpt.cli import app

ROOT = Path(__file__).parent.parent


class Loader(yaml.SafeLoader):
    """Reads what mkdocs' own tags say as text."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["site_pages"] = module
    spec.loader.exec_module(module)
    return module


def listed(entries: list[object]) -> list[str]:
    """The pages of a navigation, in order."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += listed(value) if isinstance(value, list) else [str(value)]
    return found


def test_every_page_can_be_found() -> None:
    pages = listed(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == {page for page in pages if "/" not in page}
    assert len(pages) == len(set(pages))


def test_the_reference_names_every_option(site: ModuleType) -> None:
    text = "\n".join(site.commands())
    group: Any = typer.main.get_command(app)
    for name, command in ((name, group.get_command(None, name)) for name in group.list_commands(None)):
        part = re.split(r"^## ", text.split(f"## zckpt {name}\n")[1], flags=re.MULTILINE)[0]
        for parameter in (one for one in command.params if not getattr(one, "hidden", False)):
            assert all(option in part for option in parameter.opts if option.startswith("--")), (name, parameter.opts)
        assert "Exit status: 0" in part and "zckpt " in part


def test_the_reference_names_everything_public(site: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # `make docs` needs mkdocs and zckpt alone
    text = "\n".join(site.names())
    assert all(f".{name}\n" in text or f"`{name}`" in text for name in zckpt.__all__ if not name.startswith("__"))
    first = [line for line in text.splitlines() if line.startswith(":::")][:3]
    assert [line.rpartition(".")[2] for line in first] == ["convert", "open_checkpoint", "verify"]
    assert "::: zckpt.jobs.convert.convert\n" in text and "::: zckpt.base.errors.UsageError\n" in text
    for home, _, name in (line.removeprefix("::: ").rpartition(".") for line in text.splitlines() if ":::" in line):
        monkeypatch.undo()
        assert hasattr(importlib.import_module(home), name)


def test_what_pages_point_at_beside_them_is_on_the_site(site: ModuleType) -> None:
    texts = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    pointed_at = {file for text in texts for file in re.findall(r"\]\(\.\./(benchmarks/\w+\.md)", text)}
    assert pointed_at and pointed_at <= site.PAGES.keys()
