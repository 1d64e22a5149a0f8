"""What a stranger types who has not read a page: words of other tools, near misses of paths, names of outputs."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from schemas import check
from typer.testing import CliRunner

import zckpt
from zckpt import layouts
from zckpt.base.errors import NotACheckpointError, UsageError, ZckptError
from zckpt.base.version import DOCUMENTATION
from zckpt.cli import app, desk
from zckpt.cli.commands import COMMANDS, GROUPS
from zckpt.cli.hints import _WORDS
from zckpt.layouts.places import find
from zckpt.naming import gguf_vision
from zckpt.storage.location import locate

REPO = Path(__file__).parents[2]
FIXTURE = REPO / "fixtures" / "zero3" / "bf16_w2" / "checkpoint"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to stand in: `ck`, and `out` with two numbered saves."""
    shutil.copytree(FIXTURE, tmp_path / "ck")
    for step in (2, 4):
        shutil.copytree(FIXTURE, tmp_path / "out" / f"checkpoint-{step}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path


def typed(line: str) -> str:
    """Runs a command line in this process; what it said of its error."""
    shown = io.StringIO()
    with redirect_stderr(shown), redirect_stdout(shown):
        try:
            app(line.split(), prog_name="zckpt", standalone_mode=False)
        except Exception as error:
            assert desk.report(error) == 2
    return " ".join(shown.getvalue().split())


def tree(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*")}


@pytest.mark.parametrize("word", _WORDS)
def test_a_word_of_another_tool_leads_to_a_command(word: str, run: Path) -> None:
    assert word not in COMMANDS and {*_WORDS[word]} <= {*COMMANDS} and len(_WORDS[word]) <= 5
    before, told = tree(run), typed(f"{word.replace('-', '_')} ck x")
    assert all(f"zckpt {name} ck x" in told for name in _WORDS[word]) and tree(run) == before


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("verfy ck", "Did you mean 'verify'?"),
        ("to-bf61 ck x", "Did you mean 'to-bf16'"),
        ("out/checkpoint-4 x", "'zckpt to-bf16 out/checkpoint-4 x'"),
        ("ck", "'zckpt inspect ck'"),
        ("quux ck x", "Run 'zckpt --help'"),
        ("to-bf16 ck --output x", "'zckpt to-bf16 CKPT OUT'"),
        ("to-bf16 ck -o x", "'zckpt to-bf16 CKPT OUT'"),
        ("to-bf16 ck --output-dir x", "'zckpt to-bf16 CKPT OUT'"),
        ("to-bf16 ck x --force", "Did you mean --overwrite?"),
        ("to-bf16 ck x -f", "Did you mean --overwrite?"),
        ("to-bf16 ck x --dtype float16", "to-fp16"),
        ("to-fp32 ck x --exclude_frozen_parameters", "Did you mean --exclude-frozen?"),
        ("to-fp32 ck x -t global_step2", "Did you mean --tag?"),
        ("to-fp32 ck x --overwite", "Did you mean --overwrite?"),
        ("inspect ck --overwrite", "no such option: --overwrite"),
        ("inspect out/chekpoint-4", "Did you mean 'out/checkpoint-4'?"),
        ("to-bf16 out/checkpoint-5 x", "Beside it are 'checkpoint-2', 'checkpoint-4'."),
        ("inspect ck --tag globalstep2", "Did you mean --tag global_step2?"),
        ("inspect ck --tag global_step5", "has no tag 'global_step5'"),
        ("to-bf16 meta-llama/Llama-3.2-1B x", "'hf://meta-llama/Llama-3.2-1B'"),
        ("inspect home", "an empty directory"),
        ("inspect -", "a pipe"),
    ],
)
def test_a_mistake_leads_to_what_was_meant(line: str, told: str, run: Path) -> None:
    before, said = tree(run), typed(line)
    assert said.startswith("error: ") and told in said and "Traceback" not in said and tree(run) == before
    assert said.count("--help") <= 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("reshard w x --world-size 2", "expected a checkpoint with optimizer states"),
        ("average out/checkpoint-2 out/checkpoint-4", "'out/checkpoint-4' was taken for OUT. Add a name"),
        ("diff ck w", "with --rtol 0.00390625"),
    ],
)
def test_weights_that_are_there_do_not_mislead(line: str, told: str, run: Path) -> None:
    zckpt.convert("ck", "w", dtype="bf16", progress=False)
    assert told in typed(line)


