"""What DeepSpeed has and this trainer has not: each name is there, and says so when it is called or constructed.

For the modules with DeepSpeed's names. A script that imports such a name, or asks `isinstance(model, PipelineModule)`, runs on.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zckpt.base.errors import UnsupportedError

_PLAIN = "Pass the plain model to initialize: stage 3 shares its parameters out over all ranks."
_ADAM = "Use optimizer.type AdamW or Lamb."
_GENERATE = "Use engine.module.generate, or convert a checkpoint with zckpt to-bf16 and serve that."

_INSTEAD = {
    "DeepSpeedHybridEngine": _GENERATE,
    "DeepSpeedTransformerConfig": "Use torch.nn.TransformerEncoderLayer.",
    "DeepSpeedTransformerLayer": "Use torch.nn.TransformerEncoderLayer.",
    "DistributedAttention": "Use torch.nn.functional.scaled_dot_product_attention on whole sequences.",
    "DualPipeVModule": _PLAIN,
    "InferenceEngine": _GENERATE,
    "LayerSpec": _PLAIN,
    "MoE": "Use a dense layer, or the mixture of experts that the model itself brings: it is sharded like any module.",
    "MuonWithAuxAdam": "Use optimizer.type AdamW.",
    "OnebitAdam": _ADAM,
    "OnebitLamb": _ADAM,
    "PipelineEngine": _PLAIN,
    "PipelineModule": _PLAIN,
    "TiedLayerSpec": _PLAIN,
    "TiledLinear": "Use torch.nn.Linear.",
    "TiledLinearReturnBias": "Use torch.nn.Linear.",
    "UlyssesSPAttentionHF": "Train with sequence_parallel_size 1.",
    "UlyssesSPDataLoaderAdapter": "Train with sequence_parallel_size 1.",
    "ZeroOneAdam": _ADAM,
    "init_inference": _GENERATE,
    "replace_transformer_layer": _GENERATE,
    "set_autotp_mode": _PLAIN,
    "tp_model_init": _PLAIN,
}
"""Name -> what to do instead, as sentences."""


def refuse(name: str) -> NoReturn:
    """Raises the error for a name.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"{name!r} of DeepSpeed is not built here", remedy=_INSTEAD[name])


def unbuilt(name: str) -> Any:
    """A class, or for a name in lower case a function, that raises `UnsupportedError` when it is constructed or called."""
    if name[0].islower():

        def function(*args: Any, **kwargs: Any) -> NoReturn:
            refuse(name)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"Not built. {_INSTEAD[name]}"
        return function

    def construct(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name)

    return type(name, (), {"__new__": construct, "__doc__": f"Not built. {_INSTEAD[name]}"})
