"""A hub on loopback: the part of huggingface.co's HTTP interface that the real `huggingface_hub` client uses to push and load.

Nothing of the client is replaced; the server keeps repositories in memory, large files in a directory, and can misbehave:
`fault` makes chosen requests fail, hang up in the middle, or run a function first, and `kill_at` kills a client's process
at a given tick (a tick is a request, some bytes received, or an answer).
Source of the interface: huggingface_hub 0.36-2.4, _commit_api.py, lfs.py, hf_api.py; git-lfs docs/api/batch.md.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ATTRIBUTES = b"".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n".encode()
    for pattern in ("*.bin", "*.model", "*.safetensors", "*.pt", "*tfevents*")
)
TOKEN = "hf_aliceWrites0123456789"
"""Of alice, who may write to what is hers."""
SHARD_BYTES = 250_000
"""Cuts the tests' model into three shards."""


@dataclass(frozen=True)
class Blob:
    """A file of a commit: small ones with their bytes, large ones by their hash."""

    oid: str
    size: int
    data: bytes | None = None
    sha256: str = ""

    @classmethod
    def regular(cls, data: bytes) -> Blob:
        return cls(hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), len(data), data)

    @classmethod
    def large(cls, sha256: str, size: int) -> Blob:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return cls(cls.regular(pointer).oid, size, None, sha256)


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[str]] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    gated: bool = False

    def add(self, branch: str, files: dict[str, Blob], title: str) -> str:
        oid = secrets.token_hex(20)
        self.commits[oid], self.titles[oid] = files, title
        self.branches.setdefault(branch, []).append(oid)
        return oid

    def resolve(self, revision: str) -> str | None:
        return (
            self.branches[revision][-1] if revision in self.branches else revision if revision in self.commits else None
        )

    @property
    def pulls(self) -> list[str]:
        return [name for name in self.branches if name.startswith("refs/pr/")]


@dataclass
class Fault:
    """What happens to requests that match: `status`, `drop` after so many bytes of the body, `lose` the answer, `call`."""

    method: str
    path: str
    times: int = 1
    skip: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    drop: int | None = None
    lose: bool = False
    call: Callable[[], None] | None = None


