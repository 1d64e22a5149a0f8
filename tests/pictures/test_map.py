"""A map shows what the catalog says: the page's own script is run over its data, and asked for the places of every element."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import quickjs
from html_pages import HOSTILE, Reader
from schemas import check
from typer.testing import CliRunner

from zckpt.base import words
from zckpt.cli import app
from zckpt.core.catalog import Catalog
from zckpt.core.fragments import Fragment
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.reshard import reshard
from zckpt.pictures.checkpoint_map import CheckpointMap, checkpoint_map
from zckpt.pictures.incomplete import Lack
from zckpt.pictures.lacks import part_said
from zckpt.pictures.map_page import data_of, map_page
from zckpt.pictures.page import asset
from zckpt.pictures.pieces import fold_pieces, unfold_pieces

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
SHOWN = ("zero3/w12", "zero2/tied_w2", "pipeline/zero1_pp2_tp2_dp2", "tensor/zero2_tp2_dp2", "moe/tensor_w4",
         "mcore/stages_tp2_pp2", "dcp/boxes_w4", "megatron_legacy/llama_tp2_pp2",
         "torch_checkpointing/safetensors_w4", "gguf/llama/model")  # fmt: skip


class Script:
    """The page's script with the data of a map, in a JavaScript engine without a document."""

    def __init__(self, data: object) -> None:
        self.context = quickjs.Context()
        self.context.eval(asset("map_logic.js") + "; var map, data;")
        self.context.set("text", json.dumps(data))
        self.context.eval("data = JSON.parse(text); map = zckptMap(data); undefined")

    def __call__(self, expression: str) -> Any:
        return json.loads(self.context.eval(f"JSON.stringify({expression})"))


def of(name: str) -> Path:
    path = FIXTURES / name
    return path / "checkpoint" if (path / "checkpoint").is_dir() else path


def runs(fragments: tuple[Fragment, ...]) -> list[tuple[object, ...]]:
    return sorted(
        (str(f.store), f.byte_offset, f.start, f.count, f.rows, f.pitch, f.store_pitch, f.step)
        for f in fragments
        if f.numel
    )


def drawn(script: Script, found: CheckpointMap, layer: int, tensor: int) -> list[tuple[object, ...]]:
    """The pieces of a tensor as the page has them, in the terms of fragments."""
    paths = {number: path for path, number in found.grid.numbers.items()}
    pieces = script(f"map.piecesOf(data.sides[0].layers[{layer}], {tensor})")
    keys = ("byte", "start", "count", "rows", "pitch", "storePitch", "step")
    return sorted((paths.get(piece["file"], "computed elements"), *(piece[key] for key in keys)) for piece in pieces)


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_knows_the_place_of_every_element(name: str) -> None:
    found = checkpoint_map(of(name))
    script = Script(data_of(found))
    catalog = found.inspection.catalog
    assert isinstance(catalog, Catalog) and script("map.names") == list(catalog.tensors)
    for number, entry in enumerate(catalog.tensors.values()):
        assert drawn(script, found, 0, number) == runs(entry.fragments)
        assert script(f"map.shares(data.sides[0], {number}).reduce((all, own) => all + own[1], 0)") == entry.numel
        assert [*script(f"[map.numelOf({number}), map.bytesOf({number})]")] == [entry.numel, entry.nbytes]
        copies = [layer for layer in found.layers if layer.purpose == "module"]
        if entry.own_copy is not None:
            assert drawn(script, found, found.layers.index(copies[0]), number) == runs(entry.own_copy.fragments)
    told = found.contents()
    assert script("map.contents(data.sides[0])") == [told[layer.name] for layer in found.layers]
    listed = sum(path.size() for path in found.inspection.place.listing.files.values())
    assert sum(told.values()) >= found.grid.nbytes >= listed
    for number, file in enumerate(found.grid.files):
        segments = script(f"(({{lo, hi}}) => [[...lo], [...hi]])(map.segmentsOf(data.sides[0], {number}))")
        assert all(0 <= low < high <= file.nbytes for low, high in zip(*segments, strict=True))
        assert segments[0] == sorted(segments[0])


