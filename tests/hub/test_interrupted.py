"""Pushes that are killed, interrupted or repeated: the same command goes on, and nothing is made or sent twice without need."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import proofs
import pytest
from hangs import HANG_S
from hub_server import SHARD_BYTES, TOKEN, HubServer

import zckpt
from zckpt.base.errors import UsageError
from zckpt.hub import PushReport, pipeline
from zckpt.jobs.options import Options

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]
TICKS = 140
"""Of the server during one whole push of the tests' model; asserted below."""


def small_parts(server: HubServer) -> HubServer:
    server.part_bytes, server.tick_bytes = 100_000, 8 << 10
    return server


def arguments(checkpoint: Path, tmp_path: Path) -> list[object]:
    return ["push", checkpoint, "alice/m", "--max-shard-size", SHARD_BYTES, "--scratch", tmp_path / "scratch"]


def large(server: HubServer) -> dict[str, int]:
    """Hash -> size, of the large files of the page."""
    repo = server.repos["alice/m"]
    return {blob.sha256: blob.size for blob in repo.commits[repo.branches["main"][-1]].values() if blob.sha256}


def test_a_whole_push_has_so_many_ticks(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    small_parts(server)
    process = shell(*arguments(checkpoint, tmp_path))
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert TICKS <= server.ticks <= TICKS + 15


@proofs.MORE
@pytest.mark.parametrize("tick", sorted(random.Random(5).sample(range(1, TICKS), 20))[:: 1 if proofs.IS_WHOLE else 2])
def test_killed_anywhere_it_goes_on(
    tick: int, checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path
) -> None:
    small_parts(server)
    first = shell(*arguments(checkpoint, tmp_path))
    server.victim, server.kill_at = first.pid, tick
    assert first.wait(HANG_S) in (-signal.SIGKILL, 0)
    assert "alice/m" not in server.repos or set(server.files("alice/m")) in ({".gitattributes"}, set(page(server)))
    published = "alice/m" in server.repos and len(server.repos["alice/m"].branches["main"]) == 2
    again = [*arguments(checkpoint, tmp_path), *(["--yes"] if published else [])]
    second = shell(*again)
    assert second.wait(HANG_S) == 0, second.communicate()[1]
    zckpt.convert(checkpoint, tmp_path / "want", dtype="bf16", options=Options(max_shard_size=SHARD_BYTES))
    found = page(server)
    assert found.pop("README.md") and found.pop(".gitattributes") == server.attributes
    assert found == {
        file.name: file.read_bytes() for file in (tmp_path / "want").iterdir() if file.name != "zckpt.json"
    }
    assert len(server.repos["alice/m"].branches["main"]) == 2
    sizes = large(server)
    assert set(server.sent) == set(sizes)
    assert all(nbytes <= 2 * sizes[sha256] for sha256, nbytes in server.sent.items())
    assert {file.name for file in (tmp_path / "scratch").glob("*/*")} == {"journal.jsonl", "lock"}


def page(server: HubServer) -> dict[str, bytes]:
    return server.files("alice/m")


def test_what_is_there_is_not_made_again(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    """Everything went up, but the commit failed for good."""
    fault = server.fault("POST", "/commit/", times=100, status=400, body=b'{"error": "no"}')
    with pytest.raises(zckpt.ZckptError, match="committing"):
        push(checkpoint)
    fault.times, sent = 0, dict(server.sent)
    report = push(checkpoint)
    assert (report.bytes_made, report.bytes_sent) == (0, 0)
    assert server.sent == sent
    assert set(page(server)) >= {"model-00001-of-00003.safetensors", "config.json"}


def test_what_is_there_in_part_is_made_in_part(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.fault("PUT", "/upload/", skip=2, times=100, status=400)
    with pytest.raises(zckpt.ZckptError, match="refused"):
        push(checkpoint, max_scratch=SHARD_BYTES)
    server.faults.clear()
    report = push(checkpoint)
    assert report.bytes_made == report.bytes_sent < 1.1 * 200_000
    assert len(server.repos["alice/m"].branches["main"]) == 2


def test_another_conversion_begins_anew(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    fault = server.fault("POST", "/commit/", times=100, status=400)
    for _ in range(2):
        with pytest.raises(zckpt.ZckptError, match="committing"):
            push(checkpoint)
    fault.times = 0
    (
        checkpoint / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    ).touch()  # written anew, as far as one can see
    report = push(checkpoint)
    assert report.bytes_made > 600_000
    assert report.bytes_sent == 0, "the same bytes came of it, and the hub had them"
    assert sum(server.sent.values()) == report.bytes_made
    assert push(checkpoint, dtype="fp16", yes=True).bytes_made > 600_000


def test_a_hub_that_lost_a_file(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    fault = server.fault("POST", "/commit/", times=100, status=400)
    with pytest.raises(zckpt.ZckptError):
        push(checkpoint)
    fault.times, repo = 0, server.repos["alice/m"]
    lost = sorted(repo.large)[0]
    server.fault("POST", "/commit/", call=lambda: repo.large.discard(lost))
    told: list[str] = []
    report = push(checkpoint, tell=told.append)
    assert any("lost a file" in text for text in told)
    assert report.bytes_made > 600_000 and server.sent[lost] > 0
    assert len(repo.branches["main"]) == 2


def test_ctrl_c(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    def interrupt() -> None:
        process.send_signal(signal.SIGINT)
        time.sleep(1)

    server.fault("PUT", "/upload/", skip=1, call=interrupt)
    process = shell(*arguments(checkpoint, tmp_path))
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (130, "")
    assert "Run the same command again to resume" in err and "interrupted" in err
    (left,) = (tmp_path / "scratch").iterdir()
    assert {file.name for file in left.iterdir()} == {"journal.jsonl", "lock"}
    again = shell(*arguments(checkpoint, tmp_path))
    assert again.wait(HANG_S) == 0, again.communicate()[1]
    assert all(nbytes <= 2 * large(server)[sha256] for sha256, nbytes in server.sent.items())


def test_an_interrupt_in_a_notebook_stops_the_senders(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    server.part_bytes = 10_000

    def progress(_: int) -> None:
        if server.sent:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(checkpoint, progress=progress)
    assert {file.name for file in (tmp_path / "scratch").glob("*/*")} == {"journal.jsonl", "lock"}
    time.sleep(0.3)
    sent = sum(server.sent.values())
    time.sleep(0.3)
    assert sum(server.sent.values()) == sent < 600_000


def test_two_pushes_to_one_page(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    place = (server.url, "alice/m", "main", "")
    with (
        pipeline.open_scratch(str(tmp_path / "scratch"), *place),
        pytest.raises(UsageError, match="another push to the same page is running"),
    ):
        push(checkpoint)
    assert push(checkpoint).commit


def test_a_journal_that_was_cut_short(tmp_path: Path) -> None:
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        room.remember("a", "a.safetensors", "ab" * 32)
        place = Path(room.path)
    journal = place / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"name": "b.safetensors", "sha256": "cd')
    (place / "b.safetensors").write_bytes(b"half")
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        assert room.known == {"a": "ab" * 32}
        assert not (place / "b.safetensors").exists()
        room.remember("c", "c.safetensors", "ef" * 32)
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        assert set(room.known) == {"a", "c"}
        room.finish(["c", "never made"])
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        assert room.known == {"c": "ef" * 32} == pipeline.read_known_shards(str(tmp_path), "x")
    assert {file.name for file in place.iterdir()} == {"journal.jsonl", "lock"}


def test_of_shards_that_are_through_one_is_kept_for_the_next(tmp_path: Path) -> None:
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        place = Path(room.path)
        for name in "ab":
            (place / name).write_text(name)
            room.put_away(str(place / name))
        assert [file.read_text() for file in place.iterdir() if file.name not in ("journal.jsonl", "lock")] == ["a"]
        room.lay_out("c")
        room.lay_out("d")
        assert (place / "c").read_text() == "a" and not (place / "d").exists()
        room.put_away(str(place / "c"))
        room.clear()
        assert {file.name for file in place.iterdir()} <= {"journal.jsonl", "lock"}


def test_a_token_of_ones_own_is_not_kept(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    server.fault("POST", "/commit/", times=100, status=400)
    with pytest.raises(zckpt.ZckptError):
        push(checkpoint)
    assert all(TOKEN.encode() not in file.read_bytes() for file in (tmp_path / "scratch").glob("*/*"))


def test_a_shard_that_is_through_while_all_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pipeline.open_scratch(str(tmp_path), "x") as room:
        shard = Path(room.path) / "a"
        shard.write_text("a")
        sender, listed = threading.Thread(target=room.put_away, args=(str(shard),)), os.listdir

        def meanwhile(path: str) -> list[str]:
            names = listed(path)
            sender.start()
            sender.join(0.2)
            return names

        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", meanwhile)
            room.clear()
        sender.join()
        assert {file.name for file in shard.parent.iterdir()} <= {"journal.jsonl", "lock"}
