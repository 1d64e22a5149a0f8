"""What lies beside a checkpoint and goes along with its weights: configuration, tokenizer, processor.

For `convert` and `hub`: it makes a directory of weights one that `transformers` loads. Only files of known names go along.
"""

from __future__ import annotations

import json
import os
import re

from zckpt import files
from zckpt.checkpoint import Opened
from zckpt.dtypes import DType
from zckpt.errors import OutputError, ZckptError
from zckpt.fragments import FileStore
from zckpt.layouts.huggingface import Destination, literal_file
from zckpt.plan import OutputFile

_NAMES = re.compile(
    r"generation_config\.json|tokenizer[\w.-]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt"
    r"|\w*\.(?:model|tiktoken)|(?:pre|image_|video_|feature_)?processor_config\.json|preprocessor_config\.json"
    r"|chat_template\.(?:json|jinja)|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)


def read_config(opened: Opened) -> dict[str, object]:
    """The model's configuration, from `config.json` beside the checkpoint; empty where there is none.

    Raises:
        OutputError: it cannot be read.
    """
    path = os.path.join(opened.place.home, "config.json")
    if not files.is_file(path):
        return {}
    try:
        config = json.loads(files.read(path))
    except ZckptError:
        raise
    except (OSError, ValueError) as error:
        raise OutputError("a config.json that cannot be read", file=path, found=str(error)) from error
    return config if isinstance(config, dict) else {}


def with_config(destination: Destination, opened: Opened, dtype: DType) -> Destination:
    """With `config.json`, in which the dtype is made true."""
    config = config_file(opened, dtype)
    return Destination((*destination.files, config), destination.entries) if config else destination


def config_file(opened: Opened, dtype: DType) -> tuple[OutputFile, FileStore] | None:
    """The model's `config.json`, in which the dtype is made true; None where there is none.

    Raises:
        OutputError: it cannot be read.
    """
    config = read_config(opened)
    if not config:
        return None
    text = json.dumps(_true_dtype(config, dtype), indent=2, ensure_ascii=False) + "\n"
    return literal_file("config.json", text.encode())


def _true_dtype(config: object, dtype: DType, *, top: bool = True) -> object:
    """`dtype` (transformers 5) or `torch_dtype` (4), in the config and those nested in it."""
    if not isinstance(config, dict):
        return config
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    nested = {
        key: _true_dtype(value, dtype, top=False)
        for key, value in config.items()
        if isinstance(value, dict) and key != "quantization_config"
    }
    named = dict.fromkeys(keys or (["dtype"] if top else []), dtype.torch_name)
    return {**config, **nested, **named}


def companions(opened: Opened) -> list[tuple[str, str]]:
    """(path, name) of what lies beside the checkpoint and belongs to the model: tokenizer, processor, code."""
    home = opened.place.home
    return [(os.path.join(home, name), name) for name in sorted(files.file_names(home)) if _NAMES.fullmatch(name)]
