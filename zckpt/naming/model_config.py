"""The `config.json` of a Megatron or GPT-NeoX model that becomes one of transformers.

For `transform`. The values of a config come from the tensors' shapes, from the arguments that the run kept in its checkpoint
(Megatron's `args`; GPT-NeoX's `args` and the files in `configs/`), or from a config that the user gives.

[Note: configs in architecture files] "fixed" entries are copied; "sizes" are a dimension of a tensor; "layers" and "heads" are
the keys of the numbers of blocks and heads; "present" is whether a tensor exists; "head" is the tensor whose absence means
tied embeddings; "args" lists arguments of the run that have the value, and the program's default; "refused" lists arguments
with the values that they must not have, and why; "required" lists values that arguments must have if they are recorded.
Source: GPT-NeoX, megatron/checkpointing.py `save_ds_checkpoint`, megatron/neox_arguments; Megatron-DeepSpeed,
megatron/arguments.py; transformers 4, models/megatron_gpt2 (activation functions).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from zckpt.base.errors import (
    COPY_AGAIN,
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsupportedError,
    UsageError,
    ZckptError,
)  # fmt: skip
from zckpt.base.words import examples
from zckpt.containers import Placeholder, enum_value
from zckpt.core.catalog import Catalog
from zckpt.naming.architectures import Architecture, Heads, RunFacts
from zckpt.storage.location import locate

_PLAIN = (str, int, float, bool, type(None))

_MOST_BYTES = 1 << 20
"""The most of a GPT-NeoX config file that is read; theirs have a few thousand."""


def run_arguments(catalog: Catalog, directory: str) -> dict[str, object]:
    """The arguments of the run, as far as the checkpoint kept them, with `_` in their names.

    Raises:
        CorruptError: one of GPT-NeoX's config files cannot be read.
    """
    kept = catalog.extras.get("args")
    state = kept.state if isinstance(kept, Placeholder) else kept
    arguments = dict(state) if isinstance(state, Mapping) else {}
    configs = os.path.join(directory, "configs")
    if locate(configs).is_dir():
        import yaml

        for name in sorted(locate(configs).names()):
            path = os.path.join(configs, name)
            if not name.endswith((".yml", ".yaml", ".json")) or not locate(path).is_file():
                continue
            try:
                found = yaml.safe_load(locate(path).read(_MOST_BYTES))
            except ZckptError:
                raise
            except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
                raise CorruptError("cannot be read", file=path, found=str(error), remedy=COPY_AGAIN) from error
            arguments = {**(found if isinstance(found, dict) else {}), **arguments}
    plain = {str(name).replace("-", "_"): enum_value(value) for name, value in arguments.items()}
    return {name: value for name, value in plain.items() if isinstance(value, _PLAIN)}


def origin_of(catalog: Catalog, rules: str) -> RunFacts:
    """Facts of the checkpoint, and the rules that joined it."""
    version = catalog.extras.get("checkpoint_version")
    return RunFacts(float(version) if isinstance(version, int | float) else None, catalog.topology.tp, rules)


def query_heads(given: Mapping[str, object], arguments: Mapping[str, object], path: str) -> tuple[int, int | None]:
    """The number of query heads, and the rows of a head, or None if they are not recorded.

    Raises:
        UsageError: the number of heads is not recorded.
    """
    query = _number(("num_attention_heads", "n_head"), given, arguments)
    size = _number(("head_dim", "kv_channels"), given, arguments)
    if query is None:
        raise UsageError(
            "the number of attention heads is not recorded", file=path,
            found="no 'args' with num_attention_heads, and no configs/*.yml",
            remedy="Pass the model's config.json with --config.",
        )  # fmt: skip
    return query, size


def _number(keys: Sequence[str], *places: Mapping[str, object]) -> int | None:
    """The first positive whole number that one of the keys has in one of the places."""
    values = (place.get(key) for place in places for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def make_config(
    wanted: Architecture, catalog: Catalog, heads: Heads, arguments: Mapping[str, object]
) -> dict[str, object]:
    """The config of tensors that have the architecture's names.

    Raises:
        UnsupportedError: the run used something that the architecture does not have.
    """
    data = wanted.config
    refused = [
        f"{name} {arguments[name]} ({why})"
        for name, (values, why) in data["refused"].items()
        if arguments.get(name) in values
    ]
    refused += [
        f"{name} {arguments[name]} (not {' or '.join(map(str, values))})"
        for name, values in data["required"].items()
        if arguments.get(name) not in (None, *values)
    ]
    if refused:
        raise UnsupportedError(
            f"the model is not a {data['fixed']['architectures'][0]}", file=catalog.source.path,
            found=", ".join(refused), remedy="If it is one all the same, pass its config.json with --config.",
        )  # fmt: skip
    config: dict[str, object] = {**data["fixed"], **_sizes(wanted, catalog)}
    config.update({key: getattr(heads, part) for key, part in data["heads"].items()})
    config.update({key: name in catalog for key, name in data["present"].items()})
    config["tie_word_embeddings"] = data["head"] not in catalog
    if arguments.get("norm") == "rmsnorm":  # GPT-NeoX has an epsilon for each kind of norm
        arguments = {name: value for name, value in arguments.items() if name != "layernorm_epsilon"}
    for key, (names, default) in data["args"].items():
        config[key] = next((arguments[name] for name in names if arguments.get(name) is not None), default)
    if "activation" in data and arguments:
        config[data["activation"]] = _activation(arguments, catalog.source.path)
    return config


def _sizes(wanted: Architecture, catalog: Catalog) -> dict[str, int]:
    """The sizes in a config, from the tensors' shapes.

    Raises:
        IncompleteError: one of these tensors is missing.
    """
    sizes = wanted.config["sizes"]
    missing = [name for name, _ in sizes.values() if name not in catalog]
    if missing:
        raise IncompleteError(
            f"tensors of {wanted.config['fixed']['architectures'][0]} are missing", file=catalog.source.path,
            found=f"no {examples(missing)}", remedy="Copy the files of the other layers or stages, which hold them, here too.",
        )  # fmt: skip
    blocks = {match[1] for name in catalog if (match := re.search(r"\.(\d+)\.", name))}
    return {key: catalog[name].shape[dim] for key, (name, dim) in sizes.items()} | {
        wanted.config["layers"]: len(blocks)
    }


def check_config(config: Mapping[str, object], wanted: Architecture, catalog: Catalog) -> None:
    """Checks that a config is of the architecture and has the tensors' sizes.

    Raises:
        InconsistentError: it is of another model.
    """
    data = wanted.config
    if config.get("model_type") != data["fixed"]["model_type"]:
        raise InconsistentError(
            "the config is of another architecture", found=f"model_type {config.get('model_type')!r}",
            expected=f"model_type {data['fixed']['model_type']!r}", file=catalog.source.path,
            remedy="Pass the config.json of this model with --config, or another --to.",
        )  # fmt: skip
    found = _sizes(wanted, catalog)
    wrong = [
        f"{key} {config[key]}, but {size:,} in the tensors"
        for key, size in found.items()
        if config.get(key) not in (None, size)
    ]
    if wrong:
        raise InconsistentError(
            "the config does not fit the tensors", file=catalog.source.path, found="; ".join(wrong),
            remedy="Pass the config.json of this model with --config.",
        )  # fmt: skip


def _activation(arguments: Mapping[str, object], path: str) -> str:
    """The activation function by transformers' name. Megatron's fused GELU uses tanh."""
    name = arguments.get("activation") or ("gelu_new" if arguments.get("openai_gelu") else "gelu")
    if name == "gelu":
        return "gelu_fast" if arguments.get("bias_gelu_fusion") else "gelu"
    if name not in ("gelu_new", "relu", "silu"):
        raise UnsupportedError(
            "the activation function has no name in transformers", file=path, found=str(name),
            remedy="Pass the model's config.json with --config.",
        )  # fmt: skip
    return str(name)
