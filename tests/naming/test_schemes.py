"""Schemes are data that holds together, and models in parts cost no more than their tensors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, UsageError
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.evidence import LIVE
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.jobs.open import read_tensor
from zckpt.naming.compose import compose
from zckpt.naming.decompose import decompose_with_origins
from zckpt.naming.facts import Facts, facts_of, with_parts
from zckpt.naming.families import by_parts
from zckpt.naming.parts import ALL, is_part
from zckpt.naming.schemes import Scheme, families, family_of, parse_scheme, scheme, scheme_of, schemes


@pytest.mark.parametrize("name", schemes())
def test_a_scheme_names_known_parts(name: str) -> None:
    own = scheme(name)
    assert own.name == name and own.about
    for rule in own.rules:
        assert all(map(is_part, rule.parts or ())), rule
        assert set(rule.stack) <= {"b", "e"} and rule.pairs in ("", "query", "key", "both"), rule
        for template in rule.names:
            held = set(re.findall(r"\{(\w)\}", "".join(rule.parts or ())))
            said = set(re.findall(r"\{(\w)\}", template)) - ({"r"} if rule.every > 1 else set())
            assert held == said | set(rule.stack) or rule.parts is None, rule
    assert set().union(*own.together) <= ALL
    if name.startswith("hf-"):
        fixed = own.config["fixed"]
        assert fixed["model_type"] and fixed["architectures"] and own.config["facts"]


def of_tensors(tensors: dict[str, torch.Tensor]) -> Catalog:
    entries = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        store = MemoryStore(tensor.data_ptr(), tensor.numel() * 4, tensor)
        entries[name] = TensorEntry(
            name, tuple(tensor.shape), F32, "parameter", (Fragment(store, 0, 0, tensor.numel()),)
        )
    return Catalog(entries, Source("test", "memory"), LIVE)


def tensors_of(catalog: Catalog) -> dict[str, torch.Tensor]:
    return {name: read_tensor(entry, "pt") for name, entry in catalog.tensors.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def made_of(*rules: dict[str, Any], **more: Any) -> Scheme:
    return parse_scheme({"scheme": "mine", "about": "a test's", "tensors": list(rules), **more})


Q, K, V = (f"blocks.{{b}}.attention.{name}.weight" for name in ("query", "key", "value"))
GATE, UP, DOWN = (f"blocks.{{b}}.experts.{{e}}.{name}.weight" for name in ("gate", "up", "down"))


def halves(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of pairs as two halves, as torchtitan's converter has it."""
    return x.view(heads, -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


def test_each_word_of_a_rule() -> None:
    """Against torch's own views of the whole tensors, in both directions."""
    x = torch.randn(2, 3, 8, 6)
    fused = torch.randn(8 + 4 + 4, 6)
    tensors = {"experts.w13": x, "a.0.qkv": fused, "a.0.wq": torch.randn(8, 6), "a.0.up": torch.randn(6, 10),
               "a.0.turn": torch.randn(6, 10), "emb": torch.randn(10, 6)}  # fmt: skip
    mine = made_of(
        {"name": "experts.w13", "stack": ["b", "e"], "parts": [GATE, UP]},
        {"name": "a.{b}.qkv", "parts": [Q, K, V], "rows": "groups:key_heads"},
        {"name": "a.{b}.wq", "parts": ["blocks.{b}.attention.query_up.weight"], "pairs": "query"},
        {"name": "a.{b}.up", "transpose": True, "rows": "alternating",
         "parts": ["blocks.{b}.mlp.gate.weight", "blocks.{b}.mlp.up.weight"]},
        {"name": "a.{b}.turn", "transpose": True, "parts": ["blocks.{b}.mlp.down.weight"]},
        {"name": "emb", "parts": ["embedding.weight"], "vocabulary": True},
    )  # fmt: skip
    facts = Facts({"query_heads": 4, "key_heads": 2, "head_size": 2, "vocabulary": 7})
    found = decompose_with_origins(of_tensors(tensors), mine, facts)
    parts = tensors_of(found.parts)
    by_group = fused.view(2, 8, 6)
    wanted = {f"blocks.{b}.experts.{e}.{n}.weight": x[b, e, at : at + 4] for b in range(2) for e in range(3)
              for n, at in (("gate", 0), ("up", 4))}  # fmt: skip
    wanted |= {
        "blocks.0.attention.query.weight": by_group[:, :4].reshape(8, 6),
        "blocks.0.attention.key.weight": by_group[:, 4:6].reshape(4, 6),
        "blocks.0.attention.value.weight": by_group[:, 6:].reshape(4, 6),
        "blocks.0.attention.query_up.weight": halves(tensors["a.0.wq"], 4),
        "blocks.0.mlp.gate.weight": tensors["a.0.up"].t()[::2],
        "blocks.0.mlp.up.weight": tensors["a.0.up"].t()[1::2],
        "blocks.0.mlp.down.weight": tensors["a.0.turn"].t(),
        "embedding.weight": tensors["emb"][:7],
    }
    same(parts, wanted)
    only = found.parts.select(lambda entry: not entry.name.startswith(("blocks.0.att", "blocks.0.mlp")))
    again = tensors_of(compose(only, mine, found.facts.having(padded_vocabulary=10)))
    same(again, {"experts.w13": x, "emb": torch.cat([tensors["emb"][:7], torch.zeros(3, 6)])})
    rest = found.parts.select(lambda entry: entry.name.startswith(("blocks.0.att", "blocks.0.mlp")))
    same(tensors_of(compose(rest, mine, found.facts)), {n: t for n, t in tensors.items() if n.startswith("a.0")})


EMB = {"name": "emb", "parts": ["embedding.weight"]}


def test_nothing_is_lost_silently() -> None:
    """A tensor without a rule, a part without a place, half of a fused tensor, a missing block or expert: each is named."""
    mine = made_of(EMB, {"name": "{b}.w13", "stack": ["e"], "parts": [GATE, UP]},
                   {"name": "*.freqs", "parts": None, "note": "Left out"})  # fmt: skip
    x = {"emb": torch.randn(3, 2), "0.w13": torch.randn(2, 4, 2), "a.freqs": torch.randn(2)}
    found = decompose_with_origins(of_tensors(x), mine, Facts())
    assert found.notes == ("Left out (1 tensor).",)
    with pytest.raises(UnsupportedError, match=r"no place in the scheme mine.*'other'"):
        decompose_with_origins(of_tensors({**x, "other": torch.randn(2)}), mine, Facts())
    with pytest.raises(UnsupportedError, match=r"no place in the scheme mine.*'0.w13'"):
        compose(found.parts, made_of(EMB), found.facts, found.origins)
    parts = found.parts.tensors
    half = replace(found.parts, tensors={n: p for n, p in parts.items() if n != "blocks.0.experts.1.up.weight"})
    with pytest.raises(IncompleteError, match=r"'0.w13'.*no 'blocks.0.experts.1.up.weight'"):
        compose(half, mine, found.facts, found.origins)
    hole = replace(found.parts, tensors={n: p for n, p in parts.items() if ".experts.0." not in n})
    with pytest.raises(InconsistentError, match="blocks or experts are missing"):
        compose(hole, mine, found.facts)
    with pytest.raises(InconsistentError, match=r"rows of tensor '0.w13' do not fit"):
        decompose_with_origins(of_tensors({"0.w13": torch.randn(2, 5, 2)}), mine, Facts())
    with pytest.raises(UsageError, match="key heads is not recorded"):
        decompose_with_origins(
            of_tensors({"0.qkv": torch.randn(4)}),
            made_of({"name": "{b}.qkv", "parts": [Q, K, V]}),
            Facts({"query_heads": 2}),
        )


def test_numbers_that_no_model_has() -> None:
    """In names and shapes of a stranger's file: they are refused before anything is done as many times."""
    long = "language_model.encoder.layers." + "9" * 5000 + ".input_layernorm.weight"
    with pytest.raises(UnsupportedError):
        scheme_of([long], "x")
    empty = TensorEntry("0.w13", (10**12, 0, 4), F32, "parameter", ())
    mine = made_of({"name": "{b}.w13", "stack": ["e"], "parts": [GATE, UP]})
    with pytest.raises(CorruptError, match="more blocks or experts"):
        decompose_with_origins(Catalog({"0.w13": empty}, Source("test", "memory"), LIVE), mine, Facts())
    heads = Facts({"query_heads": 10**15, "key_heads": 10**15, "head_size": 1})
    with pytest.raises(InconsistentError):
        decompose_with_origins(
            of_tensors({"0.qkv": torch.randn(6, 2)}), made_of({"name": "{b}.qkv", "parts": [Q, K, V]}), heads
        )


def test_a_head_that_is_the_embedding_is_compared() -> None:
    mine = made_of(EMB, {"name": "head", "parts": ["head.weight"]})
    found = decompose_with_origins(of_tensors({"emb": torch.randn(3, 2), "head": torch.randn(3, 2)}), mine, Facts())
    tied = compose(found.parts, mine, Facts({"tied": True}))
    assert list(tied) == ["emb"] and tied["emb"].replicas[0].whole
    assert list(compose(found.parts, mine, Facts())) == ["emb", "head"]
    half = replace(found.parts["embedding.weight"], dtype=BF16, fragments=(Fragment(FileStore("/none", 12), 0, 0, 6),))
    mixed = replace(found.parts, tensors={**found.parts.tensors, "embedding.weight": half})
    kept = compose(mixed, mine, Facts({"tied": True}))["emb"]
    assert kept.dtype == F32 and kept.replicas[0].dtype == BF16
    long = replace(
        found.parts, tensors={**found.parts.tensors, **of_tensors({"head.weight": torch.zeros(4, 2)}).tensors}
    )
    with pytest.raises(InconsistentError, match="would both be called"):
        compose(long, mine, Facts({"tied": True}))


def test_a_scheme_is_found_by_names() -> None:
    llama = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert scheme_of(llama, "x").is_of_transformers
    assert scheme_of(["language_model.encoder.layers.0.self_attention.dense.weight"], "x").name == "megatron"
    with pytest.raises(UnsupportedError, match="'strange'"):
        scheme_of([*llama, "strange"], "x")


def test_names_that_families_share_are_told_apart_by_what_is_missing() -> None:
    """Gemma 2 and GLM-4 have Llama's `post_attention_layernorm`, but mean another norm by it."""
    for family in ("llama", "qwen3", "gemma2", "glm4", "phi3", "gpt2"):
        names = [
            n.replace("{b}", "0")
            for rule in scheme(f"hf-{family}").rules
            for n in rule.names[:1]
            if not rule.optional and rule.parts
        ]
        assert scheme_of(names, "x").name == f"hf-{family}"


def llama_parts(*more: str, bias: str = "") -> Catalog:
    hidden = {name: torch.zeros(4, 4) for name in ("embedding.weight", "head.weight")}
    norms = {
        f"{name}.weight": torch.zeros(4) for name in ("final_norm", "blocks.0.attention_norm", "blocks.0.mlp_norm")
    }
    names = (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    )
    inner = {f"blocks.0.{name}.weight": torch.zeros(4, 4) for name in names}
    biases = {f"blocks.0.{name}.bias": torch.zeros(4) for name in names if name.split(".")[1] in bias.split()}
    return of_tensors({**hidden, **norms, **inner, **biases, **{name: torch.zeros(4) for name in more}})


GEMMA = ("blocks.0.attention_output_norm.weight", "blocks.0.mlp_output_norm.weight")
NORMS = ("blocks.0.attention.query_norm.weight", "blocks.0.attention.key_norm.weight")


@pytest.mark.parametrize(
    ("parts", "arguments", "family"),
    [
        (llama_parts(), {}, "llama"),
        (llama_parts(bias="query key value"), {}, "qwen2"),
        (llama_parts(bias="query key value output"), {}, "llama"),
        (llama_parts(*NORMS), {}, "qwen3"),
        (llama_parts(*GEMMA), {}, "gemma2"),
        (llama_parts(*GEMMA), {"swiglu": True, "rotary_interleaved": True}, "glm4"),
        (llama_parts(*GEMMA, *NORMS), {"apply_layernorm_1p": True}, "gemma3"),
    ],
)
def test_a_family_is_found_by_parts_and_arguments(parts: Catalog, arguments: dict[str, object], family: str) -> None:
    found, notes = by_parts(parts, with_parts(Facts(arguments=arguments), parts))
    assert found == family and f"hf:{family}" in notes[0]
    assert ("hf:mistral" in notes[0]) == (family == "llama" and "blocks.0.attention.query.bias" not in parts)


def test_a_family_that_does_not_fit_is_refused_with_the_reason() -> None:
    for parts, arguments in ((llama_parts(), {"apply_layernorm_1p": True}), (llama_parts("positions.weight"), {})):
        with pytest.raises(UnsupportedError) as caught:
            by_parts(parts, with_parts(Facts(arguments=arguments), parts))
        assert "--to hf:NAME" in caught.value.remedy and "--config" in caught.value.remedy
        assert not arguments or "counted from one" in caught.value.found


# -- large models --------------------------------------------------------------------------------------------------------


def on_disk(shapes: Iterator[tuple[str, tuple[int, ...]]], dtype: DType = BF16, pieces: int = 1) -> Catalog:
    """Tensors in one large file that is not there, each in some pieces, as ranks save them."""
    store, at, entries = FileStore("/none", 1 << 62), 0, {}
    for name, shape in shapes:
        numel = 1
        for extent in shape:
            numel *= extent
        size = numel // pieces
        fragments = tuple(Fragment(store, at + n * size * 2, n * size, size) for n in range(pieces))
        entries[name] = TensorEntry(name, shape, dtype, "parameter", fragments)
        at += numel * 2
    return Catalog(entries, Source("test", "/none"), LIVE)


def llama_405b() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, words = 16384, 53248, 128256
    yield "language_model.embedding.word_embeddings.weight", (words, hidden)
    for b in range(126):
        own = f"language_model.encoder.layers.{b}."
        yield own + "input_layernorm.weight", (hidden,)
        yield own + "self_attention.query_key_value.weight", (hidden + 2 * 1024, hidden)
        yield own + "self_attention.dense.weight", (hidden, hidden)
        yield own + "post_attention_layernorm.weight", (hidden,)
        yield own + "mlp.dense_h_to_4h.weight", (2 * inner, hidden)
        yield own + "mlp.dense_4h_to_h.weight", (hidden, inner)
    yield "language_model.encoder.final_layernorm.weight", (hidden,)
    yield "language_model.output_layer.weight", (words, hidden)


def experts_671b() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "experts.w13", (61, 256, 4096, 7168)
    yield "experts.w2", (61, 256, 7168, 2048)


ONE_BY_ONE = made_of(
    *({"name": f"layers.{{b}}.experts.{{e}}.{n}", "parts": [p]} for n, p in (("w1", GATE), ("w3", UP), ("w2", DOWN)))
)
STACKED = made_of({"name": "experts.w13", "stack": ["b", "e"], "parts": [GATE, UP]},
                  {"name": "experts.w2", "stack": ["b", "e"], "parts": [DOWN]})  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "pieces", "writer", "wanted", "facts"),
    [
        (llama_405b, 8, scheme("megatron"), scheme("hf-llama"), {"query_heads": 128, "version": 3.0}),
        (experts_671b, 61 * 64, STACKED, ONE_BY_ONE, {}),
    ],
    ids=["llama", "experts"],
)
def test_a_plan_costs_what_its_tensors_cost(
    shapes: Callable[[], Iterator[tuple[str, tuple[int, ...]]]], pieces: int, writer: Scheme, wanted: Scheme,
    facts: dict[str, object],
) -> None:  # fmt: skip
    """Fragments are counted, which is what all work is done for; the time is bounded generously."""
    catalog = on_disk(shapes(), pieces=pieces)
    began = time.process_time()
    found = decompose_with_origins(catalog, writer, Facts(facts))
    made = compose(found.parts, wanted, found.facts)
    spent = time.process_time() - began
    assert len(made) == (126 * 9 + 3 if writer.name == "megatron" else 61 * 256 * 3)
    given = sum(len(entry.fragments) for entry in catalog.tensors.values())
    assert sum(len(entry.fragments) for entry in made.tensors.values()) <= 3 * given + 2 * len(made)
    assert spent < 20, spent
    print(json.dumps({"seconds": round(spent, 2)}))


