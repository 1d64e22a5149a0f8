"""Nothing private leaks; and what a page tells is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from hangs import HANG_S
from hub_server import SHARD_BYTES, HubServer
from safetensors.torch import load as safetensors_load
from safetensors.torch import save_file

from zckpt.base.errors import UnsafeError
from zckpt.hub import PushReport
from zckpt.hub.privacy import clean_file
from zckpt.jobs.options import Options

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]
PRIVATE = [
    "rng_state_0.pth", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "zero_to_fp32.py", "latest",
    "events.out.tfevents.1", "notes.md", "id_rsa", ".env", "tokens.db", "global_step9/mp_rank_00_model_states.pt",
]  # fmt: skip


def fill(home: Path) -> None:
    """What lies in a trainer's checkpoint, private things among it."""
    for name in PRIVATE:
        (home / name).parent.mkdir(exist_ok=True)
        if not (home / name).exists():
            (home / name).write_bytes(b"private of /home/alice " + os.urandom(8))
    config = {
        "_name_or_path": "/home/alice/models/llama",
        "model_type": "llama",
        "dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (home / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "name_or_path": "/data/team/tok",
        "tokenizer_file": "/home/alice/tok.json",
        "eos_token": "</s>",
        "chat_template": "/x",
    }
    (home / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (home / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"/home/alice": 1, "/root": 2}}}))
    (home / "modeling_mine.py").write_text(f"WEIGHTS = '{home}/global_step5'\nCACHE = '/home/alice/.cache/x.bin'\n")
    (home / "generation_config.json").write_text('{"do_sample": true}')


def test_nothing_private_goes_up(checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path) -> None:
    (checkpoint / "global_step9").mkdir()
    fill(checkpoint)
    report = push(checkpoint, tag="global_step5")
    page = server.files("alice/m")
    assert set(page) == {
        ".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors.index.json",
        "modeling_mine.py", "tokenizer.json", "tokenizer_config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    }  # fmt: skip
    vocabulary = page.pop("tokenizer.json")
    assert vocabulary == (checkpoint / "tokenizer.json").read_bytes()
    for name, data in page.items():
        assert (
            b"alice/" not in data.replace(b"alice/m", b"")
            and b"/home" not in data
            and str(tmp_path).encode() not in data
        ), name
    assert json.loads(page["tokenizer_config.json"]) == {"eos_token": "</s>", "chat_template": "/x"}
    assert json.loads(page["config.json"]) == {"model_type": "llama", "dtype": "bfloat16", "eos_token_id": 2}
    assert page["modeling_mine.py"] == b"WEIGHTS = 'global_step5'\nCACHE = 'x.bin'\n"
    assert any("_name_or_path" in note for note in report.notes) and any(
        "modeling_mine.py" in note for note in report.notes
    )
    for _, _, nbytes, _ in server.log:
        assert nbytes < 300_000


@pytest.mark.parametrize(
    ("name", "text", "clean"),
    [
        (
            "README.md",
            "see /home/bob/run/out.txt, or https://host.org/home/x",
            "see out.txt, or https://host.org/home/x",
        ),
        ("README.md", r"on C:\Users\bob\weights it was", "on weights it was"),
        ("README.md", "file:///Users/bob/a.bin", "a.bin"),
        (
            "README.md",
            "and/or 1/2, a/data/b, ./data/x, /dataset, <br/>, </a></b>, 5 tok/s/GPU, https://x.org/a/b?c=/d/e",
            None,
        ),
        ("README.md", "#!/usr/bin/env python\n[a](docs/b/c) ![d](e/f.png) [g](https://h.co/i/j) {x}/y/z", None),
        (
            "README.md",
            "on /lustre/users/bob, `/gpfs/p/q.bin`, **/fsx/x** and (/p/scratch/run7/): /a/b. <b>/c/d</b>, at:/e/f",
            "on bob, `q.bin`, **x** and (run7): b. <b>d</b>, at:f",
        ),
        (
            "modeling.py",
            "W = '/work/team/w.pt'\nD = \"/etc/fstab\"\nf = open(file='/a b/c d')",
            "W = 'w.pt'\nD = \"fstab\"\nf = open(file='/a b/c d')",
        ),
        (
            "config.json",
            '{"a": {"cache_dir": "~/x", "n": 1}, "l": [{"vocab_file": "/a/b"}]}',
            {"a": {"n": 1}, "l": [{}]},
        ),
        ("config.json", '{"path": "relative/x", "token": "/", "eos": "</s>", "template": "Q:\\nA:\\n/no_think"}', None),
        (
            "config.json",
            '{"resume_from": "/lustre/users/x/ckpt", "run": "/p/scratch", "n": 1e-05, "log": "at\\n/fsx/x/y", "/a/b/c": 1}',
            {"n": 1e-05, "log": "at\ny", "c": 1},
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"/model/layers/0": "model-00001-of-00002.safetensors"}}',
            None,
        ),
        ("vocab.json", '{"/home/bob/x": 1}', None),
        ("tokenizer.model", "/home/bob/x", None),
        ("chat_template.jinja", "{{ x }} / {{ y }}", None),
    ],
)
def test_what_is_taken_out(name: str, text: str, clean: object) -> None:
    data, notes = clean_file(name, text.encode(), "/somewhere/else")
    if clean is None:
        assert (data, notes) == (text.encode(), [])
    else:
        assert (json.loads(data) if name.endswith(".json") else data.decode()) == clean
        assert notes and all(note.startswith(name) for note in notes)