def test_bars_are_as_long_as_files_are_large() -> None:
    found = checkpoint_map(of("pipeline/zero1_pp2_tp2_dp2"))
    script = Script(data_of(found))
    made = script("map.geometry(data.sides[0], 1000)")
    rows = [line for line in made["lines"] if line["kind"] == "row"]
    cells = [(cell, found.grid.files[cell["file"]]) for row in rows for cell in row["cells"]]
    assert len(cells) == len(found.grid.files) == 20
    assert all(abs(cell["width"] - 3 - file.nbytes * made["scale"]) < 1e-6 for cell, file in cells)
    assert 900 < max(cell["x"] + cell["width"] for cell, _ in cells) <= 1000.001
    assert [group.title for group in found.grid.groups][:4] == [
        f"Pipeline stage {stage} · tensor rank {rank}" for stage in (0, 1) for rank in (0, 1)
    ]
    starts = {
        kind: {cell["x"] for cell, file in cells if file.kind == kind} for kind in ("model", "optimizer", "layer")
    }
    assert [len(own) for own in starts.values()] == [1, 1, 1] and min(starts["optimizer"]) > min(starts["model"]) + 100
    for number, line in enumerate(made["lines"]):
        assert script(f"map.lineAt(map.geometry(data.sides[0], 1000), {line['y'] + 1})") == number


def test_a_thousand_ranks_that_share_evenly_are_one_piece() -> None:
    pieces = [[rank, 512, 40 * rank, 40, 1, 0, 0, 1] for rank in range(1000)]
    assert fold_pieces(map(list, pieces)) == [[0, 512, 0, 40, 1, 0, 0, 1, 1000, 1, 0, 40]]
    uneven = [*pieces, [1000, 512, 40_000, 3, 1, 0, 0, 1], [7, 0, 50_000, 3, 1, 0, 0, 1], [9, 0, 60_000, 3, 1, 0, 0, 1]]
    script = Script(
        {"tensors": {"names": [], "shapes": [], "dtypes": [], "roles": []}, "shapes": [], "dtypes": [], "sides": []}
    )
    keys = ("file", "byte", "start", "count", "rows", "pitch", "storePitch", "step")
    shown = script(f"map.piecesOf({{tensors: null, pieces: [{json.dumps(fold_pieces(map(list, uneven)))}]}}, 0)")
    assert [[piece[key] for key in keys] for piece in shown] == uneven


def test_parts_are_said_in_words() -> None:
    script = Script(
        {"tensors": {"names": [], "shapes": [], "dtypes": [], "roles": []}, "shapes": [], "dtypes": [], "sides": []}
    )
    said = {
        "all of it": ([0, 24, 1, 0], [4, 6]), "rows 2 to 3": ([12, 12, 1, 0], [4, 6]), "columns 0 to 2": ([0, 3, 4, 6], [4, 6]),
        "row 1, columns 2 to 4": ([8, 3, 1, 0], [4, 6]), "elements 5 to 9": ([5, 5, 1, 0], [24]),
        "elements 4 to 13": ([4, 10, 1, 0], [4, 6]),
        "[0:1, :, 1:2]": ([1, 1, 3, 2], [2, 3, 2]), "2 runs of 4 elements, from 4 on": ([4, 4, 2, 9], [4, 6]),
    }  # fmt: skip
    for text, ((start, many, rows, pitch), shape) in said.items():
        assert script(f"map.partOf({{start: {start}, count: {many}, rows: {rows}, pitch: {pitch}}}, {shape})") == text
    for piece, columns, boxes in (
        ((4, 10, 1, 0), 6, [[4, 0, 2, 1], [0, 1, 6, 1], [0, 2, 2, 1]]), ((2, 3, 4, 6), 6, [[2, 0, 3, 4]]),
        ((7, 2, 1, 0), 6, [[1, 1, 2, 1]]),
    ):  # fmt: skip
        keys = dict(zip(("start", "count", "rows", "pitch"), piece, strict=True))
        assert script(f"map.rectangles({json.dumps(keys)}, {columns})") == boxes
    for number in (0, 1, 999, 1000, 12_345, 999_499, 999_500, 5 * 10**9, 1_234_567_890_123):
        assert script(f"map.size({number})") == words.size(number)


