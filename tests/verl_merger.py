"""verl's own merger of rank files, without the rest of verl, which needs Ray and more: for the proof, and for the benchmark.

    python tests/verl_merger.py CKPT OUT        # writes OUT as `python -m verl.model_merger merge --backend fsdp` does

verl is where `make .make/verl` puts it. What the merger takes from `verl.utils` is replaced: functions that load a tokenizer
and a processor, of which a checkpoint here has none.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

VERL = Path(__file__).parents[1] / ".make" / "verl"


def merger(checkpoint: Path, out: Path | None = None) -> Any:
    """verl's `FSDPModelMerger` for a directory of rank files."""
    for name in ("verl", "verl.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(VERL / name.replace(".", "/"))]
        sys.modules.setdefault(name, module)
    utils: Any = sys.modules["verl.utils"]
    utils.hf_processor = utils.hf_tokenizer = lambda *args, **options: None
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge", backend="fsdp", local_dir=str(checkpoint), target_dir=None if out is None else str(out),
        hf_model_config_path=str(checkpoint / "huggingface"), trust_remote_code=False,
    )  # fmt: skip
    if out is None:  # the tensors alone: models of the tests have no config
        bare = FSDPModelMerger.__new__(FSDPModelMerger)
        bare.config = config
        return bare
    return FSDPModelMerger(config)


def merged(checkpoint: Path) -> dict[str, Any]:
    """The whole tensors, by verl: bf16. Raises what verl raises for files that it does not read."""
    mine = merger(checkpoint)
    world_size = json.loads((checkpoint / "fsdp_config.json").read_text())["world_size"]
    mesh, names = mine._extract_device_mesh_info(mine._load_rank_zero_state_dict(world_size), world_size)
    shards, shape = mine._calculate_shard_configuration(mesh, names)
    return mine._load_and_merge_state_dicts(world_size, shards, shape, names)


if __name__ == "__main__":
    merger(Path(sys.argv[1]), Path(sys.argv[2])).merge_and_save()
