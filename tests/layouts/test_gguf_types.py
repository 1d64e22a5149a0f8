"""Types of 4 to 6 bits against llama.cpp's own quantiser: its bytes are recorded in fixtures/gguf_quantised."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
from safetensors.numpy import save_file

import zckpt
from zckpt import _core
from zckpt.base.errors import CastError, CorruptError, InconsistentError, NotACheckpointError, UsageError
from zckpt.engine.kernels import NativeKernels, ReferenceKernels
from zckpt.engine.kernels_ggml import TYPES
from zckpt.engine.kernels_to_ggml import KINDS
from zckpt.layouts.gguf import blocks
from zckpt.layouts.gguf.write import BASES, Mixed, in_order, mixed_types

TRUTH = json.loads((Path(__file__).parents[2] / "fixtures" / "gguf_quantised" / "truth.json").read_text())
COLUMNS = 512


def floats(seed: int, *shape: int, least: int = 110, most: int = 121) -> Any:
    """Numbers of bf16 with such exponents, of whole random numbers alone: the same everywhere."""
    random = np.random.default_rng(seed)
    exponent = random.integers(least, most, shape)
    return (random.integers(0, 2, shape) << 31 | exponent << 23 | random.integers(0, 128, shape) << 16).astype(
        np.uint32
    )


def inputs() -> Iterator[tuple[str, Any]]:
    """Rows of all kinds of numbers."""
    plain = floats(1, 4, COLUMNS).view(np.float32)
    yield "plain", plain
    yield "wide", floats(2, 4, COLUMNS, least=100, most=140).view(np.float32)
    yield "small", floats(3, 4, COLUMNS, least=40, most=60).view(np.float32)
    yield "positive", abs(plain) + 1
    yield "negative", -abs(plain) - 1
    yield "grid", floats(4, 4, COLUMNS, least=126, most=129).view(np.float32)
    sparse = np.where(floats(5, 4, COLUMNS) & 0x70000, np.float32(0), plain)
    sparse[0], sparse[1, 7:40], sparse[2, :64] = 0, -0.0, 1.5
    yield "sparse", sparse


def columns() -> dict[str, Any]:
    """How much columns matter."""
    some = abs(floats(6, COLUMNS, least=120, most=130).view(np.float32))
    return {"alike": None, "matrix": some, "some": np.where(some > 1, some, np.float32(0)), "none": some * 0}


def encode(kernels: Any, kind: str, x: Any, weights: Any) -> tuple[Any, int]:
    nbytes, width, _ = TYPES[kind]
    blocks = np.empty(x.size // width * nbytes, np.uint8)
    return blocks, kernels.to_ggml(kind, np.ascontiguousarray(x).reshape(-1), x.shape[1], weights, blocks)


def digest_of_kind(kind: str, encoder: Callable[[str, Any, Any], Any]) -> dict[str, str]:
    """A digest for each way in which columns matter, over all inputs."""
    found = {}
    for how, weights in columns().items():
        whole = b"".join(bytes(encoder(kind, x, weights)) for _, x in inputs())
        found[how] = hashlib.sha256(whole).hexdigest()[:16]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_llama_cpp(kind: str) -> None:
    """From the C++ loops with vectors and without, and from numpy."""
    for vectors in (True, False):
        _core.use_vector_paths(vectors)
        try:
            assert digest_of_kind(kind, lambda *asked: encode(NativeKernels(), *asked)[0]) == TRUTH["blocks"][kind]
        finally:
            _core.use_vector_paths(True)
    assert digest_of_kind(kind, lambda *asked: encode(ReferenceKernels(), *asked)[0]) == TRUTH["blocks"][kind]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_mean_nothing_are_counted(kind: str) -> None:
    x = floats(7, 6, COLUMNS).view(np.float32)
    x[1, 3], x[2, 500], x[4, 0] = np.nan, np.inf, -np.inf
    if kind != "MXFP4":
        x[5, :32] = 3e38
    for kernels in (NativeKernels(), ReferenceKernels()):
        assert encode(kernels, kind, x, None)[1] == 3 + (kind != "MXFP4")
        with pytest.raises(ValueError, match="bytes of"):
            kernels.to_ggml(kind, x.reshape(-1), 500, None, np.empty(1, np.uint8))


def shapes(layers: int, hidden: int, experts: int, *, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, hidden)}
    if not tied:
        found["output.weight"] = (320, hidden)
    for layer in range(layers):
        own = f"blk.{layer}."
        found |= {f"{own}attn_{one}.weight": (hidden, hidden) for one in ("q", "k", "v", "output")}
        lead, end = ((experts,), "_exps") if experts else ((), "")
        found |= {f"{own}ffn_{one}{end}.weight": (*lead, 512, hidden) for one in ("gate", "up")}
        found[f"{own}ffn_down{end}.weight"] = (*lead, hidden, 512)
    return [(name, found[name]) for name in in_order([*found])]


CASES = {
    "dense": (shapes(17, 256, 0, tied=False), Mixed(17)), "weighted": (shapes(17, 256, 0, tied=True), Mixed(17, weighted=True)),
    "ragged": (shapes(3, 288, 0, tied=False), Mixed(3)), "odd": (shapes(2, 40, 0, tied=True), Mixed(2)),
    "eight": (shapes(5, 256, 8, tied=False), Mixed(5, 8)), "many": (shapes(6, 256, 16, tied=True), Mixed(6, 16)),
    "70b": (shapes(80, 256, 0, tied=False), Mixed(80, is_70b=True)),
}  # fmt: skip


def facts(types: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(types).encode()).hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_types_are_mixed_as_llama_cpp_does(case: str) -> None:
    found, model = CASES[case]
    for kind in BASES:
        types = {name: chosen.name for name, chosen in mixed_types(found, kind, model).items()}
        if kind in TRUTH["types"][case]:
            assert facts(types) == TRUTH["types"][case][kind], kind


def tiny(home: Path) -> Path:
    """A Llama of two layers, with rows of 256 and 288 numbers."""
    home.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 288,
        "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))
    sizes = {"model.embed_tokens": (64, 256), "lm_head": (64, 256), "model.norm": (256,)}
    for layer in range(2):
        own = f"model.layers.{layer}."
        sizes |= {f"{own}input_layernorm": (256,), f"{own}post_attention_layernorm": (256,)}
        sizes |= {f"{own}self_attn.{one}_proj": ((256 if one in "qo" else 128), 256) for one in "qkvo"}
        sizes |= {f"{own}mlp.{one}_proj": (288, 256) for one in ("gate", "up")} | {f"{own}mlp.down_proj": (256, 288)}
    save_file({f"{name}.weight": floats(20 + i, *shape).view(np.float32) for i, (name, shape) in enumerate(sizes.items())},
              home / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return home


def matrix_of(path: Path) -> dict[str, Any]:
    """An importance matrix of it in the older form, and the numbers that it stands for."""
    found, data = {}, b""
    for layer in range(2):
        for end in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            name = f"blk.{layer}.{end}.weight"
            own = abs(floats(hash_of(name), 288 if end == "ffn_down" else 256, least=120, most=132).view(np.float32))
            found[name] = own / np.float32(4)
            data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, own.size) + own.tobytes()
    path.write_bytes(struct.pack("<i", len(found)) + data + struct.pack("<ii", 9, 8) + b"wiki.txt")
    return found


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % 99991


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("types") / "tiny")


def tensors_of(path: Path) -> str:
    """A digest of names, types, shapes and elements, in their order."""
    from gguf import GGUFReader

    found = hashlib.sha256()
    for tensor in GGUFReader(path).tensors:
        found.update(
            f"{tensor.name} {tensor.tensor_type.name} {tensor.shape.tolist()}".encode() + tensor.data.tobytes()
        )
    return found.hexdigest()[:16]


def written(model: Path, out: Path, kind: str, **more: Any) -> zckpt.Report:
    options = zckpt.Options(overwrite=True)
    return zckpt.to_gguf(model, out, type=kind, tokenizer="none", progress=False, options=options, **more)


@pytest.mark.parametrize("kind", BASES)
def test_files_are_those_of_llama_cpp(model: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors, with an importance matrix and without; `verify` derives them by other code, and finds one bit."""
    out, matrix = tmp_path / "x.gguf", tmp_path / "matrix.dat"
    written(model, out, kind)
    assert tensors_of(out) == TRUTH["files"][kind]["alike"]
    if kind != "mxfp4":
        matrix_of(matrix)
        written(model, out, kind, imatrix=matrix)
        assert tensors_of(out) == TRUTH["files"][kind]["matrix"]
    if kind not in ("q4_k_m", "q5_0", "mxfp4") and not proofs.IS_WHOLE:
        return
    assert zckpt.verify(model, out).ok
    make = blocks.blocks_of

    def off(*given: Any, **more: Any) -> Any:
        recipe = make(*given, **more)

        def computed(start: int, stop: int, tools: Any) -> Any:
            found = np.array(recipe.compute(start, stop, tools))
            found.view(np.uint8)[:1] ^= 1
            return found

        return replace(recipe, compute=computed)

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "blocks_of", off)
        out = tmp_path / "wrong.gguf"
        written(model, out, kind, **({} if kind == "mxfp4" else {"imatrix": matrix}))
    found = zckpt.verify(model, out)
    assert next(check for check in found.checks if check.name == "equal").number
    if kind == "mxfp4":
        return
    matrix.write_bytes(matrix.read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match="needed to verify"):
        zckpt.verify(model, out)


