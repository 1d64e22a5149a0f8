"""A page that was pushed is loaded by the real transformers through HF_ENDPOINT, and computes what the live model did."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hangs import HANG_S
from hub_server import HubServer
from safetensors.torch import load_file
from standby import programs

Shell = Callable[..., "subprocess.Popen[str]"]
FIXTURES = Path(__file__).parents[2] / "fixtures" / "transformers"
LOAD = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
repo, revision, home, out = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(repo, revision=revision, dtype="auto", output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
tokenizer = AutoTokenizer.from_pretrained(repo, revision=revision)
tokens = load_file(f"{home}/logits.safetensors")["input_ids"]
truth = load_file(f"{home}/truth.safetensors")
live = type(model)(model.config).to(model.dtype).eval()
live.load_state_dict({n: t.to(model.dtype) if t.is_floating_point() else t for n, t in truth.items()}, strict=False)
live.tie_weights()
with torch.no_grad():
    ours, theirs = (m.eval()(input_ids=tokens).logits.float() for m in (model, live))
save_file({"ours": ours, "theirs": theirs, "ids": torch.tensor(tokenizer("b d a")["input_ids"])}, out)
"""


def tokenizer_beside(home: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({"a": 3, "b": 5, "d": 7, "?": 0}, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(home)


@pytest.mark.parametrize(("name", "revision", "shard"), [("llama_zero2", "main", "5GB"), ("gpt2_zero3", "v2", "2KB")])
def test_from_pretrained(
    name: str, revision: str, shard: str, server: HubServer, shell: Shell, environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "out" / "checkpoint-2"
    shutil.copytree(FIXTURES / name / "checkpoint", home)
    tokenizer_beside(home)
    half = json.loads((home / "config.json").read_text())["dtype"] == "bfloat16"
    pushed = shell("push", home, "alice/model", "--revision", revision, "--max-shard-size", shard)
    assert pushed.wait(HANG_S) == 0, pushed.communicate()[1]
    assert server.repos["alice/model"].private
    out = tmp_path / "logits.safetensors"
    (tmp_path / "load.py").write_text(LOAD)
    command = [f"{programs()}/python", f"{tmp_path}/load.py", "alice/model", revision, str(FIXTURES / name), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(out)
    assert torch.equal(found["ours"], found["theirs"])
    stored = load_file(FIXTURES / name / "logits.safetensors")["logits"]  # perhaps of a processor with other kernels
    assert torch.allclose(found["ours"], stored, atol=2e-2 if half else 1e-5)
    assert found["ids"].tolist() == [5, 7, 3]
