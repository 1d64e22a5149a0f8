"""PEFT's `adapter_config.json` for an adapter when its trainer wrote none, but kept the facts that its tensors do not show.

For `to_peft`. verl writes `lora_train_meta.json` beside its rank files: `{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}`.
Which modules have a LoRA, which are trained whole, and whether it is a DoRA, the tensors show.
Source: verl 0.9.1, utils/checkpoint/fsdp_checkpoint_manager.py `_get_lora_train_meta`; PEFT 0.21.2, tuners/lora/config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, InconsistentError
from zckpt.base.words import join_words
from zckpt.containers import brief
from zckpt.core.catalog import TensorEntry

META = "lora_train_meta.json"
_BASE = "base_model.model."
_TUNED = re.compile(r"(?P<module>.+)\.(?:lora_A\.weight|lora_embedding_A)")


def config_of_meta(
    meta: object, file: str, adapter: Mapping[str, TensorEntry], whole: Iterable[str], model: Iterable[str]
) -> dict[str, object]:
    """The config of a LoRA adapter.

    Args:
        meta: what `lora_train_meta.json` says.
        file: its path, for errors.
        adapter: the adapter's tensors, by their names in `adapter_model.safetensors`.
        whole: names in the model of the adapter's modules that are trained whole.
        model: names of all tensors of the model.

    Raises:
        CorruptError: `meta` does not give a rank and an alpha.
        InconsistentError: the tensors are of another rank.
    """
    r, alpha = (meta.get("r"), meta.get("lora_alpha")) if isinstance(meta, Mapping) else (None, None)
    if type(r) is not int or r < 1 or type(alpha) not in (int, float):
        raise CorruptError(
            "does not say the rank and the alpha of a LoRA", file=file, found=brief(meta),
            expected='{"r": ..., "lora_alpha": ...}', remedy=COPY_AGAIN,
        )  # fmt: skip
    modules = {match["module"].removeprefix(_BASE): name for name in adapter if (match := _TUNED.fullmatch(name))}
    ranks = sorted({adapter[name].shape[0] for name in modules.values() if adapter[name].shape})
    if ranks != [r]:
        raise InconsistentError(
            "gives a rank that the adapter does not have", file=file, found=f"r {r}",
            expected=f"r {join_words([str(own) for own in ranks])}, as its tensors have" if ranks else "LoRA matrices",
            remedy=OTHER_SAVE,
        )  # fmt: skip
    assert isinstance(meta, Mapping)
    task = meta.get("task_type")
    saved = sorted({name.partition(".modules_to_save.")[0].rpartition(".")[2] for name in whole})
    return {
        "peft_type": "LORA",
        "task_type": task if isinstance(task, str) and task != "None" else None,
        "base_model_name_or_path": None,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": any(name.endswith(".lora_magnitude_vector") for name in adapter),
        "target_modules": _targets(modules, model),
        "modules_to_save": saved or None,
        "inference_mode": True,
    }


def _targets(modules: Iterable[str], model: Iterable[str]) -> list[str]:
    """Names of the adapted modules as PEFT finds them: their last parts, where no other module of the model ends so."""
    tuned = set(modules)
    others = {
        module.removeprefix(_BASE).removesuffix(".base_layer")
        for module in (name.rpartition(".")[0] for name in model)
        if ".lora_" not in module
    } - tuned
    ends = {module.rpartition(".")[2] for module in tuned}
    taken = {module.rpartition(".")[2] for module in others}
    return sorted(ends if not ends & taken else tuned)
