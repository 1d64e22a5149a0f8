"""The command line as a person or a script meets it: help, exit status, streams, JSON, and the error desk."""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from hangs import HANG_S
from typer.testing import CliRunner

from zckpt.base.errors import UsageError, add_note
from zckpt.cli import app, desk
from zckpt.cli.commands import COMMANDS
from zckpt.cli.declare import size_in_bytes, split_rename
from zckpt.cli.output import Console, peak_rss_bytes

REPO = Path(__file__).parents[2]
GOLDEN = REPO / "tests" / "golden"
ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


def zckpt(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zckpt", *map(str, args)],
        cwd=REPO,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def write_weights(path: Path, **tensors: list[float]) -> Path:
    header, data = {}, b""
    for name, values in tensors.items():
        begin, data = len(data), data + struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return write_weights(tmp_path / "in" / "in.safetensors", a=[1.0, 2.5, -3.0], b=[0.1, 1e5])


TOLD = (
    "note: It cannot be told whether this is the whole model: one file does not say what its model has; a config.json of a "
    "model that zckpt knows would tell.\n"
)
"""Of a file of weights alone."""


@pytest.fixture(params=["zero1", "zero2", "zero3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return min((REPO / "fixtures" / request.param).glob("*/checkpoint"))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_the_golden_one(command: str) -> None:
    shown = CliRunner().invoke(app, [*filter(None, [command]), "--help"])
    assert shown.exit_code == 0
    assert "Example: zckpt " in shown.output and "Exit status: 0 " in shown.output
    result = zckpt(*filter(None, [command]), "--help", COLUMNS="80")  # the runner has a width of its own
    several = ("[ARGS]...", "CKPT...", "DELTA...", "s3://...")
    assert "..." not in re.sub("|".join(map(re.escape, several)), "", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    path = GOLDEN / f"help_{command or 'zckpt'}.txt"
    if os.environ.get("ZCKPT_GOLDEN") == "rewrite":
        path.parent.mkdir(exist_ok=True)
        path.write_text(result.stdout)
    diff = list(difflib.unified_diff(path.read_text().splitlines(), result.stdout.splitlines(), "golden", "now"))
    assert not diff, "\n".join([*diff, "run: make golden"])


def test_a_shell_completes_commands_and_options() -> None:
    def completed(*words: str) -> list[str]:
        return zckpt(
            _ZCKPT_COMPLETE="complete_bash", COMP_WORDS=" ".join(("zckpt", *words)), COMP_CWORD=str(len(words))
        ).stdout.split()

    assert completed("to-") == [command for command in completed("") if command.startswith("to-")] != []
    assert "--world-size" in completed("reshard", "--wor")


def test_every_golden_help_is_of_a_command() -> None:
    assert {path.stem for path in GOLDEN.glob("help_*.txt")} == {f"help_{name}" for name in ("zckpt", *COMMANDS)}


def test_version_and_no_arguments() -> None:
    assert zckpt("--version").stdout == f"zckpt {version('zckpt')}\n"
    alone = zckpt()
    assert alone.returncode == 2 and "Weights:" in alone.stderr and not alone.stdout


def test_a_bug_report_gets_versions_and_no_paths() -> None:
    shown = zckpt("--version", "--verbose")
    table = dict(line.split(None, 1) for line in shown.stdout.splitlines())
    assert table["zckpt"] == f"{version('zckpt')}, with the C++ engine" and table["torch"] == version("torch")
    assert str(Path.home()) not in shown.stdout and os.uname().nodename not in shown.stdout
    alone = zckpt("--verbose")
    assert alone.returncode == 2 and "--verbose is of use only with --version" in alone.stderr


@pytest.mark.parametrize(
    ("args", "first", "last"),
    [
        (
            ["to-fp32", "only-one"],
            "missing argument 'OUT'",
            "Run 'zckpt to-fp32 --help' for its arguments and options.",
        ),
        (["--nonsense"], "no such option: --nonsense", "Run 'zckpt --help' for its arguments and options."),
        (["to-fp3", "a"], "no such command: 'to-fp3'", "'to-fp32'"),
        (
            ["inspect", "a", "b"],
            "unexpected extra argument",
            "Run 'zckpt inspect --help' for its arguments and options.",
        ),
        (["to-fp32", "a", "b", "--threads", "0"], "0 threads cannot be started", "Change --threads."),
        (
            ["to-fp32", "a", "b", "--tp", "0"],
            "invalid value for '--tp': 0 is less than 1",
            "Run 'zckpt to-fp32 --help'",
        ),
        (
            ["to-fp32", "a", "b", "--buffer", "5XB"],
            "invalid value for '--buffer': '5XB' is not a size; use bytes or",
            "--help'",
        ),
        (["to-fp32", "a", "b", "--rename", "abc"], "--rename 'abc' has no '='", "Put '=' between"),
    ],
)
def test_usage_errors_are_errors_like_others(args: list[str], first: str, last: str) -> None:
    result = zckpt(*args, "--json") if args[0] != "--nonsense" else zckpt(*args)
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and lines[0].startswith(f"error: {first}") and last in lines[-1]
    assert lines[-1].startswith("  fix       ")
    if result.stdout:
        assert json.loads(result.stdout)["error"] == "usage"


def test_nothing_heavy_is_imported(weights: Path) -> None:
    names = ("jobs.options", "naming.transform", "layouts.dcp.read", "layouts.fsdp.read", "output.publish")
    ours = {f"zckpt.{name}" for name in names}
    assert all(map(find_spec, ours))
    code = (
        "import atexit, sys\n"
        "from zckpt.cli import main\n"
        f"heavy = {{'torch', 'numpy', 'deepspeed', 'tqdm', 'huggingface_hub', *{ours}}}\n"
        "atexit.register(lambda: sys.stderr.write(f'HEAVY {sorted(heavy & set(sys.modules))}'))\n"
        "main()\n"
    )
    for args in (["--help"], ["inspect", str(weights)], ["verify", str(weights)]):
        result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
        assert result.stderr.endswith("HEAVY []"), result.stderr


def test_a_conversion_says_one_json_object(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = zckpt("to-bf16", weights, out, "--json")
    assert (result.returncode, result.stderr) == (0, TOLD)
    facts = json.loads(result.stdout)
    assert set(facts) == {
        "out", "dtype", "files", "tensors", "numel", "bytes_written", "seconds", "peak_rss_bytes", "engine",
        "kept", "already_done", "overflows", "notes",
    }  # fmt: skip
    assert facts["files"] == [{"path": "out.safetensors", "bytes": out.stat().st_size}]
    assert (facts["dtype"], facts["tensors"], facts["numel"]) == ("bf16", 2, 5)
    assert facts["bytes_written"] == out.stat().st_size
    assert facts["peak_rss_bytes"] > 1_000_000
    assert facts["seconds"] > 0


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin", "out"])
def test_a_conversion_speaks_on_stdout_only(weights: Path, tmp_path: Path, name: str) -> None:
    result = zckpt("to-fp32", weights, tmp_path / name)
    assert (result.returncode, result.stderr) == (0, TOLD)
    what, how = result.stdout.splitlines()
    assert ": 2 tensors as fp32, " in what
    assert how.startswith("load it with ")
    assert (tmp_path / name).exists()


def test_quiet_says_nothing(weights: Path, tmp_path: Path) -> None:
    result = zckpt("to-fp32", weights, tmp_path / "out.bin", "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_dry_run_writes_nothing(weights: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    result = zckpt("to-fp32", weights, tmp_path / "out", "--dry-run")
    assert result.returncode == 0
    assert "would read 20 bytes and write " in result.stdout
    facts = json.loads(zckpt("to-fp32", weights, tmp_path / "out", "--dry-run", "--json").stdout)
    assert facts["dry_run"] is True
    assert facts["moves"] >= 1
    assert facts["bytes_read"] == 20
    assert sum(file["bytes"] for file in facts["files"]) == facts["bytes_written"]
    assert sorted(tmp_path.iterdir()) == before


def test_selection_and_renaming(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    options = ["--exclude", "b", "--rename", "^a$=x.a", "--strip-prefix", "y.", "--include", "*", "--json"]
    assert json.loads(zckpt("to-fp32", weights, out, *options).stdout)["numel"] == 3
    assert b'"x.a"' in out.read_bytes()


def test_overflow_is_an_error_or_a_choice(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    refused = zckpt("to-fp16", weights, out, "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"] == "cast"
    assert refused.stderr.startswith("error: ")
    assert not out.exists()
    clamped = zckpt("to-fp16", weights, out, "--overflow", "clamp", "--json")
    assert clamped.returncode == 0
    assert json.loads(clamped.stdout)["overflows"]["b"]["count"] == 1
    assert "'b'" in clamped.stderr


def test_an_existing_output_needs_overwrite(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    out.write_bytes(b"mine")
    refused = zckpt("to-fp32", weights, out)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert out.read_bytes() == b"mine"
    assert zckpt("to-fp32", weights, out, "--overwrite").returncode == 0


def test_inspect_says_yes_on_0_and_no_on_1(weights: Path, tmp_path: Path) -> None:
    result = zckpt("inspect", weights, "--tensors")
    assert (result.returncode, result.stderr) == (0, "")
    assert "export      yes" in result.stdout
    assert json.loads(zckpt("inspect", weights, "--json").stdout)["exportable"]["ok"] is True
    broken = tmp_path / "global_step1"
    broken.mkdir()
    (broken / "mp_rank_00_model_states.pt").write_bytes(b"")
    result = zckpt("inspect", broken)
    assert result.returncode == 1
    assert "export      no" in result.stdout


def test_verify_says_yes_on_0_and_no_on_1(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = zckpt("to-fp32", weights, out)
    assert result.stderr == TOLD
    result = zckpt("verify", weights, out)  # equal, but nobody knows whether it is all of a model
    assert (result.returncode, result.stderr) == (1, "") and "Do not delete" in result.stdout
    save = REPO / "fixtures" / "zero3" / "bf16_w2" / "checkpoint"
    zckpt("to-fp32", save, tmp_path / "whole.safetensors")
    result = zckpt("verify", save, tmp_path / "whole.safetensors")
    assert (result.returncode, result.stderr) == (0, "") and "\nSafe to delete if you will not resume" in result.stdout
    assert json.loads(zckpt("verify", out, "--deep", "--json").stdout)["ok"] is True
    with open(out, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    result = zckpt("verify", weights, out, "--limit-rate", "1GB", "--threads", "1")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "Do not delete the shards: 2 problems were found."
    assert json.loads(zckpt("verify", out, "--json").stdout)["ok"] is False
    assert zckpt("verify", tmp_path / "none").returncode == 2


def test_diff_says_same_on_0_and_different_on_1(weights: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.safetensors"
    zckpt("to-bf16", weights, half)
    assert zckpt("diff", weights, weights).stdout == "the same: 2 tensors, bit for bit\n"
    result = zckpt("diff", weights, half)
    assert result.returncode == 1 and all(line.startswith("note: ") for line in result.stderr.splitlines())
    assert "different: 2 of 2 tensors that both have. The dtypes differ; with --rtol" in " ".join(result.stdout.split())
    assert zckpt("diff", weights, half, "--rtol", "0.01").returncode == 0
    facts = json.loads(zckpt("diff", weights, half, "--json", "--tensors").stdout)
    assert facts["same"] is False and [t["name"] for t in facts["tensors"]] == ["a", "b"]
    assert zckpt("diff", weights, tmp_path / "none").returncode == 2
    assert zckpt("diff", weights, half, "--atol", "-1").returncode == 2
    page = tmp_path / "diff.html"
    done = zckpt("diff", weights, half, "--rtol", "0.01", "--html", page)
    assert (
        done.returncode == 0
        and done.stderr.startswith(f"wrote {page}\n")
        and "at most 0 + 0.01 |b|" in page.read_text()
    )
    before = weights.read_bytes()
    done = zckpt("diff", weights, half, "--html", weights)
    assert done.returncode == 2 and "is not an HTML page" in done.stderr and weights.read_bytes() == before
    assert "directory that exists" in zckpt("diff", weights, half, "--html", tmp_path / "none" / "a.html").stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8MiB", 8 << 20), ("500MB", 5 * 10**8), ("1.5G", 15 * 10**8), ("4096", 4096), ("2 kB", 2000), ("1GB/s", 10**9)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size_in_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.5.5M", "MB", "nan"])
def test_what_is_no_size(text: str, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="use bytes or a form such as 12GB"):
        size_in_bytes(text)
    assert zckpt("to-fp32", weights, tmp_path / "out", f"--buffer={text}").returncode == 2


def test_the_desk_says_one_field_a_line(tmp_path: Path) -> None:
    result = zckpt("inspect", tmp_path / "none", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"] == "not_a_checkpoint"
    first, fix = result.stderr.splitlines()
    assert first == f"error: {tmp_path / 'none'}: no such file or directory" and fix.startswith("  fix       ")
    assert "Traceback" in zckpt("inspect", tmp_path / "none", ZCKPT_DEBUG="1").stderr


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (OSError(28, "No space left on device", "/x/y"), "os", "error: /x/y: no space left on device"),
        (MemoryError(), "memory", "error: out of memory"),
        (KeyError("x\ny"), "internal", "error: internal error: KeyError: 'x\\ny'"),
        (desk.Interrupted(), "interrupted", "error: interrupted; no output is half written"),
    ],
)
def test_the_desk_names_foreign_errors(
    error: BaseException, code: str, first: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["zckpt", "inspect", "--json"])
    assert desk.report(error) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0] == first and all(line.startswith("  fix       ") for line in lines[1:])
    assert json.loads(out)["error"] == code
    assert code != "internal" or "ZCKPT_DEBUG=1" in lines[1]


def test_notes_follow_an_error_and_secrets_do_not_show(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["zckpt", "push", "--token=secret", "--json"])
    error = UsageError("is wrong", file="secret/x", remedy="Mend it.")
    add_note(error, "a note on secret things")
    desk.report(error)
    out, err = capsys.readouterr()
    assert err.splitlines() == ["error: .../x: is wrong", "  fix       Mend it.", "note: a note on ... things"]
    assert json.loads(out)["notes"] == ["a note on ... things"]


@pytest.mark.parametrize(("no_color", "painted"), [("", True), ("1", False)])
def test_colours_are_for_terminals(no_color: str, painted: bool, tmp_path: Path) -> None:
    import pty

    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color, "COLUMNS": "40"}
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "zckpt", "inspect", "a-name/nowhere"]
    subprocess.run(words, env=environment, cwd=tmp_path, stderr=slave, stdout=subprocess.DEVNULL, check=False)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert ("\x1b[" in shown) == painted and "\x1b[" not in zckpt("inspect", "nowhere").stderr
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert plain[0] == "error: a-name/nowhere: no such file or" and max(map(len, plain)) <= 40


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 2)])
def test_an_interruption_is_told(number: signal.Signals, status: int, tmp_path: Path) -> None:
    code = (
        "import sys, time, zckpt.jobs.inspection, zckpt.cli\n"
        "def wait(*_, **__):\n    sys.stderr.write('ready\\n'); sys.stderr.flush(); time.sleep(60)\n"
        "zckpt.jobs.inspection.inspect_checkpoint = wait\n"
        "zckpt.cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "inspect", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stdout, stderr) == (status, "", "error: interrupted; no output is half written\n")


def test_a_closed_pipe_is_no_scandal(weights: Path) -> None:
    command = f"{sys.executable} -m zckpt inspect {weights} --tensors | true"
    result = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=b", ("a", "b")),
        ("a=b=c", ("a", "b=c")),
        (r"a\=b=c", (r"a\=b", "c")),
        ("^model=", ("^model", "")),
        ("(?=a)b=c", ("(?=a)b", "c")),
        ("(?<=a)b=", ("(?<=a)b", "")),
    ],
)
def test_rename_splits_at_its_first_free_equals(text: str, pair: tuple[str, str]) -> None:
    assert split_rename(text) == pair


def test_rename_without_equals_is_a_usage_error(weights: Path) -> None:
    with pytest.raises(UsageError):
        split_rename("abc")
    assert zckpt("to-fp32", weights, "out", "--rename", "abc").returncode == 2


def test_no_bar_without_a_terminal() -> None:
    with Console().progress(10, "x") as progress:
        assert progress is None
    assert peak_rss_bytes() > 0


def test_a_checkpoint_is_inspected_and_converted(checkpoint: Path, tmp_path: Path) -> None:
    inspected = zckpt("inspect", checkpoint, "--json")
    assert inspected.returncode == 0, inspected.stderr
    facts = json.loads(inspected.stdout)
    result = zckpt("to-fp32", checkpoint, tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    converted = json.loads(result.stdout)
    assert converted["numel"] == facts["numel"]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sizes.pop("zckpt.json") and sum(sizes.values()) == converted["bytes_written"]


def test_a_dry_run_tells_of_a_full_disk_but_goes_on(tmp_path: Path) -> None:
    from zckpt.cli.written import lack_of_space
    from zckpt.storage.location import locate

    assert lack_of_space(locate(tmp_path / "out"), 1) == []
    (told,) = lack_of_space(locate(tmp_path / "out"), 1 << 62)
    assert "too little free disk" in told
