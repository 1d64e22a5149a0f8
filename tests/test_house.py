"""What holds the house together: sizes, errors, and life without the compiled core."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from sources import ROOT, TOGETHER, parsed

import zckpt
from zckpt import layouts
from zckpt.base import errors
from zckpt.layouts.save.second import UnprovedFamily

pytestmark = TOGETHER
TESTS = Path(__file__).parent
FIXTURES = TESTS.parent / "fixtures"


def test_no_module_is_longer_than_a_person_can_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > 600} == {}
    assert sorted(lengths.values())[len(lengths) // 2] < 205  # it rises where a small module goes


def modules() -> dict[str, Path]:
    """zckpt's own modules; a package is named as the module that its `__init__` is."""
    names = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in ROOT.rglob("*.py")}
    return {".".join(name[:-1] if name[-1] == "__init__" else name): path for path, name in names.items()}


def own_imports(name: str, known: dict[str, Path]) -> set[str]:
    """The modules of zckpt that one of them imports: anywhere in it, also for type checkers only."""
    found: set[str] = set()
    for node in parsed()[known[name]]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names if alias.name != "_core"}
            found |= {module if module in known else str(node.module) for module in inner.values()}
    return found & known.keys() - {name}


def test_no_imports_go_in_a_circle() -> None:
    """Nor those inside functions, or for type checkers. What is left when ends are taken away is in a circle, or leads to one."""
    known = modules()
    left = {name: own_imports(name, known) for name in known}
    while ends := {name for name, imported in left.items() if not imported}:
        left = {name: imported - ends for name, imported in left.items() if name not in ends}
    assert sorted(left.keys() & set().union(*left.values())) == []


PAGE = TESTS.parent / "ARCHITECTURE.md"


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of ARCHITECTURE.md, without its head."""
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_draws_the_house() -> None:
    """Floors are those that the linter holds, and every package is a room of the table."""
    contract = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = [sorted(layer.split(" | ")) for layer in contract[0]["layers"]]
    drawn = [sorted(re.findall(r"`(\w+)`", rooms)) for _, rooms, _ in rows_under("The rooms and the floors")]
    assert drawn == [sorted(floor) for floor in floors]
    rooms = {room for floor in drawn for room in floor}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= rooms
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "drop_in"}
    assert len(PAGE.read_text().splitlines()) <= 150


def test_every_module_says_what_it_is_for() -> None:
    """In the first line of its docstring, which the documentation site lists."""
    silent = []
    for path, nodes in parsed().items():
        said = (ast.get_docstring(nodes[0]) or "").partition("\n")[0]
        if len(said) < 12 or (said[-1] not in ".:?;,)" and not said[-1].isalnum()):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


PLACES = {
    "an option": "jobs/groups.py",
    "a command": "cli/commands.py",
    "a layout": "layouts/__init__.py",
    "a second reader": "layouts/save/second.py",
    "which path means which save": "layouts/places.py",
    "names of a model's tensors": "naming/schemes.py",
    "a quantised form": "quantized/forms.py",
    "how an output appears": "output/publish.py",
    "a check or a verdict": "checks/verdict.py",
    "a name of DeepSpeed's": "runtime/names/table.py",
}
"""Ten changes that a newcomer is asked for, and the file in which each begins."""


def test_a_newcomer_finds_the_place_for_a_change() -> None:
    rows = {change: files for change, files, _ in rows_under("Where do I change X")}
    assert not [change for change, file in PLACES.items() if f"`zckpt/{file}`" not in rows[change]]


def test_the_life_of_a_command_is_told_by_what_exists() -> None:
    """Every `file::name` of the page is a function or class there, in the order in which a command comes by."""
    named = re.findall(r"`(zckpt/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) >= 12
    for file, name in named:
        tree = ast.parse((TESTS.parent / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}, (
            file,
            name,
        )


def imports_of(path: Path) -> set[str]:
    """The modules of zckpt that a module imports, anywhere in it."""
    nodes = parsed()[path]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module):
        below = ROOT.parent / str(node.module).replace(".", "/")
        inner = {a.name for a in node.names if (below / f"{a.name}.py").exists() or (below / a.name).is_dir()}
        named |= {f"{node.module}.{name}" for name in inner} or {str(node.module)}
    return {name for name in named if name.partition(".")[0] == "zckpt"}


def test_a_second_reader_shares_nothing_with_the_first() -> None:
    """It may import values, containers, the contract and other second readers; and only by `later` is it imported."""
    seconds = {path: f"zckpt.layouts.{path.parent.name}.second" for path in ROOT.glob("layouts/*/second.py")}
    del seconds[ROOT / "layouts/save/second.py"]
    floors = ("zckpt.base", "zckpt.core", "zckpt.containers")
    may = {"zckpt.layouts.save.listing", "zckpt.layouts.save.second", *seconds.values()}
    may.add(
        "zckpt.layouts.joining.patterns"
    )  # a stranger's regular expression is matched in bounded time, or not at all
    for path in ROOT.rglob("*.py"):
        found = imports_of(path)
        if path in seconds:
            assert {name for name in found if not name.startswith(floors)} <= may, path
        else:
            assert not found & set(seconds.values()), path


UNPROVED: set[str] = set()
"""Families without a second reader. A name may only leave this list."""


def test_families_without_a_second_reader_are_listed() -> None:
    assert {family.name for family in layouts.FAMILIES if isinstance(family.second, UnprovedFamily)} == UNPROVED


def test_the_page_fits_its_width() -> None:
    assert [line for line in PAGE.read_text().splitlines() if len(line) > 135] == []


def test_a_class_name_means_one_thing() -> None:
    """But for private classes, whose names end at their module."""
    places: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_words_that_are_no_longer_used_name_nothing() -> None:
    """The glossary's "Not: `word`" holds for every name in the package, alone or between underscores."""
    glossary = (TESTS.parent / "docs" / "words.md").read_text()
    dropped = {
        word for sentence in re.findall(r"Not:\s((?:`\w+`(?:,\s)?)+)", glossary) for word in sentence.split("`")[1::2]
    }
    assert dropped
    found = set()
    for path in ROOT.rglob("*.py"):
        names = {path.stem}
        for node in parsed()[path]:
            names |= {
                value
                for field in ("id", "attr", "name", "arg", "asname")
                if isinstance(value := getattr(node, field, 0), str)
            }
        found |= {(str(path.relative_to(ROOT)), name) for name in names if dropped & {*re.split(r"[_.]", name.lower())}}
    assert sorted(found) == []


