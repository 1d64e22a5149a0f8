"""Torch's zip files against torch itself, both ways."""

import collections
import os
import random
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import proofs
import pytest
import torch

from zckpt.base.errors import CorruptError, UnsupportedError, UsageError, ZckptError
from zckpt.containers import Placeholder, TensorRef, TensorSpec, open_container, torch_zip
from zckpt.containers.emit import contiguous_stride
from zckpt.containers.zip_directory import Directory
from zckpt.core.dtypes import ALL, BF16, BOOL, BY_NAME, F32, F64, I64, U16

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def tensor_of(dtype, shape=(3, 4), seed=0):
    """Any bits at all, as a tensor; bools are 0 or 1."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype is BOOL else 256, nbytes, dtype=np.uint8)
    kind = getattr(torch, dtype.torch_name)
    return torch.from_numpy(data).view(kind).reshape(shape) if nbytes else torch.empty(shape, dtype=kind)


@pytest.fixture
def save(tmp_path):
    def saved(value, name="x.pt", **more):
        path = str(tmp_path / name)
        torch.save(value, path, **more)
        return path

    return saved


@pytest.fixture(params=["zip", "legacy"])
def opened(request, save):
    """Saves and opens, in both of torch's formats."""

    def both(value, **more):
        legacy = request.param == "legacy"
        container = open_container(save(value, **more, _use_new_zipfile_serialization=not legacy))
        assert container.kind == ("torch_legacy" if legacy else "torch_zip")
        return container.root

    return both


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype(opened, elements, bytes_of, dtype):
    tensor = tensor_of(dtype)
    ref = opened({"t": tensor, "s": tensor[0, 0].clone(), "e": tensor[:0]})
    assert (ref["t"].dtype, ref["t"].shape, ref["t"].stride) == (dtype, (3, 4), (4, 1))
    assert elements(ref["t"]) == bytes_of(tensor)
    assert ref["s"].shape == () and elements(ref["s"]) == bytes_of(tensor[0, 0].reshape(1))
    assert ref["e"].shape == (0, 4) and ref["e"].fragments() == ()


def test_views_share_their_storage(opened, elements, bytes_of):
    base = torch.arange(120, dtype=torch.int32).reshape(4, 5, 6)
    views = {
        "base": base,
        "again": base,
        "row": base[2],
        "column": base[:, 1],
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(2, 0, 1)[1:],
        "expanded": base[:, :, :1].expand(4, 5, 7),
        "scalar": base[3, 4, 5],
        "strided": base.reshape(-1)[3:100:7],
        "channels last": base.reshape(1, 4, 5, 6).to(memory_format=torch.channels_last),
        "empty": base[4:],
        "expanded scalar": torch.tensor(3.5).expand(2, 3),
    }
    refs = opened(views)
    for name, view in views.items():
        assert elements(refs[name]) == bytes_of(view), name
        assert refs[name].is_contiguous == view.is_contiguous(), name
    assert refs["base"].place == refs["again"].place != refs["row"].place
    assert len({refs[name].storage_key for name in ("base", "row", "column", "transposed")}) == 1


def test_parameters_modules_and_attributes(opened, elements, bytes_of):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module[1].weight = torch.nn.Parameter(module[0].bias.detach())
    marked = torch.arange(4.0)
    marked.ds_numel = 4
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.partition = {"dim": 0}
    refs = opened(
        {
            "state": module.state_dict(),
            "parameters": dict(module.named_parameters()),
            "marked": marked,
            "parameter": parameter,
            "buffer": torch.nn.Buffer(torch.ones(3)),
            "nested": {"optimizer": {"state": {0: {"exp_avg": marked}}, "groups": [{"params": [0]}]}},
            "bytes": torch.ones(4).untyped_storage(),
        }
    )
    assert type(refs["state"]) is dict and list(refs["state"]) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert elements(refs["state"][name]) == bytes_of(tensor)
    assert refs["parameters"]["0.bias"].place == refs["parameters"]["1.weight"].place
    assert elements(refs["marked"]) == bytes_of(marked) and elements(refs["parameter"]) == bytes_of(parameter)
    assert refs["nested"]["optimizer"]["state"][0]["exp_avg"].place == refs["marked"].place
    assert refs["bytes"].nbytes == 16


