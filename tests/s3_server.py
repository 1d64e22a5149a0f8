"""A real S3 server on loopback (moto's), which counts what it sends and can be told to fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_api._internal import mock_random  # noqa: F401  # loads moto's backends before threads use them
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class S3Server:
    """Use as a context manager.

    Attributes:
        requests: (method, path, query, Range header) of every request so far.
        sent: bytes of all answers to GET so far.
        failing: is asked of each request whether to answer 500 instead.
        losing: is asked of each request whether to answer 500 after it was carried out.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests: list[tuple[str, str, str, str]] = []
        self.sent = 0
        self.failing: Callable[[str, str, str], bool] = lambda method, path, query: False
        self.losing: Callable[[str, str, str], bool] = lambda method, path, query: False
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> S3Server:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path, query = (environ[key] for key in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING"))
        self.requests.append((method, path, query, environ.get("HTTP_RANGE", "")))
        if self.failing(method, path, query):
            return self._failed(start_response)
        if self.losing(method, path, query):
            list(self._app(environ, lambda *answer: None))
            return self._failed(start_response)
        parts = list(self._app(environ, start_response))
        if method == "GET":
            self.sent += sum(map(len, parts))
        return parts

    def _failed(self, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]
