"""A hub that is busy, breaks, hangs up, changes its mind or lies: what passes is waited for, what does not is told."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hangs import HANG_S
from hub_server import TOKEN, Blob, HubServer

import zckpt
from zckpt.base.errors import AccessError, CorruptError, RemoteError
from zckpt.hub import PushReport, cargo, client, push_to_hub
from zckpt.hub.client import Hub
from zckpt.hub.pipeline import Stopped
from zckpt.hub.target import SentFile

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Our own waits are counted; neither they nor the library's are waited for."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=waited.append))
    return waited


def is_published(server: HubServer) -> bool:
    return "alice/m" in server.repos and len(server.repos["alice/m"].branches["main"]) == 2


# ---- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "whoami"),
        ("GET", "/revision/"),
        ("POST", "/repos/create"),
        ("POST", "/commit/"),
        ("GET", "/tree/"),
        ("GET", "/resolve/"),
    ],
)
def test_a_busy_hub(
    method: str, path: str, status: int, checkpoint: Path, server: HubServer, push: Pusher, no_long_waits: list[float]
) -> None:
    server.fault(method, path, times=2, status=status)
    push(checkpoint)
    assert is_published(server)


@pytest.mark.parametrize("path", ["objects/batch", "/upload/", "/verify/", "/complete/", "preupload"])
def test_a_busy_store(
    path: str, checkpoint: Path, server: HubServer, push: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.part_bytes = 70_000
    server.fault("PUT" if path == "/upload/" else "POST", path, status=503)
    push(checkpoint)
    assert is_published(server)


def test_the_servers_own_delay(checkpoint: Path, server: HubServer, push: Pusher, no_long_waits: list[float]) -> None:
    told: list[str] = []
    server.fault("POST", "/commit/", times=2, status=429, headers={"Retry_After": "37"})
    server.fault("POST", "/commit/", status=429, headers={"ratelimit": '"api";r=0;t=55'})
    push(checkpoint, tell=told.append)
    assert [seconds for seconds in no_long_waits if seconds in (37, 55)] == [37, 37, 55]
    assert any("trying again in 37 s" in text for text in told)


def test_a_delay_that_nobody_waits_for(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("POST", "/commit/", times=9, status=429, headers={"Retry_After": "7200"})
    with pytest.raises(RemoteError, match="status 429"):
        push(checkpoint)


@pytest.mark.parametrize("drop", [0, 30_000, 150_000])
@pytest.mark.parametrize("part_bytes", [1 << 40, 100_000])
def test_a_connection_that_dies(drop: int, part_bytes: int, checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.part_bytes = part_bytes
    server.fault("PUT", "/upload/", drop=min(drop, part_bytes - 1))
    push(checkpoint)
    assert is_published(server)
    sizes = {
        b.sha256: b.size for b in server.repos["alice/m"].commits[server.repos["alice/m"].branches["main"][-1]].values()
    }
    assert all(nbytes <= 2 * sizes[sha256] for sha256, nbytes in server.sent.items())


def test_a_link_that_expires(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.part_bytes = 70_000
    server.fault("PUT", "/upload/", skip=2, call=server.links.clear)
    told: list[str] = []
    push(checkpoint, tell=told.append)
    assert is_published(server)
    assert any("link expired" in text for text in told)


# ---- a revision that moves -------------------------------------------------------------------------------------------


def move(server: HubServer) -> Callable[[], None]:
    def act() -> None:
        repo = server.repos["alice/m"]
        files = repo.commits[repo.branches["main"][-1]]
        repo.add("main", {**files, f"note{len(repo.branches['main'])}.txt": Blob.regular(b"hello")}, "somebody else's")

    return act


def test_a_revision_that_moved_is_told_and_tried_once_more(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("POST", "/commit/", call=move(server))
    told: list[str] = []
    report = push(checkpoint, tell=told.append)
    assert any("committed" in text for text in told)
    assert any("on top of theirs" in note for note in report.notes)
    assert {"note1.txt", "model-00001-of-00003.safetensors"} <= set(server.files("alice/m"))
    assert len(server.repos["alice/m"].branches["main"]) == 3


def test_a_revision_that_keeps_moving(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("POST", "/commit/", times=5, call=move(server))
    with pytest.raises(RemoteError, match="somebody else committed"):
        push(checkpoint)
    assert "model-00001-of-00003.safetensors" not in server.files("alice/m")


def test_an_answer_that_was_lost(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("POST", "/commit/", lose=True)
    report = push(checkpoint)
    assert is_published(server)
    assert report.commit == server.repos["alice/m"].branches["main"][-1]


def test_a_pull_request_whose_answer_was_lost(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.create("alice/m", files={"model.safetensors": b"x"})
    server.fault("POST", "/commit/", lose=True)
    report = push(checkpoint, create_pr=True)
    assert server.repos["alice/m"].pulls == ["refs/pr/1"]
    assert report.pull_request == f"{server.url}/alice/m/discussions/1"


# ---- what does not pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/upload/", "/verify/", "/complete/"])
def test_a_refused_hash_stops_everything(path: str, checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.part_bytes = 70_000
    server.fault(
        "PUT" if path == "/upload/" else "POST", path, times=50, status=422, body=b'{"error": "sha256 mismatch"}'
    )
    with pytest.raises(CorruptError, match="refused"):
        push(checkpoint)
    assert not is_published(server) and not any("/commit/" in path for _, path, _, _ in server.log)


def test_bytes_that_changed_on_the_way(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    """A shard goes bad in the scratch directory after it was hashed: the hub's own hash finds it."""
    write_shard = cargo._write_shard

    def spoil(*arguments: Any) -> tuple[str, str]:
        path, sha256 = write_shard(*arguments)
        with open(path, "r+b") as file:
            file.seek(1000)
            file.write(b"?")
        return path, sha256

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CorruptError, match="refused"):
        patch.setattr(cargo, "_write_shard", spoil)
        push(checkpoint)
    assert not is_published(server)