def test_ones_own_home_and_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/nfs/people/carol")
    source = str(tmp_path / "exp" / "run7")
    data, _ = clean_file("README.md", f"from {source}/tag with /nfs/people/carol/x".encode(), source)
    assert data == b"from run7/tag with ~/x"


@pytest.mark.parametrize("own", ["/model", "/data/model"])
def test_the_checkpoints_own_path_is_cut_as_whole_components(own: str) -> None:
    """/model is not a part of huggingface.co/models, nor of /models."""
    text = f"huggingface.co/models, /models, {own}2, {own}: {own}/tag and {own}."
    data, _ = clean_file("README.md", text.encode(), own)
    assert (
        data.decode()
        == f"huggingface.co/models, /models, {own if own == '/model' else 'model'}2, model: model/tag and model."
    )
    text = "huggingface.co/models and https://model/model stay"
    assert clean_file("README.md", text.encode(), own) == (text.encode(), [])


HEX = "0123456789abcdef" * 3
SECRETS = {
    "a Hugging Face token": "hf_" + "aB3" * 12,
    "an AWS key": "AKIA" + "ABCD1234" * 2,
    "a secret AWS key": "aws_secret_access_key = " + "aB3/" * 10,
    "an Anthropic key": "sk-ant-api03-" + "x1Y" * 15,
    "an OpenAI key": "sk-proj-" + "x1Y" * 15,
    "a GitHub token": "ghp_" + "Zz9" * 12,
    "a GitLab token": "glpat-" + "Zz9_" * 6,
    "a Slack token": "xoxb-" + "1234567890-" * 3,
    "a Google API key": "AIza" + "Zz9_-" * 7,
    "a PyPI token": "pypi-AgEIcHlwaS5vcmc" + "Zz9" * 12,
    "a Weights & Biases key": f'WANDB_API_KEY": "{HEX[:40]}',
    "a password of a .netrc": "machine api.wandb.ai\n  login user\n  password " + HEX[:40],
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
}


@pytest.mark.parametrize("what", ["a Hugging Face token", "a private key"])
@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "modeling_x.py", "tokenizer.model"])
def test_a_secret_stops_the_push(what: str, name: str, checkpoint: Path, server: HubServer, push: Pusher) -> None:
    (checkpoint / name).write_text(f"first line\nkey = '{SECRETS[what]}'\n")
    with pytest.raises(UnsafeError, match=f"holds {what}") as caught:
        push(checkpoint)
    assert "line 2" in str(caught.value) and SECRETS[what] not in str(caught.value)
    assert server.log == []


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("name", ["README.md", "tokenizer.model", "qwen.tiktoken", "vocab.json"])
def test_secrets_are_found_in_files_of_every_kind(what: str, name: str) -> None:
    for data in (SECRETS[what].encode(), b"\xff\xfe\x80" + SECRETS[what].encode(), SECRETS[what].encode("utf-16")):
        with pytest.raises(UnsafeError, match=f"holds {what}") as caught:
            clean_file(name, b"\x01first\n" + data + b"\n", "/somewhere/else")
        assert "line 2" in str(caught.value) and SECRETS[what] not in str(caught.value)


def test_what_only_looks_like_a_secret() -> None:
    text = f"commit {HEX[:40]}, sha256 {HEX}{HEX[:16]}, hf_model, sk-learn, a wandb run of {HEX[:40]}, PUBLIC KEY-----, AKIA"
    assert clean_file("README.md", text.encode(), "/somewhere/else") == (text.encode(), [])