def test_whole_modules_are_placeholders_that_hold_tensors(opened):
    root = opened(torch.nn.Linear(2, 3))
    assert str(root) == "torch.nn.modules.linear.Linear"
    assert isinstance(root.state["_parameters"]["weight"], TensorRef)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain_bytes_are_placeholders(opened):
    refs = opened(
        {
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "meta": torch.ones(3, device="meta"),
            "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
            "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
        }
    )
    assert all(isinstance(ref, Placeholder) and ref.called for ref in refs.values()), refs
    assert refs["quantized"].name == "_rebuild_qtensor"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_protocols(opened, elements, protocol):
    value = {"t": torch.arange(5), "path": os.PathLike, "set": {1}}
    refs = opened(value, pickle_protocol=protocol)
    assert elements(refs["t"]) == value["t"].numpy().tobytes() and refs["set"] == {1}


def test_big_endian(tmp_path, save, elements):
    """What a big-endian machine writes: its own numbers, and a record that says so."""
    values = {
        "f": torch.arange(3.0),
        "h": torch.arange(3).to(torch.bfloat16),
        "c": torch.tensor([1 + 2j, 3 - 1j]),
        "b": torch.tensor([True, False]),
    }
    path = save(values)
    big = str(tmp_path / "big.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(big, "w", zipfile.ZIP_STORED) as new:
        swapped = {"x/data/0": 4, "x/data/1": 2, "x/data/2": 4, "x/data/3": 1}
        for name in old.namelist():
            data = old.read(name)
            if name in swapped:
                data = np.frombuffer(data, f"V{swapped[name]}").tobytes()
                data = b"".join(data[at : at + swapped[name]][::-1] for at in range(0, len(data), swapped[name]))
            new.writestr(name, b"big" if name == "x/byteorder" else data)
    container = open_container(big)
    assert container.store.byteorder == "big"
    for name, tensor in values.items():
        assert elements(container.root[name]) == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    loaded = torch.load(big, weights_only=True)
    assert all(torch.equal(loaded[name], values[name]) for name in ("f", "h", "b"))


def test_unknown_byte_order(tmp_path):
    path = str(tmp_path / "x.pt")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"N.")
        file.writestr("x/byteorder", b"middle")
    with pytest.raises(CorruptError, match="byte order"):
        open_container(path)


def test_files_that_python_s_zipfile_made(tmp_path, save, elements):
    """Records of another order, descriptors after records, and a comment at the end: all legal."""
    path, other = save({"t": torch.arange(3)}), str(tmp_path / "other.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        new.comment = b"a comment with PK\x05\x06 in it"
        for name in reversed(old.namelist()):
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=True) as record:
                record.write(old.read(name))
    assert elements(open_container(other).root["t"]) == torch.arange(3).numpy().tobytes()