class Answer(Exception):
    """Ends a request."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        super().__init__(status)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()


class HangUp(Exception):
    """Closes the connection without an answer."""


class HubServer:
    """Use as a context manager.

    Attributes:
        url: for HF_ENDPOINT.
        store: where large files are sent to and fetched from; another host, as far as a client can see.
        tokens: access token -> what whoami answers.
        repos: "user/name" -> repository.
        buckets: "user/name" -> name -> (hash by which Xet knows it, bytes) of the files of a bucket.
        log: (method, path, bytes received, status or 0) of each request that ended.
        auth: (host, path, Authorization header) of each request.
        sent: sha256 -> bytes of it received, over all attempts.
        part_bytes: larger files are asked for in parts of this size.
        spool: where a client keeps the files that it sends to a bucket.
        page: entries in one page of a tree.
        tick_bytes: received between two ticks.
        xet: address of a Xet store that clients are sent to; empty for none.
        keep: False throws large files away once they are hashed, but for how they begin.
        checks: False takes large files for what they are said to be: another machine's work is not to be measured on this one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.tokens: dict[str, dict[str, Any]] = {}
        self.repos: dict[str, Repo] = {}
        self.log: list[tuple[str, str, int, int]] = []
        self.auth: list[tuple[str, str, str]] = []
        self.sent: dict[str, int] = {}
        self.faults: list[Fault] = []
        self.links: dict[str, tuple[str, int, str, int]] = {}
        self.buckets: dict[str, dict[str, tuple[str, bytes]]] = {}
        self.spool = root
        self.part_bytes, self.page, self.xet, self.keep = 1 << 40, 1000, "", True
        self.checks = True
        self.tick_bytes = 64 << 10
        self.attributes = ATTRIBUTES
        self.ticks, self.kill_at, self.victim = 0, -1, 0
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.store = f"http://localhost:{self._http.server_port}"
        self.user("alice", TOKEN)

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def user(self, name: str, token: str, role: str = "write", orgs: dict[str, str] | None = None, **more: Any) -> str:
        found = [{"type": "org", "name": org, "roleInOrg": role_} for org, role_ in (orgs or {}).items()]
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": role, **more}}
        self.tokens[token] = {"type": "user", "name": name, "id": name, "orgs": found, "auth": auth}
        return token

    def create(self, name: str, private: bool = False, files: dict[str, bytes] | None = None) -> Repo:
        repo = self.repos[name] = Repo(private)
        blobs = {".gitattributes": self.attributes} if self.attributes else {}
        repo.add(
            "main", {path: Blob.regular(data) for path, data in {**blobs, **(files or {})}.items()}, "initial commit"
        )
        return repo

    def fault(self, method: str, path: str, **what: Any) -> Fault:
        self.faults.append(Fault(method, path, **what))
        return self.faults[-1]

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        return {path: self.content(blob) for path, blob in repo.commits[repo.resolve(revision) or ""].items()}

    def content(self, blob: Blob) -> bytes:
        return blob.data if blob.data is not None else (self.root / blob.sha256).read_bytes()

    def tick(self) -> None:
        with self.lock:
            self.ticks += 1
            if self.ticks == self.kill_at:
                os.kill(self.victim, signal.SIGKILL)

    def received(self, of: str) -> int:
        """Bytes of bodies of requests whose path matches."""
        return sum(nbytes for _, path, nbytes, _ in self.log if re.search(of, path))


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client is gone
            pass

    # ---- one request -------------------------------------------------------------------------------------------------

    def _handle(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        self.route, self.query = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.left = int(self.headers.get("Content-Length") or 0)
        self.chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self.got, status = 0, 0
        hub.auth.append((self.headers.get("Host", ""), self.route, self.headers.get("Authorization", "")))
        hub.tick()
        try:
            fault = self._fault()
            try:
                if fault is not None:
                    self._misbehave(fault)
                self._route()
            except Answer as answer:
                if fault is not None and fault.lose:
                    raise HangUp from None
                status = answer.status
                self._reply(answer)
        except (HangUp, ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            hub.log.append((self.command, self.route, self.got, status))
            hub.tick()

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle

    def _fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, self.path):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def _misbehave(self, fault: Fault) -> None:
        if fault.call is not None:
            fault.call()
        if fault.drop is not None:
            for _ in self.body(fault.drop):
                pass
            raise HangUp
        if fault.status:
            raise Answer(fault.status, fault.body, **fault.headers)

    def body(self, most: int = 1 << 62) -> Iterator[bytes]:
        """The body in pieces; at most about `most` bytes of it."""
        before = self.got // self.hub.tick_bytes
        while self.got < most:
            if self.chunked and not self.left:
                self.left = int(self.rfile.readline().split(b";")[0] or b"0", 16)
                if not self.left:
                    self.rfile.readline()
                    self.chunked = False
                    return
            data = self.rfile.read1(min(self.left, 1 << 18, most - self.got)) if self.left else b""
            if not data:
                if self.left:
                    raise HangUp
                return
            self.left -= len(data)
            self.got += len(data)
            if self.chunked and not self.left:
                self.rfile.readline()
            for _ in range(before, self.got // self.hub.tick_bytes):
                self.hub.tick()
            before = self.got // self.hub.tick_bytes
            yield data

    def drop(self) -> int:
        """Takes the rest of the body off the connection without looking at it; its bytes."""
        dropped = len(self.rfile.read(min(self.left, len(self.rfile.peek()))))
        nowhere = bytearray(1 << 20)
        while dropped < self.left:
            count = self.connection.recv_into(nowhere, min(self.left - dropped, len(nowhere)), socket.MSG_TRUNC)
            if not count:
                raise HangUp
            dropped += count
        self.left -= dropped
        self.got += dropped
        return dropped

    def json(self) -> Any:
        return json.loads(b"".join(self.body()) or b"{}")

    def _reply(self, answer: Answer) -> None:
        if not self.chunked and self.left <= 1 << 16:  # else the client may never see the answer
            self.rfile.read(self.left)
            self.left = 0
        self.send_response(answer.status)
        if self.left or self.chunked:  # the rest of the body is not waited for
            self.send_header("Connection", "close")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.body and "Content-Type" not in answer.headers:
            self.send_header("Content-Type", "application/json")
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()

    def _route(self) -> None:
        for method, pattern, function in ROUTES:
            found = re.fullmatch(pattern, self.route)
            if found and self.command in method.split("|"):
                getattr(self, function)(**{name: unquote(value or "") for name, value in found.groupdict().items()})
                raise AssertionError(f"{function} gave no answer")
        raise Answer(404, {"error": f"no such route: {self.command} {self.route}"})

    # ---- who may do what ---------------------------------------------------------------------------------------------

    def who(self) -> dict[str, Any] | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def user(self) -> dict[str, Any]:
        who = self.who()
        if who is None:
            said = "Invalid credentials in Authorization header"
            raise Answer(401, {"error": said}, X_Error_Message=said)
        return who

    def may_write(self, name: str) -> bool:
        who, owner = self.user(), name.split("/")[0]
        token = who["auth"]["accessToken"]
        allowed = token["role"] == "write" or any(
            "repo.write" in scope["permissions"] and scope["entity"]["name"] in (owner, name)
            for scope in token.get("fineGrained", {}).get("scoped", ())
        )
        roles = {who["name"]: "admin"} | {org["name"]: org["roleInOrg"] for org in who["orgs"]}
        return allowed and roles.get(owner) in ("admin", "write", "contributor")

    def repo(self, name: str, *, write: bool = False) -> Repo:
        repo = self.hub.repos.get(name)
        who = self.user() if self.headers.get("Authorization") else None
        owners = [who["name"], *(org["name"] for org in who["orgs"])] if who else []
        if repo is None or (repo.private and name.split("/")[0] not in owners):
            raise Answer(404 if who else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if write and not self.may_write(name):
            raise Answer(403, {"error": "Forbidden: you don't have write access to this repository"})
        return repo

    def commit_of(self, repo: Repo, revision: str) -> str:
        oid = repo.resolve(revision)
        if oid is None:
            raise Answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        return oid

    # ---- routes ------------------------------------------------------------------------------------------------------

    def whoami(self) -> None:
        raise Answer(200, self.user())

    def create_repo(self) -> None:
        asked = self.json()
        name = f"{asked.get('organization') or self.user()['name']}/{asked['name']}"
        if not self.may_write(name):
            raise Answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        url = {"url": f"{self.hub.url}/{name}", "id": name}
        if name in self.hub.repos:
            raise Answer(409, {"error": "You already created this model repo", **url})
        self.hub.create(name, asked.get("private") or asked.get("visibility") == "private")
        raise Answer(200, url)

    def info(self, name: str, revision: str = "") -> None:
        repo = self.repo(name)
        oid = self.commit_of(repo, revision or "main")
        siblings = [{"rfilename": path} for path in repo.commits[oid]]
        facts = {"_id": name, "id": name, "modelId": name, "sha": oid, "private": repo.private, "siblings": siblings}
        raise Answer(200, {**facts, "tags": [], "downloads": 0, "likes": 0})

    def refs(self, name: str) -> None:
        repo = self.repo(name)
        named = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c[-1]} for n, c in repo.branches.items()
                 if not n.startswith("refs/")]  # fmt: skip
        pulls = [{"name": n, "ref": n, "targetCommit": repo.branches[n][-1]} for n in repo.pulls]
        raise Answer(200, {"branches": named, "converts": [], "tags": [], "pullRequests": pulls})

    def auth_check(self, name: str, write: str) -> None:
        self.repo(name, write=bool(write))
        raise Answer(200, {})

    def make_branch(self, name: str, branch: str) -> None:
        repo = self.repo(name, write=True)
        if branch in repo.branches:
            raise Answer(409, {"error": "Reference already exists"})
        repo.branches[branch] = [self.commit_of(repo, self.json().get("startingPoint") or "main")]
        raise Answer(200, {})

    def validate_yaml(self) -> None:
        content = self.json()["content"]
        if content.startswith("---") and "\n---" not in content[3:]:
            raise Answer(400, {"errors": [{"message": "no end of the metadata"}], "warnings": []})
        raise Answer(200, {"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        repo = self.repo(name, write="create_pr" not in self.query)
        files = repo.commits[self.commit_of(repo, revision)]
        asked = self.json()
        ignore = asked.get("gitIgnore") or (files[".gitignore"].data or b"").decode() if ".gitignore" in files else ""
        told = []
        for file in asked["files"]:
            path, old = file["path"], files.get(file["path"])
            large = is_large(files, path) or file["size"] > 10_000_000 or b"\0" in base64.b64decode(file["sample"])
            told.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": any(fnmatch.fnmatch(path, line) for line in ignore.split()),
                    "oid": old and (old.sha256 or old.oid),
                }
            )
        raise Answer(200, {"files": told})

    def batch(self, name: str) -> None:
        repo, asked = self.repo(name), self.json()
        if self.hub.xet and "xet" in asked["transfers"]:
            raise Answer(200, {"transfer": "xet", "objects": [{**o, "actions": {}} for o in asked["objects"]]})
        objects = []
        for wanted in asked["objects"]:
            sha, size = wanted["oid"], wanted["size"]
            if sha in repo.large:
                objects.append({"oid": sha, "size": size})
                continue
            count = -(-size // self.hub.part_bytes)
            verify = {"href": f"{self.hub.url}/verify/{name}/{sha}"}
            if count <= 1:
                actions = {"upload": {"href": self.link(name, sha, size, 0)}, "verify": verify}
            else:
                header = {f"{n:05}": self.link(name, sha, size, n) for n in range(1, count + 1)}
                header["chunk_size"] = str(self.hub.part_bytes)
                actions = {
                    "upload": {"href": f"{self.hub.url}/complete/{name}/{sha}", "header": header},
                    "verify": verify,
                }
            objects.append({"oid": sha, "size": size, "actions": actions})
        raise Answer(200, {"transfer": "multipart" if self.hub.part_bytes < 1 << 40 else "basic", "objects": objects})

    def link(self, name: str, sha: str, size: int, part: int) -> str:
        key = secrets.token_hex(8)
        self.hub.links[key] = (name, part, sha, size)
        return f"{self.hub.store}/upload/{key}?X-Amz-Signature={secrets.token_hex(16)}"

    def upload(self, key: str) -> None:
        if key not in self.hub.links:
            raise Answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        name, part, sha, size = self.hub.links[key]
        target = self.hub.root / (f"{sha}.{part:05}" if part else sha)
        private = target.with_name(f"{target.name}.{key}.tmp")
        whole, etag, nbytes = hashlib.sha256(), hashlib.md5(), 0
        with private.open("wb") as file:
            for data in self.body():
                with self.hub.lock:
                    self.hub.sent[sha] = self.hub.sent.get(sha, 0) + len(data)
                nbytes += len(data)
                if self.hub.checks:
                    (etag if part else whole).update(data)
                if self.hub.keep or nbytes < 1 << 20:
                    file.write(data)
                elif not self.hub.checks:
                    nbytes += self.drop()
        if not part and (nbytes != size or (self.hub.checks and whole.hexdigest() != sha)):
            raise Answer(400, b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>")
        private.rename(target)
        if not part:
            self.hub.repos[name].large.add(sha)
        raise Answer(200, b"", ETag=f'"{etag.hexdigest()}"')

    def complete(self, name: str, sha: str) -> None:
        count = len(self.json()["parts"])
        parts = [self.hub.root / f"{sha}.{number:05}" for number in range(1, count + 1)]
        whole = hashlib.sha256()
        with (self.hub.root / f"{sha}.tmp").open("wb") as file:
            for part in parts:
                data = part.read_bytes()
                whole.update(data)
                file.write(data)
        if self.hub.keep and whole.hexdigest() != sha:
            raise Answer(400, {"error": "the parts do not make up the object"})
        (self.hub.root / f"{sha}.tmp").rename(self.hub.root / sha)
        self.hub.repos[name].large.add(sha)
        raise Answer(200, {})

    def verify(self, name: str, sha: str) -> None:
        if self.json()["oid"] != sha or sha not in self.repo(name).large:
            raise Answer(404, {"error": "no such object"})
        raise Answer(200, {})

    def commit(self, name: str, revision: str) -> None:
        pull = "create_pr" in self.query
        repo = self.repo(name, write=not pull)
        lines = [json.loads(line) for line in b"".join(self.body()).splitlines()]
        head = self.commit_of(repo, revision)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, head) and not pull:
            raise Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(repo.commits[head])
        for line in lines[1:]:
            value, path = line["value"], line["value"]["path"]
            if line["key"] == "file":
                files[path] = Blob.regular(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in repo.large and not self.hub.xet:
                    raise Answer(400, {"error": "an LFS pointer pointed to a file that does not exist"})
                files[path] = Blob.large(value["oid"], value["size"])
            elif line["key"] == "deletedFile":
                del files[path]
            else:
                files = {known: blob for known, blob in files.items() if not known.startswith(path.rstrip("/") + "/")}
        branch = f"refs/pr/{len(repo.pulls) + 1}" if pull else revision
        oid = repo.add(branch, files, header["summary"])
        url = f"{self.hub.url}/{name}/discussions/{len(repo.pulls)}" if pull else None
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}
        raise Answer(200, {**answer, "hookOutput": "", "pullRequestUrl": url})

    def tree(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        files = repo.commits[self.commit_of(repo, revision)]
        top = path.strip("/") + "/" if path.strip("/") else ""
        below = {known: blob for known, blob in files.items() if known.startswith(top)}
        if top and not below:
            raise Answer(404, {"error": f"{path} does not exist"}, X_Error_Code="EntryNotFound")
        deep = self.query.get("recursive", "").lower() in ("true", "1")
        folders = {top + "/".join(known[len(top) :].split("/")[:n]) for known in below
                   for n in range(1, known[len(top) :].count("/") + 1)}  # fmt: skip
        entries = [entry(known, blob) for known, blob in below.items() if deep or "/" not in known[len(top) :]]
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)
                    if deep or "/" not in folder[len(top) :]]  # fmt: skip
        start = int(self.query.get("cursor", 0))
        more = {}
        if start + self.hub.page < len(entries):
            again = f"{self.hub.url}{self.route}?recursive={deep}&cursor={start + self.hub.page}"
            more = {"Link": f'<{again}>; rel="next"'}
        raise Answer(200, entries[start : start + self.hub.page], **more)

    def paths_info(self, name: str, revision: str) -> None:
        repo = self.repo(name)
        files = repo.commits[self.commit_of(repo, revision)]
        data = b"".join(self.body())
        asked = json.loads(data) if data.startswith(b"{") else parse_qs(data.decode())
        raise Answer(200, [entry(path, files[path]) for path in asked["paths"] if path in files])

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        if repo.gated:
            raise Answer(403, {"error": f"Access to model {name} is restricted"}, X_Error_Code="GatedRepo")
        oid = self.commit_of(repo, revision)
        blob = repo.commits[oid].get(path)
        if blob is None:
            raise Answer(404, b"Entry not found", X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        if blob.sha256:
            linked = {"X_Linked_Size": str(blob.size), "X_Linked_ETag": f'"{blob.sha256}"'}
            raise Answer(302, b"", X_Repo_Commit=oid, Location=f"{self.hub.store}/cdn/{blob.sha256}", **linked)
        self._send(blob.data or b"", X_Repo_Commit=oid, ETag=f'"{blob.oid}"')

    def cdn(self, sha: str) -> None:
        self._send((self.hub.root / sha).read_bytes(), ETag=f'"{sha}"')

    def _send(self, data: bytes, **headers: str) -> None:
        headers |= {"Accept_Ranges": "bytes", "Content_Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            raise Answer(200, data, Content_Length=str(len(data)), **headers)
        start, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if start >= len(data):
            raise Answer(416, b"")
        raise Answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers)

    def discussions(self, name: str) -> None:
        repo = self.repo(name)
        found = [
            {"num": number, "title": repo.titles[repo.branches[ref][-1]], "status": "open", "isPullRequest": True,
             "author": {"name": "alice"}, "createdAt": "2026-01-01T00:00:00.000Z", "repo": {"name": name, "type": "model"}}
            for number, ref in enumerate(repo.pulls, 1)
        ]  # fmt: skip
        raise Answer(200, {"discussions": found, "count": len(found), "start": 0, "numClosedDiscussions": 0})

    def xet_token(self, name: str) -> None:
        self.repo(name, write=True)
        if not self.hub.xet:
            raise Answer(404, {"error": "no Xet here"})
        facts = {"accessToken": "xet", "exp": 9_999_999_999, "casUrl": self.hub.xet}
        headers = {"X_Xet_Cas_Url": self.hub.xet, "X_Xet_Access_Token": "xet", "X_Xet_Token_Expiration": "9999999999"}
        raise Answer(200, facts, **headers)

    def bucket(self, name: str) -> dict[str, tuple[str, bytes]]:
        if name not in self.hub.buckets:
            raise Answer(404, {"error": "no such bucket"}, X_Error_Code="RepoNotFound")
        return self.hub.buckets[name]

    def bucket_info(self, name: str) -> None:
        files = self.bucket(name)
        facts = {"private": True, "createdAt": "2026-01-01T00:00:00.000Z", "totalFiles": len(files)}
        raise Answer(200, {"id": name, "size": sum(len(data) for _, data in files.values()), **facts})

    def bucket_tree(self, name: str, path: str) -> None:
        top = path.strip("/") + "/" if path.strip("/") else ""
        deep = self.query.get("recursive", "").lower() == "true"
        files = {known: file for known, file in self.bucket(name).items() if known.startswith(top) or known == top[:-1]}
        folders = {top + known[len(top) :].split("/")[0] for known in files if "/" in known[len(top) :]}
        found: list[dict[str, Any]] = [
            {"type": "file", "path": known, "size": len(data), "xetHash": digest, "uploadedAt": "2026-01-01T00:00:00.000Z"}
            for known, (digest, data) in files.items() if deep or "/" not in known[len(top) :]
        ]  # fmt: skip
        raise Answer(200, found + [{"type": "directory", "path": one} for one in sorted(folders) if not deep])

    def bucket_batch(self, name: str) -> None:
        files = self.bucket(name)
        for line in b"".join(self.body()).splitlines():
            asked = json.loads(line)
            if asked["type"] == "deleteFile":
                files.pop(asked["path"], None)
            else:
                files[asked["path"]] = asked["xetHash"], self._from_xet(asked["xetHash"])
        raise Answer(200, {"success": True, "processed": 1, "succeeded": 1, "failed": []})

    def _from_xet(self, digest: str) -> bytes:
        """The bytes of a file that was sent: the store is locked by who writes to it, so they are looked for at the sender's."""
        import hf_xet

        found = [path for path in self.hub.spool.iterdir() if hf_xet.hash_files([str(path)])[0].hash == digest]
        return found[0].read_bytes()

    def bucket_resolve(self, name: str, path: str) -> None:
        files = self.bucket(name)
        if path not in files:
            raise Answer(404, b"Entry not found", X_Error_Code="EntryNotFound")
        self._send(files[path][1], ETag=f'"{files[path][0]}"')

    def bucket_token(self, name: str) -> None:
        self.bucket(name)
        headers = {"X_Xet_Cas_Url": self.hub.xet, "X_Xet_Access_Token": "xet", "X_Xet_Token_Expiration": "9999999999"}
        raise Answer(200, {"accessToken": "xet", "exp": 9_999_999_999, "casUrl": self.hub.xet}, **headers)


def entry(path: str, blob: Blob) -> dict[str, Any]:
    lfs = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}} if blob.sha256 else {}
    return {"type": "file", "oid": blob.oid, "size": blob.size, "path": path, **lfs}


