"""One rank of real Megatron Bridge: its adapters are put into Megatron-Core's models, changed, asked, and saved as its runs do.

    torchrun .. bridge_worker.py JOBS.json

Each job has `config` (a directory with a config.json of
transformers), `checkpoint` (a run directory that `to-mcore` wrote), `sizes` (tensor, pipeline and expert parallel), `layers`
("stacked" or "numbered"), `kind` ("dora.DoRA", ..), `arguments` of it, `words` (a file) and `out`, where the adapter is saved.
Rank 0 writes beside the jobs what the adapted models say.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from gloo_ranks import tell_over_gloo
from megatron.core import dist_checkpointing, parallel_state
from megatron_on_cpu import built, logits
from safetensors.torch import load_file

bridge = types.ModuleType("megatron.bridge")  # not its own, which imports what Transformer Engine is needed for
bridge.__path__ = [str(Path(__file__).parents[2] / ".make" / "megatron-bridge" / "megatron" / "bridge")]
sys.modules["megatron.bridge"] = bridge
engine = types.ModuleType("transformer_engine.pytorch")  # of which Bridge's LoRA makes classes of its own
engine.__getattr__ = lambda name: type(name, (torch.nn.Module,), {})  # type: ignore[method-assign]


def change(model: Any) -> None:
    """Gives the adapters numbers of their own, which are the same on ranks that have the same part."""
    of_rank = parallel_state.get_tensor_model_parallel_rank(), 10 + parallel_state.get_expert_model_parallel_rank()
    numbers = [torch.Generator().manual_seed(seed) for seed in of_rank]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".adapter." in name:
                own = torch.empty_like(weight).normal_(std=0.1, generator=numbers[".experts." in name])
                weight.copy_(weight * (1 + own) if name.endswith("weight_magnitude") else own)


def adapter_class(name: str) -> Any:
    """A class of Bridge, such as "lora.LoRA"."""
    module, _, kind = name.rpartition(".")
    whole = types.ModuleType("transformer_engine")
    whole.pytorch = engine.ops = engine  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": whole, "transformer_engine.pytorch": engine}
    found = getattr(importlib.import_module(f"megatron.bridge.peft.{module}"), kind)
    del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
    importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False  # type: ignore[attr-defined]
    return found


def run(job: dict[str, Any]) -> list[Any]:
    """One job."""
    tp, pp, ep = job["sizes"]
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    model = built(SimpleNamespace(**json.loads((Path(job["config"]) / "config.json").read_text())), tp, pp, ep)
    metadata = {"non_homogeneous_layers": job["layers"] == "numbered"}
    asked = {"model": model.sharded_state_dict(metadata=metadata)}
    model.load_state_dict(dist_checkpointing.load(asked, f"{job['checkpoint']}/release")["model"])
    peft = adapter_class(job["kind"])(**job["arguments"])
    model = peft(model, training=False)
    change(model)
    out = Path(job["out"]) / "iter_0000002"
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    tensors = {name: one for name, one in model.sharded_state_dict(metadata=metadata).items() if ".adapter." in name}
    saved = {name: one for name, one in tensors.items() if not name.endswith("_extra_state")}
    dist_checkpointing.save({"model": saved, "iteration": 2}, str(out), content_metadata=metadata)
    if dist.get_rank() == 0:
        said = {"model": vars(model.config), "peft": vars(peft)}
        plain = {
            at: {
                name: value
                for name, value in own.items()
                if value is None or isinstance(value, str | bool | int | float)
            }
            for at, own in said.items()
        }
        plain["peft"]["_target_"] = f"megatron.bridge.peft.{job['kind']}"
        plain["model"] |= {"_target_": job["target"], "expert_tensor_parallel_size": 1}
        (out / "run_config.yaml").write_text(yaml.safe_dump(plain))
        state = {"step": torch.tensor(2, dtype=torch.int32)}
        torch.save(state, out / "train_state.pt")
        torch.save(state, out.parent / "latest_train_state.pt")
        (out.parent / "latest_checkpointed_iteration.txt").write_text("2")
    found = logits(model, load_file(job["words"])["words"])
    parallel_state.destroy_model_parallel()
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    tell_over_gloo(run)