def test_compressed_and_foreign_zips(tmp_path, save):
    path, other = save({"t": torch.arange(3)}), str(tmp_path / "other.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedError, match="compressed"):
        open_container(other)
    np.savez(str(tmp_path / "x.npz"), a=np.arange(3))
    with pytest.raises(ZckptError, match="torch did not save"):
        open_container(tmp_path / "x.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(tmp_path / "script.pt"))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        open_container(tmp_path / "script.pt")


def test_many_records_open_fast_and_touch_no_tensor(save, monkeypatch):
    path = save({str(number): torch.full((300,), number) for number in range(1000)})
    read, reads = os.pread, []

    def counting(descriptor, nbytes, offset):
        reads.append((offset, nbytes))
        return read(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", counting)
    root = open_container(path).root
    touched = sum(nbytes for _, nbytes in reads)
    assert touched < Path(path).stat().st_size / 5
    for ref in (root["0"], root["500"]):
        end = ref.byte_offset + ref.nbytes
        assert not any(offset < end and ref.byte_offset < offset + nbytes for offset, nbytes in reads[3:])


def test_records(save):
    path = save({"t": torch.arange(100)})
    with zipfile.ZipFile(path) as reference:
        for name, byte_offset, nbytes, crc in torch_zip.records(path):
            info = reference.getinfo(name)
            assert (nbytes, crc) == (info.file_size, info.CRC)
            with open(path, "rb") as file:
                assert os.pread(file.fileno(), nbytes, byte_offset) == reference.read(name)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_truncation_is_an_error_everywhere(tmp_path, save):
    path = save({"a": torch.arange(50), "b": torch.ones(7)})
    with open(path, "rb") as file:
        data = file.read()
    with zipfile.ZipFile(path) as reference:
        ends = [info.header_offset for info in reference.infolist()]
    chance = random.Random(1)
    short = tmp_path / "short.pt"
    for end in [*ends, *(chance.randrange(len(data)) for _ in range(50)), len(data) - 1, 1, 3, 4, 22]:
        short.write_bytes(data[:end])
        with pytest.raises(ZckptError):
            open_container(short)
    short.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError, match="cut short") as caught:
        open_container(short)
    assert f"{len(data) // 2:,} bytes" in str(caught.value)


def test_damage_is_an_error_or_another_file(tmp_path, save):
    path = save({"a": torch.arange(50), "b": torch.ones(7).t(), "c": {"d": [torch.ones(1)]}})
    with open(path, "rb") as file:
        data = file.read()
    pickle_at = next(offset for name, offset, _, _ in torch_zip.records(path) if name.endswith("data.pkl"))
    regions = [
        range(pickle_at, pickle_at + 600),
        range(data.index(b"PK\x01\x02"), len(data)),
        range(len(data) - 98, len(data)),
    ]
    chance = random.Random(2)
    damaged = str(tmp_path / "damaged.pt")
    for _ in range(2000):
        copy = bytearray(data)
        for at in chance.sample(chance.choice(regions), chance.choice((1, 1, 2))):
            copy[at] = chance.randrange(256)
        with open(damaged, "wb") as file:
            file.write(copy)
        try:
            root = open_container(damaged).root
        except ZckptError as error:
            assert str(error) and error.file == damaged
            continue
        for ref in root.values() if isinstance(root, dict) else ():
            if isinstance(ref, TensorRef):
                assert all(fragment.nbytes_end(ref.dtype.itemsize) <= len(data) for fragment in ref.fragments())


# -- writing -----------------------------------------------------------------------------------------------------------


def loads(path, bytes_of):
    """As each kind of torch.load sees it; the kinds must agree."""
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) for info in file.infolist())
    ways = [torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True), torch.load(path)]
    for other in ways[1:]:
        assert other.keys() == ways[0].keys()
        assert all(bytes_of(a) == bytes_of(b) for a, b in zip(ways[0].values(), other.values()))
    return ways[1]


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("dtypes", [ALL, ()])
def test_torch_reads_what_we_lay_out(tmp_path, fill, elements, bytes_of, dtypes, zip64):
    shapes = [(3, 4), (), (0,), (0, 4), (4, 0, 2), (1, 70000), (2, 1, 3)]
    tensors = {
        f"{dtype}.{shape}": tensor_of(dtype, shape, seed) for seed, dtype in enumerate(dtypes) for shape in shapes
    }
    specs = [TensorSpec(name, BY_NAME[name.partition(".")[0]], tuple(tensor.shape)) for name, tensor in tensors.items()]
    skeleton = torch_zip.skeleton(specs, zip64=zip64)
    path = fill(skeleton, {name: bytes_of(tensor) for name, tensor in tensors.items()}, tmp_path / "out.bin")
    assert Path(path).stat().st_size == skeleton.size and all(offset % 64 == 0 for offset in skeleton.offsets.values())
    loaded = loads(path, bytes_of)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape, loaded[name].stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert bytes_of(loaded[name]) == bytes_of(tensor)
    refs = open_container(path).root
    for name, tensor in tensors.items():
        place = skeleton.offsets[name] if tensor.numel() else refs[name].byte_offset  # what is empty lies nowhere
        assert (refs[name].byte_offset, refs[name].stride) == (place, tensor.stride())
    assert skeleton == torch_zip.skeleton(specs, zip64=zip64)


