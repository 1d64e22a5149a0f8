"""Which commands there are, and in which module each is declared: a module is imported when its command is asked for.

`zckpt --help` prints this table and imports none of them, and `zckpt inspect` imports what it needs alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "inspect": ("look", "Show what a checkpoint holds, and whether it is complete."),
    "verify": ("look", "Check that a checkpoint, or what was made of it, is intact."),
    "diff": ("look", "Compare two checkpoints or weights files, in any layouts."),
    "map": ("picture", "Draw which rank holds what of a checkpoint."),
    "to-fp32": ("convert", "Write a checkpoint's whole weights in fp32."),
    "to-fp16": ("convert", "Write a checkpoint's whole weights in fp16."),
    "to-bf16": ("convert", "Write a checkpoint's whole weights in bf16."),
    "to-dcp": ("convert", "Write weights as a torch.distributed.checkpoint directory."),
    "to-mcore": ("convert", "Write a checkpoint of Megatron-Core (torch_dist)."),
    "to-peft": ("convert", "Write the adapter alone (LoRA and other PEFT methods)."),
    "to-fp8": ("quantize", "Write weights of fp8 (E4M3) with scales."),
    "to-gguf": ("gguf", "Write a model as GGUF, which llama.cpp runs."),
    "reshard": ("reshape", "Write a ZeRO checkpoint for another world size or stage."),
    "to-universal": ("reshape", "Write a universal checkpoint, for any number of ranks."),
    "to-states": ("reshape", "Write the optimizer's states as safetensors, by name."),
    "average": ("combine", "Average checkpoints of one model, or merge them."),
    "delta": ("versions", "Write what changed in weights since an older version."),
    "apply": ("versions", "Write the weights that deltas make of an older version."),
    "du": ("upkeep", "Show what a run's saves take: weights, optimizer, waste."),
    "prune": ("upkeep", "Delete the saves of a run that no rule keeps."),
    "slim": ("upkeep", "Write a smaller save of the same layout."),
    "push": ("push", "Make a model page on the Hugging Face hub of a checkpoint."),
    "estimate": ("estimate", "Say how much memory training a model needs."),
    "train": ("train", "Train a language model with ZeRO sharding."),
    "run": ("run", "Run a training script with this trainer as deepspeed."),
    "demo": ("demo", "Train, resume, export and compare, in a minute."),
}
"""Name -> (its module, what it does in at most 60 characters), in the order in which `zckpt --help` lists them."""


class Commands(TyperGroup):
    """All of them. Each is built from its declaration when `get_command` is first asked for it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: typer.core.TyperCommand(name, short_help=COMMANDS[name][1]) for name in COMMANDS}
        self._declared: dict[str, Any] = {}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None if there is none."""
        if cmd_name in COMMANDS and cmd_name not in self._declared:
            self._declared[cmd_name] = _built(cmd_name)
        return self._declared.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _built(name: str) -> Any:
    declared = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    import_module(f"zckpt.cli.{COMMANDS[name][0]}").register(declared)
    declared.registered_commands = [command for command in declared.registered_commands if command.name == name]
    return typer.main.get_command(declared)
