"""Every command and snippet of README.md and docs/ runs as it is printed, in the order of the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
import synth
from hub_server import HubServer
from pages import ROOT, Reader, blocks_of, check_options, indented_code
from s3_server import KEYS, S3Server
from standby import programs

import zckpt
from zckpt.base.version import DOCUMENTATION, REPOSITORY

FIXTURES = ROOT / "fixtures"
BIN = Path(sys.executable).parent
PAGES = [
    "README.md",
    "RELEASE.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
ELSEWHERE = {"docs/extending.md": "tests/layouts/test_extending.py"}
"""Page -> the test that runs what it prints."""
TOKEN = "hf_meWrites0123456789"

MODEL = """
import torch, zckpt
model = torch.nn.Module()
with zckpt.open_checkpoint("out/checkpoint-500") as _checkpoint:
    for _name in _checkpoint:
        *_path, _leaf = _name.split(".")
        _parent = model
        for _part in _path:
            if _part not in _parent._modules:
                _parent.add_module(_part, torch.nn.Module())
            _parent = _parent._modules[_part]
        _parent.register_buffer(_leaf, torch.zeros(_checkpoint[_name].shape))
"""
"""A model with the checkpoint's names and shapes, without the seconds that importing transformers takes."""

TRAINING = """
import torch
torch.set_num_threads(1)
class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).square().mean()
model, batch, steps, tokens, engine_or_model = _Model(), torch.ones(2, 8), 2, 0, _Model()
batches = iter(lambda: batch, None)
"""

PEFT = """
import torch, types, sys, json
class PeftModel:  # what is shown is that the directory is one that PEFT loads; tests/interop/test_peft.py has PEFT load it
    @staticmethod
    def from_pretrained(base, path):
        from safetensors.torch import load_file
        assert json.load(open(path + "adapter_config.json"))["peft_type"] == "LORA"
        return load_file(path + "adapter_model.safetensors")
base = None
"""

FSDP = """
import torch, warnings
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
import torch.distributed.checkpoint, zckpt
model = torch.nn.Module()
with zckpt.open_checkpoint("out/checkpoint-500") as _checkpoint:
    for _name in _checkpoint:
        *_path, _leaf = _name.split(".")
        _parent = model
        for _part in _path:
            if _part not in _parent._modules:
                _parent.add_module(_part, torch.nn.Module())
            _parent = _parent._modules[_part]
        if _checkpoint.catalog[_name].role == "buffer":
            _parent.register_buffer(_leaf, torch.zeros_like(_checkpoint[_name]))
        else:
            _parent.register_parameter(_leaf, torch.nn.Parameter(torch.zeros(_checkpoint[_name].shape)))
optimizer = torch.optim.AdamW(model.parameters())
"""

ENGINE = """
import zckpt.runtime
engine, *_ = zckpt.runtime.initialize(model=model, config="ds_config.json")
engine.backward(engine(batch))
engine.step()
"""

GIVEN = {"model": MODEL, "training": TRAINING, "engine": ENGINE, "peft": PEFT, "fsdp": FSDP}

CHECKPOINTS = {
    "out/checkpoint-400": "transformers/llama_zero3",
    "out/checkpoint-500": "transformers/llama_zero3",
    "lora/checkpoint-500": "peft/lora_zero2",
    "megatron": "megatron/llama_zero2_tp2_dp2",
}
"""Path -> fixture, for every page."""

MORE = {
    "docs/averages.md": {f"{run}/checkpoint-500": "transformers/llama_zero3" for run in "ab"},
    "docs/deltas.md": {"out/checkpoint-600": "transformers/llama_zero2"},
    "docs/dcp.md": {"run/step-1000": "dcp/fsdp2_nested_w2"},
    "docs/megatron-core.md": {"run": "mcore/reshardable_dp2"},
    "docs/nvme-offload.md": {"run": "nvme/bf16_w2"},
    "docs/to-mcore.md": {"llama": "transformers/llama_zero3"},
    "docs/fairscale.md": {"run": "fairscale/fairseq_w3"},
    "docs/instead-of-merging.md": {"outputs/fsdp/checkpoint-500": "dcp/accelerate_fsdp2_w2"},
    "docs/orbax.md": {"run": "orbax/steps"},
    "docs/more-saves.md": {"checkpoints": "nanotron/llama_tp2_pp2"},
    "docs/megatron-legacy.md": {"run": "megatron_legacy/llama_tp2_pp2"},
    "docs/rank-files.md": {
        "run": "ranks/fsdp2_w2",
        "saves/step-1000": "torch_checkpointing/torch_files_w2",
        "local": "flat/local_uneven_w3",
    },
    "docs/huggingface.md": {
        "neox": "megatron/neox_pp2_tp2_dp2",
        "pipeline": "pipeline/zero1_pp2_dp2",
        "megatron-run": "mcore/stages_tp2_pp2",
        "mixtral-run": "fused/mixtral_zero3",
    },
    "docs/torchtitan.md": {
        "outputs/checkpoint": "torchtitan/llama3_0_3_0_w3",
        "run": "trainers/lightning_w1",
        "composer-run": "trainers/composer_w1",
    },
    "docs/your-trainer.md": {
        "trl/checkpoint-500": "transformers/llama_zero3",
        "trl-lora/checkpoint-500": "peft/lora_zero2",
        "outputs/out/checkpoint-500": "transformers/llama_zero2",
        "outputs/fsdp/checkpoint-500": "dcp/accelerate_fsdp2_w2",
        "saves/llama3-8b/full/sft/checkpoint-500": "transformers/llama_zero2",
        "saves/llama3-8b/lora/sft/checkpoint-500": "peft/lora_zero2",
        "lightning": "trainers/lightning_w1",
        "qlora/checkpoint-500": "peft/lora_zero3",
    },
    "docs/peft.md": {"several/checkpoint-500": "peft/several_zero3", "out/checkpoint-500": "peft/lora_zero2"},
    "docs/merge.md": {"out/checkpoint-500": "peft/lora_zero3"},
    "docs/reshaping.md": {"tensor-parallel": "tensor/plain_tp2"},
}
"""Page -> path -> fixture, for what only one page has."""


