"""Tells mkdocstrings, which reads modules without running them, that zckpt's `dataclass` is Python's."""

import ast
from typing import Any

import griffe


class OurDataclass(griffe.Extension):
    """Reads the import of the one as that of the other, so that classes are described with their parameters."""

    def on_module_node(self, node: ast.AST | griffe.ObjectNode, **_: Any) -> None:
        """Called for each module before griffe looks at its statements."""
        for statement in node.body if isinstance(node, ast.Module) else ():
            if isinstance(statement, ast.ImportFrom) and statement.module == "zckpt.base.dataclass":
                statement.module = "dataclasses"