def test_a_large_vocabulary_is_searched_too(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    (checkpoint / "tokenizer.json").write_text(f"{' ' * (2 << 20)}{SECRETS['a GitHub token']}")
    with pytest.raises(UnsafeError, match="GitHub"):
        push(checkpoint)
    assert server.log == []


def test_links_out_of_the_checkpoint_are_not_sent(
    checkpoint: Path, server: HubServer, push: Pusher, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name in ("tokenizer.model", "README.md", "generation_config.json"):
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).symlink_to(secret)
    report = push(checkpoint)
    page = server.files("alice/m")
    assert "tokenizer.model" not in page and "generation_config.json" not in page
    assert page["README.md"] != secret.read_bytes()
    said = " ".join(note for note in report.notes if "out of the checkpoint" in note)
    assert all(name in said for name in ("tokenizer.model", "README.md", "generation_config.json"))


# ---- the card --------------------------------------------------------------------------------------------------------


def parts(page: dict[str, bytes]) -> tuple[dict[str, object], str]:
    _, metadata, text = page["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_the_card(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    push(checkpoint, license="apache-2.0", base_model="meta/base-1B")
    page = server.files("alice/m")
    metadata, text = parts(page)
    assert metadata == {
        "license": "apache-2.0", "base_model": "meta/base-1B", "library_name": "transformers",
        "tags": ["llama", "deepspeed", "zckpt"],
    }  # fmt: skip
    for name, data in page.items():
        if name.endswith(".safetensors"):
            assert f"| `{name}` | {len(data):,} |" in text
    assert "4 tensors, 300,007 elements" in text and "300,007 parameters in bfloat16" in text
    assert "DeepSpeed 0.19.8 ZeRO stage 3, 2 data-parallel ranks (`global_step5`)" in text
    assert "training step: 5" in text and "zckpt" in text
    assert 'LlamaForCausalLM.from_pretrained("alice/m", dtype="auto")' in text
    from huggingface_hub import ModelCard

    card = ModelCard(page["README.md"].decode())
    assert card.data.license == "apache-2.0" and card.data.base_model == "meta/base-1B"


def test_the_card_of_bare_weights(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    (checkpoint / "config.json").unlink()
    push(checkpoint, options=Options())
    metadata, text = parts(server.files("alice/m"))
    assert metadata == {"library_name": "safetensors", "tags": ["deepspeed", "zckpt"]}
    snippet = text.split("```python\n")[1].split("```")[0]
    compile(snippet, "snippet", "exec")
    assert "load_file" in snippet


def test_a_readme_of_ones_own(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\nMine, from /home/alice/exp.\n")
    push(checkpoint)
    assert server.files("alice/m")["README.md"] == b"---\nlicense: mit\n---\nMine, from exp.\n"


def test_metadata_that_the_hub_refuses(checkpoint: Path, server: HubServer, push: Pusher) -> None:
    (checkpoint / "README.md").write_text("---\nlicense: mit\nno end")
    with pytest.raises(Exception, match="Invalid metadata"):
        push(checkpoint)


def test_large_small_files(checkpoint: Path, server: HubServer, push: Pusher, shell: Shell, tmp_path: Path) -> None:
    """A tokenizer of 12 MB goes up as a large file, from where it lies."""
    (checkpoint / "tokenizer.json").write_text(json.dumps({"vocab": {f"token{i}": i for i in range(700_000)}}))
    push(checkpoint)
    repo = server.repos["alice/m"]
    blob = repo.commits[repo.branches["main"][-1]]["tokenizer.json"]
    assert blob.size > 10_000_000 and blob.sha256
    assert server.files("alice/m")["tokenizer.json"] == (checkpoint / "tokenizer.json").read_bytes()
    assert b"tokenizer.json filter=lfs" in server.files("alice/m")[".gitattributes"]
    assert shell("push", checkpoint, "alice/again", "--max-shard-size", SHARD_BYTES).wait(HANG_S) == 0
    assert server.files("alice/again")["tokenizer.json"] == server.files("alice/m")["tokenizer.json"]


@pytest.mark.parametrize("code", ["\x1b[31m", "\n---\n# x", "\u202e", "](http://x.example)", "<img src=x>"])
def test_names_that_a_page_or_a_terminal_would_obey(
    code: str, server: HubServer, push: Pusher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names of the directory, of tensors and in configs stand in the weights as they are, and nowhere else unescaped."""
    home = tmp_path / f"run{code.replace('/', '')}"
    home.mkdir()
    save_file({f"w{code}.weight": torch.ones(3)}, home / "model.safetensors")
    config = {"model_type": f"llama{code}", "architectures": [f"Llama{code}"], "_name_or_path": f"base{code}"}
    (home / "config.json").write_text(json.dumps(config))
    (home / f"tokenizer{code.replace('/', '')}.json").write_text("{}")
    push(home)
    page = server.files("alice/m")
    shown = "".join(capfd.readouterr())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    card = page["README.md"].decode()
    assert code not in card.replace("\\", "") or code.strip() == "", card
    assert all(re.fullmatch(r"[\w.-]+", name) for name in page), list(page)
    assert list(safetensors_load(page["model.safetensors"])) == [f"w{code}.weight"]
