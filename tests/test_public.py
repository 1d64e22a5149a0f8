"""The public names: what `dir` shows, paths of any kind, progress, what is opened and inspected, and types for checkers."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hub_server import TOKEN, HubServer
from typer.testing import CliRunner

import zckpt
from zckpt import drop_in
from zckpt.cli import app

ROOT = Path(__file__).parent.parent
ZERO3 = ROOT / "fixtures" / "zero3" / "bf16_w2" / "checkpoint"
LLAMA = ROOT / "fixtures" / "transformers" / "llama_zero3" / "checkpoint"
LORA = ROOT / "fixtures" / "peft" / "lora_zero2" / "checkpoint"


class OnlyPathLike:
    """A path that is neither a str nor a pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


def small_model() -> torch.nn.Module:
    model = torch.nn.Module()
    with zckpt.open_checkpoint(ZERO3) as checkpoint:
        for name in checkpoint:
            parts, parent = name.split("."), model
            for part in parts[:-1]:
                if part not in parent._modules:
                    parent.add_module(part, torch.nn.Module())
                parent = parent._modules[part]
            parent.register_buffer(parts[-1], torch.zeros_like(checkpoint[name]))
    return model


def saved_model(where: Path) -> tuple[torch.nn.Module, OnlyPathLike]:
    model = torch.nn.Linear(2, 2)
    zckpt.live.save_pretrained(model, where)
    return model, OnlyPathLike(where)


def add_family(where: Path) -> None:
    """A family that is like Llama."""
    fixed = {"model_type": "public", "architectures": ["PublicForCausalLM"]}
    file = where / "family.json"
    file.write_text(json.dumps({"family": "public", "about": "a test's", "like": "llama", "config": {"fixed": fixed}}))
    zckpt.add_family(OnlyPathLike(file))


def calls(given: OnlyPathLike, tag: OnlyPathLike, out: OnlyPathLike, where: Path) -> dict[str, Callable[[], object]]:
    """Every public function that takes a path, called with one."""
    more = OnlyPathLike(where)
    converted, files = OnlyPathLike(where / "converted"), OnlyPathLike(where / "files")
    fs = {
        "add_family": lambda: add_family(where),
        "average": lambda: zckpt.average([given, given], out),
        "convert": lambda: zckpt.convert(given, out, also=[more]),
        "delta": lambda: zckpt.delta(given, given, out),
        "apply_delta": lambda: (zckpt.delta(given, given, files), zckpt.apply_delta(given, files, out)),
        "diff": lambda: zckpt.diff(given, given),
        "inspect_checkpoint": lambda: zckpt.inspect_checkpoint(given, also=[more]),
        "open_checkpoint": lambda: zckpt.open_checkpoint(given, also=[more]),
        "reshard": lambda: zckpt.reshard(given, out, world_size=1, also=[more]),
        "to_dcp": lambda: zckpt.to_dcp(given, out, also=[more]),
        "to_fp8": lambda: zckpt.to_fp8(OnlyPathLike(LLAMA), out, also=[more]),
        "quantize": lambda: zckpt.quantize(OnlyPathLike(LLAMA), out, to="int8", also=[more]),
        "to_gguf": lambda: zckpt.to_gguf(OnlyPathLike(LLAMA), out, tokenizer="none", also=[more]),
        "to_mlx": lambda: zckpt.to_mlx(OnlyPathLike(LLAMA), out, also=[more]),
        "to_mcore": lambda: zckpt.to_mcore(OnlyPathLike(LLAMA), out, also=[more]),
        "to_peft": lambda: zckpt.to_peft(OnlyPathLike(LORA), out, also=[more]),
        "to_universal": lambda: zckpt.to_universal(given, out, also=[more]),
        "to_states": lambda: zckpt.to_states(given, out, also=[more]),
        "du": lambda: zckpt.du(given),
        "estimate": lambda: zckpt.estimate(OnlyPathLike(LLAMA), memory="1GB"),
        "map": lambda: zckpt.map(given, also=[more]).save(out),
        "slim": lambda: zckpt.slim(given, out, drop=["optimizer"], also=[more]),
        "verify": lambda: (zckpt.convert(given, converted), zckpt.verify(given, converted, also=[more])),
        "push_to_hub": lambda: pushed(given, files, more, where),
        "export_delta": lambda: zckpt.live.export_delta(*saved_model(where / "old"), out),
        "save_pretrained": lambda: zckpt.live.save_pretrained(torch.nn.Linear(2, 2), out),
        "get_fp32_state_dict_from_zero_checkpoint": lambda: drop_in.get_fp32_state_dict_from_zero_checkpoint(given),
        "convert_zero_checkpoint_to_state_dict": lambda: drop_in.convert_zero_checkpoint_to_state_dict(given, out),
        "convert_zero_checkpoint_to_fp32_state_dict": lambda: drop_in.convert_zero_checkpoint_to_fp32_state_dict(
            given, out
        ),
        "load_state_dict_from_zero_checkpoint": lambda: drop_in.load_state_dict_from_zero_checkpoint(
            small_model(), given
        ),
        "get_checkpoint_files": lambda: drop_in.get_checkpoint_files(tag, "*.pt"),
        "get_optim_files": lambda: drop_in.get_optim_files(tag),
        "get_model_state_files": lambda: drop_in.get_model_state_files(tag),
        "get_model_state_file": lambda: drop_in.get_model_state_file(tag, 3),
    }
    return fs


