"""What a push makes of a page, with the real client and a hub on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hangs import HANG_S
from hub_server import SHARD_BYTES, TOKEN, HubServer
from safetensors.torch import load, load_file, save_file
from schemas import check

import zckpt
from zckpt.base.errors import CastError, OutputError, UsageError
from zckpt.base.progress import JobWatch
from zckpt.base.sizes import to_bytes
from zckpt.hub import PageTarget, PushReport, cargo_of, prepare, push_to_hub
from zckpt.hub import load as plan_push
from zckpt.hub.target import Watched
from zckpt.jobs.declarations import PUSH
from zckpt.jobs.options import LoraMerge, Options

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]
FIXTURES = Path(__file__).parents[2] / "fixtures"
SOME = [
    "transformers/llama_zero3",
    "zero2/tied_w2",
    "zero3/packed_w2",
    "zero0/bf16",
    "bf16_optimizer/w2",
    "zero1/frozen_w2",
]
SHARD_NAMES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def local_files(place: Path) -> dict[str, bytes]:
    """Relative path -> bytes, but for the manifest: the hub keeps hashes of its own."""
    files = (file for file in place.rglob("*") if file.is_file() and file.name != "zckpt.json")
    return {str(file.relative_to(place)): file.read_bytes() for file in files}


def test_the_public_name() -> None:
    assert zckpt.push_to_hub is push_to_hub


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SOME)
def test_a_page_holds_what_a_conversion_writes(
    name: str, dtype: str, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    source, options = FIXTURES / name / "checkpoint", Options(max_shard_size=2_000)
    zckpt.convert(source, tmp_path / "want", dtype=dtype, options=options)
    report = push(source, dtype=dtype, options=options)
    page = server.files("alice/m")
    readme = page.pop("README.md").decode()
    assert page.pop(".gitattributes") == server.attributes
    assert page == local_files(tmp_path / "want")
    assert readme.startswith("---\n")
    assert {path for path, _, _ in report.files} == {*page, "README.md"}
    assert report.url == f"{server.url}/alice/m"
    assert report.commit == server.repos["alice/m"].branches["main"][-1]
    assert len(server.repos["alice/m"].branches["main"]) == 2
    assert {file.name for file in (tmp_path / "scratch").glob("*/*")} == {"journal.jsonl", "lock"}


@pytest.mark.parametrize("plain", [False, True])
def test_dtypes_and_files_of_a_model_that_is_there(
    plain: bool, checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    """As a conversion with `--like` writes it; weights that could be sent as they are, too."""
    source, base = checkpoint, tmp_path / "base"
    if plain:
        zckpt.convert(checkpoint, tmp_path / "weights", dtype="bf16")
        source = tmp_path / "weights"
    zckpt.convert(checkpoint, base, dtype="bf16", options=Options(keep_dtype=["norm.*"], max_shard_size=SHARD_BYTES))
    zckpt.convert(source, tmp_path / "want", dtype="bf16", options=Options(like=base))
    push(source, dtype=None if plain else "bf16", options=Options(like=base))
    page = server.files("alice/m")
    readme = page.pop("README.md").decode()
    page.pop(".gitattributes")
    assert page == local_files(tmp_path / "want") and {*SHARD_NAMES} <= page.keys()
    assert "every tensor in its own dtype" in readme


def test_a_page_is_signed(server: HubServer, push: Pusher, tmp_path: Path) -> None:
    """`model_signing` accepts a copy of the page; a page that holds other files is said to."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import verifying

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "key.pub").write_bytes(key.public_key().public_bytes(pem, info))
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "key.pub")

    def copied(place: Path) -> Path:
        for name, data in server.files("alice/m").items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        return place

    source, signed = FIXTURES / "transformers" / "llama_zero3" / "checkpoint", tmp_path / "key.pem"
    report = push(source, dtype="bf16", options=Options(max_shard_size=2_000, sign=signed))
    assert "model.sig" in {path for path, _, _ in report.files} and not any("cover" in note for note in report.notes)
    page = copied(tmp_path / "page")
    verifier.verify(page, page / "model.sig")
    push(source, dtype="bf16", options=Options(max_shard_size=2_000, sign=signed), yes=True)
    again = copied(tmp_path / "again")
    verifier.verify(again, again / "model.sig")
    report = push(source, dtype="bf16", path_in_repo="half", options=Options(sign=signed), yes=True)
    half = copied(tmp_path / "half")
    verifier.verify(half / "half", half / "half" / "model.sig")
    assert not any("cover" in note for note in report.notes)
    (half / "half" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="Hash mismatch"):
        verifier.verify(half / "half", half / "half" / "model.sig")
    report = push(source, dtype="fp32", options=Options(max_shard_size=2_000), yes=True)
    assert any("signs what was there before" in note for note in report.notes)