def test_tensors_are_found_by_words_globs_role_and_dtype() -> None:
    script = Script(data_of(checkpoint_map(of("moe/tensor_w4"))))
    names = script("map.names")
    assert (
        script("map.search('EXPERTS weight')")
        == [n for n, name in enumerate(names) if "experts" in name and "weight" in name]
        != []
    )
    assert script("map.search('*.bias')") == [n for n, name in enumerate(names) if name.endswith(".bias")] != []
    assert (
        script("map.search('', {role: 2})")
        == [n for n, role in enumerate(script("data.tensors.roles")) if role == 2]
        != []
    )
    assert script("map.search('[.*')") == []
    sizes = script("map.search('', {order: 'size'}).map(map.bytesOf)")
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == len(names)


def test_after_a_reshard_it_is_as_the_map_said(tmp_path: Path) -> None:
    reshard(of("zero2/tied_w2"), tmp_path / "out", world_size=3, stage=3, progress=False)
    said, real = checkpoint_map(of("zero2/tied_w2"), world_size=3, stage=3).after, checkpoint_map(tmp_path / "out")
    assert said is not None and said.title == "ZeRO-3 for 3 ranks"
    assert said.grid.groups == real.grid.groups[:1]
    assert [(f.name, f.nbytes, f.contents) for f in said.grid.files] == [
        (f.name, f.nbytes, f.contents) for f in real.grid.files
    ]
    names = [layer.name for layer in real.layers]
    assert [layer.name for layer in said.layers] == names and "optimizer: exp_avg" in names
    for planned, read in zip(said.layers, real.layers, strict=True):
        assert {n: sorted(pieces) for n, (_, pieces) in planned.pieces.items()} == {
            n: sorted(own) for n, (_, own) in read.pieces.items()
        }


def test_what_is_missing_or_of_another_save_is_said(tmp_path: Path) -> None:
    shutil.copytree(of("zero3/w12"), tmp_path / "a")
    folder = next((tmp_path / "a").glob("global_step*"))
    (folder / "bf16_zero_pp_rank_5_mp_rank_00_optim_states.pt").unlink()
    (folder / "zero_pp_rank_7_mp_rank_00_model_states.pt").write_bytes(b"")
    shutil.copy(
        folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        folder / "bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt",
    )
    found = checkpoint_map(tmp_path / "a")
    wrong = {file.name: file for file in found.grid.wrong}
    missing = wrong["optimizer file of rank 5"]
    assert missing.state == "missing" and missing.nbytes == 0 < missing.expected
    assert wrong["zero_pp_rank_7_mp_rank_00_model_states.pt"].state == "empty"
    page = map_page(found)
    assert "What is wrong" in page and "The weights are not complete" in page and "What tensors lack" in page
    assert Script(data_of(found))("map.geometry(data.sides[0], 800).lines.length") > 12
    facts = check("map", json.dumps({**found.as_json(), "html": None}))
    assert facts["complete"]["ok"] is False and facts["lacking"] and "roles" in facts  # type: ignore[index]


LOST = (
    ("zero3/w12", "*_rank_5_*optim_states.pt"), ("zero3/w12", "*_rank_0_*optim_states.pt"),
    ("zero2/w12", "*_rank_11_*optim_states.pt"), ("zero1/bf16_w3", "*_rank_1_*optim_states.pt"),
    ("tensor/zero2_tp2_dp2", "*_rank_1_mp_rank_01_optim_states.pt"),
    ("mcore/stages_tp2_pp2", "__2_0.distcp"), ("dcp/boxes_w4", "__3_7.distcp"), ("torchtitan/llama3_0_3_0_w3", "__1_0.distcp"),
    ("ranks/fsdp2_w2", "model_world_size_2_rank_1.pt"), ("ranks/empty_w5", "model_world_size_5_rank_2.pt"),
    ("ranks/empty_w5", "model_world_size_5_rank_[01].pt"),
)  # fmt: skip


def held(found: CheckpointMap) -> dict[tuple[str, str], set[tuple[str, int]]]:
    """Layer and tensor -> each element, with the file that holds it."""
    root = found.inspection.place.listing.directory.path
    names = {number: path.removeprefix(root) for path, number in found.grid.numbers.items()}
    made: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for layer in found.layers:
        for tensor, (_, pieces) in layer.pieces.items():
            elements = made.setdefault((layer.name, found.tensors[tensor].name), set())
            for file, _, start, many, rows, pitch, _, _ in unfold_pieces(pieces):
                elements |= {(names.get(file, ""), start + row * pitch + k) for row in range(rows) for k in range(many)}
    return made


