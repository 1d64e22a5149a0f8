"""The page of all results, `docs/benchmarks.md`, and its chart, from `benchmarks/results.json`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

TITLES = {
    "consolidation": ("Plain weights from ZeRO shards", "World size 8. `cp` copies what zckpt wrote just before."),
    "loading": (
        "Into a live model",
        "The seconds of the call alone, without imports and without making the model.",
    ),
    "reshaping": (
        "Other shapes of checkpoint",
        "With AdamW's moments, world size 8: four to seven times the bytes of the weights are written. The limit is the "
        "larger of the usual one and what a plain writer of as many bytes takes, past the page cache and synced: a disk that "
        "is fast for two GiB may be slower for many.",
    ),
    "reshaping in memory": (
        "Other shapes of checkpoint, in memory",
        "A smaller GPT-2 shape (layers of 1,600), source and output in a memory file system, free memory touched before each "
        "command: the time without a disk.",
    ),
    "transposing": (
        "Transposed matrices",
        "`--to hf:gpt2` transposes most matrices; the rival is the same conversion without transposing. The source is a save of "
        "Megatron-DeepSpeed with fp32 weights.",
    ),
    "cold": (
        "Cold sources, and shared blocks",
        'The checkpoint is dropped from the page cache before each command. "The disk alone" moves the same bytes past the '
        "page cache, eight requests of 4 MiB at once on each side; its quickest round is the limit of these rows (if zckpt "
        "took less, its own requests suited this disk better). On XFS (in a file that is mounted; a third of the layers, so "
        "that the source is in the page cache) blocks that are equal in source and output are cloned: they are read, "
        "for the checksums, and not written.",
    ),
    "checking": (
        "Verify and diff",
        "The rivals are `cat`, which reads the same bytes and checks none, and `cmp`, which checks equality alone.",
    ),
    "checking on an older processor": (
        "Verify and diff on an older processor",
        "The same on a processor of 2017 at 2 GHz, which computes CRCs 16 bytes at a time: checks take up to twice as long "
        "there, and `cat` and `cmp` do not.",
    ),
    "looking": (
        "Inspect",
        "A GPT-2 shape with narrow layers: the part of a file that is read does not depend on their width. ZeRO-3 has two files "
        "for each rank, and a piece of every parameter in each.",
    ),
    "push": (
        "To the hub",
        "bf16 from ZeRO-3 shards, to the tests' hub on loopback, which receives every byte and checks none. "
        "Converting and sending overlap; `upload_folder` gets weights that were converted before, from the page cache. Free "
        "memory is touched before each command: on a virtual machine with a host that had taken it back, the scratch files' "
        "pages cost push some tenths of a second more.",
    ),
    "wire": (
        "From and to a store that limits each request",
        "An S3 server on loopback gives 1 MB/s to each request and waits 30 ms before each answer, as object stores do. The "
        "limit is what 32 parallel requests of 8 MiB take for the same bytes; both begin with the start of a program. zckpt has "
        "40 requests under way where it reads, and 33 where it writes (by s3fs 30). The hub is the tests', and sends readers on "
        "to it.",
    ),
    "dcp": ("torch.distributed.checkpoint", "A save of two ranks, sharded as `fully_shard` does."),
    "rank files": (
        "Rank files of FSDP",
        "fp32 DTensors of 8 ranks, as verl saves them. verl's merger writes bf16; the rest of verl is not installed.",
    ),
    "fp8 and GGUF": (
        "fp8 and GGUF",
        "A bf16 model of Llama's shape with at most 22 layers (1.1 B parameters), from torch.distributed.checkpoint's shards in "
        "one pass. The rivals begin with consolidated weights.",
    ),
    "averages": (
        "Averages",
        "Three bf16 checkpoints of one model to one. mergekit keeps what it has computed in memory until a shard is full.",
    ),
    "deltas": (
        "Deltas",
        "Two bf16 versions of a model, a step of Adam with a learning rate of 1e-5 apart, in the form that SGLang pulls.",
    ),
    "merged adapters": (
        "Merged adapters",
        "An fp32 LoRA on all matrices of a bf16 model's blocks. PEFT holds the whole model in memory. Arithmetic "
        "is no limit: at rank 64 it takes 1 s of these two processors.",
    ),
    "megatron": (
        "Megatron-Core",
        "A bf16 model of Llama's shape, written as a `torch_dist` save and back. The rival loads all tensors with "
        "Megatron-Core's own `dist_checkpointing`, takes them apart with torch and saves them; it makes no config.",
    ),
    "tuning": (
        "Threads, buffers, page cache",
        "`to-fp32` of ZeRO-3 with files on the disk: the defaults and other settings. Each round has an order of its "
        "own, and the last column is the ratio within a round, with its 95 % interval: a setting is better than "
        "the defaults if the whole interval is above 1, by at least as much as its lower end. The difference of the second "
        "run with the defaults is noise; so is that of the row with as many threads as the defaults have.",
    ),
    "growth": ("As the model grows", "![Time and memory against model size](benchmarks.svg)\n\nZeRO-3, world size 8."),
}
PUBLISHED = (
    (
        8.03, "Llama 3 8B, ZeRO-3", "`zero_to_fp32.py`: 2 min 17 s, and 1 min 10 s since it was rewritten",
        "deepspeedai/DeepSpeed", "pull/6658",
    ),
    (
        31, "Gemma 4 31B, FSDP2 on NFS", "`save_consolidated` of NeMo RL and AutoModel: 35 to 45 min",
        "NVIDIA-NeMo/RL", "issues/3624",
    ),
    (235, "Qwen3 235B, FSDP", "verl's merger: 4 h", "verl-project/verl", "issues/3761"),
    (
        671, "DeepSeek-V3 671B", "Pai-Megatron-Patch, to Megatron: over 6 h, after 1.5 h from fp8 to bf16",
        "alibaba/Pai-Megatron-Patch", "issues/558",
    ),
)  # fmt: skip
"""Parameters in billions, the model, what its users report of another program, and where."""
LARGE = """## What that means for large models

