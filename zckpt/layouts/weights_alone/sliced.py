"""Reads slices of tensor-parallel ranks that only rules can join: Llama's original files, NeMo 1, Neuron's NxD.

- Llama, `consolidated.00.pth` and so on beside `params.json`: `wq`, `wk`, `wv`, `w1`, `w3` and `output` are cut by rows, `wo` and
  `w2` by columns, the embedding by columns (Llama 2) or rows (Llama 3), which shapes tell. Where there are more ranks than heads
  of keys, several ranks hold the same ones. Rows of `wq` and `wk` lie in pairs, as they are saved.
- NeMo 1, a tar archive `.nemo`, or its files unpacked: `model_config.yaml`, and `model_weights.ckpt` in it or in a directory
  `mp_rank_TT` or `tp_rank_TT_pp_rank_PPP` of each rank. Names and rules are Megatron-LM's; each stage numbers its layers from 0.
- NxD, `model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt`: names and rules are transformers', or `--tp-rules`. With `xser`, a file has
  numbers in place of tensors, which lie in `<file>.tensors/tensor_N.pt`.
Source: transformers 4.57, models/llama/convert_llama_weights_to_hf.py `write_model`, mixtral/convert_mixtral_weights_to_hf.py;
llama-models, models/llama3/model.py; NeMo 1.23, nemo/collections/nlp/parts/nlp_overrides.py `NLPSaveRestoreConnector`;
neuronx_distributed, trainer/checkpoint.py, parallel_layers/layers.py, torch_xla/utils/serialization.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, TensorRef, value_at
from zckpt.core.catalog import Catalog, Replica, Source, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.layouts.joining.rules import check_loads, rules_of_file, unknown_rule
from zckpt.layouts.joining.slices import Joint, join, join_along, join_replicas
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import Shape, as_mapping, as_tensor, flatten, root_of, views_of, whole
from zckpt.layouts.weights_alone import LLAMA, NEMO, NXD
from zckpt.storage.json_files import read_json

_PARAMS = "params.json"
_CONFIG = "model_config.yaml"
_MOST_BYTES = 1 << 20
_EMBEDDING = "tok_embeddings.weight"
_IN_LAYER = (
    "attention.wq.weight", "attention.wk.weight", "attention.wv.weight", "attention.wo.weight", "feed_forward.w1.weight",
    "feed_forward.w2.weight", "feed_forward.w3.weight", "attention_norm.weight", "ffn_norm.weight",
)  # fmt: skip
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_SETTING = re.compile(r"^([a-z_]+):[ \t]*['\"]?([\w.-]+)['\"]?[ \t]*(?:#.*)?$", re.MULTILINE)
"""The pattern of a setting at the top of a YAML file that is one word; others are not needed."""


class RankState(NamedTuple):
    """What one rank holds: the path of its file, and its tensors by name."""

    file: str
    tensors: Mapping[str, TensorRef]


Join = Callable[[str, Sequence[Shape]], Joint | None]


def _join_ranks(ranks: Sequence[RankState], joint_of: Join, directory: str) -> Iterator[TensorEntry]:
    """The whole tensors of ranks that each hold a slice.

    Raises:
        InconsistentError: they do not hold the same tensors. CorruptError: they hold none. UnsupportedError: no rule joins one.
    """
    if not ranks[0].tensors:
        raise CorruptError("holds no tensors", file=ranks[0].file, expected="a state dict", remedy=COPY_AGAIN)
    for rank in ranks[1:]:
        if odd := sorted(ranks[0].tensors.keys() ^ rank.tensors.keys()):
            raise InconsistentError(
                "holds other tensors than the first rank", file=rank.file, found=f"{examples(odd)} in one of them",
                expected=f"the {len(ranks[0].tensors):,} tensors of {ranks[0].file!r}", remedy=OTHER_SAVE,
            )  # fmt: skip
    for name in ranks[0].tensors:
        slices = [whole(name, rank.tensors[name], "parameter") for rank in ranks]
        shapes = [one.shape for one in slices]
        joint = join_replicas(shapes) if len(slices) == 1 else joint_of(name, shapes)
        if joint is None:
            raise unknown_rule(name, shapes, directory)
        yield join(name, slices, joint)


def _add_stage(tensors: dict[str, TensorEntry], entry: TensorEntry, stage: int) -> None:
    """Adds a tensor of a stage; one that an earlier stage has too is a copy, which checks compare."""
    if (known := tensors.get(entry.name)) is not None:
        copy = Replica(entry.dtype, entry.fragments, f"stage {stage}", True)
        entry = replace(known, replicas=(*known.replicas, copy))
    tensors[entry.name] = entry


def _catalog(
    listing: Listing, layout: str, tensors: Mapping[str, TensorEntry], refs: Sequence[RankState], evidence: Evidence,
    topology: Topology, notes: Sequence[str],
) -> Catalog:  # fmt: skip
    source = Source(layout, listing.directory.path, listing.tag, (layout, ""), notes=tuple(dict.fromkeys(notes)))
    views = tuple(views_of(ref for rank in refs for ref in rank.tensors.values()))
    return Catalog(tensors, source, evidence, topology=topology, views=views)


# -- Llama's original files --------------------------------------------------------------------------------------------


def match_llama(listing: Listing) -> str | None:
    """None when the files are Llama's original ones; opens the first."""
    none = "no consolidated.*.pth of Llama with params.json"
    if _PARAMS not in listing.files or any(name.startswith(("model.", "pytorch_model.")) for name in listing.files):
        return none
    root = listing.open(listing.matching(LLAMA)[0]).root
    return None if isinstance(root, Mapping) and {_EMBEDDING, "norm.weight"} <= root.keys() else none


