"""Parameters of known kinds of transformers, from a config.json alone: names and shapes by formula.

For `model_shapes`, and for `estimate`. Nothing is built. A kind of model, or a head, that is not here is left to others.
Source: transformers 5.23, models/*/modeling_*.py; tests/estimation/test_sizes.py compares every name and shape, and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

_LLAMA = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_BERT = {"bert": "Bert", "roberta": "Roberta"}


class KnownShapes(NamedTuple):
    """A model's parameters.

    Attributes:
        shapes: name -> shape; tied ones once.
        tied: whether the head is the embedding.
        in_order: whether they are in the order of the model's `named_parameters()`, which is that of all of transformers'
            versions. (Roberta's embeddings have changed places.)
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool
    in_order: bool


def known_shapes(config: Config) -> KnownShapes | None:
    """The parameters of the model of a config; None if its kind or its head is not known here, or it lacks something."""
    kind = config.get("model_type")
    heads = config.get("architectures") or [""]
    read: Callable[[Config, str], tuple[Shapes, bool] | None] | None = None
    if kind in _LLAMA:
        read = _llama
    elif kind == "gpt2":
        read = _gpt2
    elif kind in _BERT:
        read = _bert
    try:
        found = read(config, str(heads[0])) if read is not None else None
        return None if found is None else KnownShapes(dict(found[0]), found[1], kind != "roberta")
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _linear(name: str, out: int, into: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(name: str, width: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _llama(config: Config, head: str) -> tuple[Shapes, bool] | None:
    kind = _LLAMA[config["model_type"]]
    if head not in (f"{kind}ForCausalLM", f"{kind}Model"):
        return None
    tied = head.endswith("CausalLM") and bool(config.get("tie_word_embeddings", False))

    def shapes() -> Shapes:
        h, f, v = (int(config[key]) for key in ("hidden_size", "intermediate_size", "vocab_size"))
        heads = int(config["num_attention_heads"])
        groups = int((config.get if kind == "Llama" else config.__getitem__)("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or (128 if kind == "Qwen3" else h // heads))
        own = bool(config.get("attention_bias", False)) if kind in ("Llama", "Qwen3") else False
        first, out = own or kind == "Qwen2", own
        start = "model." if head.endswith("CausalLM") else ""
        yield f"{start}embed_tokens.weight", (v, h)
        for number in range(int(config["num_hidden_layers"])):
            block = f"{start}layers.{number}."
            yield from _linear(f"{block}self_attn.q_proj", heads * size, h, first)
            yield from _linear(f"{block}self_attn.k_proj", groups * size, h, first)
            yield from _linear(f"{block}self_attn.v_proj", groups * size, h, first)
            yield from _linear(f"{block}self_attn.o_proj", h, heads * size, out)
            if kind == "Qwen3":
                yield f"{block}self_attn.q_norm.weight", (size,)
                yield f"{block}self_attn.k_norm.weight", (size,)
            bias = bool(config.get("mlp_bias", False)) if kind == "Llama" else False
            yield from _linear(f"{block}mlp.gate_proj", f, h, bias)
            yield from _linear(f"{block}mlp.up_proj", f, h, bias)
            yield from _linear(f"{block}mlp.down_proj", h, f, bias)
            yield f"{block}input_layernorm.weight", (h,)
            yield f"{block}post_attention_layernorm.weight", (h,)
        yield f"{start}norm.weight", (h,)
        if head.endswith("CausalLM") and not tied:
            yield "lm_head.weight", (v, h)

    return shapes(), tied


def _gpt2(config: Config, head: str) -> tuple[Shapes, bool] | None:
    if head not in ("GPT2LMHeadModel", "GPT2Model") or config.get("add_cross_attention"):
        return None
    whole = head == "GPT2LMHeadModel"
    tied = whole and bool(config.get("tie_word_embeddings", True))

    def shapes() -> Shapes:
        h, v = int(config.get("n_embd", 768)), int(config.get("vocab_size", 50257))
        inner = int(config.get("n_inner") or 4 * h)
        start = "transformer." if whole else ""
        yield f"{start}wte.weight", (v, h)
        yield f"{start}wpe.weight", (int(config.get("n_positions", 1024)), h)
        for number in range(int(config.get("n_layer", 12))):
            block = f"{start}h.{number}."
            yield from _norm(f"{block}ln_1", h)
            for name, into, out in (("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h)):
                yield from ((f"{block}{name}.weight", (into, out)), (f"{block}{name}.bias", (out,)))
            yield from _norm(f"{block}ln_2", h)
            for name, into, out in (("mlp.c_fc", h, inner), ("mlp.c_proj", inner, h)):
                yield from ((f"{block}{name}.weight", (into, out)), (f"{block}{name}.bias", (out,)))
        yield from _norm(f"{start}ln_f", h)
        if whole and not tied:
            yield "lm_head.weight", (v, h)

    return shapes(), tied


def _bert(config: Config, head: str) -> tuple[Shapes, bool] | None:
    kind = _BERT[config["model_type"]]
    masked, classes = f"{kind}ForMaskedLM", f"{kind}ForSequenceClassification"
    allowed = (masked, classes, f"{kind}Model")
    if head not in allowed or config.get("add_cross_attention") or config.get("is_decoder"):
        return None
    tied = head == masked and bool(config.get("tie_word_embeddings", True))

    def shapes() -> Shapes:
        h, v = int(config.get("hidden_size", 768)), int(config.get("vocab_size", 30522))
        inner = int(config.get("intermediate_size", 3072))
        start = "" if head == f"{kind}Model" else f"{config['model_type']}."
        table = f"{start}embeddings."
        yield f"{table}word_embeddings.weight", (v, h)
        yield f"{table}position_embeddings.weight", (int(config.get("max_position_embeddings", 512)), h)
        yield f"{table}token_type_embeddings.weight", (int(config.get("type_vocab_size", 2)), h)
        yield from _norm(f"{table}LayerNorm", h)
        for number in range(int(config.get("num_hidden_layers", 12))):
            block = f"{start}encoder.layer.{number}."
            for name in ("query", "key", "value"):
                yield from _linear(f"{block}attention.self.{name}", h, h)
            yield from _linear(f"{block}attention.output.dense", h, h)
            yield from _norm(f"{block}attention.output.LayerNorm", h)
            yield from _linear(f"{block}intermediate.dense", inner, h)
            yield from _linear(f"{block}output.dense", h, inner)
            yield from _norm(f"{block}output.LayerNorm", h)
        if head == f"{kind}Model" or (head == classes and kind == "Bert"):
            yield from _linear(f"{start}pooler.dense", h, h)
        yield from _bert_head(config, head, h, v, tied)

    return shapes(), tied


def _bert_head(config: Config, head: str, h: int, v: int, tied: bool) -> Shapes:
    labels = len(config.get("id2label") or (0, 1))
    if head == "BertForMaskedLM":
        yield "cls.predictions.bias", (v,)
        yield from _linear("cls.predictions.transform.dense", h, h)
        yield from _norm("cls.predictions.transform.LayerNorm", h)
        if not tied:
            yield "cls.predictions.decoder.weight", (v, h)
    elif head == "RobertaForMaskedLM":
        yield "lm_head.bias", (v,)
        yield from _linear("lm_head.dense", h, h)
        yield from _norm("lm_head.layer_norm", h)
        if not tied:
            yield "lm_head.decoder.weight", (v, h)
    elif head == "BertForSequenceClassification":
        yield from _linear("classifier", labels, h)
    elif head == "RobertaForSequenceClassification":
        yield from _linear("classifier.dense", h, h)
        yield from _linear("classifier.out_proj", labels, h)