def test_the_tolerance_that_diff_names_is_one_that_holds(run: Path) -> None:
    for dtype in ("bf16", "fp16"):
        zckpt.convert("ck", dtype, dtype=dtype, progress=False)
        told = str(zckpt.diff("ck", dtype, progress=False))
        rtol = float(" ".join(told.split()).partition("with --rtol ")[2].partition(",")[0])
        assert zckpt.diff("ck", dtype, rtol=rtol, progress=False).same
    assert "--rtol" not in str(zckpt.diff("bf16", "fp16", progress=False)).replace("--rtol 0.00390625", "")


def test_one_file_of_weights_goes_into_the_folder_of_the_save(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As zero_to_fp32.py is run there; the save is read as before, and its files cannot be replaced."""
    monkeypatch.chdir(run / "ck")
    assert (
        "complete" not in typed("to-fp32 . pytorch_model.bin")
        and zckpt.diff(".", "pytorch_model.bin", progress=False).same
    )
    assert zckpt.inspect_checkpoint(".").place.listing.tag == "global_step2"
    before = tree(run / "ck")
    assert "inside the input" in typed("to-fp32 . global_step2/model.bin") and tree(run / "ck") == before
    assert "inside the input" in typed("to-fp32 . weights") and tree(run / "ck") == before


@pytest.mark.parametrize(("text", "numel"), [("7B", 7e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("70B", 7e10)])
def test_a_number_of_parameters_is_a_model(text: str, numel: float) -> None:
    from zckpt.estimation.sources import model_of_size, parameters_in

    assert parameters_in(text) == numel and parameters_in("gpt2") is None and parameters_in("7B-chat") is None
    assert abs(model_of_size(int(numel)).numel / numel - 1) < 0.1


def test_estimate_takes_a_number_of_parameters() -> None:
    assert "Llama's kind" in typed("estimate 1.5b")


def test_an_option_that_is_far_from_all_gets_no_guess(run: Path) -> None:
    said = typed("to-bf16 ck x --verbose")
    assert not any(name in said for name in ("--base", "--overflow", "--overwrite", "Did you mean"))
    assert "Did you mean" not in typed("to-bf16 ck x --zzzz")


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("w.gguf", "to-gguf"),
        ("w.pth", ".pt"),
        ("w.ckpt", ".pt"),
        ("consolidated.00.pth", ".pt"),
        ("w.safetensor", "'w.safetensors'"),
        ("w.safetensros", "'w.safetensors'"),
        ("w.SAFETENSORS", "'w.safetensors'"),
        ("w.safe_tensors", "'w.safetensors'"),
        ("w.npz", ".safetensors"),
        ("w.h5", ".safetensors"),
        ("model.safetensors.index.json", "zckpt makes the index"),
        ("-", "standard output"),
    ],
)
def test_out_with_the_name_of_another_file_is_refused(out: str, told: str, run: Path) -> None:
    before, said = tree(run), typed(f"to-bf16 ck {out}")
    assert said.startswith("error: ") and told in said and tree(run) == before
    with pytest.raises(UsageError):
        zckpt.convert("ck", out, progress=False)
    assert tree(run) == before


@pytest.mark.parametrize("command", ["to-dcp", "reshard --world-size 1", "to-universal", "slim", "to-states"])
def test_every_command_that_writes_a_directory_refuses_the_same(command: str, run: Path) -> None:
    name, *options = command.split()
    before, said = tree(run), typed(" ".join([name, "ck", "w.safetensors", *options]))
    assert said.startswith("error: ") and tree(run) == before, said


@pytest.mark.parametrize("out", ["llama-3.2-1b", "weights.v2", "w.ckpt/", "öut", "step.500", "a.b.c"])
def test_a_dot_in_a_name_is_no_mistake(out: str, run: Path) -> None:
    zckpt.convert("ck", out, progress=False)
    assert {path.name for path in Path(out).iterdir()} >= {"model.safetensors", "zckpt.json"}


def test_the_home_directory_is_meant_by_a_tilde(run: Path) -> None:
    shutil.copytree("ck", run / "home" / "ck")
    zckpt.convert("~/ck", "~/weights", progress=False)
    assert (run / "home" / "weights" / "model.safetensors").exists() and not (run / "~").exists()
    assert typed("inspect ~/ck").startswith(str(run / "home" / "ck"))


def test_a_neighbour_needs_the_same_numbers() -> None:
    from zckpt.layouts.search import tag_meant

    assert tag_meant("global_step5", ["global_step500", "global_step15"]) == "Choose one with --tag."
    assert tag_meant("global-step500", ["global_step500", "global_step15"]) == "Did you mean --tag global_step500?"


def test_an_error_names_a_file_as_it_was_typed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zckpt.convert("ck", "one.safetensors", progress=False)
    for place, shown in (
        ("one.safetensors", "one.safetensors: "),
        (f"{run}/one.safetensors", f"{run}/one.safetensors: "),
    ):
        monkeypatch.setattr("sys.argv", ["zckpt", "to-universal", place, "x"])
        assert typed(f"to-universal {place} x").startswith(f"error: {shown}")


def test_pipes_are_told_from_missing_files(run: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(NotACheckpointError, match="a pipe"):
        zckpt.inspect_checkpoint("pipe")


def test_help_by_word_is_help_by_option() -> None:
    assert typed("help to-bf16") == typed("to-bf16 --help") and typed("help") == typed("--help")
    assert typed("version") == typed("--version")


def test_the_first_page_of_help_has_groups_examples_and_the_fields_words() -> None:
    shown = typed("--help")
    assert all(len(group) <= 10 for group in GROUPS.values())
    assert shown.count("Example: ") >= 3 and DOCUMENTATION in shown
    words = ("merge", "consolidate", "shards", "safetensors", "hugging face", "deepspeed", "zero", "fsdp")
    assert not [word for word in words if word not in shown.lower()]
    assert f'Documentation = "{DOCUMENTATION}"' in (REPO / "pyproject.toml").read_text()


def test_results_print_as_commands_do_and_stay_short_where_a_debugger_shows_them(run: Path) -> None:
    found, checked = zckpt.inspect_checkpoint("ck"), zckpt.verify("ck")
    compared = zckpt.diff("ck", "out/checkpoint-2")
    for result in (found, checked, compared):
        assert len(repr(result)) <= 400 and "\n" not in repr(result) and repr(result).startswith("<zckpt.")
        assert max(map(len, str(result).splitlines())) <= 160
        assert result._repr_html_().startswith("<pre>")
    assert "export      yes" in str(found) and "intact" in str(checked) and "the same" in str(compared)
    with zckpt.open_checkpoint("ck", framework="np") as opened:
        name = next(iter(opened))
        part = opened.get_slice(name)
        assert name in repr(part) and part.shape == tuple(part.get_shape()) and name in opened._repr_html_()


def test_without_torch_opening_says_both_ways_out_at_once(run: Path) -> None:
    code = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else found(name, package)
import json, zckpt
told = []
for call in (lambda: zckpt.open_checkpoint("ck"), lambda: zckpt.load_state_dict_from_zero_checkpoint, lambda: zckpt.live):
    try:
        call()
    except zckpt.ZckptError as error:
        told.append(str(error))
with zckpt.open_checkpoint("ck", framework="np") as opened:
    told.append(str(sum(one.size for _, one in opened.items())))
print(json.dumps(told))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *others, numel = json.loads(done.stdout)
    assert "framework='np'" in first and "zckpt[torch]" in first
    assert len(others) == 2 and all("zckpt[torch]" in one for one in others) and numel == "232"


def test_the_demo_needs_no_torch_and_no_clone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.cli import train

    lines: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        train,
        "_run_command",
        lambda home, *words: (monkeypatch.chdir(home), lines.append(words), typed(" ".join(words))),
    )
    home = run / "demo"
    home.mkdir()
    train._convert(home)
    assert [words[0] for words in lines] == ["inspect", "map", "to-fp32", "diff", "to-bf16", "verify"]
    assert zckpt.diff(home / "model.safetensors", home / "truth.safetensors").same
    stored = Path(train.__file__).with_name("demo_save")
    assert sum(path.stat().st_size for path in stored.rglob("*") if path.is_file()) <= 60_000


def test_ctrl_c_has_the_status_that_shells_expect() -> None:
    with redirect_stderr(io.StringIO()):
        assert desk.report(desk.Interrupted(is_ctrl_c=True)) == 130 and desk.report(desk.Interrupted()) == 2
        assert desk.report(ZckptError("no")) == 2


@pytest.mark.parametrize("dtype", ["fp16", "float16", "torch.float16", "half", "F16"])
def test_a_dtype_has_all_its_names(dtype: str, run: Path) -> None:
    typed(f"convert ck x --dtype {dtype}")
    typed(f"average ck out/checkpoint-2 y --dtype={dtype}")
    typed("to-fp16 ck z")
    assert zckpt.diff("x", "z", progress=False).same and zckpt.diff("y", "z", progress=False).same
    assert "'int9' is not one of 'fp32', 'fp16', 'bf16'" in typed("convert ck q --dtype int9")


def test_convert_writes_fp32_by_default_as_in_python(run: Path) -> None:
    typed("convert ck x.safetensors")
    zckpt.convert("ck", "y.safetensors", progress=False)
    assert Path("x.safetensors").read_bytes() == Path("y.safetensors").read_bytes()


def test_types_that_llama_cpp_makes_itself_are_told(run: Path) -> None:
    assert "llama-quantize" in typed("to-gguf ck x.gguf --type q3_k_m")
    assert "llama-quantize" not in typed("to-gguf ck x.gguf --type quatsch")


@pytest.mark.parametrize(
    "line",
    ["push me/w ck", "to-bf16 w ck", "to-bf16 gone ck", "to-fp8 w ck", "slim w ck", "reshard w ck --world-size 1"],
)
def test_swapped_arguments_are_told(line: str, run: Path) -> None:
    zckpt.convert("ck", "w", dtype="bf16", progress=False)
    before, said = tree(run), typed(line)
    assert "the arguments seem to be swapped" in said and f"ck {line.split()[1]}" in said and tree(run) == before


def test_an_output_that_exists_is_no_swap(run: Path) -> None:
    zckpt.convert("ck", "w", dtype="bf16", progress=False)
    assert "already exists" in typed("to-fp32 ck w") and "already exists" in typed("to-fp32 ck out/checkpoint-4")


@pytest.fixture
def best(run: Path) -> Path:
    """A run whose best save is not the newest, by the record that its trainer left."""
    state = {"best_model_checkpoint": "/of/another/machine/out/checkpoint-2", "global_step": 4}
    (run / "out" / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
    return run


def test_the_best_save_is_taken_by_name_and_named_where_it_is_not(best: Path) -> None:
    shutil.rmtree("out/checkpoint-2")
    shutil.copytree(FIXTURE.parents[1] / "fp16_w2" / "checkpoint", "out/checkpoint-2")
    assert "--best" in typed("to-bf16 out newest --dry-run")
    typed("to-fp32 out x --best")
    zckpt.convert("out", "y", best=True, progress=False)
    assert all(zckpt.diff(out, "out/checkpoint-2", progress=False).same for out in "xy")
    assert not zckpt.diff("x", "out/checkpoint-4", progress=False).same


def test_a_best_save_that_is_not_there_is_an_error(best: Path) -> None:
    shutil.rmtree("out/checkpoint-2")
    assert "does not hold the best save, 'checkpoint-2'" in typed("to-bf16 out x --best") and not Path("x").exists()
    Path("out/checkpoint-4/trainer_state.json").write_text('{"best_model_checkpoint": null}')
    assert "says of no save that it is the best" in typed("to-bf16 out x --best") and not Path("x").exists()
    Path("out/checkpoint-4/trainer_state.json").write_text("{")
    assert "is not valid JSON" in typed("to-bf16 out x --best") and not Path("x").exists()
    Path("out/checkpoint-4/trainer_state.json").write_text('{"best_model_checkpoint": "../../etc"}')
    assert "says of no save that it is the best" in typed("to-bf16 out x --best") and not Path("x").exists()


def test_a_record_of_the_run_itself_counts_first(best: Path) -> None:
    Path("out/trainer_state.json").write_text('{"best_model_checkpoint": "out/checkpoint-4"}')
    assert "--best" not in typed("to-bf16 out newest --dry-run")


def test_options_are_keywords_in_python(run: Path) -> None:
    report = zckpt.convert("ck", "x", max_shard_size="100B", include=["*weight"], progress=False)
    assert len(report.files) > 2 and "x: " in str(report) and repr(report).startswith("<zckpt.Report x")
    assert zckpt.convert("ck", "x", overwrite=True, progress=False).tensors == 10
    with pytest.raises(TypeError, match="nosuch"):
        zckpt.convert("ck", "y", nosuch=1)


def fixture_saves() -> list[Path]:
    """Every fixture that is a save or a model."""
    patterns = ("*/*/checkpoint", "*/*/model", "gguf/*/*.gguf")
    return sorted(path for pattern in patterns for path in (REPO / "fixtures").glob(pattern))


WITHOUT_FIXTURE = {"Llama", "NeMo 1", "NxD"}
"""Families with saves that their tests write (tests/layouts/test_sliced.py)."""


def test_the_list_of_formats_is_what_readers_and_fixtures_say(tmp_path: Path) -> None:
    found = check("formats", CliRunner().invoke(app, ["formats", "--json"]).stdout)
    listed = {one["name"]: one["optimizer_states"] for one in found["reads"]["layouts"]}
    zckpt.to_universal(FIXTURE, tmp_path / "universal", progress=False)
    seen = set()
    for path in [*fixture_saves(), REPO / "fixtures/orbax/zarr2", tmp_path / "universal"]:
        family = layouts.family_of(find(locate(path)).listing)
        assert listed[family.name] == (family.read_training is not None), path
        seen.add(family.name)
    assert listed.keys() - seen == WITHOUT_FIXTURE and seen <= listed.keys()
    assert all(one["about"] for one in found["reads"]["layouts"])
    types = {one for model in found["models"] for one in model["model_types"]}
    configs = [json.loads(path.read_text()) for path in (REPO / "fixtures").glob("*/*/*/config.json")]
    assert {config.get("model_type") for config in configs} - types <= {
        None,
        "bert",
        "t5",
        *gguf_vision.kinds_by_model(),
    }
    assert found["writes"]["commands"].keys() <= COMMANDS.keys()
    told = typed("formats")
    assert all(name in told for name in [*listed, *(one["name"] for one in found["models"])])


FINAL = "The weights in 'out' itself are not; to take these, give 'out/model.safetensors'."


@pytest.mark.parametrize(
    "command", ["inspect {}", "verify {}", "to-fp32 {} x --dry-run", "push {} me/x --dry-run", "map {}"]
)
def test_a_final_model_beside_a_trainers_folders_is_told(
    command: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    zckpt.convert("ck", "w", dtype="bf16", progress=False)
    shutil.copy("w/model.safetensors", "out/model.safetensors")
    assert "the newest, 'checkpoint-4', is taken" in (told := typed(command.format("out"))) and FINAL in told
    assert "is taken" not in typed(command.format("out/model.safetensors"))
    for step in (2, 4):
        shutil.rmtree(f"out/checkpoint-{step}")
        shutil.copytree("w", f"out/checkpoint-{step}")
    assert "'out' holds weights itself, which are taken, and not 'checkpoint-4'" in typed(command.format("out"))
