"""Writes zckpt/runtime/names/surface_0_19_8.txt: what the installed DeepSpeed's public modules are and which names they have.

Read by AST, so that nothing of DeepSpeed runs. One line a module, its path below `deepspeed` first:

    path: Class function() CONSTANT=literal value=? name@path name@path:other module@path: *@path

`@` says where a name that a module has from another module of DeepSpeed is at home, and under which name; a path with a colon
and nothing behind it is a module, and a star all names of one. Spaces in a literal are written as escapes. Names from other
libraries are left out, and so are values that an installation writes. The last line is of the engine's class: its public
methods, and the attributes that it sets on itself.

    python .ci/deepspeed_surface.py            writes the file
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "deepspeed"
OUTPUT = Path(__file__).parents[1] / "zckpt" / "runtime" / "names" / "surface_0_19_8.txt"
ENGINE = ("runtime.engine", "DeepSpeedEngine")
BUILDERS = "ops.op_builder"
_WRITTEN = "git_version_info_installed"
"""A module that an installation writes: what it has found on its machine."""

_LONGEST = 2000
"""Characters of a literal: longer texts are documentation."""

Home = tuple[str, str]
"""A module's path, and a name in it; "" is the module itself."""


def main() -> None:
    """Writes the file, of the DeepSpeed that this Python has."""
    found = importlib.util.find_spec(NAME)
    if found is None or not found.submodule_search_locations:
        sys.exit("DeepSpeed is not installed: pip install 'zckpt[interop]'")
    OUTPUT.write_text(read_surface(Path(found.submodule_search_locations[0])), encoding="utf-8")


def read_surface(root: Path) -> str:
    """The text of the file, of a DeepSpeed that lies in a directory."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        if not any(part.startswith("_") for part in parts) and all(
            (root.joinpath(*parts[:n]) / "__init__.py").exists() for n in range(len(parts))
        ):
            modules[".".join(parts)] = Module(".".join(parts), is_package, ast.parse(path.read_text(encoding="utf-8")))
    take_builders(modules)
    lines = []
    for path, module in sorted(modules.items()):
        words = []
        for name in sorted({*module.own, *module.taken}):
            if name in module.own:
                words.append(name + module.own[name])
            elif (home := home_of(module.path, name, modules, frozenset())) is not None:
                words.append(f"{name}@{home[0]}" + ("" if home[1] == name else f":{home[1]}"))
        words += [f"*@{star}" for star in module.stars if star in modules]
        lines.append(" ".join((f"{path}:", *words)))
    return "\n".join((*lines, engine_line(modules[ENGINE[0]].tree))) + "\n"


def take_builders(modules: dict[str, Module]) -> None:
    """Gives `ops.op_builder` what it sets by a loop: each class of its modules that builds something."""
    package = modules[BUILDERS]
    for path, module in sorted(modules.items(), key=lambda item: (item[1].is_package, item[0])):
        if path.rpartition(".")[0] == BUILDERS and not path.endswith((".all_ops", ".builder")):
            for name in sorted({*module.own, *module.taken}):
                if name.endswith("Builder") and name not in ("OpBuilder", "CUDAOpBuilder"):
                    package.taken.setdefault(name, (path, name))


class Module:
    """One module of DeepSpeed.

    Attributes:
        own: names that it defines -> what is written behind them.
        taken: names that it has from other modules of DeepSpeed -> from where.
        stars: modules whose names it takes all.
    """

    def __init__(self, path: str, is_package: bool, tree: ast.Module) -> None:
        self.path, self.is_package, self.tree = path, is_package, tree
        self.own: dict[str, str] = {}
        self.taken: dict[str, Home] = {}
        self.stars: list[str] = []
        self._package = path if is_package else path.rpartition(".")[0]
        self._known: dict[str, Any] = {}
        for node in statements(tree.body):
            self._take(node)

    def _take(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef):
            self._own(node.name, "")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._own(node.name, "()")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                    if isinstance(one, ast.Name):
                        self._assign(one.id, node.value if one is target else None)
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{NAME}.") and alias.asname:
                    self._had(alias.asname, (alias.name.removeprefix(f"{NAME}."), ""))

    def _assign(self, name: str, value: ast.expr | None) -> None:
        kind = "=?"
        if isinstance(value, ast.Name) and value.id not in self._known:
            kind = self.own.get(value.id, kind)
        elif value is not None:
            try:
                self._known[name] = valued = value_of(value, self._known)
                text = literal(valued)
                if len(text) <= _LONGEST and self.path != _WRITTEN and ast.literal_eval(text) == valued:
                    kind = f"={text}"
            except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError):
                self._known.pop(name, None)
        if kind != "=?" or name not in self.own:
            self._own(name, kind)

    def _own(self, name: str, kind: str) -> None:
        if not name.startswith("_"):
            self.own[name] = kind
            self.taken.pop(name, None)

    def _had(self, name: str, home: Home) -> None:
        if not name.startswith("_") and name not in self.own:
            self.taken[name] = home

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level:
            base = self._package.split(".") if self._package else []
            parts = [*base[: len(base) - node.level + 1], *(node.module.split(".") if node.module else [])]
        elif node.module and node.module.split(".")[0] == NAME:
            parts = node.module.split(".")[1:]
        else:
            return
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(".".join(parts))
            else:
                self._had(alias.asname or alias.name, (".".join(parts), alias.name))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, with those inside of `if`, `try`, `with` and loops; not what runs in a program only."""
    for node in body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                yield from statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def home_of(path: str, name: str, modules: dict[str, Module], seen: frozenset[Home]) -> Home | None:
    """Where a name of a module is defined; None where it is none of a public module."""
    if (path, name) in seen or path not in modules:
        return None
    module = modules[path]
    if name in module.own:
        return path, name
    sources = [module.taken[name]] if name in module.taken else [(star, name) for star in module.stars]
    for where, other in sources:
        below = f"{where}.{other}".strip(".")
        found = (where, "") if not other else home_of(where, other, modules, seen | {(path, name)})
        if found is None and below in modules:
            found = (below, "")
        if found is not None and found[0] in modules:
            return found
    return None


_OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}  # fmt: skip


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of an expression of literals and of a module's other constants.

    Raises:
        ValueError: it has another part.
        KeyError: it has another operation, or a name that is no constant.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        made = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return made([value_of(one, known) for one in node.elts])
    if isinstance(node, ast.Dict) and all(node.keys):
        return {value_of(k, known): value_of(v, known) for k, v in zip(node.keys, node.values, strict=True) if k}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand, known)
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](value_of(node.left, known), value_of(node.right, known))
    raise ValueError(ast.dump(node))


def literal(value: Any) -> str:
    """Python's text of a value, without a space."""
    if isinstance(value, str | bytes):
        return repr(value).replace(" ", "\\x20")
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(key)}:{literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{literal(one)}," for one in value) + ")"
    if isinstance(value, list):
        return "[" + ",".join(literal(one) for one in value) + "]"
    if isinstance(value, set):
        return "{" + ",".join(sorted(literal(one) for one in value)) + "}"
    return repr(value)


def engine_line(tree: ast.Module) -> str:
    """The line of the engine's class."""
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == ENGINE[1]]
    methods = [node for node in nodes[0].body if isinstance(node, ast.FunctionDef)]
    decorated = {
        node.name for node in methods if re.search("property|setter", "".join(map(ast.dump, node.decorator_list)))
    }
    plain = {node.name for node in methods} - decorated
    stored = (
        node for node in ast.walk(nodes[0]) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    set_on = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    words = {*(f"{name}()" for name in plain), *((decorated | set_on) - plain)}
    return " ".join((f"{'.'.join(ENGINE)}:", *sorted(word for word in words if not word.startswith("_"))))


if __name__ == "__main__":
    main()