@pytest.mark.parametrize("kind", errors.ZckptError.__subclasses__())
def test_every_kind_of_error_is_raised_in_earnest_and_tested(kind: type[errors.ZckptError]) -> None:
    raised = [p for p in ROOT.rglob("*.py") if f"{kind.__name__}(" in p.read_text() and p.name != "errors.py"]
    tested = [p for p in TESTS.rglob("test_*.py") if kind.__name__ in p.read_text() and p != Path(__file__)]
    assert raised and tested
    assert kind.__name__ in zckpt.__all__ and kind.__name__ in (errors.__doc__ or "")


def test_no_fixture_names_a_place_of_the_machine_that_made_it() -> None:
    """Frameworks put the path of a save into it: fixtures are written by relative paths."""
    places = {b"/home/", b"/root/", b"/Users/", str(TESTS.parent.parent).encode() + b"/"} - {b"//"}
    files = [path for path in FIXTURES.rglob("*") if path.is_file() and path.suffix not in (".py", ".md", ".pyc")]
    assert [str(path) for path in files if any(place in path.read_bytes() for place in places)] == []


def test_no_test_opens_a_file_that_only_its_writer_has() -> None:
    """Tests write where pytest says: a place like /tmp/mine is there on one machine alone."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and node.args
        and ast.unparse(node.func) in ("open", "Path", "os.open", "Path.open")
        if ast.unparse(node.args[0]).lstrip("f'\"").startswith(("/tmp/", "/dev/shm/", "/var/tmp/"))
    ]
    assert found == []


def test_without_the_core_one_line_says_so_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    code = """
import sys
class NoCore:
    def find_spec(self, name, *_):
        if name == "zckpt._core":
            raise ImportError(name)
sys.meta_path.insert(0, NoCore())
from zckpt.cli import main
main()
"""
    checkpoint = str(FIXTURES / "zero3" / "bf16_w2" / "checkpoint")
    done = {}
    for name, start in {"without": ["-c", code], "with": ["-m", "zckpt"]}.items():
        out = str(tmp_path / f"{name}.bin")
        command = [sys.executable, *start, "to-bf16", checkpoint, out]
        done[name] = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [line for line in done["without"].stderr.splitlines() if "engine" in line]
    assert told == ["note: zckpt's C++ engine was not built: the slow Python one is used."]
    assert "engine" not in done["with"].stderr
    assert (tmp_path / "without.bin").read_bytes() == (tmp_path / "with.bin").read_bytes()
