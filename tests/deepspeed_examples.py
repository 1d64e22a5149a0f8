"""Scripts of DeepSpeedExamples as they are, under `zckpt run` on two ranks of the CPU; for `make examples`.

    .venv/bin/python tests/deepspeed_examples.py CHECKOUT [NAME ...]

CHECKOUT is a clone of github.com/deepspeedai/DeepSpeedExamples. Models and data are tiny and made here. Each run must end well,
and each of its ranks must have taken steps on zckpt's engine: `WATCH`, which runs the script, counts them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKE = ROOT / ".make"
CHAT = "applications/DeepSpeed-Chat"

WATCH = """
import os, runpy, sys
import deepspeed
from zckpt.runtime.engine import Engine
steps, step = [], Engine.step
Engine.step = lambda self, *args, **kwargs: (steps.append(1), step(self, *args, **kwargs))[1]
if "cifar" in (script := os.environ["EXAMPLE"]):  # made here, not downloaded
    import torch
    operators = torch.library.Library("torchvision", "FRAGMENT")  # a torchvision for GPUs has none on the CPU, and asks for these
    for name in ("nms", "qnms"):
        operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import datasets
    datasets.CIFAR10 = lambda train, transform, **_: datasets.FakeData(64, (3, 32, 32), transform=transform)
if "HelloDeepSpeed" in script:  # which names its folder by the second at which a rank gets there
    import datetime, pytz
    class Began(datetime.tzinfo):
        def fromutc(self, now):
            return datetime.datetime.fromtimestamp(float(os.environ["BEGAN"]))
    pytz.timezone = lambda name: Began()
sys.argv[0], sys.path[0] = script, os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
assert deepspeed.__name__ == "zckpt.runtime", deepspeed
print(f"\\nzckpt's engine on rank {os.environ['RANK']}: {len(steps)} steps", flush=True)
"""

CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
OF_CHAT = (
    "--data_path local/jsonfile --data_split 4,3,3 --data_output_path chat_data --dtype bf16 --num_train_epochs 1 "
    "--num_warmup_steps 0 --seed 1 --output_dir"
)
OF_ONE = "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_seq_len 32 --deepspeed"
EXAMPLES = {
    "cifar": ("training/cifar/cifar10_deepspeed.py", "--deepspeed --dtype bf16 --stage 2 --epochs 1 --log-interval 1"),
    "HelloDeepSpeed": (
        "training/HelloDeepSpeed/train_bert_ds.py",
        "--checkpoint_dir hello --tokenizer model --num_layers 1 --num_heads 2 --ff_dim 32 --h_dim 16 --max_seq_length 32 "
        "--batch_size 2 --num_iterations 4 --log_every 1",
    ),
    "HelloDeepSpeed, resumed": (
        "training/HelloDeepSpeed/train_bert_ds.py",
        "--load_checkpoint_dir hello/* --num_iterations 6 --log_every 1",
    ),
    "SuperOffload": (
        "training/DeepSpeed-SuperOffload/finetune_zero3.py",
        "--deepspeed_config config.json --model_name model --lr 1e-3 --batch_size 2 --output_dir super --max_length 32 "
        "--attn_implementation eager --bench_steps 4 --activation_checkpointing",
    ),
    "Trainer": (
        "training/tensor_parallel/hf_integration/train.py",
        "--model_name_or_path model --data_path data.json --output_dir trainer --max_steps 3 --use_cpu --report_to none "
        "--per_device_train_batch_size 2 --model_max_length 512 --deepspeed trainer.json --bf16 --save_strategy no",
    ),
    "Chat, step 1": (
        f"{CHAT}/training/step1_supervised_finetuning/main.py",
        f"--model_name_or_path model --zero_stage 3 {OF_ONE} {OF_CHAT} sft --print_loss",
    ),
    "Chat, step 2, reward": (
        f"{CHAT}/training/step2_reward_model_finetuning/main.py",
        f"--model_name_or_path model --num_padding_at_beginning 0 --zero_stage 2 {OF_ONE} {OF_CHAT} reward",
    ),
    "Chat, step 2, DPO": (
        f"{CHAT}/training/step2_dpo_finetuning/main.py",
        f"--model_name_or_path model --zero_stage 2 {OF_ONE} {OF_CHAT} dpo --print_loss",
    ),
    "Chat, step 3": (
        f"{CHAT}/training/step3_rlhf_finetuning/main.py",
        "--actor_model_name_or_path sft --critic_model_name_or_path reward --num_padding_at_beginning 0 "
        "--actor_zero_stage 3 --critic_zero_stage 3 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 "
        f"--max_prompt_seq_len 64 --max_answer_seq_len 8 --deepspeed {OF_CHAT} rlhf",
    ),
}


def write(path: str, value: object) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(value if isinstance(value, str) else json.dumps(value))


def prepare() -> None:
    """A tokenizer, a model of OPT's kind, and the data that the scripts ask for by the names that they use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2TokenizerFast, OPTConfig, OPTForCausalLM

    texts = [f"how many are {a} and {b} and {a} ? they are {2 * a + b} in all ." for a in range(8) for b in range(8)]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters)
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    GPT2TokenizerFast(tokenizer_object=words, **names).save_pretrained("model")
    size = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    OPTForCausalLM(OPTConfig(vocab_size=320, max_position_embeddings=512, **size)).save_pretrained("model")

    chosen = [{"prompt": f"Human: {t} Assistant:", "chosen": t, "rejected": "they are 0 ."} for t in texts]
    told = [{"instruction": text, "input": "", "output": text} for text in texts]
    wiki = "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files: train.json\n---\n"
    write("wikitext/README.md", wiki)
    write("wikitext/train.json", [{"text": text} for text in texts])
    write("tatsu-lab/alpaca/train.json", told)
    write("data.json", told)
    write(f"{CHAT}/data/train.json", chosen)
    write(f"{CHAT}/data/eval.json", chosen[:8])
    write("config.json", CONFIG)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size"), "auto")
    write("trainer.json", {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}})
    write("watch.py", WATCH)


