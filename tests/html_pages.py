"""What a browser would find in a page, and names of tensors that try to be more than text."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", '"><img src=x onerror=alert(1)>', "&lt;b&gt;", "\u2028\u2029",
    "\x00\x1b[31m", "\u202egnp.exe", "\ud800", "'); alert(1); ('", "{{7*7}}", "javascript:alert(1)", "</title></style>",
)  # fmt: skip


class Reader(HTMLParser):
    """What a browser would find: elements with their attributes, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.texts.append((self.elements[-1][0], data))


def policy_of(found: Reader) -> str:
    return next(str(own["content"]) for _, own in found.elements if own.get("http-equiv") == "Content-Security-Policy")
