"""One HTML file that needs nothing else: no network, no fonts, light and dark; what strangers named cannot run in it.

For every picture of the command line. The page's policy (Content-Security-Policy) names the one style and the one script that may
be used, by their digests, and allows nothing else: no connection, image, frame or form. Data is JSON in a script element of a
type that no browser runs, with every character that HTML knows written as an escape. Scripts make elements and texts, never HTML.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files

from zckpt.base.errors import OutputError
from zckpt.base.version import __version__
from zckpt.output.durable import replace_file

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}

DATA_ID = "data"
"""The id of the element with the data."""


def text(value: object) -> str:
    """A value as text for an element or attribute, escaped."""
    return html.escape(str(value).encode("utf-8", "backslashreplace").decode())


def escaped_json(value: object) -> str:
    """A value as JSON for a script element: ASCII without `<`, `>` and `&`."""
    found = json.dumps(value, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        found = found.replace(character, escape)
    return found


def asset(name: str) -> str:
    """The text of a style, a script or a piece of HTML of this package."""
    return files("zckpt.pictures").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def page(title: str, body: str, data: object, *, styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """Makes the page's HTML. In `body`, which is HTML, `text` has escaped whatever is not the program's own; `data` is what
    scripts read, as a value that JSON has: they find it by `DATA_ID`. Styles and scripts are names of `asset`s, after the common
    ones.
    """
    style = "".join(asset(name) for name in ("page.css", *styles))
    script = "".join(asset(name) for name in ("page.js", *scripts))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return asset("page.html").format(
        policy=policy, version=text(__version__), title=text(title), style=style, body=body, data_id=DATA_ID,
        data=escaped_json(data), script=script,
    )  # fmt: skip


def write_page(path: str, content: str) -> None:
    """Writes a page, or replaces one. Raises OutputError if there is something else under this name, or no directory
    for it; OSError if the file cannot be written.
    """
    check_place(path)
    staged = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        replace_file(path, content.encode(), staged)
    except BaseException:
        if os.path.exists(staged):
            os.unlink(staged)
        raise


def check_place(path: str) -> None:
    """Refuses a page's name that something else has, before the work on the page begins. Raises OutputError if there
    is, or there is no directory for it.
    """
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise OutputError(
            "is in a directory that does not exist", file=path, found=f"no directory {directory}",
            expected="a file of this machine", remedy="Name a file in a directory that exists here; no address.",
        )  # fmt: skip
    if os.path.lexists(path) and not _is_page(path):
        raise OutputError(
            "exists and is not an HTML page", file=path, expected="a new name, or a page to replace",
            remedy="Choose another name for --html.",
        )  # fmt: skip


def _is_page(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(15).lower() == b"<!doctype html>"