@pytest.mark.parametrize(("name", "lost"), LOST)
def test_a_save_that_lacks_a_file_is_drawn_with_what_lay_in_it(name: str, lost: str, tmp_path: Path) -> None:
    shutil.copytree(of(name), tmp_path / "a")
    gone = sorted((tmp_path / "a").rglob(lost))
    for path in gone:
        path.unlink()
    whole, found = held(checkpoint_map(of(name))), checkpoint_map(tmp_path / "a")
    paths = {str(path).removeprefix(found.inspection.place.listing.directory.path) for path in gone}
    drawn = held(found)
    lacks = {found.tensors[lack.tensor].name: lack.numel for lack in found.lacking}
    assert lacks
    for tensor in (tensor for layer, tensor in whole if layer == "weights"):
        if not any(layer.startswith("copies") for layer, own in whole if own == tensor):
            assert drawn["weights", tensor] == whole["weights", tensor]
            assert lacks.get(tensor, 0) == sum(file in paths for file, _ in whole["weights", tensor])
    script = Script(data_of(found))
    assert script("map.names.map((_, t) => map.lost(data.sides[0], t))") == [
        lacks.get(name, 0) for name in script("map.names")
    ]
    assert len(script("map.search('', {lacking: true})")) == len(lacks)
    page = map_page(found)
    assert 'id="list"' in page and "What tensors lack" in page and not found.inspection.exportable.ok


@pytest.mark.parametrize(("name", "lost"), [LOST[6], LOST[8]])
def test_an_empty_file_in_a_directory_that_is_laid_over_another(name: str, lost: str, tmp_path: Path) -> None:
    """It is drawn once, where it is."""
    shutil.copytree(of(name), tmp_path / "a")
    [path] = (tmp_path / "a").rglob(lost)
    empty = tmp_path / "b" / path.relative_to(tmp_path / "a")
    empty.parent.mkdir(parents=True)
    path.unlink()
    alone = checkpoint_map(tmp_path / "a")
    empty.touch()
    found = checkpoint_map(tmp_path / "a", also=[str(tmp_path / "b")])
    assert [(file.name, file.state) for file in found.grid.wrong] == [(lost, "empty")]
    assert found.lacking and [lack.numel for lack in found.lacking] == [lack.numel for lack in alone.lacking]
    assert found.grid.nbytes == alone.grid.nbytes


@pytest.mark.parametrize(
    ("shape", "pieces", "said"),
    [
        ((64, 32), [(0, 2048, 1, 0)], "all of [64, 32]"),
        ((64, 32), [(384, 192, 1, 0)], "rows 12 to 17 of [64, 32]"),
        ((64, 32), [(32, 32, 2, 32), (640, 32, 1, 0)], "rows 1 to 2 and row 20 of [64, 32]"),
        ((64, 32), [(16, 40, 1, 0)], "40 elements from 16 on of [64, 32]"),
        ((64, 32), [(0, 16, 64, 32)], "1,024 of the elements 0 to 2,031 of [64, 32]"),
        ((9,), [(n, 1, 1, 0) for n in (0, 2, 4, 6)], "element 0, element 2, element 4 and 1 more part of [9]"),
        ((9,), [(n, 1, 1, 0) for n in range(0, 9, 2)], "element 0, element 2, element 4 and 2 more parts of [9]"),
    ],
)
def test_what_is_gone_is_said(shape: tuple[int, ...], pieces: list[tuple[int, int, int, int]], said: str) -> None:
    lack = Lack(0, sum(many * rows for _, many, rows, _ in pieces), tuple(pieces), (0,), spare=False)
    assert part_said(shape, lack) == said


