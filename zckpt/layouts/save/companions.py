"""The small files beside weights: config, tokenizer, processor, model code; and those without which a run does not go on as it
was.

For `convert`, `reshard` and `hub`. Trainers put those that make weights loadable beside the tag directories of a checkpoint.
The others, which a Trainer and Accelerate keep beside a save, `reshard`, `to-universal` and `to-dcp` copy byte for byte;
nothing in them is ever unpickled. Random states are files of ranks, so those of ranks that the new run does not have are left
out.
[Note: names of random states] transformers' Trainer looks for `rng_state_{rank}.pth`, and alone for `rng_state.pth`; both hold
the same entries. Accelerate looks for `random_states_{rank}.pkl`, alone too.
Source: transformers 5.23, trainer.py `_save_checkpoint`, `_load_rng_state`; accelerate 1.15, checkpointing.py,
utils/constants.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

from zckpt.base import words
from zckpt.base.errors import CorruptError, ZckptError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.core.dtypes import DType
from zckpt.core.plan import OutputFile, literal_file
from zckpt.core.stores import FileStore
from zckpt.layouts.save import trainers
from zckpt.storage.identity import leads_out_of
from zckpt.storage.location import Location

_MOST_BYTES = 16 << 20
"""The most bytes of a config."""

_KINDS = ("model_type", "_class_name")
"""Keys, one for transformers and one for diffusers; a model's config has one of them."""

_INNER = ("huggingface", ".hf_metadata", "policy/huggingface")
_TOKENIZERS = ("tokenizer", "policy/tokenizer")
"""Directories in which programs keep a model's config and tokenizer, and the tokenizer alone: verl's and Accelerate's, those of
NeMo Automodel, of NeMo-RL and of Megatron Bridge."""

_CAUSAL = "ForCausalLM"
_ENDS = ("score.weight", "score.bias", "lm_head.weight")

