"""The small files that make a directory of weights loadable: the config, tokenizer and processor files, and model code.

For `convert`, `reshard` and `hub`. They lie beside the checkpoint's tag directories, where a trainer put them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from zckpt.base.errors import CorruptError
from zckpt.core.dtypes import DType
from zckpt.core.fragments import FileStore
from zckpt.core.plan import OutputFile, literal_file
from zckpt.storage import paths
from zckpt.storage.json_files import read_json

_MOST_BYTES = 16 << 20
"""Of a config."""

# What makes a directory of weights loadable, where it lies beside the checkpoint. Everything else stays where it is.
_BESIDE = re.compile(
    r"generation_config\.json|tokenizer[\w.-]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt"
    r"|\w*\.(?:model|tiktoken)|(?:pre|image_|video_|feature_)?processor_config\.json|preprocessor_config\.json"
    r"|chat_template\.(?:json|jinja)|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)


def config_file(
    home: str, dtype: DType, config: Mapping[str, object] | None = None
) -> tuple[OutputFile, FileStore] | None:
    """The model's `config.json`, in which the dtype is made true; None where there is none.

    Args:
        home: where it lies.
        dtype: of the weights.
        config: what it says; None for what the file does.

    Raises:
        As `read_config`.
    """
    if config is None:
        config = read_config(home)
        if config is None:
            return None
    text = json.dumps(true_dtype(config, dtype), indent=2, ensure_ascii=False) + "\n"
    return literal_file("config.json", text.encode())


def read_config(home: str) -> dict[str, object] | None:
    """The `config.json` in a directory; None where there is none.

    Raises:
        CorruptError: it is no JSON object. NotACheckpointError: it cannot be read.
    """
    path = os.path.join(home, "config.json")
    return config_of(path) if paths.is_file(path) else None


def config_of(path: str) -> dict[str, object]:
    """The config in a file; errors as in `read_config`."""
    config = read_json(path, _MOST_BYTES, "a config.json")
    if not isinstance(config, dict):
        raise CorruptError("a config.json that is not an object", file=path, found=type(config).__name__)
    return config


def true_dtype(config: object, dtype: DType, *, top: bool = True) -> object:
    """A model's config with `dtype` (transformers 5) or `torch_dtype` (4) made true, in those nested in it too."""
    if not isinstance(config, dict):
        return config
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    nested = {
        key: true_dtype(value, dtype, top=False)
        for key, value in config.items()
        if isinstance(value, dict) and key != "quantization_config"
    }
    named = dict.fromkeys(keys or (["dtype"] if top else []), dtype.torch_name)
    return {**config, **nested, **named}


def companions(home: str) -> list[tuple[str, str]]:
    """(path, name) of what lies beside the checkpoint and belongs to the model: tokenizer, processor, code."""
    return [(os.path.join(home, name), name) for name in sorted(paths.file_names(home)) if _BESIDE.fullmatch(name)]
