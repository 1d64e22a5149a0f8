"""Stand-ins for what DeepSpeed has and this trainer lacks: each name exists, and raises when called or constructed.

For `table`: its rows say what to do instead, and for code that refuses a use of such a thing. A script that imports
such a name, or asks `isinstance(model, PipelineModule)`, runs on.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError

PLAIN = "Pass the plain model to initialize: stage 3 shares its parameters out over all ranks."
ADAM = "Use optimizer.type AdamW or Lamb."
GENERATE = "Use engine.module.generate, or convert a checkpoint with zckpt to-bf16 and serve that."
DENSE = "Use a dense layer, or the mixture of experts that the model itself brings: it is sharded like any module."
ENCODER = "Use torch.nn.TransformerEncoderLayer."
OWN_FILES = (
    "Set device nvme in zero_optimization.offload_optimizer or offload_param of the config: the trainer reads and writes its "
    "files by itself."
)
ONE_SEQUENCE = "Train with sequence_parallel_size 1."

INSTEAD = {
    name: remedy
    for remedy, names in (
        (PLAIN, "DualPipeVModule LayerSpec PipelineEngine PipelineModule TiedLayerSpec set_autotp_mode tp_model_init"),
        (GENERATE, "DeepSpeedHybridEngine InferenceEngine init_inference replace_transformer_layer"),
        (ENCODER, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
        (ADAM, "OnebitAdam OnebitLamb ZeroOneAdam"),
        ("Use optimizer.type AdamW.", "MuonWithAuxAdam"),
        (DENSE, "MoE"),
        ("Use torch.nn.Linear.", "TiledLinear TiledLinearReturnBias"),
        (ONE_SEQUENCE, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        ("Use torch.nn.functional.scaled_dot_product_attention on whole sequences.", "DistributedAttention"),
    )
    for name in names.split()
}
"""Name -> the remedy, as sentences. Other names have the remedy of their row in `table`."""


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A row of the table: names that are not built. `instead`: what to do instead, as sentences."""

    instead: str


def refuse(name: str, instead: str = "") -> NoReturn:
    """Raises UnsupportedError for a name of DeepSpeed's. `instead`: what to do instead, if `INSTEAD` does not say it."""
    raise UnsupportedError(f"{name!r} of DeepSpeed is not built here", remedy=INSTEAD.get(name, instead))


def make_unbuilt(name: str, instead: str = "", *, is_function: bool | None = None) -> Any:
    """A class or a function that raises `UnsupportedError` when it is constructed or called; `instead` as for `refuse`. By
    default names in lower case are functions. A class with a name that says so is an exception.
    """
    told = f"Not built. {INSTEAD.get(name, instead)}"
    if name[0].islower() if is_function is None else is_function:

        def function(*args: Any, **kwargs: Any) -> NoReturn:
            refuse(name, instead)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = told
        return function

    def construct(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    bases = (Exception,) if name.endswith(("Error", "Exception")) else ()
    return type(name, bases, {"__new__": construct, "__doc__": told})
