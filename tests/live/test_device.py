"""Which device a process uses and who communicates for it; a GPU itself is `make gpu-check`'s."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import zckpt
from zckpt import live
from zckpt.jobs.open import open_catalog
from zckpt.live import assignment, carry, device, loading
from zckpt.runtime.loader import rng_state, set_rng_state


def test_no_other_module_names_a_kind_of_device():
    found = []
    for path in Path(zckpt.__file__).parent.rglob("*.py"):
        text = re.sub(r"`[^`]*`", "", path.read_text())
        if path.name != "device.py" and re.search(
            r"torch\.(cuda|xpu|accelerator)\b|\.cuda\(|[\"\x27]nccl[\"\x27] in|== [\"\x27]nccl", text
        ):
            found.append(str(path))
    assert found == []


class Machine:
    """Stands for torch on a machine with two accelerators of one kind."""

    def __init__(self, kind, monkeypatch):
        self.kind, self.current, self.state = kind, 0, torch.tensor([1, 2, 3], dtype=torch.uint8)
        monkeypatch.setattr(torch, "accelerator", self)
        monkeypatch.setattr(torch, "get_device_module", lambda asked: self)

    def is_available(self):
        return True

    is_initialized = is_available

    def current_accelerator(self):
        return torch.device(self.kind)

    def device_count(self):
        return 2

    def set_device_index(self, index):
        self.current = index

    def current_device_index(self):
        return self.current

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state

    def max_memory_allocated(self, asked):
        return 4096 + asked.index


@pytest.mark.parametrize(
    ("kind", "backends", "trains_on", "sends_from"),
    [
        ("cuda", "cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda:1", "cpu"),  # as init_process_group() without a backend makes it
        ("cuda", "cpu:gloo,cuda:gloo", "cpu", "cpu"),  # init_process_group("gloo"): a script that wants the CPU
        ("xpu", "xpu:xccl", "xpu:1", "xpu:1"),
        ("xpu", "cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("mps", "cpu:gloo,mps:gloo", "cpu", "cpu"),
    ],
)
def test_device_of_a_group(kind, backends, trains_on, sends_from, monkeypatch):
    Machine(kind, monkeypatch)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert str(device.use_device(local_rank=3)) == trains_on
    assert str(device.device_of_messages()) == sends_from


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl"), ("vulkan", "gloo")])
def test_backend_is_torchs(kind, backend, monkeypatch):
    Machine(kind, monkeypatch)
    assert device.default_backend() == backend


def test_random_generators_of_an_accelerator(monkeypatch):
    before = torch.get_rng_state(), random.getstate()
    machine = Machine("cuda", monkeypatch)
    saved = rng_state()
    assert saved["cuda"] is machine.state  # the name that it has in files
    machine.state = None
    set_rng_state(saved)
    assert machine.state is saved["cuda"]
    machine.kind, machine.state = "xpu", None
    set_rng_state(saved)  # of a run on other GPUs: stays as it is
    assert machine.state is None
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_generators_in_a_save_are_short_texts_and_the_words_of_older_saves_are_taken_too() -> None:
    numpy.random.seed(5)
    python, key = random.getstate(), numpy.random.get_state()[1].tolist()
    saved, drawn = rng_state(), (random.random(), numpy.random.rand())
    assert type(saved["python"][1]) is type(saved["numpy"]["state"]["key"]) is str
    inner = {**saved["numpy"]["state"], "key": key}
    for state in (saved, {"python": python, "numpy": {**saved["numpy"], "state": inner}}):
        set_rng_state(state)
        assert (random.random(), numpy.random.rand()) == drawn


def test_memory(monkeypatch):
    assert device.peak_memory(device.CPU) > 64 << 20
    Machine("cuda", monkeypatch)
    assert device.peak_memory(torch.device("cuda", 1)) == 4097


def test_fused_kernels():
    adam, adagrad = torch.optim.Adam, torch.optim.Adagrad
    assert device.has_fused_kernels(torch.device("cpu"), adagrad)
    assert device.has_fused_kernels(torch.device("xpu"), adam)
    assert not device.has_fused_kernels(torch.device("cuda"), adagrad)
    assert not device.has_fused_kernels(torch.device("mps"), adam)


class Delayed:
    """A device that copies nothing before somebody waits for it: who reads or reuses memory too early gets wrong numbers."""

    def __init__(self, monkeypatch):
        self.asked, self.done, self.under_way_while_working = [], 0, []
        monkeypatch.setattr(device, "copy", lambda target, source: self.asked.append((target, source)))
        monkeypatch.setattr(device, "copies_of", self.copies_of)
        for module in (carry, loading):
            monkeypatch.setattr(module, "is_direct", lambda tensor: False)
            monkeypatch.setattr(module, "run", self.working(module.run))
        for module in (assignment, carry):
            monkeypatch.setattr(module, "PIECE_BYTES", 512)
        monkeypatch.setattr(loading, "BUFFER_BYTES", 512)

    def copies_of(self, devices):
        assert all(isinstance(one, torch.device) for one in devices)
        last = len(self.asked)

        def wait():
            for target, source in self.asked[self.done : last]:
                target.copy_(source)
            self.done = max(self.done, last)

        return wait

    def working(self, run):
        def spied(*arguments, **more):
            self.under_way_while_working.append(len(self.asked) > self.done)
            return run(*arguments, **more)

        return spied


def model_of(tensors):
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_overlap_with_writing_and_reading(tmp_path, monkeypatch, dtype):
    """Of weights that are cast on the way to the files, and of those that are not."""
    truth = {f"w{number}": torch.randn(3 + 17 * number, 5) for number in range(6)}
    slow = Delayed(monkeypatch)
    live.save_pretrained(model_of(truth), tmp_path / "out", dtype)
    worked = slow.under_way_while_working
    if dtype == torch.bfloat16:
        assert len(worked) > 4 and worked[:-1] == [True] * (len(worked) - 1)
    slow.under_way_while_working = worked = []
    model = model_of({name: torch.zeros(tensor.shape) for name, tensor in truth.items()})
    live.load_into(model, open_catalog(str(tmp_path / "out")).catalog)
    assert len(worked) > 4 and worked[1:] == [True] * (len(worked) - 1)
    assert slow.done == len(slow.asked)
    for name, tensor in truth.items():
        assert torch.equal(getattr(model, name).data, tensor.to(dtype).float())


def resident(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_memory_beside_the_model_is_bounded(tmp_path):
    """192 MiB that are not dense go through 32 MiB of buffers on the way in."""
    model = model_of({f"w{number}": torch.ones(2048, 4096).t() for number in range(6)})
    live.save_pretrained(model, tmp_path / "out", torch.bfloat16)
    catalog = open_catalog(str(tmp_path / "out")).catalog
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    live.load_into(model, catalog)
    assert resident("VmHWM") - before < 64 << 20


def test_a_torch_that_is_too_old_is_named():
    code = "import torch; del torch.accelerator; import zckpt; zckpt.load_state_dict_from_zero_checkpoint"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedError" in last and f"torch {torch.__version__}" in last and "torch 2.6 or later" in last