def run(name: str) -> list[str]:
    """The last line that has a loss, after the counts of steps; an error shows what the run wrote."""
    script, arguments = EXAMPLES[name]
    words = [str(next(Path().glob(word))) if "*" in word else word for word in arguments.split()]
    needs = MAKE / "examples"
    more = (
        [needs / "vision"]
        if name == "cifar"
        else [Path(CHAT).resolve(), needs / "chat"]
        if script.startswith(CHAT)
        else []
    )
    paths = [*more, MAKE / "trl" / "site-packages", needs / "usual", ROOT]
    own = {
        "EXAMPLE": os.path.abspath(script),
        "BEGAN": str(time.time()),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": os.path.abspath("home"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-m", "zckpt", "run", "--nproc", "2", "watch.py", *words]
    environment = {**os.environ, **own, **offline}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    steps = re.findall(r"zckpt's engine on rank (\d): (\d+) steps", done.stdout)
    if done.returncode or len(steps) != 2 or not all(int(count) for _, count in steps):
        raise SystemExit(f"{name} failed, exit status {done.returncode}\n{done.stdout[-6000:]}")
    losses = [
        line.strip() for line in done.stdout.splitlines() if "loss" in line.lower() and re.search(r"\d\.\d", line)
    ]
    return [f"{steps[0][1]} steps on each of two ranks", *losses[-1:]]


def main() -> None:
    checkout, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        for script, _ in EXAMPLES.values():
            folder = CHAT if script.startswith(CHAT) else os.path.dirname(script)
            shutil.copytree(os.path.join(checkout, folder), os.path.join(work, folder), dirs_exist_ok=True)
        os.chdir(work)
        prepare()
        for name in names or EXAMPLES:
            print(f"{name}:", "; ".join(run(name)), flush=True)


if __name__ == "__main__":
    main()
