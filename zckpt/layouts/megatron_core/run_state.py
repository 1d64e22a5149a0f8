"""What a Megatron-Core save says of its run, beside the tensors: arguments, sizes, counters, the kind of optimizer.

For `megatron_core`. The common state is `common.pt`, or in newer versions the item `common_state/shard_0_1`; Megatron Bridge adds
`run_config.yaml`, NeMo 2 `context/model.yaml`. All of it is optional: a save of weights may say nothing.
Source: Megatron-LM, megatron/training/checkpointing.py `generate_state_dict` (core 0.9 - 0.16.1); Megatron Bridge,
training/checkpointing.py; NeMo 2, lightning/io/pl.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsafeError, UnsupportedError, ZckptError
from zckpt.containers import Placeholder, brief, mapping_at, value_at
from zckpt.core.catalog import Topology
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Metadata
from zckpt.layouts.megatron_core import COMMON, CONFIG
from zckpt.layouts.run.values import step_of
from zckpt.layouts.save.listing import Listing
from zckpt.storage.identity import stays_inside
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

_DIGESTS = "integrity.json"
_COMMON_ITEM = "common_state"
_MOST_YAML_BYTES = 1 << 20
_MOST_JSON_BYTES = 1 << 20
_MOST_DIGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """What a save says of its run.

    Attributes:
        common: the common state; inert values.
        config: what a YAML file of Bridge or NeMo says; empty where there is none.
    """

    common: Mapping[str, object] = field(default_factory=dict[str, object])
    config: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def arguments(self) -> Mapping[str, object]:
        """The arguments of the run, or the model's section of its config, by name."""
        kept = self.common.get("args")
        state = kept.state if isinstance(kept, Placeholder) else kept
        if isinstance(state, Mapping) and state:
            return state
        return mapping_at(self.config.get("model", self.config))

    @property
    def step(self) -> int | None:
        """Optimizer steps; None where they are not recorded."""
        return step_of(self.common.get("iteration"))

    @property
    def sharding(self) -> str:
        """The layout of the optimizer's states, by Megatron-Core's name for it; empty where it is not recorded."""
        if isinstance(kind := value_at(self.common, "content_metadata", "distrib_optim_sharding_type"), str):
            return kind
        for own in self.optimizers():
            if isinstance(kind := own.get("param_state_sharding_type"), str):
                return kind
        return ""

    def optimizers(self) -> Iterator[Mapping[object, object]]:
        """The state of each optimizer, as far as it is the same on all ranks; several where experts have their own."""
        held = self.common.get("optimizer")
        if isinstance(held, Mapping):
            chained = [value for key, value in held.items() if type(key) is int and isinstance(value, Mapping)]
            yield from chained or [held]
        elif isinstance(held, list):
            yield from (value for value in held if isinstance(value, Mapping))

    def number(self, *names: str) -> int | None:
        """The first whole number among arguments of these names."""
        values = (self.arguments.get(name) for name in names)
        return next((value for value in values if type(value) is int), None)

    def topology(self, files: int) -> Topology:
        """The ranks per axis; `files`: the number of ranks that wrote, taken for data ranks where nothing else is
        known.
        """
        tp, pp = (max(self.number(f"{axis}_model_parallel_size") or 1, 1) for axis in ("tensor", "pipeline"))
        ep = max(self.number("expert_model_parallel_size") or 1, 1)
        dp = self.number("data_parallel_size")
        if dp is None and (world := self.number("world_size")) is not None:
            dp = world // (tp * pp * max(self.number("context_parallel_size") or 1, 1))
        return Topology(dp=max(dp or -(-files // (tp * pp)), 1), tp=tp, pp=pp, ep=ep)

    def extras(self) -> dict[str, object]:
        """The extras that naming and other jobs use: `args`, `checkpoint_version`, and the config of the run."""
        version = self.common.get("checkpoint_version")
        found = {"args": self.arguments, "run_config": self.config, "checkpoint_version": version}
        return {name: value for name, value in found.items() if value}

    def details(self) -> tuple[tuple[str, str], ...]:
        """Rows for a person: (label, text)."""
        sizes = [(name, self.number(*keys)) for name, keys in _SIZES]
        texts = [f"{name} {value:,}" for name, value in sizes if value is not None]
        rows = [("model", ", ".join(texts))] if texts else []
        return (*rows, *([("sharding", self.sharding)] if self.sharding else []))


_SIZES = (
    ("layers", ("num_layers",)),
    ("hidden", ("hidden_size",)),
    ("heads", ("num_attention_heads",)),
    ("query groups", ("num_query_groups",)),
    ("head size", ("kv_channels",)),
    ("ffn", ("ffn_hidden_size",)),
    ("experts", ("num_experts", "num_moe_experts")),
    ("vocabulary", ("padded_vocab_size", "vocab_size")),
    ("context ranks", ("context_parallel_size",)),
)


def backend(listing: Listing) -> str:
    """The format that `metadata.json` names; empty where there is no such file, or another program wrote it."""
    if CONFIG not in listing.files:
        return ""
    try:
        found = read_json(listing.files[CONFIG].path, _MOST_JSON_BYTES, "a metadata.json")
    except ZckptError:
        return ""  # the names of the tensors tell it too
    kind = found.get("sharded_backend") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else ""


def digests(listing: Listing) -> dict[str, str]:
    """File name -> SHA-256, as `integrity.json` lists them; empty where there is no such file.

    Raises:
        CorruptError: it cannot be read. UnsafeError: it names files elsewhere. UnsupportedError: it is of another algorithm.
    """
    if _DIGESTS not in listing.files:
        return {}
    path = listing.files[_DIGESTS].path
    found = read_json(path, _MOST_DIGEST_BYTES, "an integrity.json")
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise CorruptError("is not an integrity.json", file=path, found=brief(found), remedy=COPY_AGAIN)
    if (kind := found.get("algorithm", "sha256")) != "sha256":
        raise UnsupportedError(
            "has checksums of another kind", file=path, found=brief(kind), expected="sha256",
            remedy="Check it with Megatron-Core, or remove the file to verify the save without it.",
        )  # fmt: skip
    for name in files:
        if not stays_inside(name.replace("\\", "/")):
            raise UnsafeError(
                "names a file elsewhere", file=path, found=brief(name), expected="files of the save",
                remedy="Do not use this checkpoint unless you know who made it. Nothing was read from there.",
            )  # fmt: skip
    return files


def run_state(listing: Listing, metadata: Metadata, items: Items) -> MegatronRun:
    """What a save says of its run; errors as those of opening its files."""
    common: object = None
    if COMMON in listing.files:
        common = listing.open(COMMON).root
    else:
        for name, item in metadata.items.items():
            if name.partition("/")[0] == _COMMON_ITEM and isinstance(item, BytesItem):
                held = items.value(item)
                common = held[0] if isinstance(held, list) and held else held
                break
        else:
            common = _of_items(metadata, items)
    return MegatronRun({str(key): value for key, value in mapping_at(common).items()}, _config(listing))


def _of_items(metadata: Metadata, items: Items) -> dict[str, object]:
    """The common state of a `fsdp_dtensor` save, which has items of its own for it."""
    wanted = ("args", "iteration", "checkpoint_version", "content_metadata")
    found = {name: metadata.items.get(name) for name in wanted}
    return {name: items.value(item) for name, item in found.items() if isinstance(item, BytesItem)}


def _config(listing: Listing) -> dict[str, object]:
    """The config that Bridge or NeMo keeps as YAML; empty where there is none, or it names Python's objects."""
    directory = listing.directory
    if not directory.is_dir():
        return {}
    for path in (
        directory / "run_config.yaml",
        directory.parent / "run_config.yaml",
        directory.parent / "context" / "model.yaml",
    ):
        if (found := _yaml(path)) is not None:
            return found
    return {}


def _yaml(path: Location) -> dict[str, object] | None:
    if not path.is_file() or path.size() > _MOST_YAML_BYTES:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read(_MOST_YAML_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError, ZckptError):
        return None
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else None