def test_a_page_that_is_not_what_was_sent(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    def swap() -> None:
        repo = server.repos["alice/m"]
        files = repo.commits[repo.branches["main"][-1]]
        files["config.json"] = Blob.regular(b"{}")
        del files["tokenizer_config.json"]

    server.fault("GET", "/tree/", skip=1, call=swap)
    process = shell("push", checkpoint, "alice/m")
    err = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 2
    assert "'config.json' has 2 bytes" in err and "'tokenizer_config.json' is missing" in err


def test_a_header_that_is_not_what_was_sent(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    def spoil() -> None:
        for sha256 in server.repos["alice/m"].large:
            data = bytearray((server.root / sha256).read_bytes())
            data[20] ^= 1
            (server.root / sha256).write_bytes(data)

    server.fault("GET", "/resolve/.*safetensors", call=spoil)
    with pytest.raises(CorruptError, match="begins with another header"):
        push(checkpoint)


def test_a_hub_that_is_down(checkpoint: Path, server: HubServer, push: Pusher, no_long_waits: list[float]) -> None:
    server.fault("GET", "whoami", times=1000, status=500)
    with pytest.raises(RemoteError, match="status 500"):
        push(checkpoint)
    assert no_long_waits == [1, 2, 4, 8, 16, 32, 64]


def test_nobody_there(checkpoint: Path, no_long_waits: list[float]) -> None:
    """Nothing is lost yet: the command ends soon."""
    with pytest.raises(RemoteError, match=r"no connection to the hub while.*HF_ENDPOINT"):
        push_to_hub(checkpoint, "alice/m", endpoint="http://127.0.0.1:9", token=TOKEN)
    assert no_long_waits == [1, 2]


def test_an_address_at_a_hub_that_nobody_reaches(shell: Shell) -> None:
    process = shell("inspect", "hf://alice/m", HF_ENDPOINT="http://127.0.0.1:9")
    told = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 2 and "no connection" in told and "HTTPS_PROXY" in told, told


def test_a_sender_whose_push_ended_waits_for_nothing(
    checkpoint: Path, server: HubServer, no_long_waits: list[float]
) -> None:
    ended: list[bool] = []

    def watch(_: int) -> None:
        if ended:
            raise Stopped

    hub = Hub(TOKEN, server.url, lambda _: None)
    file = checkpoint / "config.json"
    sent = SentFile("a.safetensors", file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest(), "")
    hub.api.create_repo("alice/m")
    server.fault("POST", "objects/batch", times=1000, status=500, call=lambda: ended.append(True))
    with pytest.raises(Stopped):
        hub.send("alice/m", "main", sent, str(file), watch, create_pr=False)
    assert no_long_waits == []


def test_rights_that_are_lost_meanwhile(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("POST", "/commit/", times=9, status=403, body=b'{"error": "Private repository storage limit reached"}')
    with pytest.raises(AccessError, match="storage limit"):
        push(checkpoint)


# ---- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PUT", "/upload/", 422), ("POST", "/commit/", 403), ("GET", "whoami", 401), ("POST", "objects/batch", 400)],
)
def test_no_secret_is_ever_told(
    method: str, path: str, status: int, debug: str, checkpoint: Path, server: HubServer, shell: Shell
) -> None:
    body = f'{{"error": "bad token {TOKEN} in Authorization: Bearer {TOKEN}"}}'.encode()
    server.fault(method, path, times=50, status=status, body=body)
    given = ["--token", TOKEN] if debug == "1" else [f"--token={TOKEN}"]
    process = shell("push", checkpoint, "alice/m", "--json", *given, HF_TOKEN=None, ZCKPT_DEBUG=debug)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 2 and "error: " in err and "Traceback" * int(debug) in err
    for secret in (TOKEN, "X-Amz-Signature="):
        assert secret not in out and secret not in err


def test_a_token_goes_to_the_hub_only(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    push(checkpoint)
    store = server.store.removeprefix("http://")
    told = {host == store: set() for host, _, _ in server.auth}
    for host, _, header in server.auth:
        told[host == store].add(header)
    assert told[True] == {""}
    assert told[False] == {f"Bearer {TOKEN}"}


def test_every_kind_of_push_error_is_zckpts() -> None:
    assert issubclass(AccessError, PermissionError) and issubclass(RemoteError, ConnectionError)
    assert {zckpt.AccessError, zckpt.RemoteError} == {AccessError, RemoteError}