**Computed**, not measured: the seconds per parameter of `to-bf16` with a cold source, above, times the parameters.
`to-bf16` reads fp32 weights and writes bf16, {rate:.0f} million parameters a second on that machine's one disk; the
table assumes the same rate for larger models. The reported figures of other programs were measured on other machines,
most of them larger, with other disks. The 671 B are the other way, from weights to Megatron. A bf16 source takes less.

| model | `zckpt to-bf16`, computed | reported |
| --- | --- | --- |
"""
HEAD = """# Benchmarks

`make bench` measures all of this and writes this page: each command in turn with its rival, round after round. Each section was
measured in one run on one machine, which it names. A cell gives the median of the rounds and, if they differ, the least and
the most. A ratio is that of the medians: below 1, zckpt took less time. Memory is the peak of any one process of a command,
measured from outside. zckpt syncs its output before it gets its name, and computes checksums while it writes; so `cp` is
followed by `sync`, and if a rival does not sync, the table says "not durable".

"Part of the limit" is the least time in which this machine's disk and memory could move the necessary bytes, divided by
the time that zckpt took. Direct sequential reads of two GiB, direct writes, both at once, and a copy of memory by all
processors are measured in the same run, just before. It is more than 100 % if the disk is quicker a minute later, or serves
more requests at once. Over twenty GB the disk may be much slower than over two, as `cp` in the same table shows. Sources
count as cached, as far as they fit into memory, unless a row says "cold" or "from the disk". Commands that move hardly any
bytes (`--help`, `inspect`, `verify` of checksums alone) have no part of the limit.

