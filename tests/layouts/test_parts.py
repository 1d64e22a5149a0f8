"""A path that is one part of a save: the whole is taken, or the rest is named; `as_part` takes the part knowingly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors.torch import load_file, save_file
from small_llama import CONFIG as LLAMA
from small_llama import weights as weights_of_llama

import zckpt
from zckpt.base.errors import IncompleteError, InconsistentError, UsageError, ZckptError
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import Options
from zckpt.layouts.save.folder import list_folder
from zckpt.layouts.save.series import meaning_of, numbers_in, series_of
from zckpt.layouts.save.weight_files import files_counted_with
from zckpt.storage import location
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    torch.manual_seed(0)
    return {f"layers.{i}.{part}": torch.randn(6, 4) for i in range(3) for part in ("up", "down")}


def halves(whole: Tensors) -> tuple[Tensors, Tensors]:
    names = list(whole)
    return {n: whole[n] for n in names[:3]}, {n: whole[n] for n in names[3:]}


def write(state: Tensors, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)


def write_index(path: Path, shards: dict[str, Tensors]) -> None:
    path.write_text(json.dumps({"weight_map": {name: shard for shard, own in shards.items() for name in own}}))


def assert_whole(path: Path, whole: Tensors, also: tuple[str, ...] = ()) -> zckpt.Checkpoint:
    found = zckpt.open_checkpoint(path, also=also)
    assert set(found) == set(whole)
    assert all(same_bits(found[name], whole[name]) for name in whole)
    return found


PAIRS = {
    "transformers": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "torch": ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
    "after the suffix": ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"),
    "adapters": ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"),
    "diffusers": (
        "diffusion_pytorch_model-00001-of-00002.safetensors", "diffusion_pytorch_model-00002-of-00002.safetensors",
    ),
    "from zero, with dots": ("weights.0.of.2.pt", "weights.1.of.2.pt"),
}  # fmt: skip


@pytest.mark.parametrize("names", PAIRS.values(), ids=PAIRS)
def test_one_of_counted_files(names: tuple[str, str], tmp_path: Path) -> None:
    """With an index and without: the shard, the index and the directory mean the whole; alone, a shard names the others."""
    whole = tensors()
    shards = dict(zip(names, halves(whole), strict=True))
    for name, own in shards.items():
        write(own, tmp_path / "run" / name)
    for path in (*(tmp_path / "run" / name for name in names), tmp_path / "run", f"{tmp_path}/run/"):
        assert_whole(Path(path), whole)
    catalog = open_catalog(str(tmp_path / "run" / names[0])).catalog
    assert any(f"'{names[0]}' is one of 2 files" in note for note in catalog.source.notes)
    assert catalog.evidence.level == "metadata"
    index = tmp_path / "run" / f"any{Path(names[0]).suffix}.index.json"
    write_index(index, shards)
    for path in (index, tmp_path / "run" / names[1], tmp_path / "run"):
        assert_whole(path, whole)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run" / names[0])
    (tmp_path / "run" / names[1]).rename(tmp_path / names[1])
    for path in (tmp_path / "run" / names[0], tmp_path / "run"):
        with pytest.raises(IncompleteError, match=names[1]):
            zckpt.convert(path, tmp_path / "out", progress=False)
    index.unlink()
    for path in (tmp_path / "run" / names[0], tmp_path / "run"):
        with pytest.raises(IncompleteError, match=names[1]):
            zckpt.convert(path, tmp_path / "out", progress=False)
    assert_whole(tmp_path / "run" / names[0], whole, also=(str(tmp_path),))


def test_an_index_names_files_of_any_names(tmp_path: Path) -> None:
    whole = tensors()
    shards = dict(zip(("bottom.safetensors", "top.safetensors"), halves(whole), strict=True))
    for name, own in shards.items():
        write(own, tmp_path / name)
    write_index(tmp_path / "model.safetensors.index.json", shards)
    assert_whole(tmp_path / "top.safetensors", whole)


def test_numbers_without_a_count(tmp_path: Path) -> None:
    """Shards hold tensors of other names, and it is not known how many they are; models hold the same."""
    whole = tensors()
    for number, own in enumerate(halves(whole), 1):
        for epoch in (0, 1):
            write({n: t + epoch for n, t in own.items()}, tmp_path / "tune" / f"hf_model_{number:04d}_{epoch}.pt")
    assert_whole(tmp_path / "tune" / "hf_model_0001_0.pt", whole)
    assert open_catalog(str(tmp_path / "tune" / "hf_model_0002_1.pt")).catalog.evidence.level == "unknown"
    write(whole, tmp_path / "runs" / "model_1.pt")
    write({n: t + 1 for n, t in whole.items()}, tmp_path / "runs" / "model_2.pt")
    assert_whole(tmp_path / "runs" / "model_1.pt", whole)
    with pytest.raises(IncompleteError, match=r"several models.*'model_1\.pt', 'model_2\.pt'"):
        open_catalog(str(tmp_path / "runs"))
    shutil.copy(tmp_path / "tune" / "hf_model_0002_0.pt", tmp_path / "tune" / "hf_model_0004_0.pt")
    write({"more": torch.ones(1)}, tmp_path / "tune" / "hf_model_0004_0.pt")
    with pytest.raises(IncompleteError, match=r"hf_model_0003_0\.pt"):
        open_catalog(str(tmp_path / "tune" / "hf_model_0001_0.pt"))


def test_slices_under_counted_names_are_not_shards(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tensors(), tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(InconsistentError, match="tensors of the same name"):
        open_catalog(str(tmp_path))
    catalog = open_catalog(str(tmp_path / "model-00001-of-00002.safetensors"), Reading(as_part=True)).catalog
    assert len(catalog) == 6


@pytest.mark.parametrize(
    "names",
    [
        ("consolidated.00.pth", "consolidated.01.pth"),
        ("mp_rank_00/model_weights.ckpt", "mp_rank_01/model_weights.ckpt"),
        ("tp_rank_00_pp_rank_000/model_weights.ckpt", "tp_rank_01_pp_rank_000/model_weights.ckpt"),
        ("stage_0/model.safetensors", "stage_1/model.safetensors"),
        ("expert-0/step_5/model.safetensors", "expert-1/step_5/model.safetensors"),
        ("model.rank0.pt", "model.rank1.pt"),
    ],
)
def test_slices_of_ranks_are_not_joined(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        write(tensors(), tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / names[0])
    paths = [tmp_path / names[0], tmp_path / names[1], tmp_path, tmp_path / "link"]
    for path in [*paths, *(path.parent for path in paths[:2])]:
        with pytest.raises(ZckptError) as raised:
            open_catalog(str(path))
        first, second = (name.partition("/")[0] for name in names)
        assert first in str(raised.value) and second in str(raised.value) and "global_step" not in str(raised.value)
    (tmp_path / names[0]).unlink()
    alone = open_catalog(str(tmp_path / names[1]), Reading(as_part=True)).catalog
    assert len(alone) == 6


def save_halves(run: Path, word: str) -> None:
    for number in (0, 1):
        dcp.save({"model": {n: t.chunk(2)[number].clone() for n, t in tensors().items()}},
                 checkpoint_id=run / f"{word}{number}", no_dist=True)  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("word", ["rank_", "node", "pp_rank_", "tp-", "worker", "host_", "gpu-node-"])
def test_directories_of_ranks_are_no_saves(word: str, tmp_path: Path) -> None:
    save_halves(tmp_path, word)
    for path in (tmp_path, tmp_path / f"{word}0", tmp_path / f"{word}1"):
        with pytest.raises(IncompleteError, match=rf"'{word}0', '{word}1'"):
            open_catalog(str(path))
    with pytest.raises(IncompleteError, match=f"'{word}0'"):
        open_catalog(str(tmp_path), Reading(tag=f"{word}1"))
    opened = open_catalog(str(tmp_path / f"{word}1"), Reading(as_part=True))
    assert opened.catalog["layers.0.up"].shape == (3, 4) and opened.catalog.source.part == "one of 2 parts"
    assert opened.catalog.evidence.level == "unknown"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_words_that_are_neither_time_nor_place(tmp_path: Path) -> None:
    save_halves(tmp_path, "fold_")
    with pytest.raises(IncompleteError, match="fold_0, fold_1"):
        open_catalog(str(tmp_path))
    assert open_catalog(str(tmp_path), Reading(tag="fold_1")).catalog.source.tag == "fold_1"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_save_on_two_nodes_disks(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(4, 4) for i in range(4)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "one", single_file_per_rank=False), no_dist=True)
    for number, name in enumerate(sorted(path.name for path in (tmp_path / "one").iterdir())):
        node = tmp_path / "run" / f"node_{number % 2}"
        node.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "one" / name, node / name)
    for path in (tmp_path / "run", tmp_path / "run" / "node_0", tmp_path / "run" / "node_1"):
        assert any("2 parts" in note for note in assert_whole(path, state).catalog.source.notes)
    assert_whole(tmp_path / "run" / "node_0", state, also=(str(tmp_path / "run" / "node_1"),))
    (tmp_path / "run" / "node_1" / "rank.log").touch()
    shutil.rmtree(tmp_path / "run" / "node_0")
    with pytest.raises(ZckptError):
        open_catalog(str(tmp_path / "run"))


def test_a_deepspeed_save_on_two_nodes_disks(tmp_path: Path) -> None:
    source = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"
    tag = (source / "latest").read_text()
    for path in sorted((source / tag).iterdir()):
        node = tmp_path / f"node{int('rank_1' in path.name)}"
        (node / tag).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, node / tag / path.name)
        shutil.copy(source / "latest", node / "latest")
    assert set(zckpt.open_checkpoint(tmp_path)) == set(zckpt.open_checkpoint(source))


def test_parts_of_families_given_as_files(tmp_path: Path) -> None:
    """A data file of torch.distributed.checkpoint, one rank's of FSDP, and one parameter's of a universal save."""
    zckpt.to_universal(FIXTURES / "zero2" / "bf16_w2" / "checkpoint", tmp_path / "universal")
    parameter = next((tmp_path / "universal").rglob("zero/*/fp32.pt"))
    files = [
        FIXTURES / "dcp" / "alone_w2" / "checkpoint" / "__0_0.distcp",
        FIXTURES / "ranks" / "sharded_tensors_w2" / "checkpoint" / "model_world_size_2_rank_0.pt",
        parameter, parameter.parent, parameter.parent.parent,
    ]  # fmt: skip
    for file, whole in zip(files, [files[0].parent, files[1].parent, *[tmp_path / "universal"] * 3], strict=True):
        assert set(zckpt.open_checkpoint(file)) == set(zckpt.open_checkpoint(whole))


def test_a_part_is_exported_knowingly(tmp_path: Path) -> None:
    names = PAIRS["transformers"]
    for name, own in zip(names, halves(tensors()), strict=True):
        write(own, tmp_path / "run" / name)
    shard = tmp_path / "run" / names[0]
    zckpt.convert(shard, tmp_path / "part", options=Options(as_part=True), progress=False)
    assert set(load_file(tmp_path / "part" / "model.safetensors")) == set(halves(tensors())[0])
    assert json.loads((tmp_path / "part" / "zckpt.json").read_text())["source"]["part"] == "one of 2 files"
    found = zckpt.verify(shard, tmp_path / "part", as_part=True, progress=False)
    assert (
        found.ok and found.deletable is not None and not found.deletable[0] and "one of 2 files" in found.deletable[1]
    )
    assert not zckpt.verify(shard, tmp_path / "part", progress=False).ok
    whole = open_catalog(str(tmp_path / "run"), Reading(as_part=True)).catalog.source
    assert not whole.part and any("as it is" in note for note in whole.notes)


def test_links_to_parts_under_other_names(tmp_path: Path) -> None:
    for name, own in zip(PAIRS["transformers"], halves(tensors()), strict=True):
        write(own, tmp_path / "run" / name)
    (tmp_path / "weights.safetensors").symlink_to(tmp_path / "run" / PAIRS["transformers"][1])
    assert_whole(tmp_path / "weights.safetensors", tensors())


def test_a_slice_of_llamas_files_alone(tmp_path: Path) -> None:
    """`params.json` says how wide the model is; the second slice says itself that it is not the first."""
    for number, columns in ((0, 8), (1, 8)):
        home = tmp_path / str(number)
        write({"layers.0.attention.wo.weight": torch.ones(16, columns)}, home / f"consolidated.0{number}.pth")
        (home / "params.json").write_text(json.dumps({"dim": 16, "n_heads": 4}))
        for path in (home, home / f"consolidated.0{number}.pth"):
            with pytest.raises(IncompleteError, match="not all are there") as raised:
                open_catalog(str(path))
            assert f"consolidated.0{1 - number}.pth" in raised.value.expected
    (tmp_path / "1" / "params.json").unlink()
    for path in (tmp_path / "1", tmp_path / "1" / "consolidated.01.pth"):
        with pytest.raises(IncompleteError, match="one part of a save"):
            open_catalog(str(path))


def test_what_numbers_count() -> None:
    moments = [
        "step_100",
        "global_step5",
        "ep0-ba100",
        "epoch=0-step=100.ckpt",
        "100",
        "checkpoint_1_500.pt",
        "iter_0000005",
    ]
    places = [
        "rank_0",
        "mp_rank_00_001",
        "consolidated.00.pth",
        "tp_rank_00_pp_rank_000",
        "gpu-node-17",
        "model-shard3.pt",
        "1_of_2",
    ]
    unknown = ["hf_model_0001_0.pt", "fold_1", "lora_rank_8", "version_3"]
    for names, meaning in ((moments, "moment"), (places, "place"), (unknown, "unknown")):
        assert all(word.meaning == meaning for name in names for word in numbers_in(name)), meaning
    assert series_of("mp_rank_00_001") == "mp_rank_#_#" and not series_of("step_5")
    assert meaning_of(["step_1_rank_0", "step_1_rank_1"]) == "place"
    assert meaning_of(["step_1_rank_0", "step_2_rank_0"]) == "moment"
    assert meaning_of(["step_1", "rank_1"]) == meaning_of(["step_1"]) == "unknown"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00001.safetensors", "epoch-3-of-10.pt", "model-00003-of-00002.bin"]
)
def test_names_that_count_nothing(name: str) -> None:
    assert files_counted_with(name, [name]) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_several_state_dicts_in_one_save(tmp_path: Path) -> None:
    whole, other = tensors(), {n: t + 1 for n, t in tensors().items()}
    with_head = {**other, "value_head": torch.ones(3)}
    saves: dict[str, dict[str, object]] = {
        "alike": {"policy": whole, "ref": other},
        "nearly": {"actor": whole, "critic": with_head},
        "deeper": {"policy": {"model": whole}, "ref": {"model": other}},
    }
    writers: list[Callable[[dict[str, object], Path], object]] = [
        lambda state, path: torch.save(state, path),
        lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    ]
    for name, state in saves.items():
        for number, writer in enumerate(writers):
            path = tmp_path / f"{name}{number}.pt"
            writer(state, path)
            first, second = state
            with pytest.raises(UsageError, match=f"'{first}.*'{second}.*--key {first}"):
                zckpt.convert(path, tmp_path / "out", progress=False)
            for key in state:
                chosen = f"{key}.model" if name == "deeper" else key
                opened = open_catalog(str(path), Reading(read_options=zckpt.ReadOptions(key=chosen)))
                assert set(opened.catalog) == set(with_head if (name, key) == ("nearly", "critic") else whole)
    torch.save({"encoder": whole, "decoder": other}, tmp_path / "halves.pt")
    assert len(open_catalog(str(tmp_path / "halves.pt")).catalog) == 12
    with pytest.raises(UsageError, match="does not have this key"):
        open_catalog(str(tmp_path / "alike0.pt"), Reading(read_options=zckpt.ReadOptions(key="value")))


def test_a_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tensors(), tmp_path / "run" / "step_10" / "policy" / "weights" / "model.safetensors")
    seen: list[str] = []
    kinds = location.LocalPath.kinds

    def counting(path: location.LocalPath) -> dict[str, str]:
        seen.append(path.path)
        return kinds(path)

    monkeypatch.setattr(location.LocalPath, "kinds", counting)
    open_catalog(str(tmp_path / "run"))
    assert len(seen) == len(set(seen)) == 4
    assert list_folder(locate(tmp_path)).names == ("run",)


@pytest.mark.parametrize("word", ["stage{}", "sweep_rank{}", "lora_rank{}", "exp-node-{}", "fold_{}"])
def test_runs_below_directories_with_numbers_are_runs(word: str, tmp_path: Path) -> None:
    """Of a directory that holds runs, a number in its name says nothing of the files of one of them."""

    for number in (1, 2):
        home = tmp_path / word.format(number) / "run" / "checkpoint-10"
        home.mkdir(parents=True)
        save_file({"w": torch.full((3,), float(number))}, home / "model.safetensors")
        (home / "config.json").write_text("{}")
    for given in ("run/checkpoint-10", "run"):
        with zckpt.open_checkpoint(tmp_path / word.format(2) / given) as found:
            assert found["w"].tolist() == [2.0, 2.0, 2.0]


def test_an_index_that_leaves_out_a_shard_beside_it(tmp_path: Path) -> None:
    """Half of a model would load without an error: the other tensors are made up by who loads it."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"layers.{number}.weight": torch.randn(4, 4)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"layers.0.weight": names[0]}}))
    for path in (tmp_path, index):
        with pytest.raises(InconsistentError, match="leaves out shards") as raised:
            open_catalog(str(path))
        assert names[1] in str(raised.value.found)
    index.unlink()
    assert len(open_catalog(str(tmp_path)).catalog) == 2


