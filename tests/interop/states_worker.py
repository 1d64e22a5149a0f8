"""One rank of real DeepSpeed that loads reshards of other shapes' checkpoints: `torchrun .. states_worker.py JOBS.json`.

JOBS is a list of objects: `load` (the checkpoint), `stage`, `zero` (more of that section of the config), `precision`, `state` (a
safetensors file of the module's tensors, under ROLE/NAME, and of optimizer states, under STATE/NAME), `groups` (lists of names),
`aliases` (name -> name of the same tensor). The model is a bag of parameters of these names: what an engine loads does not depend
on what it computes. Rank 0 writes `JOBS.json.told`: of each job what differs from `state`, and how many tensors were compared.
"""

from __future__ import annotations

from typing import Any

import torch
from gloo_ranks import gloo_ranks, tell
from safetensors.torch import load_file


class Bag(torch.nn.Module):
    """Tensors under dotted names, all zero; the loss is half the square of the trained ones."""

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]], aliases: dict[str, str]) -> None:
        super().__init__()
        for role, held in tensors.items():
            for name, tensor in held.items():
                owner, own = self.place_of(name)
                if role == "buffer":
                    owner.register_buffer(own, torch.zeros_like(tensor))
                else:
                    zeros = torch.zeros_like(tensor)
                    owner.register_parameter(own, torch.nn.Parameter(zeros, requires_grad=role == "parameter"))
        for name, kept in aliases.items():
            owner, own = self.place_of(name)
            owner.register_parameter(own, self.get_parameter(kept))

    def place_of(self, name: str) -> tuple[torch.nn.Module, str]:
        """The module that a tensor lies in, made where it is not there, and its own name."""
        *path, own = name.split(".")
        owner: torch.nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        return owner, own

    def forward(self) -> torch.Tensor:
        """A gradient for each."""
        return sum((p.float().square().sum() / 2 for p in self.parameters() if p.requires_grad), torch.zeros(()))


def run(job: dict[str, Any]) -> tuple[list[str], int]:
    """What differs after loading, and how many tensors were compared; then takes a step, if the stage lets a bag do so."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "frozen": {}, "buffer": {}}
    for key, tensor in load_file(job["state"]).items():
        kind, _, name = key.partition("/")
        tensors.setdefault(kind, {})[name] = tensor
    model = Bag({role: tensors[role] for role in ("parameter", "frozen", "buffer")}, job["aliases"])
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in group]} for group in job["groups"]], lr=0.05)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0, **job["zero"]},
        **({"bf16": {"enabled": True}} if job["precision"] == "bf16" else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, _ = engine.load_checkpoint(job["load"])
    assert path is not None, job
    if job["stage"] < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # a step would do so
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"parameter/{name}"] = safe_get_full_fp32_param(parameter)
            for state in sorted(tensors.keys() - {"parameter", "frozen", "buffer"}):  # on all ranks in turn
                found[f"{state}/{name}"] = safe_get_full_optimizer_state(parameter, state)
    wanted = {
        f"{kind}/{n}": t for kind, own in tensors.items() if kind not in ("frozen", "buffer") for n, t in own.items()
    }
    differ = [
        key
        for key, tensor in wanted.items()
        if (own := found.get(key)) is None or not torch.equal(own.reshape(tensor.shape).float(), tensor.float())
    ]
    if job["stage"] < 3:  # under ZeRO-3 a parameter is there only while its own module computes
        engine.backward(engine())
        engine.step()
    engine.destroy()
    return differ, len(wanted)


def main() -> None:
    """All jobs, one after another."""
    with gloo_ranks():
        tell(run)


if __name__ == "__main__":
    main()