def is_large(files: dict[str, Blob], path: str) -> bool:
    attributes = (files[".gitattributes"].data or b"").decode() if ".gitattributes" in files else ""
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
    return any(fnmatch.fnmatch(path if "/" in pattern else path.rpartition("/")[2], pattern) for pattern in patterns)


_NAME = r"(?P<name>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+|refs/pr/\d+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", rf"/api/models/{_NAME}", "info"),
    ("GET", rf"/api/models/{_NAME}/revision/{_REVISION}", "info"),
    ("GET", rf"/api/models/{_NAME}/refs", "refs"),
    ("GET", rf"/api/models/{_NAME}/auth-check(?P<write>/write)?", "auth_check"),
    ("POST", rf"/api/models/{_NAME}/branch/(?P<branch>[^/]+)", "make_branch"),
    ("POST", rf"/api/models/{_NAME}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/upload/(?P<key>\w+)", "upload"),
    ("POST", rf"/complete/{_NAME}/(?P<sha>\w+)", "complete"),
    ("POST", rf"/verify/{_NAME}/(?P<sha>\w+)", "verify"),
    ("POST", rf"/api/models/{_NAME}/commit/{_REVISION}", "commit"),
    ("GET", rf"/api/models/{_NAME}/tree/{_REVISION}(?P<path>/.*)?", "tree"),
    ("POST", rf"/api/models/{_NAME}/paths-info/{_REVISION}", "paths_info"),
    ("GET|HEAD", rf"/{_NAME}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
    ("GET|HEAD", r"/cdn/(?P<sha>\w+)", "cdn"),
    ("GET", rf"/api/models/{_NAME}/discussions", "discussions"),
    ("GET", rf"/api/buckets/{_NAME}", "bucket_info"),
    ("GET", rf"/api/buckets/{_NAME}/tree(?P<path>/.*)?", "bucket_tree"),
    ("POST", rf"/api/buckets/{_NAME}/batch", "bucket_batch"),
    ("GET", rf"/api/buckets/{_NAME}/xet-(?:write|read)-token", "bucket_token"),
    ("GET|HEAD", rf"/buckets/{_NAME}/resolve/(?P<path>.+)", "bucket_resolve"),
    ("GET", rf"/api/models/{_NAME}/xet-(?:write|read)-token/.*", "xet_token"),
]