def read_llama(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of Llama's original files.

    Raises:
        IncompleteError: ranks are missing. InconsistentError: they do not fit `params.json`, or each other.
        CorruptError: `params.json` cannot be read. UnsupportedError: no rule joins a tensor.
    """
    del allow_unknown
    params = _read_params(listing)
    notes: list[str] = []
    names = sorted(listing.matching(LLAMA))
    numbers = {name: int(match[1]) for name in names if (match := LLAMA.fullmatch(name))}
    ranks = [RankState(listing.files[name].path, flatten(_root(listing, name), notes)) for name in names]
    output = ranks[0].tensors.get("layers.0.attention.wo.weight")
    columns = output.shape[1] if output is not None and len(output.shape) == 2 else 0
    total = params.heads * params.head_size // columns if columns else len(ranks)
    if not 0 < total <= limits.RANKS or (columns and total * columns != params.heads * params.head_size):
        raise InconsistentError(
            "is not of this model", file=ranks[0].file, found=f"'layers.0.attention.wo.weight' with {columns:,} columns",
            expected=f"a part of {params.heads * params.head_size:,}, as {_PARAMS!r} says", remedy=OTHER_SAVE,
        )  # fmt: skip
    if lacking := sorted({*range(total)} - {*numbers.values()}):
        raise missing_ranks(listing, "consolidated", sorted(numbers.values()), lacking, total)
    if len(ranks) > total:
        raise InconsistentError(
            "holds files of several models", file=listing.directory, found=examples(names), expected=f"{total} files",
            remedy=OTHER_SAVE,
        )  # fmt: skip
    tensors = {entry.name: entry for entry in _join_llama(ranks, params, listing)}
    wanted = {f"layers.{layer}.{name}" for layer in range(params.layers) for name in _IN_LAYER}
    wanted |= {_EMBEDDING, "norm.weight", "output.weight"}
    evidence = Evidence("unknown", f"{_PARAMS!r} does not say all tensors of this kind of model")
    if wanted <= tensors.keys():
        evidence = Evidence("shapes", f"{_PARAMS}, which says the sizes of the model")
    return _catalog(listing, "Llama", tensors, ranks, evidence, Topology(tp=len(ranks)), notes)


class _Params(NamedTuple):
    """The facts of a model in `params.json`."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int


def _read_params(listing: Listing) -> _Params:
    file = listing.files[_PARAMS].path
    said = as_mapping(read_json(file, _MOST_BYTES, "a model's parameters"), "its content", file)
    said = as_mapping(said.get("model", said), "'model'", file)
    dim, layers, heads = (said.get(key) for key in ("dim", "n_layers", "n_heads"))
    kv_heads = heads if said.get("n_kv_heads") is None else said["n_kv_heads"]
    numbers = [value for value in (dim, layers, heads, kv_heads) if type(value) is int and 0 < value < 1 << 31]
    head_size = said.get("head_dim") or (numbers[0] // numbers[2] if len(numbers) == 4 else 0)
    if len(numbers) < 4 or type(head_size) is not int or not 0 < head_size < 1 << 31 or numbers[1] > limits.RANKS:
        raise CorruptError(
            "does not say the sizes of a model", file=file, found=examples(map(str, said)),
            expected="whole numbers called 'dim', 'n_layers' and 'n_heads'", remedy=COPY_AGAIN,
        )  # fmt: skip
    return _Params(numbers[0], numbers[1], numbers[2], numbers[3], head_size)


def _join_llama(ranks: Sequence[RankState], params: _Params, listing: Listing) -> Iterator[TensorEntry]:
    rules = rules_of_file(listing.options.tp_rules or "llama")
    rows = {"wk.weight": params.kv_heads * params.head_size, "wv.weight": params.kv_heads * params.head_size}

    def joint_of(name: str, shapes: Sequence[Shape]) -> Joint | None:
        if name == _EMBEDDING and len(shapes[0]) == 2:
            return join_along(shapes, 0 if shapes[0][1] == params.dim else 1)
        return rules.joint(name, shapes)

    for entry in _join_ranks(ranks, joint_of, listing.directory.path):
        wanted = rows.get(entry.name.rpartition(".attention.")[2])
        times = entry.shape[0] // wanted if wanted and entry.shape[0] % wanted == 0 else 1
        if len(ranks) % times or times < 2:
            yield entry
            continue
        held = [
            [whole(entry.name, rank.tensors[entry.name], "parameter") for rank in ranks[n::times]] for n in range(times)
        ]
        joined = [join(entry.name, own, join_along([one.shape for one in own], 0)) for own in held]
        copies = (Replica(one.dtype, one.fragments, f"rank {n}", True) for n, one in enumerate(joined[1:], 1))
        yield replace(joined[0], replicas=tuple(copies))


# -- NeMo 1 ------------------------------------------------------------------------------------------------------------


def match_nemo(listing: Listing) -> str | None:
    """None when the file is an archive of NeMo, or the files are those of one."""
    names = list(listing.files)
    if len(names) == 1 and names[0].endswith(".nemo"):
        return None
    return None if _CONFIG in listing.files and listing.matching(NEMO) else f"no .nemo archive, nor {_CONFIG!r} of one"


def read_nemo(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of an archive of NeMo 1, or of its files; errors as in `read_llama`. Raises UnsupportedError if the
    archive holds weights in another form.
    """
    del allow_unknown
    notes: list[str] = []
    file = listing.directory.path
    if listing.matching(NEMO):
        roots: dict[str, object] = {name: listing.open(name).root for name in listing.matching(NEMO)}
        config = listing.files[_CONFIG].read(_MOST_BYTES).decode(errors="replace")
    else:
        container = listing.open(next(iter(listing.files)))
        roots = dict(as_mapping(container.root, "its content", file))
        config = container.metadata.get(_CONFIG, "")
    settings = dict(_SETTING.findall(config))
    by_rank: dict[tuple[int, int], str] = {}
    for name in roots:
        match = NEMO.fullmatch(name)
        by_rank[(int(match["pp"] or 0), int(match["tp"] or 0)) if match else (0, 0)] = name
    tp, pp = (_size(settings, f"{kind}_model_parallel_size", file) for kind in ("tensor", "pipeline"))
    tp, pp = tp or 1 + max(rank for _, rank in by_rank), pp or 1 + max(stage for stage, _ in by_rank)
    if (_size(settings, "virtual_pipeline_model_parallel_size", file) or 1) > 1:
        raise UnsupportedError(
            "is of a run with virtual pipeline stages", file=file, found="virtual_pipeline_model_parallel_size",
            expected="stages that are one part of the model", remedy="Save it with NeMo for one pipeline stage.",
        )  # fmt: skip
    if lacking := next(
        ((stage, rank) for stage in range(pp) for rank in range(tp) if (stage, rank) not in by_rank), None
    ):
        raise IncompleteError(
            "ranks are missing", file=file, found=examples(by_rank.values()),
            expected=f"files of {tp} x {pp} ranks, such as tensor rank {lacking[1]} of stage {lacking[0]}",
            remedy="Copy the directories of all ranks here, or use another archive.",
        )  # fmt: skip
    ranks = {
        key: RankState(name, flatten(as_mapping(roots[name], repr(name), file), notes)) for key, name in by_rank.items()
    }
    if tp > 1 and not settings and not listing.options.tp_rules:
        raise UnsupportedError(
            "does not say how its ranks' slices are joined", file=file, found=f"no settings in {_CONFIG!r}",
            expected="the settings of the run, among them its activation", remedy="Pass rules with --tp-rules.",
        )  # fmt: skip
    # a run without the key has the activation gelu: NeMo 1, megatron_gpt_model.py `cfg.get('activation', 'gelu')`
    gated = settings.get("activation", "gelu").removeprefix("fast-") in ("swiglu", "geglu", "reglu")
    rules = rules_of_file(listing.options.tp_rules or ("megatron-swiglu" if gated else "megatron"))
    layers = _size(settings, "num_layers", file)
    tensors: dict[str, TensorEntry] = {}
    before = 0
    for stage in range(pp):
        own = [ranks[stage, rank] for rank in range(tp)]
        numbers = {int(match[2]) for match in map(_LAYER.fullmatch, own[0].tensors) if match}
        for entry in _join_ranks(own, rules.joint, file):
            _add_stage(tensors, replace(entry, name=_renumber(entry.name, before)), stage)
        before += 1 + max(numbers, default=-1)
    evidence = Evidence("unknown", f"{_CONFIG!r} does not say how many layers there are", "num_layers in it")
    if layers is not None and before != layers:
        raise IncompleteError(
            "layers are missing", file=file, found=f"{before} layers", expected=f"{layers}, as {_CONFIG!r} says",
            remedy="Copy the directories of all stages here, or use another archive.",
        )  # fmt: skip
    if layers is not None and settings.keys() >= {"tensor_model_parallel_size", "pipeline_model_parallel_size"}:
        evidence = Evidence("metadata", f"the ranks and layers that {_CONFIG} says")
    return _catalog(listing, "NeMo", tensors, list(ranks.values()), evidence, Topology(tp=tp, pp=pp), notes)


def _renumber(name: str, before: int) -> str:
    match = _LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + before}{match[3]}" if match else name


def _size(settings: Mapping[str, str], key: str, file: str) -> int | None:
    text = settings.get(key, "")
    if text in ("", "null", "None"):
        return None
    if not text.isdecimal() or not 0 < int(text[:12]) <= limits.RANKS:
        raise CorruptError(
            f"its {_CONFIG!r} has no usable {key}", file=file, found=repr(text[:40]), expected="a whole number",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    return int(text)


# -- Neuron's NxD ------------------------------------------------------------------------------------------------------


def read_nxd(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of what NxD saved of a model; errors as in `read_llama`."""
    del allow_unknown
    notes: list[str] = []
    ranks: dict[tuple[int, int], RankState] = {}
    for name in listing.matching(NXD):
        match = NXD.fullmatch(name)
        if match is None or match["ep"]:
            raise UnsupportedError(
                "is of a run with expert-parallel ranks", file=listing.files[name].path, found=name,
                expected="tensor- and pipeline-parallel ranks", remedy="Merge it with neuronx_distributed's own converter.",
            )  # fmt: skip
        if not int(match["dp"]):
            state = _with_tensors(listing, name, _root(listing, name))
            ranks[int(match["pp"]), int(match["tp"])] = RankState(listing.files[name].path, flatten(state, notes))
    tp, pp = 1 + max(rank for _, rank in ranks), 1 + max(stage for stage, _ in ranks)
    if lacking := [f"tp_rank_{t:02d}_pp_rank_{p:02d}" for p in range(pp) for t in range(tp) if (p, t) not in ranks]:
        raise IncompleteError(
            "ranks are missing", file=listing.directory, found=f"no file of {examples(lacking)}", expected=f"{tp} x {pp} files",
            remedy="Copy the files of all ranks here (--also DIR lays further directories over this one).",
        )  # fmt: skip
    rules = rules_of_file(listing.options.tp_rules or "transformers")
    if listing.options.tp_rules:
        check_loads(rules, [*ranks[0, 0].tensors])
    elif tp > 1:
        notes.append("Slices were joined by the rules 'transformers'; --tp-rules takes others.")
    tensors: dict[str, TensorEntry] = {}
    for stage in range(pp):
        for entry in _join_ranks([ranks[stage, rank] for rank in range(tp)], rules.joint, listing.directory.path):
            _add_stage(tensors, entry, stage)
    evidence = Evidence(
        "unknown", "the files do not say over how many ranks the model was cut", "a config.json of the model"
    )
    return _catalog(listing, "NxD", tensors, list(ranks.values()), evidence, Topology(tp=tp, pp=pp), notes)


def _with_tensors(listing: Listing, name: str, state: Mapping[str, object]) -> dict[str, object]:
    """The state dict with tensors in place of their numbers: `xser` puts each tensor into a file of its own. Raises
    IncompleteError if such a file is missing.
    """
    found: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, Placeholder) and value.name == "TensorReference":
            file = f"{name}.tensors/tensor_{value_at(value.state, 'tid')}.pt"
            if file not in listing.files:
                raise IncompleteError(
                    f"has no file of tensor {key!r}", file=listing.directory, found=f"no {file!r}",
                    expected="a file for each tensor", remedy="Copy the directory of that rank's tensors too.",
                )  # fmt: skip
            value = as_tensor(listing.open(file).root, "its content", listing.files[file].path)
        found[key] = value
    return found


def _root(listing: Listing, name: str) -> Mapping[str, object]:
    root = root_of(listing, name)
    inner = root.get("model")
    has_tensors = any(isinstance(value, TensorRef) for value in root.values())
    return inner if isinstance(inner, Mapping) and not has_tensors else root