def pushed(given: OnlyPathLike, scratch: OnlyPathLike, more: OnlyPathLike, where: Path) -> object:
    with HubServer(where / "hub") as server:
        return zckpt.push_to_hub(
            given, "alice/m", endpoint=server.url, token=TOKEN, scratch=scratch, also=[more], dtype="bf16"
        )


def is_of_paths(function: Callable[..., Any]) -> bool:
    return any("PathLike" in str(p.annotation) or p.annotation == "Path" for p in parameters(function))


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", calls(*[OnlyPathLike(ZERO3)] * 3, ZERO3))
def test_paths_of_any_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    tag = ZERO3 / (ZERO3 / "latest").read_text()
    (tmp_path / "more").mkdir()
    calls(*map(OnlyPathLike, (ZERO3, tag, tmp_path / "out")), tmp_path / "more")[name]()


def test_every_public_function_of_paths_is_among_those() -> None:
    own = {name: f for name, f in vars(drop_in).items() if getattr(f, "__module__", "") == drop_in.__name__}
    live = {name: getattr(zckpt.live, name) for name in ("save_pretrained", "consolidate", "export_delta")}
    functions = {**{name: getattr(zckpt, name) for name in zckpt.__all__}, **own, **live}
    functions = {name: f for name, f in functions.items() if inspect.isfunction(f) and not name.startswith("_")}
    tried = calls(*[OnlyPathLike(ZERO3)] * 3, ZERO3)
    assert {name for name, f in functions.items() if is_of_paths(f)} - {*tried} == set()


def test_dir_shows_the_public_names_and_imports_nothing() -> None:
    code = "import sys, zckpt; print(*dir(zckpt)); print(*sorted({'torch', 'numpy', 'typer', 'zckpt.jobs'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, imported = done.stdout.split("\n")[:2]
    assert names.split() == sorted([*zckpt.__all__, "drop_in", "live", "runtime"])
    assert imported == ""
    assert all(hasattr(zckpt, name) and getattr(zckpt, name).__doc__ for name in dir(zckpt) if name != "__version__")


@pytest.mark.parametrize("name", [n for n in zckpt.__all__ if inspect.isfunction(getattr(zckpt, n))])
def test_a_public_function_says_all_of_itself(name: str) -> None:
    function = getattr(zckpt, name)
    words = inspect.getdoc(function) or ""
    assert "Example:" in words and "zckpt.jobs" not in words and "prepare" not in words
    if "arguments and errors as for" not in words:
        assert "Args:" in words and "Raises:" in words
        assert [p.name for p in parameters(function) if f"\n    {p.name}: " not in words] == []


@pytest.mark.parametrize("name", [n for n in zckpt.__all__ if inspect.isclass(getattr(zckpt, n))])
def test_a_public_class_says_where_users_have_it_from(name: str) -> None:
    kind = getattr(zckpt, name)
    assert kind.__module__ == "zckpt" and repr(kind) == f"<class 'zckpt.{name}'>" and kind.__doc__
    assert pickle.loads(pickle.dumps(kind)) is kind