def test_tied_weights_share_their_storage(tmp_path, fill, bytes_of):
    names = ["größe/é", "a" * 300, "日本.weight", ""]
    tensor = torch.arange(6.0).reshape(2, 3)
    skeleton = torch_zip.skeleton(
        [TensorSpec(name, F32, (2, 3)) for name in names], aliases={"tied": names[0], "tied too": names[0]}
    )
    path = fill(skeleton, {name: bytes_of(tensor) for name in names}, tmp_path / "out.bin")
    loaded = loads(path, bytes_of)
    assert list(loaded) == [*names, "tied", "tied too"]
    assert loaded["tied"].data_ptr() == loaded["tied too"].data_ptr() == loaded[names[0]].data_ptr()
    assert loaded["tied"].data_ptr() != loaded[names[1]].data_ptr()
    refs = open_container(path).root
    assert refs["tied"].place == refs[names[0]].place


@proofs.only
def test_more_records_than_16_bits_count(tmp_path, fill):
    count = 70_000
    skeleton = torch_zip.skeleton([TensorSpec(str(number), I64, ()) for number in range(count)])
    path = fill(skeleton, {str(n): struct.pack("<q", n) for n in (0, 65_536, count - 1)}, tmp_path / "out.bin")
    with zipfile.ZipFile(path) as file:
        assert len(file.namelist()) == count + 3
    assert torch.load(path, weights_only=True, mmap=True)["65536"].item() == 65_536
    assert len(open_container(path).root) == count


def test_offsets_and_sizes_beyond_4_gib(tmp_path, fill):
    """A sparse file: 5 GiB of holes and two numbers."""
    specs = [TensorSpec("big", F64, (5 << 27,)), TensorSpec("tail", F32, (2,)), TensorSpec("half", BF16, (3,))]
    skeleton = torch_zip.skeleton(specs)
    assert skeleton.offsets["tail"] > 5 << 30
    path = str(tmp_path / "big.bin")
    with open(path, "wb") as file:
        file.truncate(skeleton.size)
        for offset, literal in skeleton.literals:
            file.seek(offset)
            file.write(literal)
        file.seek(skeleton.offsets["tail"])
        file.write(struct.pack("<2f", 1.5, 2.5))
    refs = open_container(path).root
    assert (refs["tail"].byte_offset, refs["big"].nbytes) == (skeleton.offsets["tail"], 5 << 30)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["tail"].tolist() == [1.5, 2.5] and loaded["big"].shape == (5 << 27,)
    with zipfile.ZipFile(path) as file:
        assert file.getinfo("archive/data/0").file_size == 5 << 30
    assert [name for name, *_ in torch_zip.records(path)][:2] == ["archive/data.pkl", "archive/byteorder"]


def test_names_that_cannot_be(tmp_path):
    with pytest.raises(UsageError):
        torch_zip.skeleton([TensorSpec("a", F32, ()), TensorSpec("a", F32, ())])
    with pytest.raises(UsageError):
        torch_zip.skeleton([TensorSpec("a", F32, ())], aliases={"b": "c"})


def test_strides_are_torch_s():
    for shape in [(), (3,), (0,), (0, 4), (4, 0), (2, 0, 3), (2, 3, 4), (1, 1)]:
        assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_an_ordered_dict_of_uint16_as_torch_saves_it(save, elements):
    value = collections.OrderedDict(t=torch.arange(4).to(torch.uint16))
    ref = open_container(save(value)).root["t"]
    assert ref.dtype is U16 and elements(ref) == struct.pack("<4H", 0, 1, 2, 3)


def test_a_directory_is_parsed_once_for_all_records(save):
    from zckpt.containers.container import open_input

    with open_input(save({"t": torch.arange(3)})) as file:
        directory = Directory(file)
        assert directory.data_offset("x/data/0") == directory.data_offset("x/data/0")
        with pytest.raises(CorruptError, match="is missing"):
            directory.data_offset("x/data/9")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_peek_finds_numbers_and_only_those(save, protocol):
    steps = [0, 5, 300, 70_000]
    for step in steps:
        value = {"global_steps": -1, "module": {"global_steps_not": 7}, "dp_world_size": 2**40, "text": "x"}
        value["nested"] = {"".join(["global", "_steps"]): step}
        path = save(value, pickle_protocol=protocol)
        found = torch_zip.peek(path, ["global_steps", "dp_world_size", "text", "absent", "steps"])
        assert found == {"global_steps": step}


def test_a_peek_tells_damage(tmp_path, save):
    path = Path(save({"global_steps": 3}))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptError):
        torch_zip.peek(path, ["global_steps"])
