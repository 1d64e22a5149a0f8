"""Llama's original files, archives of NeMo 1 and saves of NxD: slices cut as each program's own layers cut them, and joined."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file
from small_llama import CONFIG, weights

import zckpt
from zckpt.base.errors import IncompleteError, InconsistentError, UnsafeError, UnsupportedError, ZckptError
from zckpt.core.evidence import Evidence
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.layouts.save.listing import ReadOptions
from zckpt.storage.location import locate

State = dict[str, torch.Tensor]
DIM, HEADS, KV, INNER, VOCABULARY, LAYERS = 16, 4, 2, 24, 12, 2


def numbers(shapes: dict[str, tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def evidence_of(path: Path) -> Evidence:
    return open_catalog(locate(path), Reading()).catalog.evidence


def check(path: Path, truth: State, out: Path) -> None:
    """Every element, and `verify` finds it a second time."""
    zckpt.convert(path, out, dtype="bf16")
    found = load_file(out / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in truth.items())
    verified = zckpt.verify(path, out, deep=True)
    assert verified.ok, verified


# ---- Llama -----------------------------------------------------------------------------------------------------------


def llama() -> State:
    head = DIM // HEADS
    layer = {
        "attention.wq.weight": (DIM, DIM), "attention.wk.weight": (KV * head, DIM), "attention.wv.weight": (KV * head, DIM),
        "attention.wo.weight": (DIM, DIM), "feed_forward.w1.weight": (INNER, DIM), "feed_forward.w2.weight": (DIM, INNER),
        "feed_forward.w3.weight": (INNER, DIM), "attention_norm.weight": (DIM,), "ffn_norm.weight": (DIM,),
    }  # fmt: skip
    shapes = {"tok_embeddings.weight": (VOCABULARY, DIM), "norm.weight": (DIM,), "output.weight": (VOCABULARY, DIM)}
    return numbers({**shapes, **{f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}})


def write_llama(home: Path, state: State, ranks: int, embedding: int, **more: Any) -> Path:
    """The parts that fairscale's layers have, with copies of keys' heads where there are more ranks than heads."""
    home.mkdir()
    cut = {"wo": 1, "w2": 1, "tok_embeddings": embedding}
    for rank in range(ranks):
        part: State = {}
        for name, tensor in state.items():
            kind = name.split(".")[-2]
            if kind in ("wk", "wv") and ranks > KV:
                times = ranks // KV
                part[name] = tensor.chunk(KV)[rank // times].clone()
            elif kind.startswith("w") or kind in ("tok_embeddings", "output"):
                part[name] = tensor.chunk(ranks, cut.get(kind, 0))[rank].clone()
            else:
                part[name] = tensor.clone()
        torch.save(part, home / f"consolidated.{rank:02d}.pth")
    params = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCABULARY, **more}
    (home / "params.json").write_text(json.dumps(params))
    return home


@pytest.mark.parametrize(("ranks", "embedding"), [(1, 0), (2, 0), (2, 1), (4, 0)])
def test_llamas_original_files(ranks: int, embedding: int, tmp_path: Path) -> None:
    state = llama()
    home = write_llama(tmp_path / "in", state, ranks, embedding)
    check(home, state, tmp_path / "out")
    assert evidence_of(home).level == "shapes"
    check(home / f"consolidated.{ranks - 1:02d}.pth", state, tmp_path / "again")


def test_what_is_missing_of_llama(tmp_path: Path) -> None:
    home = write_llama(tmp_path / "in", llama(), 4, 0)
    (home / "consolidated.03.pth").rename(tmp_path / "03.pth")
    for path in (home, home / "consolidated.00.pth"):
        with pytest.raises(IncompleteError, match=r"consolidated.*(03|rank 3)"):
            zckpt.open_checkpoint(path)
    shutil.copy(tmp_path / "03.pth", home / "consolidated.03.pth")
    shutil.copy(tmp_path / "03.pth", home / "consolidated.04.pth")
    with pytest.raises(InconsistentError, match="several models"):
        zckpt.open_checkpoint(home)
    (home / "consolidated.04.pth").unlink()
    part = torch.load(home / "consolidated.01.pth")
    del part["norm.weight"]
    torch.save(part, home / "consolidated.01.pth")
    with pytest.raises(InconsistentError, match=r"consolidated.01.pth.*norm.weight"):
        zckpt.open_checkpoint(home)


@pytest.mark.parametrize("params", [{"dim": "16"}, {"n_heads": 0}, {"n_layers": 10**9}, {"head_dim": 7}, {"dim": None}])
def test_sizes_that_are_none(params: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ZckptError):
        zckpt.open_checkpoint(write_llama(tmp_path / "in", llama(), 2, 0, **params))


def test_a_part_without_a_rule_is_refused(tmp_path: Path) -> None:
    state = {**llama(), "layers.0.odd.weight": torch.ones(4, 4)}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.odd"):
        zckpt.open_checkpoint(write_llama(tmp_path / "in", state, 2, 0))


def test_a_hugging_face_model_beside_them_is_taken(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    home = write_llama(tmp_path / "in", llama(), 2, 0)
    save_file({"own": torch.ones(2)}, home / "model.safetensors")
    assert set(zckpt.open_checkpoint(home)) == {"own"}


# ---- NeMo ------------------------------------------------------------------------------------------------------------


def megatron() -> tuple[State, dict[str, int]]:
    """A model by Megatron-Core's names, and the dimension in which each tensor is cut; -1: not at all."""
    layer = {
        "self_attention.linear_qkv.weight": ((DIM * 2, DIM), 0), "self_attention.linear_proj.weight": ((DIM, DIM), 1),
        "self_attention.linear_qkv.layer_norm_weight": ((DIM,), -1), "mlp.linear_fc1.weight": ((2 * INNER, DIM), 0),
        "mlp.linear_fc2.weight": ((DIM, INNER), 1),
    }  # fmt: skip
    whole = {f"model.decoder.layers.{n}.{name}": value for n in range(4) for name, value in layer.items()}
    whole["model.embedding.word_embeddings.weight"] = ((VOCABULARY, DIM), 0)
    whole["model.decoder.final_layernorm.weight"] = ((DIM,), -1)
    whole["model.output_layer.weight"] = ((VOCABULARY, DIM), 0)
    return numbers({name: shape for name, (shape, _) in whole.items()}), {name: dim for name, (_, dim) in whole.items()}