# What makes a directory of weights loadable. Everything else stays where it is.
_BESIDE = compile_late(
    r"generation_config\.json|tokenizer[\w.-]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt"
    r"|\w*\.(?:model|tiktoken)|(?:pre|image_|video_|feature_)?processor_config\.json|preprocessor_config\.json"
    r"|chat_template\.(?:json|jinja)|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)

_OF_TOKENIZER = compile_late(r"tokenizer[\w.-]*|\w*\.(?:model|tiktoken)|vocab\.(?:json|txt)|merges\.txt")


def config_file(config: Mapping[str, object] | None, dtype: DType) -> tuple[OutputFile, FileStore] | None:
    """The model's `config.json` with the dtype of the output's weights; None where there is no config."""
    if config is None:
        return None
    text = json.dumps(with_dtype(config, dtype), indent=2, ensure_ascii=False) + "\n"
    return literal_file("config.json", text.encode())


def find_config(home: Location) -> tuple[dict[str, object], Location] | None:
    """The model's config in a directory, or in one of those in which programs keep it, and where it is; None where there is none.

    A `config.json` that names no type of model is not the model's: OLMo-core, for one, has its run's settings in such a file.

    Raises:
        As `config_of`.
    """
    for path in (home / "config.json", *(home / inner / "config.json" for inner in _INNER)):
        if path.is_file() and any(isinstance((config := config_of(path.path)).get(key), str) for key in _KINDS):
            return config, path
    return None


def read_config(home: Location) -> dict[str, object] | None:
    """The config that `find_config` finds; errors as there."""
    found = find_config(home)
    return None if found is None else found[0]


def read_own_config(home: Location, named: Location | None) -> dict[str, object] | None:
    """The config in a directory as it may be written to an output; None where there is none that is the checkpoint's own.

    Raises:
        As `read_config`.
    """
    found = find_config(home)
    return found[0] if found is not None and is_own(found[1], home, named) else None


def config_near(save: Location, *, plain: bool = False) -> Mapping[str, object]:
    """The config in a save or beside it; empty where there is none that can be read; arguments as for `home_of`."""
    for place in _homes(save.parent if plain and save.is_file() else save, plain):
        with suppress(ZckptError, OSError):
            if (config := read_config(place)) is not None:
                return config
    return {}


def home_of(save: Location, *, plain: bool = False) -> Location:
    """The directory that has the model's config: the first that has one, or an unreadable one; the save's own if none has.

    Args:
        save: the directory of the save.
        plain: whether it holds weights alone. What is beside these may be of the same model in another form, as beside Llama's
            `original/`; NeMo-RL's are called `weights/`, or lie in `weights/model/`.
    """
    for place in _homes(save, plain):
        try:
            found = find_config(place)
        except (ZckptError, OSError):
            return place
        if found is not None:
            return place
    return save


def _homes(save: Location, plain: bool = False) -> list[Location]:
    """The directories in which the config of a save may be."""
    above = save.absolute().parent
    homes = [save] if plain else [save / "huggingface", save, above]
    if plain and save.name == "weights":
        homes.append(above)
    if above.name == "weights":
        homes.append(above.parent)
    return homes


def config_of(path: str) -> dict[str, object]:
    """The config in a file; errors as in `read_config`."""
    from zckpt.storage.json_files import read_json

    config = read_json(path, _MOST_BYTES, "a config.json")
    if not isinstance(config, dict):
        raise CorruptError(
            "is not a JSON object",
            file=path,
            found=type(config).__name__,
            expected="a model's config",
            remedy="Copy the config.json of the model again.",
        )
    return config


def other_class(config: Mapping[str, object] | None, names: Iterable[str]) -> str:
    """The transformers class that a model has, where its config names a causal language model; empty where it is one.

    verl makes a critic of such a model's config, which goes on to name that class. The critic has `score.weight` and `score.bias`
    in place of the head, as classes for token classification have; those for sequences, such as reward models, have no bias.
    Source: transformers 5.23, modeling_layers.py `GenericForTokenClassification`, `GenericForSequenceClassification`.
    """
    said = config.get("architectures") if config is not None else None
    first = said[0] if isinstance(said, list) and said else None
    if not isinstance(first, str) or not first.endswith(_CAUSAL):
        return ""
    found = list(names)
    has_score, has_bias, has_head = (any(name.endswith(end) for name in found) for end in _ENDS)
    if not has_score or has_head:
        return ""
    return first.removesuffix(_CAUSAL) + ("ForTokenClassification" if has_bias else "ForSequenceClassification")


def with_dtype(config: object, dtype: DType, *, top: bool = True) -> object:
    """The config with its `dtype` (transformers 5) or `torch_dtype` (4) replaced, also in nested configs."""
    if not isinstance(config, dict):
        return config
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    nested = {
        key: with_dtype(value, dtype, top=False)
        for key, value in config.items()
        if isinstance(value, dict) and key != "quantization_config"
    }
    named = dict.fromkeys(keys or (["dtype"] if top else []), dtype.torch_name)
    return {**config, **nested, **named}


def is_own(file: Location, home: Location, named: Location | None = None) -> bool:
    """Whether a file that is seen in a checkpoint lies in the checkpoint's own tree.

    A stranger's checkpoint may hold a link to any file that its reader can read, such as a private key. What such a link leads
    to is never written to an output, nor published.

    Args:
        file: the file.
        home: the directory that has config and tokenizer files, or another one of the checkpoint.
        named: the path that a person gave, which may be a directory above `home`.
    """
    if file.is_remote or home.is_remote:
        return True
    return not leads_out_of(file.path, home.path, *([] if named is None else [named.path]))


def note_of_links(names: Iterable[str]) -> tuple[str, ...]:
    """A sentence on files that are not copied because they are not the checkpoint's own; empty if there are none."""
    found = sorted(set(names))
    if not found:
        return ()
    text = (
        "a link that leads out of the checkpoint, and is"
        if len(found) == 1
        else "links that lead out of the checkpoint, and are"
    )
    return (f"{examples(found, 10)}: {text} not copied. Put the file itself there if it belongs to the model.",)


def companions(home: Location, named: Location | None = None) -> tuple[list[tuple[Location, str]], tuple[str, ...]]:
    """The files beside the checkpoint that belong to the model, tokenizer, processor and code, and which were left out.

    Megatron Bridge and NeMo-RL have the tokenizer in a directory of its own, verl and others in `huggingface`, Automodel in
    `.hf_metadata`.

    Args:
        home: the directory that has them.
        named: as in `is_own`.

    Returns:
        (where a file is, its name) for each that is the checkpoint's own, and a sentence that names the others.
    """
    found = {name: home / name for name in sorted(home.file_names()) if _BESIDE.fullmatch(name)}
    for inner in (home / name for name in (*_TOKENIZERS, *_INNER)):
        if not any(_OF_TOKENIZER.fullmatch(name) for name in found) and inner.is_dir():
            found = {name: inner / name for name in sorted(inner.file_names()) if _BESIDE.fullmatch(name)} | found
    own = [(path, name) for name, path in sorted(found.items()) if is_own(path, home, named)]
    configs = (place / "config.json" for place in (home, *(home / name for name in _INNER)))
    config = next((file for file in configs if file.is_file()), None)
    seen = found if config is None else {**found, config.name: config}
    return own, note_of_links(name for name, path in seen.items() if not is_own(path, home, named))


_OF_RUN = compile_late(
    r"trainer_state\.json|training_args\.bin|adapter_config\.json|sc(?:heduler|aler)\.pt"
    r"|scheduler(?:_\d+)?\.bin|sampler(?:_\d+)?\.bin|dl_state_dict(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
)
_OF_RANK = compile_late(r"(?P<stem>rng_state_|random_states_)(?P<rank>\d+)(?P<end>\.pth|\.pkl)")
_OF_ONE = "rng_state.pth"
_OF_FIRST = "rng_state_0.pth"

Copies = list[tuple[Location, str]]
"""(where a file is, its name in the output)."""


def run_files(
    home: Location, also: Iterable[Location] = (), world_size: int | None = None, named: Location | None = None
) -> tuple[Copies, tuple[str, ...]]:
    """The files to copy, and sentences on ranks that have no random states, and on links that lead out of the checkpoint.

    Args:
        home: the directory beside the tags, or the save itself.
        also: the same on other nodes' disks, or what is above it there; of files of one name the first counts.
        world_size: ranks of the run that goes on; None where it may be any number.
        named: as in `companions.is_own`.
    """
    homes = [home.absolute().parent if trainers.FSDP_MODEL.fullmatch(home.name) else home]
    for root in also:
        homes.append(inner if (inner := root / homes[0].name).is_dir() else root)
    there: dict[str, Location] = {}
    others: set[str] = set()
    for home in homes:
        for name in sorted(home.file_names()):
            if _OF_RUN.fullmatch(name) or _OF_RANK.fullmatch(name) or name == _OF_ONE:
                if is_own(home / name, home, named):
                    there.setdefault(name, home / name)
                else:
                    others.add(name)
    left_out = note_of_links(others - there.keys())
    copies = [(place, name) for name, place in there.items() if _OF_RUN.fullmatch(name)]
    if world_size is None:
        return [(place, name) for name, place in there.items()], left_out
    if world_size == 1 and _OF_ONE not in there and _OF_FIRST in there:
        copies.append((there[_OF_FIRST], _OF_ONE))
    elif world_size > 1 and _OF_FIRST not in there and _OF_ONE in there:
        copies.append((there[_OF_ONE], _OF_FIRST))
    elif world_size == 1 and _OF_ONE in there:
        copies.append((there[_OF_ONE], _OF_ONE))
    dropped: set[int] = set()
    known: set[int] = {0} if {_OF_ONE, _OF_FIRST} & there.keys() else set()
    for name, place in there.items():
        if match := _OF_RANK.fullmatch(name):
            rank = int(match["rank"])
            known.add(rank)
            if rank >= world_size:
                dropped.add(rank)
            elif world_size > 1 or match["stem"] != "rng_state_":
                copies.append((place, name))
    return copies, _notes_on_random(dropped, known, world_size) + left_out


def _notes_on_random(dropped: set[int], known: set[int], world_size: int) -> tuple[str, ...]:
    notes: list[str] = []
    if dropped:
        whom = words.ranks(sorted(dropped))
        notes.append(f"The random states of {whom} are left out: the new run has {words.count(world_size, 'rank')}.")
    if known and (new := sorted({*range(world_size)} - known)):
        notes.append(
            f"No random states were saved for {words.ranks(new)}: they begin with the seed of the script, "
            "so dropout and other random numbers differ from a run that never stopped."
        )
    return tuple(notes)