def functions_of(package: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and public methods of public classes."""
    for name in package.__all__:
        found = getattr(package, name)
        if inspect.isclass(found):
            own = {key: value for key, value in vars(found).items() if not key.startswith("_") or key == "__init__"}
            if dataclasses.is_dataclass(found):
                own.pop("__init__", None)
            yield from ((f"{name}.{key}", value) for key, value in own.items() if inspect.isfunction(value))
        elif inspect.isfunction(found):
            yield name, found


@pytest.mark.parametrize("package", ["zckpt", "zckpt.live", "zckpt.integrations", "zckpt.runtime"])
def test_signatures_show_plain_defaults(package: str) -> None:
    """As somebody types them: no address of a function, no object; but what DeepSpeed's own signatures have.

    Fields of dataclasses aside: options are values of their own.
    """
    plain = (type(None), bool, int, float, str, tuple, torch.dtype, datetime.timedelta)
    for name, function in functions_of(importlib.import_module(package)):
        defaults = {p.name: p.default for p in parameters(function) if p.default is not p.empty}
        assert not {key: value for key, value in defaults.items() if not isinstance(value, plain)}, name


def test_looking_from_python_prints_what_commands_print(tmp_path: Path) -> None:
    drawn, used, needed = zckpt.map(ZERO3), zckpt.du(ZERO3), zckpt.estimate("7B", gpus=8, memory="80GB")
    for result, command in ((drawn, ["map", ZERO3]), (used, ["du", ZERO3])):
        told = CliRunner().invoke(app, [*map(str, command)], env={"COLUMNS": "100"}).stdout
        assert str(result).split() == told.split()
    for result in (drawn, used, needed):
        assert repr(result).startswith("<zckpt.") and len(repr(result)) < 200 and "<pre>" in result._repr_html_()
    assert needed.ok and needed.best("bf16") is not None and not zckpt.estimate("7B", memory="1GB").ok
    drawn.save(tmp_path / "map.html")
    assert "<svg" in (tmp_path / "map.html").read_text() or "canvas" in (tmp_path / "map.html").read_text()
    smaller = zckpt.slim(ZERO3, tmp_path / "slim", drop=["optimizer"], progress=False)
    assert zckpt.du(tmp_path / "slim").classes["moments"] == 0 and smaller.out == str(tmp_path / "slim")


def test_types_are_shipped(tmp_path: Path) -> None:
    """In the wheel, built without its C++: which files there are is decided before."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path),
         "-C", "wheel.cmake=false", "-C", "wheel.py-api=py3", "-C", f"build-dir={tmp_path / 'build'}", str(ROOT)],
        check=True, capture_output=True,
    )  # fmt: skip
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {*wheel.namelist()}
    assert {"zckpt/py.typed", "zckpt/_core.pyi", "zckpt/__main__.py"} <= names
    assert not [name for name in names if name.startswith(("zckpt/csrc", "tests", "docs"))]


def test_open_and_close() -> None:
    with zckpt.open_checkpoint(ZERO3) as checkpoint:
        shown = repr(checkpoint)
        name = next(iter(checkpoint))
        part = checkpoint.get_slice(name)
        whole = checkpoint[name]
        numel = sum(t.numel() for n, t in checkpoint.items() if checkpoint.catalog[n].role != "buffer")
        count = len(checkpoint.catalog.tensors)
    tag = (ZERO3 / "latest").read_text()
    assert shown == (
        f"<zckpt.Checkpoint {str(ZERO3 / tag)!r}, layout zero3, tag {tag}: {count} tensors, {numel:,} parameters>"
    )
    assert repr(checkpoint).endswith(": closed>")
    assert not len(checkpoint) and torch.equal(part[:], whole)
    with pytest.raises(zckpt.UsageError, match="is closed"):
        checkpoint[name]
    checkpoint.close()


def test_an_inspection_is_what_the_command_prints() -> None:
    found = zckpt.inspect_checkpoint(ZERO3)
    command = [sys.executable, "-m", "zckpt", "inspect", str(ZERO3)]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    assert json.loads(json.dumps(found.as_json())) == json.loads(told)
    assert found.exportable.ok and found.resumable.ok and isinstance(found, zckpt.Inspection)
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"})
    assert shown.stdout.splitlines()[0] == next(iter(found.lines()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for number, (terminal, progress) in enumerate([(True, None), (True, False), (False, None), (False, True)]):
        monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
        zckpt.convert(ZERO3, tmp_path / f"{number}.bin", progress=progress)
        shown.append("convert:" in sys.stderr.getvalue())
    assert shown == [True, False, False, True]


def test_progress_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": lambda: shell}))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    zckpt.diff(ZERO3, ZERO3)
    assert "diff:" in sys.stderr.getvalue()


def test_progress_functions(tmp_path: Path) -> None:
    ones: list[int] = []
    twos: list[tuple[int, int | None]] = []
    kept: list[object] = []
    total = zckpt.convert(ZERO3, tmp_path / "a.bin", progress=ones.append).bytes_written
    zckpt.convert(ZERO3, tmp_path / "b.bin", progress=lambda done, total: twos.append((done, total)))
    zckpt.convert(ZERO3, tmp_path / "c.bin", progress=lambda done, kept=kept: kept.append(done))
    assert ones[-1] == total and twos[-1] == (total, total) and kept[-1] == total
    checked: list[tuple[int, int | None]] = []
    zckpt.verify(ZERO3, deep=True, progress=lambda *said: checked.append(said))
    zckpt.diff(ZERO3, tmp_path / "a.bin", rtol=1, progress=lambda done, total=None: twos.append((done, total)))
    assert checked[-1][0] == checked[-1][1] == sum(file.stat().st_size for file in ZERO3.rglob("*.pt"))
    zckpt.verify(ZERO3, tmp_path / "a.bin", progress=lambda done, total: checked.append((done, total)))
    assert checked[-1][0] == checked[-1][1] and all(total is not None and done <= total for done, total in checked)
    assert twos[-1][0] == twos[-1][1]
    for number, function in enumerate([zckpt.reshard, zckpt.to_universal, zckpt.to_dcp]):
        said: list[tuple[int, int]] = []
        more = {"world_size": 1} if function is zckpt.reshard else {}
        function(ZERO3, tmp_path / f"out{number}", progress=lambda *done, said=said: said.append(done), **more)
        assert said[-1][0] == said[-1][1] > 0