def write_nemo(home: Path, tp: int, pp: int, form: str = "nemo", mode: str = "w", gated: bool = True) -> State:
    """An archive, or its files; layers are numbered anew in each stage, and fc1 has each rank's part of gate and up."""
    state, dims = megatron()
    files: dict[str, bytes] = {}
    config = f"mcore_gpt: true\ntensor_model_parallel_size: {tp}\npipeline_model_parallel_size: {pp} # stages\nnum_layers: 4\n"
    config += f"activation: '{'fast-swiglu' if gated else 'gelu'}'\ntokenizer:\n  num_layers: 99\n"
    for stage in range(pp):
        for rank in range(tp):
            part: State = {}
            for name, tensor in state.items():
                words = name.split(".")
                if "layers" in words:
                    at = words.index("layers") + 1
                    number = int(words[at])
                    if number * pp // 4 != stage:
                        continue
                    words[at] = str(number % (4 // pp))
                elif ("embedding" in words) != (stage == 0) and pp > 1 and ("embedding" in words or stage != pp - 1):
                    continue
                pieces = tensor.chunk(2) if gated and "linear_fc1.weight" in name else [tensor]
                dim = dims[name]
                part[".".join(words)] = (
                    tensor if dim < 0 else torch.cat([one.chunk(tp, dim)[rank] for one in pieces], dim)
                )
            part["model.decoder.layers.0.self_attention._extra_state"] = io.BytesIO(b"")  # type: ignore[assignment]
            data = io.BytesIO()
            torch.save({key: value for key, value in part.items() if isinstance(value, torch.Tensor)}, data)
            below = (
                ""
                if tp * pp == 1
                else f"mp_rank_{rank:02d}/"
                if pp == 1
                else f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/"
            )
            files[f"{below}model_weights.ckpt"] = data.getvalue()
    files["model_config.yaml"] = config.encode()
    if form == "nemo":
        with tarfile.open(home, mode) as archive:  # type: ignore[call-overload]
            for name, content in files.items():
                info = tarfile.TarInfo(f"./{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        for name, content in files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(content)
    return state


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_archives_of_nemo_are_read_in_place(tp: int, pp: int, tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    state = write_nemo(home / "model.nemo", tp, pp)
    check(home / "model.nemo", state, tmp_path / "out")
    assert [path.name for path in home.iterdir()] == ["model.nemo"]  # nothing was unpacked
    assert evidence_of(home / "model.nemo").level == "metadata"
    check(home, state, tmp_path / "again")


def test_a_changed_byte_in_an_archive_is_found(tmp_path: Path) -> None:
    """The torch files in it have checksums."""
    write_nemo(tmp_path / "model.nemo", 2, 1)
    zckpt.convert(tmp_path / "model.nemo", tmp_path / "out.safetensors", dtype="bf16")
    assert zckpt.verify(tmp_path / "model.nemo", tmp_path / "out.safetensors").deletable[0]  # type: ignore[index]
    fragment = (
        open_catalog(locate(tmp_path / "model.nemo"), Reading()).catalog["model.output_layer.weight"].fragments[0]
    )
    with (tmp_path / "model.nemo").open("r+b") as file:
        file.seek(fragment.byte_offset)
        file.write(b"\x7f\x7f")
    zckpt.convert(tmp_path / "model.nemo", tmp_path / "again.safetensors", dtype="bf16")
    assert not zckpt.verify(tmp_path / "model.nemo", tmp_path / "again.safetensors", deep=True).ok


def test_archives_without_gates_and_their_files(tmp_path: Path) -> None:
    state = write_nemo(tmp_path / "model.nemo", 2, 1, gated=False)
    check(tmp_path / "model.nemo", state, tmp_path / "out")
    state = write_nemo(tmp_path / "files", 2, 2, form="files")
    for number, path in enumerate(
        ("files", "files/tp_rank_00_pp_rank_000", "files/tp_rank_01_pp_rank_001/model_weights.ckpt")
    ):
        check(tmp_path / path, state, tmp_path / f"out{number}")
    shutil.rmtree(tmp_path / "files/tp_rank_01_pp_rank_001")
    with pytest.raises(IncompleteError, match="tensor rank 1 of stage 1"):
        zckpt.open_checkpoint(tmp_path / "files")


def test_ranks_of_nemo_without_settings_are_not_joined_by_guess(tmp_path: Path) -> None:
    """Whether rows of gate and up lie in turn follows from the activation alone."""
    write_nemo(tmp_path / "files", 2, 1, form="files")
    (tmp_path / "files" / "model_config.yaml").write_text("")
    with pytest.raises(UnsupportedError, match="joined"):
        zckpt.convert(tmp_path / "files", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_names_and_sizes_of_members_in_other_forms_of_tar(tmp_path: Path) -> None:
    """GNU's long names, and pax headers with sizes as Python writes them beyond 8 GiB."""
    state = write_nemo(tmp_path / "in.nemo", 1, 1)
    with tarfile.open(tmp_path / "in.nemo") as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "out.nemo", "w", format=form) as archive:
            for name, content in {"./" + "x" * 150 + ".txt": b"x", **members}.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                if form == tarfile.PAX_FORMAT:
                    info.pax_headers = {"size": str(len(content)), "comment": "y" * 40}
                archive.addfile(info, io.BytesIO(content))
        zckpt.convert(tmp_path / "out.nemo", tmp_path / "out.safetensors", dtype="bf16", overwrite=True)
        assert load_file(tmp_path / "out.safetensors").keys() == state.keys()


def test_archives_that_are_not_read(tmp_path: Path) -> None:
    """Compressed, of another form, cut short, and with a pickle that would run code."""
    write_nemo(tmp_path / "zipped.nemo", 1, 1, mode="w:gz")
    with pytest.raises(UnsupportedError, match="gzip"):
        zckpt.open_checkpoint(tmp_path / "zipped.nemo")
    write_nemo(tmp_path / "model.nemo", 2, 1)
    data = (tmp_path / "model.nemo").read_bytes()
    (tmp_path / "short.nemo").write_bytes(data[: len(data) // 2])
    with pytest.raises(ZckptError):
        zckpt.open_checkpoint(tmp_path / "short.nemo")
    for name, content in (("model_weights/x/.zarray", b"{}"), ("model_weights.ckpt", evil())):
        with tarfile.open(tmp_path / "other.nemo", "w") as archive:
            for member, held in (("model_config.yaml", b"num_layers: 4\n"), (name, content)):
                info = tarfile.TarInfo(member)
                info.size = len(held)
                archive.addfile(info, io.BytesIO(held))
        with pytest.raises(UnsafeError if content != b"{}" else UnsupportedError):
            zckpt.open_checkpoint(tmp_path / "other.nemo")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("true",)


def evil() -> bytes:
    data = io.BytesIO()
    torch.save({"model.x": torch.ones(1), "more": Evil()}, data)
    return data.getvalue()


# ---- NxD -------------------------------------------------------------------------------------------------------------


class TensorReference:
    """As torch_xla.utils.serialization has it."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


TensorReference.__module__ = "torch_xla.utils.serialization"


@pytest.fixture(autouse=True)
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles name the class by its module, which has to be there while they are written."""
    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torch_xla.utils.serialization"].TensorReference = TensorReference  # type: ignore[attr-defined]


def write_nxd(home: Path, state: State, tp: int, pp: int, *, apart: bool = False) -> Path:
    """What NxD's `save_checkpoint` leaves; `apart`: with tensors in files of their own, as `use_xser` has them."""
    (home / "step_10/model").mkdir(parents=True)
    for stage in range(pp):
        for rank in range(tp):
            part: dict[str, Any] = {}
            for number, (name, tensor) in enumerate(state.items()):
                if number * pp // len(state) != stage:
                    continue
                cut = None if tensor.dim() == 1 else int("o_proj" in name or "down_proj" in name)
                part[name] = tensor if cut is None else tensor.chunk(tp, cut)[rank].clone()
            file = home / f"step_10/model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            if apart:
                (home / f"{file}.tensors").mkdir()
                for tid, name in enumerate(part):
                    torch.save(part[name], f"{file}.tensors/tensor_{tid}.pt")
                    part[name] = TensorReference(tid)
                torch.save({"info": []}, f"{file}.info.pt")
            torch.save(part, file)
    (home / "step_10/optim").mkdir()
    torch.save({}, home / "step_10/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    (home / "step_10/done").write_text("1")
    (home / "newest").write_text("step_10")
    return home


@pytest.mark.parametrize(("tp", "pp", "apart"), [(2, 1, False), (2, 2, False), (1, 1, False), (2, 2, True)])
def test_saves_of_nxd(tp: int, pp: int, apart: bool, tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in weights().items()}
    home = write_nxd(tmp_path / "run", state, tp, pp, apart=apart)
    for number, path in enumerate((home, home / "step_10", home / "step_10/model")):
        check(path, state, tmp_path / f"out{number}")
    model = home / "step_10/model"
    assert evidence_of(home).level == "unknown"
    (model.parent / "config.json").write_text(json.dumps(CONFIG))
    assert evidence_of(home).level == "shapes"
    if apart:
        (model / "dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors/tensor_1.pt").unlink()
        with pytest.raises(IncompleteError, match=r"tensor_1\.pt"):
            zckpt.open_checkpoint(home)
    elif tp > 1:
        (model / "dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
        with pytest.raises(IncompleteError):
            zckpt.open_checkpoint(home)


def test_rules_of_a_users_own_for_nxd(tmp_path: Path) -> None:
    state = {"layers.0.mix_proj.weight": torch.randn(4, 6)}
    home = write_nxd(tmp_path / "run", state, 2, 1)
    with pytest.raises(UnsupportedError, match="mix_proj"):
        zckpt.open_checkpoint(home)
    rules = {"rules": [{"match": ".*mix_proj", "join": 0}]}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    opened = zckpt.open_checkpoint(home, read_options=ReadOptions(tp_rules=str(tmp_path / "rules.json")))
    assert opened["layers.0.mix_proj.weight"].equal(state["layers.0.mix_proj.weight"])
