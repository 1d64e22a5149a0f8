"""Torch's files from before 1.6. The stream is also in test_torch_zip, where both formats save the same values."""

import io
import os
import pickle
import random
import struct
import tarfile

import pytest
import torch

from zckpt.base.errors import CorruptError, NotACheckpointError, UnsupportedError, ZckptError
from zckpt.containers import open_container, torch_legacy

VALUE = {
    "a": torch.arange(50, dtype=torch.int16),
    "b": torch.ones(3, 4).t(),
    "e": torch.empty(0),
    "c": {"tied": torch.tensor(2.5, dtype=torch.float64)},
}


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "x.pt")
    torch.save(VALUE, path, _use_new_zipfile_serialization=False)
    return path


def test_offsets_without_reading_elements(saved, elements, bytes_of, monkeypatch):
    read, reads = os.pread, []
    monkeypatch.setattr(torch_legacy, "FIRST_WINDOW_BYTES", 64)

    def counting(descriptor, nbytes, offset):
        reads.append(nbytes)
        return read(descriptor, nbytes, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", counting)
        refs = open_container(saved).root
    assert max(reads) <= 64 * 8**2
    assert elements(refs["a"]) == bytes_of(VALUE["a"]) and elements(refs["b"]) == bytes_of(VALUE["b"])
    assert elements(refs["c"]["tied"]) == struct.pack("<d", 2.5) and refs["e"].numel == 0


@pytest.mark.parametrize("protocol", range(6))
def test_protocols(tmp_path, elements, bytes_of, protocol):
    path = tmp_path / "x.pt"
    torch.save(VALUE, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    if protocol == 0:  # torch writes the text "('storage', <class ...>, ..)" and cannot read it itself
        with pytest.raises(CorruptError, match="not a storage"):
            open_container(path)
        return
    container = open_container(path)
    assert container.kind == "torch_legacy"
    assert elements(container.root["a"]) == bytes_of(VALUE["a"])


def test_a_pickle_longer_than_the_first_window(tmp_path, elements):
    path = tmp_path / "x.pt"
    torch.save(
        {"t": torch.arange(3), "words": ["ä" * 1000] * 3 + [str(n) for n in range(50_000)]},
        path,
        _use_new_zipfile_serialization=False,
    )
    root = open_container(path).root
    assert elements(root["t"]) == struct.pack("<3q", 0, 1, 2) and root["words"][-1] == "49999"


def test_truncation_and_damage(saved, tmp_path):
    with open(saved, "rb") as file:
        data = file.read()
    damaged = str(tmp_path / "damaged.pt")
    for end in range(len(data)):
        with open(damaged, "wb") as file:
            file.write(data[:end])
        with pytest.raises(ZckptError) as caught:
            open_container(damaged)
        assert caught.value.file == damaged
    chance = random.Random(3)
    for _ in range(2000):
        copy = bytearray(data)
        copy[chance.randrange(len(copy))] = chance.randrange(256)
        with open(damaged, "wb") as file:
            file.write(copy)
        try:
            open_container(damaged)
        except ZckptError as error:
            assert str(error)


def test_plain_pickles_are_not_checkpoints(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(NotACheckpointError, match="torch did not save"):
        open_container(path)
    path.write_bytes(pickle.dumps(torch_legacy.MAGIC_NUMBER, 2) + pickle.dumps(7, 2) + pickle.dumps({}, 2))
    with pytest.raises(UnsupportedError, match="version of torch's format is unknown"):
        open_container(path)


class Id(tuple):
    """Pickled as a persistent id."""


class Named(pickle._Pickler):
    def persistent_id(self, value):
        return tuple(value) if type(value) is Id else None


def pickled(value):
    buffer = io.BytesIO()
    Named(buffer, 2).dump(value)
    return buffer.getvalue()


def stream(body, keys, *storages):
    head = b"".join(pickle.dumps(part, 2) for part in (torch_legacy.MAGIC_NUMBER, 1001, {"little_endian": False}))
    return head + pickled(body) + pickle.dumps(keys, 2) + b"".join(struct.pack("<q", len(s) // 4) + s for s in storages)


def tensor(storage, offset, shape, stride):
    """What torch 0.x wrote: no hooks, no gradients."""

    class Call:
        def __reduce__(self):
            return torch._utils._rebuild_tensor, (storage, offset, shape, stride)

    return Call()


def test_storage_views_and_sources_of_old_files(tmp_path, elements):
    data = struct.pack("<6f", *range(6))
    whole = Id(("storage", torch.FloatStorage, "1", "cuda:0", 6, None))
    view = Id(("storage", torch.FloatStorage, "1", "cuda:0", 6, ("2", 2, 3)))
    body = {
        "whole": tensor(whole, 0, (6,), (1,)),
        "view": tensor(view, 1, (2,), (1,)),
        "class": Id(("module", torch.nn.Linear, "linear.py", "class ...")),
    }
    path = tmp_path / "x.pt"
    path.write_bytes(stream(body, ["1"], data))
    root = open_container(path).root
    assert elements(root["whole"]) == data and elements(root["view"]) == struct.pack("<2f", 3, 4)
    assert str(root["class"]) == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    ("key", "keys", "what"),
    [
        (("storage", torch.FloatStorage, "1", "cpu", 6, None), ["1", "9"], "without a tensor"),
        (("storage", torch.FloatStorage, "1", "cpu", 6, None), [["1"]], "without a tensor"),
        (("storage", torch.FloatStorage, "1", "cpu", 5, None), ["1"], "as the pickle says"),
        (("storage", torch.FloatStorage, "1", "cpu", 6, ("2", 4, 3)), ["1"], "view of storage '1' is impossible"),
        (("storage", torch.FloatStorage, "1", "cpu", 6, "x"), ["1"], "view of storage '1' is impossible"),
        (("storage", torch.FloatStorage, "1", "cpu", -6, None), ["1"], "not a storage"),
        (("storage", torch.FloatStorage, "1", "cpu", True, None), ["1"], "not a storage"),
        (("storage", torch.FloatStorage), ["1"], "not a storage"),
        (("storage", torch.Tensor, "1", "cpu", 6, None), ["1"], "class of a storage is unknown"),
    ],
)
def test_references_that_cannot_be(tmp_path, key, keys, what):
    path = tmp_path / "x.pt"
    path.write_bytes(stream({"t": Id(key)}, keys, struct.pack("<6f", *range(6))))
    with pytest.raises((CorruptError, UnsupportedError), match=what):
        open_container(path)


def test_a_storage_that_is_not_in_the_list(tmp_path):
    path = tmp_path / "x.pt"
    one, other = (Id(("storage", torch.FloatStorage, name, "cpu", 1, None)) for name in "12")
    path.write_bytes(stream([one, other], ["1"], bytes(4)))
    with pytest.raises(CorruptError, match="storage '2' is missing"):
        open_container(path)


# -- tar ---------------------------------------------------------------------------------------------------------------


def tar_of(tmp_path, members):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def members(**changes):
    """As torch 0.1 wrote: storages, a view of one of them, tensors, and an object that names the tensors."""
    floats, longs = struct.pack("<6f", *range(6)), struct.pack("<2q", 7, 8)
    storages = pickle.dumps(2, 2)
    storages += pickle.dumps((1, "cpu", torch.FloatStorage), 2) + struct.pack("<q", 6) + floats
    storages += pickle.dumps((2, "cuda:1", torch.LongStorage), 2) + struct.pack("<q", 2) + longs
    storages += pickle.dumps([(3, 1, 2, 4)], 2)
    tensors = pickle.dumps(3, 2)
    tensors += pickle.dumps((10, 1, torch.FloatTensor), 2) + struct.pack("<2i5q", 2, 0, 2, 3, 3, 1, 0)
    tensors += pickle.dumps((11, 2, torch.LongTensor), 2) + struct.pack("<2i3q", 1, 0, 2, 1, 0)
    tensors += pickle.dumps((12, 3, torch.FloatTensor), 2) + struct.pack("<2i3q", 1, 0, 2, 1, 1)
    body = Pickled({"weight": "10", "steps": "11", "view": "12"})
    return {"sys_info": pickle.dumps({}, 2), "pickle": body, "tensors": tensors, "storages": storages} | changes


def Pickled(names):
    parts = b"".join(
        b"X" + struct.pack("<I", len(name)) + name.encode() + b"P" + key.encode() + b"\n" for name, key in names.items()
    )
    return b"\x80\x02}(" + parts + b"u."


def test_tar(tmp_path, elements):
    container = open_container(tar_of(tmp_path, members()))
    assert container.kind == "torch_tar"
    root = container.root
    assert elements(root["weight"]) == struct.pack("<6f", *range(6)) and root["weight"].shape == (2, 3)
    assert elements(root["steps"]) == struct.pack("<2q", 7, 8)
    assert elements(root["view"]) == struct.pack("<2f", 3, 4)


def test_torch_reads_our_tar_alike(tmp_path):
    loaded = torch.load(tar_of(tmp_path, members()), weights_only=False, map_location="cpu")
    assert loaded["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["view"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pickle": Pickled({"weight": "13"})}, CorruptError),
        ({"pickle": b"N"}, CorruptError),
        ({"tensors": pickle.dumps(1, 2)}, CorruptError),
        ({"tensors": pickle.dumps("x", 2)}, CorruptError),
        ({"tensors": pickle.dumps(1, 2) + pickle.dumps((10, 1), 2)}, CorruptError),
        (
            {"tensors": pickle.dumps(1, 2) + pickle.dumps((10, 9, None), 2) + struct.pack("<2i3q", 1, 0, 2, 1, 0)},
            CorruptError,
        ),
        ({"tensors": pickle.dumps(1, 2) + pickle.dumps((10, 1, None), 2) + struct.pack("<2i", -1, 0)}, CorruptError),
        (
            {"tensors": pickle.dumps(1, 2) + pickle.dumps((10, 1, None), 2) + struct.pack("<2i3q", 1, 0, 9, 1, 0)},
            CorruptError,
        ),
        ({"storages": pickle.dumps(10**9, 2)}, CorruptError),
        ({"storages": pickle.dumps(1, 2) + pickle.dumps((1, "cpu", None), 2) + bytes(8)}, UnsupportedError),
        (
            {"storages": pickle.dumps(1, 2) + pickle.dumps((1, "cpu", torch.FloatStorage), 2) + struct.pack("<q", -1)},
            CorruptError,
        ),
        ({"storages": pickle.dumps(0, 2) + pickle.dumps([(3, 1, 2, 4)], 2)}, CorruptError),
        ({"storages": pickle.dumps(0, 2) + pickle.dumps([3], 2)}, CorruptError),
    ],
)
def test_tars_that_cannot_be(tmp_path, changes, error):
    with pytest.raises(error):
        open_container(tar_of(tmp_path, members(**changes)))


def test_other_tars_and_truncation(tmp_path):
    with pytest.raises(NotACheckpointError, match="tar archive"):
        open_container(tar_of(tmp_path, {"readme": b"hello"}))
    data = tar_of(tmp_path, members()).read_bytes()
    path = tmp_path / "short.tar"
    last = data.rindex(struct.pack("<2q", 7, 8))
    for end in range(0, last, 100):
        path.write_bytes(data[:end])
        with pytest.raises(ZckptError):
            open_container(path)