def test_numbers_of_blocks_are_derived_a_second_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wrong loops made of a file with blocks is found by `verify`, which has others."""
    source, right, wrong = (tmp_path / name for name in ("x.gguf", "right", "wrong"))
    written(model, source, "q4_k_m")
    zckpt.convert(source, right, dtype="fp32", progress=False)
    assert zckpt.verify(source, right).ok

    def off(kind: str, blocks: Any, numbers: Any) -> None:
        ReferenceKernels().of_ggml(kind, blocks, numbers)
        numbers[7] += np.float32(2**-10)

    monkeypatch.setattr(NativeKernels, "of_ggml", lambda self, kind, blocks, numbers: off(kind, blocks, numbers))
    zckpt.convert(source, wrong, dtype="fp32", progress=False)
    found = zckpt.verify(source, wrong)
    assert not found.ok and "differ" in "".join(found.lines())


def test_what_no_type_holds_is_named(tmp_path: Path) -> None:
    model = tiny(tmp_path / "wild")
    from safetensors.numpy import load_file

    held = load_file(model / "model.safetensors")
    held["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(held, model / "model.safetensors")
    with pytest.raises(CastError, match=r"blk.1.ffn_up.weight.*no place in Q4_K"):
        written(model, tmp_path / "x.gguf", "q4_k_m")
    assert not (tmp_path / "x.gguf").exists()


def test_a_matrix_that_is_none_or_of_another_model_is_named(model: Path, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "matrix.dat"
    matrix_of(path)
    whole = path.read_bytes()
    cases: tuple[tuple[bytes, type[Exception], str], ...] = (
        (struct.pack("<i", -3), NotACheckpointError, "not an importance matrix"),
        (struct.pack("<ii", 1, 1 << 20), NotACheckpointError, "not an importance matrix"),
        (whole[:8], CorruptError, "ends before the end of a name"),
        (whole[:200], NotACheckpointError, "not an importance matrix"),
        (
            whole.replace(struct.pack("<i", 288), struct.pack("<i", 287)),
            NotACheckpointError,
            "not an importance matrix",
        ),
        (b"", CorruptError, "ends before"),
    )
    for data, error, words in cases:
        path.write_bytes(data)
        with pytest.raises(error, match=words):
            written(model, tmp_path / "x.gguf", "q4_0", imatrix=path)
    for sums, counts, metadata, error, words in (
        (256, 1, True, None, ""), (255, 1, True, InconsistentError, "of another model"),
        (256, 0, True, NotACheckpointError, "counts"),
        (256, 1, False, NotACheckpointError, "datasets"), (-256, 1, True, CastError, "NaN or infinity"),
    ):  # fmt: skip
        writer = GGUFWriter(path, "x")
        writer.add_type("imatrix")
        if metadata:
            writer.add_array("imatrix.datasets", ["a.txt"])
            writer.add_uint32("imatrix.chunk_count", 2)
            writer.add_uint32("imatrix.chunk_size", 512)
        own = np.ones((1, abs(sums)), np.float32) * (np.float32(2) if sums > 0 else np.float32("nan"))
        writer.add_tensor("blk.0.attn_q.weight.in_sum2", own)
        if counts:
            writer.add_tensor("blk.0.attn_q.weight.counts", np.full((1, 1), 2, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if error is None:
            written(model, tmp_path / "x.gguf", "q4_0", imatrix=path)
        else:
            with pytest.raises(error, match=words):
                written(model, tmp_path / "x.gguf", "q4_0", imatrix=path)
    with pytest.raises(UsageError, match="importance matrix changes"):
        written(model, tmp_path / "x.gguf", "q8_0", imatrix=path)