def test_a_page_holds_a_merged_model(server: HubServer, push: Pusher, tmp_path: Path) -> None:
    home = FIXTURES / "peft" / "lora_zero3"
    options = Options(lora=LoraMerge(base=home / "base"), max_shard_size=1_500)
    zckpt.convert(home / "checkpoint", tmp_path / "want", dtype="bf16", options=options)
    push(home / "checkpoint", dtype="bf16", options=options)
    page = server.files("alice/m")
    assert {name: data for name, data in page.items() if name not in ("README.md", ".gitattributes")} == local_files(
        tmp_path / "want"
    )
    kept = plan_push(str(home / "adapter"), None, PUSH.ask(lora=LoraMerge(base=home / "base")))
    assert {entry.dtype.name for _, entry in kept.plan.pairs} == {"BF16"}, "the base's, where none is given"


def test_large_shards_go_up_in_parts(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.part_bytes = 70_000
    report = push(checkpoint)
    page = server.files("alice/m")
    assert sorted(name for name in page if name.endswith(".safetensors")) == SHARD_NAMES
    assert report.bytes_sent == report.bytes_made == sum(len(page[name]) for name in SHARD_NAMES)
    assert len([path for method, path, _, _ in server.log if method == "PUT"]) == 3 * 3
    weights = {name: tensor for shard in SHARD_NAMES for name, tensor in load(page[shard]).items()}
    index = json.loads(page["model.safetensors.index.json"])
    assert set(index["weight_map"]) == set(weights)


def test_the_dtype_is_that_of_the_configuration(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    push(checkpoint)
    page = server.files("alice/m")
    assert {tensor.dtype for tensor in load(page[SHARD_NAMES[0]]).values()} == {torch.bfloat16}
    assert json.loads(page["config.json"])["dtype"] == "bfloat16"
    (checkpoint / "config.json").unlink()
    push(checkpoint, "alice/plain", options=Options())
    assert {t.dtype for t in load(server.files("alice/plain")["model.safetensors"]).values()} == {torch.float32}
    assert "config.json" not in server.files("alice/plain")


def test_a_trainers_directory(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    report = push(checkpoint.parent)
    assert any("checkpoint-5" in note for note in report.notes)
    assert "tokenizer_config.json" in server.files("alice/m")


def test_only_one_commit_shows_anything(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    seen: list[set[str]] = []
    server.fault("POST", "/commit/", call=lambda: seen.append(set(server.files("alice/m"))))
    push(checkpoint)
    assert seen == [{".gitattributes"}]


# ---- the repository --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("private", "wanted"), [(None, True), (True, True), (False, False)])
def test_who_sees_a_new_page(
    private: bool | None, wanted: bool, checkpoint: Path, server: HubServer, push: Pusher
) -> None:
    push(checkpoint, private=private)
    assert server.repos["alice/m"].private is wanted
    with pytest.raises(UsageError, match="another visibility"):
        push(checkpoint, private=not wanted, yes=True)


def test_a_name_of_ones_own(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    assert push(checkpoint, "mine").url.endswith("/alice/mine")
    assert set(server.repos) == {"alice/mine"}


def test_a_page_that_is_not_empty(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    old = {
        "pytorch_model-00001-of-00002.bin": b"o",
        "model.safetensors": b"x",
        "notes.txt": b"n",
        "sub/model.safetensors": b"s",
    }
    server.create("alice/m", files=old)
    with pytest.raises(OutputError, match="is not empty"):
        push(checkpoint)
    assert not any(method in ("PUT", "POST") for method, _, _, _ in server.log)
    push(checkpoint, yes=True)
    page = server.files("alice/m")
    assert page["notes.txt"] == b"n" and page["sub/model.safetensors"] == b"s"
    assert "model.safetensors" not in page and "pytorch_model-00001-of-00002.bin" not in page
    push(checkpoint, yes=True)
    assert server.files("alice/m") == page


@pytest.mark.parametrize("yes", [False, True])
def test_the_same_push_again_is_already_done(
    yes: bool, checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    first = push(checkpoint)
    assert not first.already_done and first.bytes_sent == first.bytes_made > 600_000
    commits, sent = list(server.repos["alice/m"].branches["main"]), dict(server.sent)
    again = push(checkpoint, yes=yes)
    assert again.already_done and (again.bytes_made, again.bytes_sent) == (0, 0)
    assert sorted(again.files) == sorted(first.files) and again.commit == first.commit and again.url == first.url
    shutil.rmtree(tmp_path / "scratch")  # another machine makes the shards, and then finds them there
    with pytest.raises(OutputError, match="is not empty"):
        push(checkpoint)
    elsewhere = push(checkpoint, yes=True)
    assert elsewhere.already_done and elsewhere.bytes_sent == 0 and elsewhere.bytes_made == first.bytes_made
    assert (server.repos["alice/m"].branches["main"], server.sent) == (commits, sent)
    (checkpoint / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    with pytest.raises(OutputError, match="is not empty"):
        push(checkpoint)
    changed = push(checkpoint, yes=True)
    assert not changed.already_done and (changed.bytes_made, changed.bytes_sent) == (0, 0)
    assert json.loads(server.files("alice/m")["tokenizer_config.json"]) == {"model_max_length": 256}


def test_a_push_that_was_killed_after_its_commit_is_already_done(
    checkpoint: Path, server: HubServer, push: Pusher
) -> None:
    fault = server.fault("GET", "/tree/", skip=0, times=0, status=400)
    server.fault("POST", "/commit/", call=lambda: setattr(fault, "times", 100))
    with pytest.raises(zckpt.ZckptError):
        push(checkpoint)  # the commit is there, but nobody could look at it
    fault.times = 0
    assert len(server.repos["alice/m"].branches["main"]) == 2
    assert push(checkpoint).already_done


def test_a_push_does_not_replace_its_own_input(server: HubServer, push: Pusher, tmp_path: Path) -> None:
    """Weights at the hub, to be replaced by themselves in another dtype."""
    generator = torch.Generator().manual_seed(0)
    save_file({"w": torch.randn(10, 10, generator=generator)}, tmp_path / "model.safetensors")
    server.create("alice/m", files={"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    before = server.files("alice/m")
    code = (
        "import sys, zckpt\n"
        "zckpt.push_to_hub('hf://alice/m', sys.argv[1], dtype='bf16', yes=True, path_in_repo=sys.argv[2])"
    )
    mine = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    runs = [
        subprocess.run([sys.executable, "-c", code, *place], env={**os.environ, **mine}, capture_output=True, text=True)
        for place in (("alice/m", ""), ("alice/m", "bf16"))
    ]
    assert "would replace the input" in runs[0].stderr and runs[1].returncode == 0, runs[1].stderr
    after = server.files("alice/m")
    assert all(after[name] == data for name, data in before.items() if name != ".gitattributes")
    assert "bf16/model.safetensors" in after


def test_a_page_with_only_what_every_page_has(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.create("alice/m", files={"README.md": b"soon"})
    push(checkpoint)
    assert server.files("alice/m")["README.md"].startswith(b"---")


def test_a_directory_of_a_page(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.create("alice/m", files={"model.safetensors": b"x"})
    push(checkpoint, path_in_repo="a/bf16/")
    page = server.files("alice/m")
    assert page["model.safetensors"] == b"x"
    assert {f"a/bf16/{name}" for name in (*SHARD_NAMES, "config.json", "README.md")} <= set(page)
    with pytest.raises(UsageError, match="no repository can have"):
        push(checkpoint, path_in_repo="a/../b")


def test_a_branch(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    report = push(checkpoint, revision="step-5")
    assert report.url.endswith("/alice/m/tree/step-5")
    assert set(server.files("alice/m", "step-5")) >= set(SHARD_NAMES)
    assert set(server.files("alice/m")) == {".gitattributes"}
    push(checkpoint, revision="step-6")
    assert server.files("alice/m", "step-6") == server.files("alice/m", "step-5")


def test_a_pull_request(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.create("bob/m", files={"model.safetensors": b"x"})
    report = push(checkpoint, "bob/m", create_pr=True, message="Better weights")
    assert report.pull_request == f"{server.url}/bob/m/discussions/1"
    proposed = server.files("bob/m", "refs/pr/1")
    assert set(SHARD_NAMES) <= set(proposed) and "model.safetensors" not in proposed
    assert server.files("bob/m")["model.safetensors"] == b"x"
    with pytest.raises(UsageError, match="no such repository"):
        push(checkpoint, "alice/nothing", create_pr=True)
    with pytest.raises(UsageError, match="no such pull request"):
        push(checkpoint, "bob/m", revision="refs/pr/7", create_pr=True)


def test_a_tree_of_many_pages(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    server.page = 2
    server.create("alice/m", files={f"{i}.txt": b"" for i in range(5)})
    assert len(push(checkpoint, yes=True).files) == 7


def test_attributes_are_right(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.model").write_bytes(bytes(range(256)) * 1000)
    server.attributes = b"*.h5 filter=lfs diff=lfs merge=lfs -text"
    push(checkpoint)
    page = server.files("alice/m")
    subprocess.run(["git", "init", "-q", tmp_path / "clone"], check=True)
    (tmp_path / "clone" / ".gitattributes").write_bytes(page[".gitattributes"])
    blobs = server.repos["alice/m"].commits[server.repos["alice/m"].branches["main"][-1]]
    for path, blob in blobs.items():
        command = ["git", "-C", tmp_path / "clone", "check-attr", "filter", "--", path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told.strip().endswith("filter: lfs") == bool(blob.sha256), path
    assert blobs["tokenizer.model"].sha256
    assert page[".gitattributes"].startswith(server.attributes)


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_a_converted_directory_goes_up_as_it_is(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    zckpt.convert(checkpoint, tmp_path / "done", dtype="fp16", options=Options(max_shard_size=SHARD_BYTES))
    (tmp_path / "done" / "training_args.bin").write_bytes(b"\x80secret")
    (tmp_path / "done" / "optimizer.pt").write_bytes(b"moments")
    before = local_files(tmp_path / "done")
    report = push(tmp_path / "done", options=Options())
    page = server.files("alice/m")
    assert {name: data for name, data in page.items() if name not in (".gitattributes", "README.md")} == {
        name: data for name, data in before.items() if not name.startswith(("training", "optim"))
    }
    assert local_files(tmp_path / "done") == before
    assert report.bytes_sent == sum(len(page[name]) for name in SHARD_NAMES)
    prepared = prepare(
        cargo_of(plan_push(str(tmp_path / "done"), None, PUSH.ask())),
        PageTarget("alice/x", token=TOKEN, endpoint=server.url),
    )
    assert prepared.room == 0


def test_other_weights_are_made_anew(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "bin", dtype="fp32", options=Options(format="bin"))
    push(tmp_path / "bin", options=Options())
    tensors = load(server.files("alice/m")["model.safetensors"])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    zckpt.convert(checkpoint, tmp_path / "st", dtype="fp32")
    push(tmp_path / "st", "alice/half", dtype="bf16", options=Options())
    assert {t.dtype for t in load(server.files("alice/half")["model.safetensors"]).values()} == {torch.bfloat16}
    save_file({"w": torch.ones(3)}, tmp_path / "odd.safetensors")
    push(tmp_path / "odd.safetensors", "alice/odd", options=Options())
    assert set(server.files("alice/odd")) == {".gitattributes", "README.md", "model.safetensors"}


def test_a_selection(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    push(checkpoint, options=Options(include=["layer*"], exclude=["*1.weight"]))
    assert set(load(server.files("alice/m")["model.safetensors"])) == {"layer0.weight", "layer2.weight"}


def test_the_same_checkpoint_gives_the_same_bytes_anywhere(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "elsewhere" / "run")
    push(checkpoint, "alice/a", options=Options(max_shard_size=SHARD_BYTES, threads=1))
    push(tmp_path / "elsewhere" / "run", "alice/b", options=Options(max_shard_size=SHARD_BYTES, threads=4))
    a, b = server.files("alice/a"), server.files("alice/b")
    readme = a.pop("README.md"), b.pop("README.md")
    assert a == b and readme[0].replace(b"alice/a", b"alice/b").replace(b"# a\n", b"# b\n") == readme[1]


def test_an_overflow_publishes_nothing(server: HubServer, push: Pusher, tmp_path: Path) -> None:
    import synth

    synth.zero3(tmp_path / "ckpt", [{"a": torch.ones(100), "b": torch.full((100,), 1e6)}], 2)
    with pytest.raises(CastError, match="too large for float16"):
        push(tmp_path / "ckpt", dtype="fp16", options=Options(max_shard_size=200))
    assert set(server.files("alice/m")) == {".gitattributes"}
    push(tmp_path / "ckpt", dtype="fp16", options=Options(max_shard_size=200, overflow="clamp"))
    assert "model.safetensors.index.json" in server.files("alice/m")


# ---- room and time ---------------------------------------------------------------------------------------------------


def test_never_more_than_two_shards_in_scratch(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at every tick of the server and every step of the mover."""
    most, lock = [0, 0], threading.Lock()

    def count(*_: object) -> None:
        sizes: dict[int, int] = {}  # by inode: for a moment a file may have two names
        for file in (tmp_path / "scratch").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                sizes |= {file.stat().st_ino: file.stat().st_size} if file.name not in ("journal.jsonl", "lock") else {}
        with lock:
            most[0] = max(most[0], sum(sizes.values()))
            most[1] = max(most[1], len(sizes))

    tick = server.tick
    monkeypatch.setattr(server, "tick", lambda: (count(), tick()))
    push(checkpoint, options=Options(max_shard_size=100_000), progress=count)
    shard = max(len(data) for name, data in server.files("alice/m").items() if name.endswith(".safetensors"))
    assert 0 < most[0] <= 2 * shard and most[1] <= 2
    most[:] = [0, 0]
    push(checkpoint, "alice/n", options=Options(max_shard_size=100_000), progress=count, max_scratch=shard)
    assert 0 < most[0] <= shard and most[1] == 1
    with pytest.raises(UsageError, match="too little scratch"):
        push(checkpoint, "alice/o", max_scratch=shard - 1, options=Options(max_shard_size=100_000))


def test_shards_are_sent_in_large_pieces(
    checkpoint: Path, server: HubServer, push: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece costs httpx as much as sending it does; others who use the library get its session as it was."""
    from huggingface_hub.utils import get_session

    if not hasattr(get_session(), "event_hooks"):
        pytest.skip("this huggingface_hub has sessions of requests")
    asked: list[int | None] = []
    read = Watched.read

    def noted(file: Watched, nbytes: int | None = -1) -> bytes:
        asked.append(nbytes)
        return read(file, nbytes)

    monkeypatch.setattr(Watched, "read", noted)
    before = list(get_session().event_hooks["request"])
    push(checkpoint)
    assert len(asked) == 3 * 2 and set(asked) == {1 << 20}  # and one that finds the end
    assert get_session().event_hooks["request"] == before


def test_progress_names_each_shard(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    shown: list[tuple[int, int | None, str]] = []
    push(checkpoint, options=Options(max_shard_size=100_000), progress=JobWatch(None, lambda *said: shown.append(said)))
    shards = [name for name in server.files("alice/m") if name.endswith(".safetensors")]
    items = list(dict.fromkeys(item for _, _, item in shown))
    assert items == [f"{name} ({n} of {len(shards)})" for n, name in enumerate(sorted(shards), 1)] and len(items) > 1
    assert shown[-1][0] == shown[-1][1]


def test_a_shard_is_written_where_one_lay_that_was_sent(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    """Without new pages for each; what it is does not depend on what lay there."""
    inodes: dict[str, int] = {}

    def look(_: int) -> None:
        for file in (tmp_path / "scratch").glob("*/*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                inodes[file.name] = file.stat().st_ino

    options = Options(max_shard_size=100_000)
    push(checkpoint, options=options, progress=look)
    files = {name: data for name, data in server.files("alice/m").items() if name.endswith(".safetensors")}
    assert inodes.keys() <= files.keys() and len(set(inodes.values())) < len(inodes)
    out = tmp_path / "out"
    zckpt.convert(checkpoint, out, dtype="bf16", options=options)
    assert {name: (out / name).read_bytes() for name in files} == files


def test_on_a_disk_with_room_for_two_shards(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    """A real quota: a file system of that size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    room = 2 * 200_704 + 3 * 16_384  # two shards of 200 kB, in whole blocks, and the journal
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        done = shell("push", checkpoint, "alice/m", "--scratch", disk, "--max-shard-size", SHARD_BYTES)
        err = done.communicate(timeout=HANG_S)[1]
        assert done.returncode == 0, err
        assert len([n for n in server.files("alice/m") if n.endswith(".safetensors")]) == 3
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_next_shard_is_made_while_the_last_is_sent(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    def wait_for_the_next() -> None:
        assert made.wait(HANG_S)

    made, first = threading.Event(), server.fault("PUT", "/upload/", call=wait_for_the_next)

    def progress(_: int) -> None:
        names = {file.name for file in (tmp_path / "scratch").glob("*/*.safetensors")}
        if {SHARD_NAMES[0], SHARD_NAMES[1]} <= names:
            made.set()

    push(checkpoint, progress=progress)
    assert made.is_set() and first.times == 0


@pytest.mark.parametrize(
    ("text", "nbytes"), [("12GB", 12 * 10**9), ("8 GiB", 8 << 30), ("500", 500), ("1.5mb", 1_500_000)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert to_bytes(text) == nbytes
    with pytest.raises(UsageError, match="size"):
        to_bytes(text + "!")


# ---- the command line ------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_exactly_what_goes_up(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    server.create("alice/m", files={"pytorch_model.bin": b"old"})
    options = ["push", checkpoint, "alice/m", "--max-shard-size", SHARD_BYTES, "--yes", "--license", "mit", "--json"]
    out, err = shell(*options, "--dry-run").communicate(timeout=HANG_S)
    facts = check("page-plan", out)
    assert all(method == "GET" for method, _, _, _ in server.log), err
    done = shell(*options)
    report = check("page", done.communicate(timeout=HANG_S)[0])
    assert done.returncode == 0
    page = server.files("alice/m")
    del page[".gitattributes"]
    assert {file["path"]: file["bytes"] for file in facts["files"]} == {name: len(data) for name, data in page.items()}
    assert facts["removed"] == report["removed"] == ["pytorch_model.bin"]
    assert facts["card"].encode() == page["README.md"]
    assert {file["path"]: file["bytes"] for file in report["files"]} == {name: len(data) for name, data in page.items()}
    lines = shell("push", checkpoint, "alice/m", "--dry-run", "--yes", "--max-shard-size", SHARD_BYTES).communicate(
        timeout=HANG_S
    )[0]
    assert all(f"  {path} (" in lines for path in page)


def test_a_dry_run_tells_what_is_there(checkpoint: Path, server: HubServer, shell: Shell, push: Pusher) -> None:
    options = ["push", checkpoint, "alice/m", "--max-shard-size", SHARD_BYTES, "--dry-run"]
    push(checkpoint)
    page = server.files("alice/m")
    server.create("alice/m", files={**page, SHARD_NAMES[0]: b"x", SHARD_NAMES[1]: page[SHARD_NAMES[1]][:-1] + b"x"})
    out, err = shell(*options, "--json").communicate(timeout=HANG_S)
    seen = {file["path"]: file["there"] for file in json.loads(out)["files"]}
    assert seen.pop(SHARD_NAMES[0]) == "another" and seen.pop(SHARD_NAMES[1]) == "perhaps the same"
    assert seen.pop(SHARD_NAMES[2]) == "perhaps the same", "of this machine no push has made it"
    assert set(seen.values()) == {"the same"}
    assert "would be refused" in err and "not empty" in err
    process = shell(*options)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0 and "; there already)" in out and "; replaces the one there)" in out
    assert server.files("alice/m")[SHARD_NAMES[0]] == b"x"


def test_a_dry_run_needs_no_token(checkpoint: Path, shell: Shell, server: HubServer) -> None:
    process = shell("push", checkpoint, "alice/m", "--dry-run", HF_TOKEN=None)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, server.log) == (0, [])
    assert "alice/m@main (new, private): would get" in out and "the hub was not asked" in err


def test_what_it_says(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    out, err = shell("push", checkpoint, "m", "--public", "--no-card", "--token", TOKEN, HF_TOKEN=None).communicate(
        timeout=HANG_S
    )
    assert out.splitlines()[-1] == f"{server.url}/alice/m" and err == ""
    assert "README.md" not in server.files("alice/m")
    process = shell("push", checkpoint, "m")
    assert "not empty" in process.communicate(timeout=HANG_S)[1] and process.returncode == 2


def test_an_endpoint_of_ones_own(checkpoint: Path, server: HubServer, shell: Shell) -> None:
    process = shell("push", checkpoint, "alice/m", "--endpoint", server.url, HF_ENDPOINT="http://127.0.0.1:9")
    assert process.communicate(timeout=HANG_S)[0].splitlines()[-1] == f"{server.url}/alice/m"


def test_to_commands_take_a_page(checkpoint: Path, server: HubServer, shell: Shell, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "want", dtype="fp16")
    for out, repo, revision, top in [
        ("hf://alice/a", "alice/a", "main", ""),
        ("hf://alice/a@v2/half/", "alice/a", "v2", "half/"),
    ]:
        process = shell("to-fp16", checkpoint, out)
        assert process.wait(HANG_S) == 0, process.communicate()[1]
        page = server.files(repo, revision)
        assert all(page[f"{top}{name}"] == data for name, data in local_files(tmp_path / "want").items())
    refused = [
        shell("to-bf16", checkpoint, out) for out in ("hf://alice/a/x.bin", "hf://datasets/alice/a", "hf://alice/a")
    ]
    errors = [process.communicate(timeout=HANG_S)[1] for process in refused]
    assert [process.returncode for process in refused] == [2, 2, 2]
    assert (
        "shards in safetensors" in errors[0] and "not the address of a model" in errors[1] and "not empty" in errors[2]
    )
    process = shell("to-fp16", checkpoint, "hf://alice/a")
    assert "already done" in process.communicate(timeout=HANG_S)[0] and process.returncode == 0
    with pytest.raises(UsageError, match="push_to_hub"):
        zckpt.convert(checkpoint, "hf://alice/a")


def test_a_checkpoint_at_the_hub(server: HubServer, shell: Shell, tmp_path: Path) -> None:
    """`hf://` as CKPT: a ZeRO checkpoint in a repository, read by byte ranges."""
    source = FIXTURES / "zero3/bf16_w2/checkpoint"
    server.create("alice/run", private=True, files={f"ckpt/{name}": data for name, data in local_files(source).items()})
    zckpt.convert(source, tmp_path / "want.safetensors", dtype="bf16")
    process = shell("to-bf16", "hf://alice/run/ckpt", tmp_path / "out.safetensors")
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "want.safetensors").read_bytes()
    gets = [
        (method, path, status) for method, path, _, status in server.log if path.endswith(".pt") and method == "GET"
    ]
    assert gets and all(status == 206 for _, _, status in gets)
    assert shell("verify", "hf://alice/run/ckpt", tmp_path / "out.safetensors").wait(HANG_S) == 0
    assert shell("push", "hf://alice/run/ckpt", "alice/page", "--dtype", "bf16").wait(HANG_S) == 0
    assert shell("diff", "hf://alice/page", tmp_path / "out.safetensors").wait(HANG_S) == 0
    assert server.files("alice/page")["model.safetensors"] == (tmp_path / "want.safetensors").read_bytes()


def test_a_model_at_the_hub_gives_dtypes_and_files(server: HubServer, shell: Shell, tmp_path: Path) -> None:
    source, base = FIXTURES / "zero3/bf16_w2/checkpoint", tmp_path / "base"
    zckpt.convert(source, base, dtype="fp16", options=Options(max_shard_size="150B", include=["*weight*"]))
    names = sorted(file.name for file in base.glob("*.safetensors"))
    server.create("alice/base", private=True, files=local_files(base))
    process = shell("to-fp32", source, tmp_path / "out", "--like", "hf://alice/base")
    assert process.wait(HANG_S) == 0, process.communicate()[1]
    assert len(names) > 1 and sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")) == names
    theirs = {name: tensor for file in names for name, tensor in load_file(base / file).items()}
    ours = {name: tensor for file in names for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    assert ours.keys() - theirs.keys() and all(
        ours[name].dtype != torch.float16 for name in ours.keys() - theirs.keys()
    )
    gets = [status for method, path, _, status in server.log if path.endswith(".safetensors") and method == "GET"]
    assert gets and all(status == 206 for status in gets)


def test_help_costs_no_import_of_the_client() -> None:
    code = "import sys; from zckpt.cli import app; print(sorted({'huggingface_hub', 'fsspec', 'zckpt.hub'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_weights_load(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    push(checkpoint, options=Options(), dtype="fp32")
    (tmp_path / "w.safetensors").write_bytes(server.files("alice/m")["model.safetensors"])
    zckpt.convert(checkpoint, tmp_path / "want.safetensors")
    ours, theirs = load_file(tmp_path / "w.safetensors"), load_file(tmp_path / "want.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