Trainer: [steps and memory](../benchmarks/results_trainer.md), [saves and loads](../benchmarks/results_checkpoints.md). Planning
for a trillion parameters: [Very large models, planned](../benchmarks/results_giants.md); saves of thousands of ranks:
[A save on many ranks, planned](../benchmarks/results_exchange.md); several machines behind slow links:
[Several machines at one conversion](../benchmarks/results_machines.md); what ranks say to agree:
[What ranks say to agree](../benchmarks/results_words.md); every loop over elements alone:
[Loops over elements](../benchmarks/results_kernels.md); a million chunks or tensors of torch.distributed.checkpoint:
[Many chunks](../benchmarks/results_many_chunks.md); mixtures of experts of each family, at the size of DeepSeek-V3:
[Large mixtures of experts, planned](../benchmarks/results_giant_families.md); four processes on one slow mount:
[One mount that limits each request](../benchmarks/results_mounts.md).
"""


def write(results: dict[str, Any], path: Path) -> None:
    """The page."""
    parts = [HEAD]
    for name, (title, about) in TITLES.items():
        if name in results:
            found = results[name]
            model = (
                ""
                if name in ("dcp", "growth", "looking", "reshaping in memory", "transposing")
                else f" GPT-2 shape, {found['layers']} layers of 1,600."
            )
            limits = found.get("limits")
            able = f" {_able(limits)}" if limits else ""
            rounds = max((len(row["ours"]["seconds"]) for row in found["rows"]), default=found["rounds"])
            if name == "fp8 and GGUF":
                model = f" {min(found['layers'], 22)} layers of 2,048."
            told = f"{found['machine']}; {rounds} round{'s' * (rounds != 1)}; {found['when']}.{model}{able}"
            if (load := found.get("load_before", 0)) > _BUSY:
                told += f" Other jobs ran at the same time (load {load:.0f}): times are long, and only those of one row compare."
            parts.append(f"## {title}\n\n{about} {told}\n\n{table(found)}\n")
    parts.append(_large(results))
    path.write_text("\n".join(parts))


_BUSY = 4
"""Jobs that wait for a processor before a section, from which on it says so."""


def _large(results: dict[str, Any]) -> str:
    """What the rate of a cold source means for models that do not fit here; empty where the rows are not there."""
    cold = [row for row in results.get("cold", {}).get("rows", []) if row["what"] == "to-bf16, cold"]
    sizes = [row["numel"] for row in results.get("growth", {}).get("rows", []) if 1.4e9 < row["numel"] < 1.7e9]
    if not cold or not sizes:
        return ""
    each = statistics.median(cold[0]["ours"]["seconds"]) / sizes[0]
    lines = [
        f"| {model} | {_minutes(each * billions * 1e9)} | {said} ([{home}](https://github.com/{home}/{at})) |"
        for billions, model, said, home, at in PUBLISHED
    ]
    return LARGE.format(rate=1e-6 / each) + "\n".join(lines) + "\n"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _able(limits: dict[str, float]) -> str:
    """What the machine can do, in words."""
    rates = {name: f"{rate / 1e9:.1f}" for name, rate in limits.items()}
    both = f"both at once {rates['both_read']} and {rates['both_write']}"
    disk = f"The disk reads {rates['read']} GB/s and writes {rates['write']}, {both}"
    return f"{disk}; memory is copied at {rates['copy']} GB/s."


def table(found: dict[str, Any]) -> str:
    """One section's rows."""
    rows = found["rows"]
    growing, counted = any(row["numel"] for row in rows), any(row.get("least") for row in rows)
    compared = any(row.get("paired") for row in rows)
    head = ["what", "zckpt, s", "rival", "its s", "ratio", "zckpt, MiB", "rival, MiB", *["part of the limit"] * counted]
    head += ["ratio within a round"] * compared
    lines = [["parameters", *head] if growing else head]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        rival = row["rival"] + (f" ({row['note']})" if row["note"] else "")
        line = [row["what"], _seconds(ours), rival, "", "", _memory(ours), ""]
        if theirs:
            ratio = statistics.median(ours["seconds"]) / statistics.median(theirs["seconds"])
            line[3], line[4], line[6] = _seconds(theirs), f"**{ratio:.2f}**", _memory(theirs)
        if counted:
            least = row.get("least")
            line.append(f"{least / statistics.median(ours['seconds']):.0%}" if least else "")
        if compared:
            line.append("{:.3f} ({:.3f}-{:.3f})".format(*row["paired"]) if row.get("paired") else "")
        lines.append([f"{row['numel'] / 1e9:.2f} B", *line] if growing else line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(taken: dict[str, Any]) -> str:
    low, middle, high = min(taken["seconds"]), statistics.median(taken["seconds"]), max(taken["seconds"])
    spread = f" ({low:.2f}-{high:.2f})" if f"{low:.2f}" != f"{high:.2f}" else ""
    return f"{middle:.2f}{spread}"


def _memory(taken: dict[str, Any]) -> str:
    return f"{taken['peak'] / 1024:,.0f}"


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and memory against model size, both on logarithmic axes; comes last, for what draws it makes this process large."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zckpt"
    import matplotlib.pyplot as plt

    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        for label, taken in ((f"zckpt {row['what']}", row["ours"]), (_rival(row), row["theirs"])):
            point = (row["numel"], statistics.median(taken["seconds"]), taken["peak"] / 1024)
            if point not in lines.setdefault(label, []):
                lines[label].append(point)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for number, (label, points) in enumerate(lines.items()):
        sizes, seconds, memory = zip(*points, strict=True)
        line = "-" if label.startswith("zckpt") else "--"
        style = {"marker": "o", "linestyle": line, "label": label, "color": f"C{number}"}
        left.plot(sizes, seconds, **style)
        if "cp" not in label:
            right.plot(sizes, memory, **style)
    for axes, what in ((left, "seconds"), (right, "peak memory, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel=what)
        axes.grid(visible=True, which="both", alpha=0.2)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _rival(row: dict[str, Any]) -> str:
    name: str = row["rival"].replace("`", "")
    return name if "zero_to" in name else f"cp and sync of the {row['what'][3:]} bytes"