@pytest.mark.parametrize(("kind", "key"), [("falcon", "parallel_attn"), ("gpt_neox", "use_parallel_residual")])
def test_blocks_are_parallel_where_the_class_has_them_so(kind: str, key: str) -> None:
    """A config that lacks the key means its class's default."""
    from transformers import AutoConfig

    assert getattr(AutoConfig.for_model(kind), key) is True
    nothing = Catalog({}, Source("plain", "here"), evidence=LIVE)
    assert facts_of(nothing, {"model_type": kind}).get("parallel") is True
    assert facts_of(nothing, {"model_type": kind, key: False}).get("parallel") is False
    assert facts_of(nothing, {"model_type": "llama"}).get("parallel") is None


@pytest.mark.parametrize("name", ["a\nb", "", ".", "a/b"])
def test_names_of_any_characters_are_refused_in_words(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no scheme of names"):
        scheme_of([name], "file")


def test_a_model_type_leads_to_the_one_family_that_knows_it() -> None:
    """Also where a family's name is the type, and no other family is read."""
    knows = {name: scheme(f"hf-{name}") for name in families()}
    kinds = [
        (kind, own.name)
        for own in knows.values()
        for kind in {own.config["fixed"]["model_type"], *own.recognised.get("model_type", ())}
    ]
    assert len(kinds) == len(dict(kinds)) > 60
    for kind, name in kinds:
        family = family_of(kind)
        assert family is not None and family.name == name
    assert family_of("no-such") is family_of(None) is None