def test_of_a_missing_shard_only_the_names_are_known(tmp_path: Path) -> None:
    for shard, names in enumerate(("ab", "c"), 1):
        header = {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(4 * len(names))
        (tmp_path / f"model-0000{shard}-of-00002.safetensors").write_bytes(content)
    index = {name: f"model-0000{1 + (name == 'c')}-of-00002.safetensors" for name in "abc"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (tmp_path / index["c"]).unlink()
    found = checkpoint_map(tmp_path)
    assert [entry.name for entry in found.tensors] == ["a", "b"] and found.unseen == {"c": index["c"]}
    assert [file.name for file in found.grid.wrong] == [index["c"]] and "only the names are known" in map_page(found)
    facts = check("map", json.dumps({**found.as_json(), "html": None}))
    assert facts["lacking"] == [{"tensor": "c", "elements": None, "of": None, "files": [index["c"]], "copy": False}]  # type: ignore[index]


def test_what_the_other_files_do_not_say_is_not_drawn(tmp_path: Path) -> None:
    shutil.copytree(of("zero2/w12"), tmp_path / "a")
    next((tmp_path / "a").rglob("mp_rank_00_model_states.pt")).unlink()
    found = checkpoint_map(tmp_path / "a")
    assert (
        not found.layers
        and [file.state for file in found.grid.wrong] == ["missing"]
        and 'id="list"' not in map_page(found)
    )


def test_what_cannot_be_read_is_said_with_its_reason() -> None:
    found = checkpoint_map(of("tensor/plain_tp2"))
    page = map_page(found)
    assert not found.grid.wrong and "The weights cannot be read" in page and "--tp-rules" in page
    assert "What is wrong" not in page


def hostile_weights(path: Path) -> Path:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(HOSTILE)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(HOSTILE)))
    return path


def test_a_page_says_whose_map_it_is_and_an_address_keeps_a_tensor() -> None:
    found = checkpoint_map(of("transformers/llama_zero3"))
    html = map_page(found)
    assert "<h1><bdi>llama</bdi></h1>" in html and "ZeRO-3" in html and "<bdi>zero3" not in html
    assert "<title>llama global_step2 - zckpt map</title>" in html
    script = Script(data_of(found))
    numbers = range(len(found.tensors))
    assert [script(f"map.tensorAt(map.addressOf({n}))") for n in numbers] == [*numbers]
    assert script("map.addressOf(-1)") == "" and script("[map.tensorAt('#tensor=%'), map.tensorAt('#x')]") == [-1, -1]


def test_a_terminal_says_what_every_colour_means(tmp_path: Path) -> None:
    shutil.copytree(of("zero3/w12"), tmp_path / "a")
    next((tmp_path / "a").glob("*/*rank_3_*optim_states.pt")).unlink()
    text = " ".join(CliRunner().invoke(app, ["map", str(tmp_path / "a")]).stdout.split())
    assert "\u2591 missing or damaged" in text or "? missing or damaged" in text


def test_no_name_runs_or_breaks_out(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    path = hostile_weights(folder / "a'\"><script>.safetensors")
    page = map_page(checkpoint_map(path))
    found = Reader(page)
    assert [tag for tag, _ in found.elements].count("script") == 2 and "img" not in {tag for tag, _ in found.elements}
    assert not any(name.startswith("on") or name == "style" for _, own in found.elements for name in own)
    data = json.loads(next(text for tag, text in found.texts if tag == "script"))
    shown = Script(data)("map.names")
    assert sorted(shown) == sorted(inspect_checkpoint(path).catalog or ())
    assert Script(data)("map.names.map(map.visible)").count("\\u202egnp.exe") == 1
    for script in ("page.js", "map_logic.js", "map_view.js"):
        text = asset(script)
        assert not any(
            sink in text
            for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(")
        )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["map", *map(str, args)])
        assert result.exit_code == status, result.output
        return result.stdout

    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    html = tmp_path / "map.html"
    assert run(of("zero3/w12"), "--html", html, "--open") == f"wrote {html}\n" and opened == [html.as_uri()]
    assert Reader(html.read_text()).elements
    same = of("gguf/llama/model")
    result = CliRunner().invoke(app, ["diff", str(same), str(same), "--open"])
    assert (
        result.exit_code == 0 and opened[1].endswith("/diff.html") and Reader(Path(opened[1][7:]).read_text()).elements
    )
    text = run(of("zero3/w12"), "--reshard", 4)
    assert "rank 11" in text and "ZeRO-3 for 4 ranks" in text and "\x1b" not in text and "optimizer: exp_avg" in text
    for name, options in (("zero3/w12", ("--reshard", 4)), ("moe/tensor_w4", ()), ("gguf/llama/model", ())):
        assert check("map", run(of(name), "--json", *options))["html"] is None
    assert run(of("zero3/w12"), "--stage", 2, status=1) == ""  # the desk makes it 2
