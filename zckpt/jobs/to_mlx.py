"""From any checkpoint to a model in MLX's form, quantised or not, in one pass.

For `zckpt to-mlx`. What is written is what `mlx_lm.convert` writes, tensor by tensor. A file has them in another order: mlx
has that of a hash, which is another one on each system.
Source: mlx-lm 0.32.2, convert.py, utils.py (`save_model`, `save_config`, `load_config`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, BY_TORCH_NAME, CAST_TARGETS, DType
from zckpt.core.plan import Plan, literal_file
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_MLX, Asked
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Mlx
from zckpt.jobs.planned import Report, carry_out, find_left_out
from zckpt.jobs.quantize import open_model_for
from zckpt.layouts.plain.write import LaidOutFiles, WeightsTarget, lay_out
from zckpt.naming.mlx_names import MlxForm, in_mlx_form
from zckpt.quantized.affine import affine_entries
from zckpt.quantized.configs import without
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, locate

RECORDED = "mlx"
"""The key of a manifest's options under which it says how an output was quantised."""
_MOST_BYTES = 16 << 20


def to_mlx(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    bits: int | None = None,
    group_size: int = 64,
    dtype: str | DType | None = None,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a model that mlx-lm loads: what `mlx_lm.convert` makes of it, from any checkpoint, in constant memory.

    Args:
        checkpoint: as for `zckpt.convert`, with the model's config.json beside it.
        out: the directory for safetensors, their index and a config.json with its `quantization`.
        bits: of a weight: 2, 3, 4, 5, 6 or 8; None leaves weights as they are.
        group_size: columns that have a scale and a bias: 32, 64 or 128.
        dtype: of scales and of what is not quantised: "bf16", "fp16" or "fp32"; None for what the config says.
        tag: as for `zckpt.to_fp8`.
        also: as for `zckpt.to_fp8`.
        options: as for `zckpt.to_fp8`.
        progress: as for `zckpt.to_fp8`.

    Raises:
        UnsupportedError: it is not known how MLX has such a model.
        CastError: a weight is NaN, infinite or too large.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_mlx("model", "mlx/", bits=4, group_size=32, progress=False).out
        'mlx/'
    """
    asked = (options or Options()).split(
        TO_MLX, dtype=None if dtype is None else to_dtype(dtype), bits=bits, group_size=group_size,
        tag=tag, also=also,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to mlx")


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Mlx]) -> PlannedConversion:
    """Plans the output and checks the arguments, which are those of `to_mlx`; writes nothing."""
    _, model = open_model_for(checkpoint, out, asked, "there is no config.json, without which MLX loads no model")
    opened, catalog, config = model.opened, model.catalog, model.config or {}
    dtype = asked.casting.dtype or dtype_said(config)
    asked = replace(asked, casting=replace(asked.casting, dtype=dtype))
    bits, group = asked.own.bits, asked.own.group_size
    found = in_mlx_form(catalog, config, bits, group)
    stays = [name for name, e in found.catalog.tensors.items() if len(e.shape) > 1 and e.shape[-1] % group]
    if bits is not None and not found.widths:
        raise UsageError(
            "there is nothing to quantise", file=opened.place.home, found=f"no rows that are multiples of {group}",
            expected="a matrix with such rows", remedy="Pass another --group-size, or leave --bits out.",
        )  # fmt: skip
    made, dtypes = mlx_tensors(found, dtype)
    wanted = [(entry, dtypes[name]) for name, entry in made.tensors.items()]
    target = WeightsTarget(
        "safetensors", max_shard_size=asked.sharding.max_shard_size, order="as given", framework="mlx"
    )
    destination = _with_index(lay_out(wanted, {}, target), sum(e.numel for e in found.catalog.tensors.values()))
    copies, left_out = opened.companions()
    said = _config_of(config, opened.place.home, found, bits, group)
    files = (*destination.files, literal_file("config.json", json.dumps(said, indent=4).encode()))
    pairs = [(made.tensors[name], entry) for name, entry in destination.entries.items()]
    recorded = {**model.recorded, RECORDED: {"bits": bits, "group_size": group}}
    rules = {**model.given_up, **found.dropped}
    fates = find_left_out(model.source, made.tensors, asked.selecting, selectable=model.selectable, rules=rules)
    order = order_for(asked, Plan(files, pairs), locate(out), made, copies, recorded, fates)
    notes = (*model.notes, *left_out)
    if bits is not None and stays:
        them = count(len(stays), "matrix has", "matrices have")
        notes += (f"{them} rows that are no multiple of {group}, and not quantised: {examples(stays)}.",)
    return PlannedConversion(opened, order, notes, asked, sources=(catalog,))


def mlx_tensors(form: MlxForm, dtype: DType) -> tuple[Catalog, dict[str, DType]]:
    """The tensors of an output, in the order of a file, and the dtype of each.

    What is quantised is first, with scales and biases behind the codes, so that all words of four bytes keep their places.
    """
    quantised: dict[str, TensorEntry] = {}
    others: dict[str, TensorEntry] = {}
    for name, entry in form.catalog.tensors.items():
        if name in form.widths:
            quantised |= affine_entries(entry, *form.widths[name], dtype)
        else:
            others[name] = entry
    dtypes = {name: entry.dtype for name, entry in quantised.items()}
    dtypes |= {name: e.dtype if name in form.precise else output_dtype(e, dtype) for name, e in others.items()}
    others = dict(sorted(others.items(), key=lambda one: -dtypes[one[0]].itemsize))
    return replace(form.catalog, tensors=quantised | others), dtypes


def dtype_said(config: Mapping[str, Any]) -> DType:
    """The dtype that mlx-lm reads in a config; bf16 where the config names none that weights can have."""
    text = config.get("text_config")
    places = (config.get("torch_dtype"), config.get("dtype"), text.get("dtype") if isinstance(text, Mapping) else None)
    found = (BY_TORCH_NAME.get(str(said)) for said in places if said is not None)
    return next((dtype for dtype in found if dtype in CAST_TARGETS), BF16)


def _config_of(
    config: Mapping[str, object], home: Location, form: MlxForm, bits: int | None, group: int
) -> dict[str, object]:
    """The config of an output; the end of a text is taken from generation_config.json, where it says one."""
    found: dict[str, object] = {**without(config)}
    beside = home / "generation_config.json"
    if beside.is_file():
        said = read_json(beside.path, _MOST_BYTES, "a generation_config.json")
        if isinstance(said, dict) and said.get("eos_token_id"):
            found["eos_token_id"] = said["eos_token_id"]
    for key in ("_name_or_path", "vision_config", "quantization"):
        found.pop(key, None)
    if "lm_head.weight" in form.catalog.tensors:
        found.setdefault("tie_word_embeddings", False)  # mlx-lm has some models' heads tied if nothing says it
    if bits is not None:
        found["quantization"] = {"group_size": group, "bits": bits, "mode": "affine", **form.own}
        found["quantization_config"] = found["quantization"]
    return dict(sorted(found.items()))


def _with_index(laid_out: LaidOutFiles, parameters: int) -> LaidOutFiles:
    """The files with an index as mlx-lm writes it, where there is one file too."""
    files = [one for one in laid_out.files if not one[0].path.endswith(".index.json")]
    where = {name: str(entry.fragments[0].store) for name, entry in laid_out.entries.items() if entry.fragments}
    metadata = {
        "total_size": sum(entry.nbytes for entry in laid_out.entries.values()),
        "total_parameters": parameters,
    }
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(where.items()))}, indent=4)
    return replace(laid_out, files=(*files, literal_file("model.safetensors.index.json", text.encode())))