CONVERTED = ("docs/jobs.md", "docs/push.md", "docs/verify.md")
"""Pages that begin with weights/, and all but the first with resumable/, made of out/checkpoint-500."""


def put(fixture: str, place: Path) -> None:
    """A fixture's checkpoint under the name that a page uses, with its tag called global_step500."""
    home = FIXTURES / fixture
    shutil.copytree(home / "checkpoint" if (home / "checkpoint").exists() else home, place)
    latest = place / "latest"
    if latest.is_file():
        (place / latest.read_text()).rename(place / "global_step500")
        latest.write_text("global_step500")


def prepare(page: str, home: Path) -> None:
    for name, fixture in {**CHECKPOINTS, **MORE.get(page, {})}.items():
        put(fixture, home / name)
    if page == "docs/rank-files.md":
        shutil.copy(FIXTURES / "flat/local_uneven_w3/shapes.json", home)
    if page == "docs/your-trainer.md":
        from hf_models import llama, llava

        shutil.copytree(FIXTURES / "peft/lora_zero2/base", home / "Llama")
        shutil.copytree(FIXTURES / "peft/lora_zero2/adapter", home / "outputs" / "checkpoint-60")
        for name, model in (("llava", llava()), ("reward", llama("SequenceClassification", num_labels=1))):
            save = home / name / "checkpoint-500"
            synth.zero3(save, [dict(model.float().state_dict())], 2, tag="global_step500", step=500)
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(save)
    if page == "SECURITY.md":
        (home / "tests").symlink_to(ROOT / "tests")
    if page == "docs/merge.md":
        shutil.copytree(FIXTURES / "peft/lora_zero3/base", home / "Llama")
        for adapter in ("style", "facts"):
            shutil.copytree(FIXTURES / "peft/lora_zero3/adapter", home / adapter)
    if page in CONVERTED:
        zckpt.convert(home / "out" / "checkpoint-500", home / "weights", dtype="bf16")
    if page in CONVERTED and page != "docs/jobs.md":
        zckpt.reshard(home / "out" / "checkpoint-500", home / "resumable", world_size=4)
    if page == "docs/gguf.md":
        shutil.copytree(FIXTURES / "gguf/llama/model", home / "llama")
    if page == "docs/jobs.md":
        shutil.copytree(FIXTURES / "gguf/mistral/model", home / "base-model")
    shutil.copy(FIXTURES / CHECKPOINTS["megatron"] / "config.json", home / "llama.json")
    if page == "docs/torchtitan.md":
        shutil.copy(FIXTURES / "torchtitan/llama3_0_3_0_w3/hf/config.json", home / "config.json")
    (home / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    }
    (home / "ds_config.json").write_text(json.dumps(config))


