"""`zckpt.runtime.train.train` on several ranks; the tests of this folder say what must come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import CHECKS, check, main, rank
from live_checks import Shared, equal, load, same_files

import zckpt
from zckpt import live
from zckpt.runtime.train.train import TrainingJob, train

CHECKS.clear()  # those of `live_checks`

WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. "


def settings(home: Path, stage: int, **more: Any) -> str:
    """A config's path; the global batch is the same everywhere."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    if rank() == 0:
        (home / "config.json").write_text(json.dumps(config))
        (home / "text.txt").write_text(WORDS * 40)
    dist.barrier()
    return str(home / "config.json")


@check(1, 2)
def straight_and_resumed() -> dict[str, Any]:
    """4 steps, and 2 and 2, end with the same weights, losses and metrics; what is exported live is what converts."""
    out: dict[str, Any] = {}
    for stage, more in ((3, {"bf16": {"enabled": True}}), (0, {})):
        with Shared() as home:
            config, data = settings(home, stage, **more), str(home / "text.txt")
            dtype = "bf16" if more else "fp32"
            straight = train(TrainingJob(config, data, str(home / "a"), 4, seed=3, save_pretrained=str(home / "live")))
            first = train(TrainingJob(config, data, str(home / "b"), 2, seed=3))
            # Steps that were not saved are done again.
            then = train(TrainingJob(config, data, str(home / "b"), 4, seed=3, resume=True, save_every=1))
            steps = {
                name: [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]
                for name in "ab"
            }
            dist.barrier()
            if rank() == 0:
                for name in "ab":
                    zckpt.convert(home / name, home / f"{name}-weights", dtype=dtype)
                out[f"{stage} weights"] = same_files(home / "a-weights", home / "b-weights")
                out[f"{stage} live"] = same_files(home / "live", home / "a-weights")
                out[f"{stage} picture"] = (home / "a" / "loss.png").read_bytes()[:4] == b"\x89PNG"
                out[f"{stage} tags"] = sorted(path.name for path in (home / "b").glob("global_step*"))
            out[f"{stage} losses"] = [line["loss"] for line in steps["a"]] == [line["loss"] for line in steps["b"]]
            out[f"{stage} steps"] = [[line["step"] for line in steps[name]] for name in "ab"]
            out[f"{stage} said"] = [first.step, then.began_after, then.step, then.stopped, then.last_loss] == [
                2, 2, 4, False, straight.last_loss,
            ]  # fmt: skip
            out[f"{stage} falls"] = straight.last_loss < straight.first_loss
    return out


@check(2)
def transformers_model() -> dict[str, Any]:
    """A model's own weights and tokenizer are taken up, each rank its part; its export goes back to transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

    out: dict[str, Any] = {}
    with Shared() as home:
        config, data = settings(home, 3), str(home / "text.txt")
        torch.manual_seed(9)
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=40, max_position_embeddings=8))
        if rank() == 0:
            words = {word: number for number, word in enumerate(sorted({*WORDS.replace(",", " ,").split(), "?"}))}
            made = Tokenizer(models.WordLevel(words, unk_token="?"))
            made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(home / "model")
            model.save_pretrained(home / "model")
        dist.barrier()
        still = settings(home, 3, optimizer={"type": "SGD", "params": {"lr": 0.0}})
        train(
            TrainingJob(still, data, str(home / "still"), 1, str(home / "model"), save_pretrained=str(home / "weights"))
        )
        out["weights"] = equal(load(home / "weights"), {n: t.detach() for n, t in model.state_dict().items()})
        settings(home, 3)
        done = train(
            TrainingJob(config, data, str(home / "run"), 6, str(home / "model"), save_pretrained=str(home / "new"))
        )
        again = AutoModelForCausalLM.from_pretrained(home / "new")
        tokenizer = AutoTokenizer.from_pretrained(home / "new")
        ids = torch.tensor([tokenizer(WORDS)["input_ids"][:8]])
        with torch.no_grad():
            out["learnt"] = again(ids, labels=ids).loss.item() < model(ids, labels=ids).loss.item()
        out["loss"] = done.last_loss < done.first_loss
        out["again"] = not equal(load(home / "new"), load(home / "weights"))
    return out


@check(2)
def tiny_is_gpt2() -> dict[str, Any]:
    """tiny-gpt exports what transformers computes the same with."""
    from transformers import AutoModelForCausalLM

    from zckpt.runtime.train.models import TinyGPT

    torch.manual_seed(2)
    model = TinyGPT()
    tokens = torch.randint(0, 256, (2, 50))
    with Shared() as home:
        live.save_pretrained(model, home)
        other = AutoModelForCausalLM.from_pretrained(home)
        with torch.no_grad():
            ours, theirs = model(tokens, labels=tokens), other(tokens, labels=tokens)
    return {
        "loss": abs(ours["loss"] - theirs.loss).item() < 1e-5,
        "logits": (ours["logits"] - theirs.logits).abs().max().item() < 1e-4,
        "kind": type(other).__name__,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