def test_other_weights_in_the_directory_are_no_part_of_what_was_compared(tmp_path: Path) -> None:
    save = tmp_path / "save"
    save.mkdir()
    save_file(weights_of_llama(), save / "model.safetensors")
    torch.save(weights_of_llama(), save / "pytorch_model.bin")
    (save / "config.json").write_text(json.dumps(LLAMA))
    zckpt.convert(save, tmp_path / "out", progress=False)
    found = zckpt.verify(save, tmp_path / "out", progress=False)
    assert found.deletable is not None and found.deletable[0]
    assert found.deletable[1].startswith("if you will not need 'pytorch_model.bin', where nothing was compared: ")


@pytest.mark.parametrize(
    ("model", "other"), [("model", "ema"), ("state_dict", "ema_state_dict"), ("model", "reference")]
)
def test_another_model_in_the_file_is_named_before_it_is_called_safe(model: str, other: str, tmp_path: Path) -> None:
    weights = weights_of_llama()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    moments = {number: {"exp_avg": torch.zeros_like(one)} for number, one in enumerate(weights.values())}
    run = {"optimizer": {"state": moments, "param_groups": [{"params": [*moments]}]}, "step": 3}
    for path, more in (
        (tmp_path / "one.pt", {}),
        (tmp_path / "two.pt", {other: {k: v + 1 for k, v in weights.items()}}),
    ):
        torch.save({model: weights, **more, **run}, path)
        zckpt.convert(path, out := tmp_path / f"of {path.name}", progress=False)
        found = zckpt.verify(path, out, progress=False)
        assert found.deletable is not None and found.deletable[0]
        assert (f"need '{other}.{next(iter(weights))}', " in found.deletable[1]) == bool(more)


def test_a_file_and_shards_of_one_name_are_two_saves(tmp_path: Path) -> None:
    """transformers would load the file, vLLM the shards; an index whose shards are gone is a rest of an older save."""
    older, newer = weights_of_llama(), weights_of_llama()
    shard, file, index = (
        f"model{end}" for end in ("-00001-of-00001.safetensors", ".safetensors", ".safetensors.index.json")
    )
    save_file(older, tmp_path / shard)
    (tmp_path / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(older, shard)}))
    save_file(newer, tmp_path / file)
    with pytest.raises(InconsistentError, match="two saves lie in one directory") as raised:
        zckpt.convert(tmp_path, tmp_path.parent / "out", progress=False)
    assert file in str(raised.value.remedy) and index in str(raised.value.remedy)
    for path, truth in ((tmp_path / file, newer), (tmp_path / index, older)):
        with zckpt.open_checkpoint(path) as checkpoint:
            assert all(same_bits(checkpoint[name], truth[name]) for name in truth)
    (tmp_path / shard).unlink()
    assert zckpt.inspect_checkpoint(tmp_path).exportable.ok