class World:
    """What a page's commands find outside of their directory: a hub, and an object store; each started when it is used."""

    def __init__(self, home: Path) -> None:
        self._home, self._stack = home, ExitStack()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self, page: str) -> dict[str, str]:
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "AWS_", "ZCKPT_"))
        }
        path = os.pathsep.join((programs(), str(BIN), mine.get("PATH", "")))
        found = {
            **mine, "PATH": path, "HOME": str(self._home / "home"), "NO_COLOR": "1",
            "COLUMNS": "80", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(self._home / "hf"),
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        text = (ROOT / page).read_text()
        if "zckpt push" in text or "hf://" in text:
            found |= {"HF_ENDPOINT": self._hub().url, "HF_TOKEN": TOKEN}
        if "s3://" in text:
            found |= self._store()
        return found

    def _hub(self) -> HubServer:
        server = self._stack.enter_context(HubServer(self._home / "server"))
        server.user("me", TOKEN, orgs={"my-org": "admin"})
        run = FIXTURES / "zero3" / "bf16_w2" / "checkpoint"
        files = {f"checkpoint-500/{f.relative_to(run)}": f.read_bytes() for f in run.rglob("*") if f.is_file()}
        server.create("me/my-run", files=files)
        return server

    def _store(self) -> Mapping[str, str]:
        server = self._stack.enter_context(S3Server())
        store = fsspec.filesystem("s3", endpoint_url=server.url, key="k", secret="s", skip_instance_cache=True)
        if store.exists("bucket"):  # of another page: all of moto's servers in a process have the same buckets
            store.rm("bucket", recursive=True)
        store.mkdir("bucket")
        store.put(str(self._home / "page" / "out" / "checkpoint-500"), "bucket/run/checkpoint-500", recursive=True)
        return {"AWS_ENDPOINT_URL": server.url, **KEYS}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page) and page not in ELSEWHERE])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    home = tmp_path / "page"
    (tmp_path / "home").mkdir()
    home.mkdir()
    prepare(page, home)
    with World(tmp_path) as world, Reader(home, world.environment(page), GIVEN) as reader:
        for block in blocks_of(page):
            reader.follow(block)


@pytest.mark.parametrize("page", PAGES)
def test_no_code_escapes(page: str) -> None:
    assert indented_code(page) == [] and (ROOT / ELSEWHERE.get(page, "README.md")).exists()
    assert all(block.about for block in blocks_of(page) if block.mark)


def test_an_option_that_does_not_exist_is_found() -> None:
    block = next(block for block in blocks_of("docs/many.md") if block.mark == "not run")
    check_options(block)
    with pytest.raises(Exception, match="--nosuch"):
        check_options(
            type(block)(block.place, "sh", block.text.replace("zckpt to-bf16", "zckpt to-bf16 --nosuch"), "", "")
        )


def at_home(link: str) -> Path | None:
    """The file of this repository that an absolute link leads to; None where it leads elsewhere."""
    path = link.partition("#")[0]
    raw = f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/"
    for beginning, home in ((f"{REPOSITORY}/blob/main/", ROOT), (raw, ROOT), (DOCUMENTATION, ROOT / "docs")):
        if path.startswith(beginning):
            name = path.removeprefix(beginning) or "index.html"
            return home / (name.removesuffix(".html") + ".md" if name.endswith(".html") else name)
    return None


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md"])
def test_what_a_page_points_at_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if (mine := at_home(link)) is not None:
            target, path = mine, link
        if ("://" not in link or mine is not None) and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            lost.append(link)
    for path, name in re.findall(
        r"`((?:tests|zckpt|fixtures|benchmarks)/[\w/.]+)(?:::(\w+)\*?)?`", "" if page in ELSEWHERE else text
    ):
        if not (ROOT / path).exists() or (name and not re.search(rf"(def|class) {name}\b", (ROOT / path).read_text())):
            lost.append(f"{path}::{name}")
    assert lost == []


def test_speeds_are_those_that_were_measured() -> None:
    ratios = {page: {*re.findall(r"\*\*(\d\.\d\d)\*\*", (ROOT / page).read_text())} for page in PAGES}
    assert ratios["README.md"] and ratios["README.md"] <= ratios["docs/benchmarks.md"]


def test_the_package_page_stands_alone() -> None:
    """README.md is the page on the package index too, where relative links lead nowhere."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]*)"', text)
    assert [link for link in links if "://" not in link] == []
    assert [link for link in links if (home := at_home(link)) and not home.exists()] == []
    assert len(text.split()) <= 1200
    first = text.splitlines()[:60]
    assert sum("/docs/map" in line for line in first) == 2 and sum(line.startswith("$ zckpt ") for line in first) == 4


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "RELEASE.md", "docs/trainer-inside.md"])
def test_a_page_names_files_that_are_there(page: str) -> None:
    names = re.findall(
        r"(?<![\w/.-])((?:zckpt|tests|docs|examples|fixtures|benchmarks|\.ci)/[\w./-]+\w)", (ROOT / page).read_text()
    )
    assert names and [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, "AGENTS.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/README.md"])
def test_a_page_reads_well(page: str) -> None:
    """No fenced line is cut off on a small screen, and a link says where it leads."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [line for block in fenced for line in block.splitlines() if len(line) > 80] == []
    names = [found[0] for found in re.findall(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", text)]
    assert [name for name in names if re.fullmatch(r"`?[\w./-]+\.md(#[\w-]+)?`?", name)] == []
