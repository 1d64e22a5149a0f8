"""What is refused before any work: tokens, names, rights; and nothing was made or changed."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hangs import HANG_S
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, HfFileSystem, constants

import zckpt
from zckpt.base.errors import AccessError, UsageError, ZckptError
from zckpt.hub import PushReport, card
from zckpt.jobs.options import Options

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]
ORGS = {"lab": "write", "museum": "read", "crowd": "contributor"}


def scoped(*names: str) -> dict[str, object]:
    scopes = [
        {"entity": {"type": "user", "name": name}, "permissions": ["repo.content.read", "repo.write"]} for name in names
    ]
    read = [{"entity": {"type": "user", "name": "alice"}, "permissions": ["repo.content.read"]}]
    return {"fineGrained": {"scoped": [*read, *scopes]}}


def nothing_happened(server: HubServer, tmp_path: Path) -> bool:
    writes = [entry for entry in server.log if entry[0] != "GET"]
    return not writes and not server.repos and not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("role", "more", "repo_id", "words"),
    [
        ("read", {}, "alice/m", "a token of alice for reading; it may write to none"),
        ("write", {}, "bob/m", r"not a member of bob; .* of alice, lab and crowd\. Push to alice/m, or"),
        ("write", {}, "museum/m", r"may only read in museum; .*Push to alice/m, or"),
        ("fineGrained", scoped(), "alice/m", "fine-grained token of alice that may write to nothing"),
        ("fineGrained", scoped("lab"), "alice/m", r"may write to lab; .*Push to lab/m, or"),
    ],
)
def test_tokens_that_may_not(
    role: str,
    more: dict[str, object],
    repo_id: str,
    words: str,
    checkpoint: Path,
    server: HubServer,
    push: Pusher,
    tmp_path: Path,
) -> None:
    server.user("alice", "hf_other", role, ORGS, **more)
    with pytest.raises(AccessError, match=words):
        push(checkpoint, repo_id, token="hf_other")
    assert nothing_happened(server, tmp_path)


@pytest.mark.parametrize(
    ("role", "more", "repo_id"),
    [
        ("write", {}, "lab/m"),
        ("write", {}, "crowd/m"),
        ("fineGrained", scoped("alice"), "alice/m"),
        ("fineGrained", scoped("lab/m"), "lab/m"),
    ],
)
def test_tokens_that_may(
    role: str, more: dict[str, object], repo_id: str, checkpoint: Path, server: HubServer, push: Pusher
) -> None:
    server.user("alice", "hf_other", role, ORGS, **more)
    push(checkpoint, repo_id, token="hf_other")
    assert "config.json" in server.files(repo_id)


def test_a_right_that_only_the_hub_knows_of(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    """The organization's member list says "admin", the hub's own check says no."""
    if "write" not in inspect.signature(HfApi.auth_check).parameters:
        pytest.skip("this huggingface_hub cannot ask")
    server.user("alice", "hf_other", "write", {"lab": "admin"})
    server.create("lab/m")
    server.fault("GET", "auth-check/write", times=9, status=403)
    with pytest.raises(AccessError, match="may not write there"):
        push(checkpoint, "lab/m", token="hf_other")


def test_a_token_that_nobody_knows(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AccessError, match=r"the hub does not know this token.*of --token.*HF_TOKEN"):
        push(checkpoint, token="hf_nobodys")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(AccessError, match=r"the hub does not know this token.*of HF_TOKEN"):
        push(checkpoint, token=None)
    assert nothing_happened(server, tmp_path)


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("bob/secret", TOKEN, "the hub has no such repository, or does not show it.*HF_TOKEN, of alice.*set HF_TOKEN"),
        ("bob/nothing", "", "the hub has no such repository, or does not show it.*no token"),
        (
            "bob/open",
            "hf_expired",
            "the hub does not let this token read it.*which the hub does not know.*unset HF_TOKEN",
        ),
        ("bob/gated", TOKEN, "is gated.*of alice.*Ask for access at https://huggingface.co/bob/gated"),
    ],
)
def test_what_a_token_may_not_read(
    name: str, token: str, words: str, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("bob/secret", "bob/open", "bob/gated"):
        server.create(key, private=key == "bob/secret", files={"model.safetensors": b"1234567890"})
    server.repos["bob/gated"].gated = True
    HfFileSystem.clear_instance_cache()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ZckptError, match=words):
        zckpt.open_checkpoint(f"hf://{name}", framework="np")


def test_no_token(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    process = shell("push", checkpoint, "alice/m", HF_TOKEN=None)
    err = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 2 and "there is no token for the hub" in err and "hf auth login" in err
    assert server.log == []


def test_the_token_that_is_logged_in(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN)
    process = shell("push", checkpoint, "m", HF_TOKEN=None)
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert "config.json" in server.files("alice/m")


@pytest.mark.parametrize(
    "name", ["a/b/c", "alice/", "alice/m m", "-x", "alice/" + "m" * 100, "alice/m.git", "alice/a--b", ""]
)
def test_names_of_nothing(name: str, checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no repository can have"):
        push(checkpoint, name)
    assert server.log == []


def test_shards_that_no_hub_takes(
    checkpoint: Path, server: HubServer, push: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.hub.transfer.MOST_FILE_BYTES", 100_000)
    with pytest.raises(UsageError, match="larger than the hub takes"):
        push(checkpoint)
    assert server.log == []


def test_placeholders_among_weights(server: HubServer, push: Pusher, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "w").mkdir()
    save_file(
        {"norm": torch.ones(9), "bias": torch.ones(9), "matrix": torch.empty(0)}, tmp_path / "w/model.safetensors"
    )
    with pytest.raises(ZckptError, match=r"placeholders.*'matrix'"):
        push(tmp_path / "w")
    assert server.log == []


def test_a_source_that_contradicts_itself(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    import torch
    from synth import zero12

    zero12(tmp_path / "z2", [{"a.weight": torch.randn(100)}], 2)
    file = tmp_path / "z2" / "global_step5" / "mp_rank_00_model_states.pt"
    data = torch.load(file, weights_only=False)
    data["module"]["a.weight"][0] = 77
    torch.save(data, file)
    with pytest.raises(ZckptError, match="are not the model's in"):
        push(tmp_path / "z2", options=Options())
    assert not server.repos


@pytest.mark.parametrize(
    ("text", "paths", "added"),
    [
        (b"", ["a.safetensors", "x/b.safetensors"], b"*.safetensors"),
        (b"*.safetensors filter=lfs diff=lfs merge=lfs -text", ["a.safetensors", "x/b.safetensors"], None),
        (b"*.safetensors filter=lfs\na.* -filter\n", ["a.safetensors"], b"*.safetensors"),
        (b"x/*.json filter=lfs\n# *.json filter=lfs\n", ["x/a.json", "b.json"], b"b.json"),
        (b"/b.json filter=lfs", ["b.json"], None),
        (b"", ["a b[1].json"], b"a?b[[]1].json"),
    ],
)
def test_lines_for_large_files(text: bytes, paths: list[str], added: bytes | None, tmp_path: Path) -> None:
    found = card.with_large(text, paths)
    if added is None:
        assert found is None
    else:
        line = b" filter=lfs diff=lfs merge=lfs -text\n"
        assert found == (text + b"\n" if text and not text.endswith(b"\n") else text) + added + line
        assert card.with_large(found, paths) is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitattributes").write_bytes(found or text)
    for path in paths:
        command = ["git", "-C", tmp_path, "check-attr", "filter", "--", path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told.strip().endswith("filter: lfs"), path
