"""Which commands there are, and in which module each is declared: a module is imported when its command is asked for.

`zckpt --help` prints this table and imports none of them, and `zckpt inspect` imports what it needs alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

GROUPS = {
    "Look": {
        "inspect": ("look", "Show what a checkpoint holds, and whether it is complete."),
        "verify": ("look", "Check that a checkpoint, or what was made from it, is intact."),
        "diff": ("look", "Compare two checkpoints or weights files, in any layouts."),
        "map": ("look", "Draw which rank holds what of a checkpoint."),
        "formats": ("formats", "List what is read and written, as of this version."),
    },
    "Weights": {
        "convert": ("convert", "Merge shards into weights of the dtype that --dtype names."),
        "to-bf16": ("convert", "Merge shards into bf16 weights that Hugging Face loads."),
        "to-fp16": ("convert", "Merge shards into fp16 weights that Hugging Face loads."),
        "to-fp32": ("convert", "Consolidate shards into fp32 safetensors, bit for bit."),
        "quantize": ("convert", "Write weights of 4 or 8 bits, which vLLM loads."),
        "to-fp8": ("convert", "Write fp8 weights (E4M3) with scales."),
        "to-gguf": ("convert", "Write a model as GGUF, which llama.cpp runs."),
        "to-mlx": ("convert", "Write a model that mlx-lm loads, of 4 or 8 bits."),
        "to-peft": ("convert", "Write the adapter alone (LoRA and other PEFT methods)."),
        "push": ("push", "Upload weights with a model card to the Hugging Face hub."),
    },
    "Resume elsewhere": {
        "reshard": ("reshape", "Write a ZeRO checkpoint for another world size or stage."),
        "to-universal": ("reshape", "Write a universal checkpoint, for any number of ranks."),
        "to-dcp": ("convert", "Write a torch.distributed.checkpoint directory, for FSDP."),
        "to-mcore": ("convert", "Write a Megatron-Core checkpoint (torch_dist)."),
        "to-states": ("reshape", "Write optimizer states as safetensors, by tensor name."),
    },
    "Several versions": {
        "average": ("convert", "Average checkpoints of one model, or merge models."),
        "delta": ("versions", "Write what changed in weights since an older version."),
        "apply": ("versions", "Write the newer weights from an older version and deltas."),
    },
    "Disk space": {
        "du": ("upkeep", "Show what a run's saves take: weights, optimizer, waste."),
        "prune": ("upkeep", "Delete the saves of a run that no rule keeps."),
        "slim": ("upkeep", "Write a smaller save of the same layout."),
    },
    "Train": {
        "estimate": ("estimate", "Estimate the memory that training a model needs."),
        "train": ("train", "Train a language model with ZeRO sharding."),
        "run": ("run", "Run a DeepSpeed script with zckpt's trainer."),
        "demo": ("train", "See it work: convert a small ZeRO-3 save, and verify it."),
    },
}
"""Group -> name -> (its module, what it does in at most 60 characters), in the order in which `zckpt --help` lists them."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class Commands(TyperGroup):
    """All commands. Each is built from its declaration when `get_command` is first asked for it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None if there is none."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            import_module(f"zckpt.cli.{COMMANDS[cmd_name][0]}")
            self.commands[cmd_name] = import_module("zckpt.cli.declare").build_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, with the other words; `help` and `version` stand for these options.
        Raises UsageError if it names none; the error says what was meant.
        """
        if args[0] == "help" and len(args) > 1:
            args = [args[1], "--help"]
        elif args[0] in ("help", "version"):
            from zckpt.cli import about

            typer.echo(ctx.get_help() if args[0] == "help" else "\n".join(about.lines(False)))
            raise typer.Exit
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from zckpt.cli.hints import check_command

            check_command(args, COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table of commands; names have one column in all groups."""
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in group.items()])
