"""Files that are not containers, and what is said about them."""

import errno
import os

import pytest
import torch
from descriptors import open_below

from zckpt.base.errors import CorruptError, IncompleteError, NotACheckpointError, UnsupportedError
from zckpt.containers import open_container

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n"

CASES = {
    "empty": (b"", CorruptError, "the file is empty"),
    "zeros": (bytes(5000), CorruptError, "zeros"),
    "lfs": (LFS, IncompleteError, "git lfs pull"),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", NotACheckpointError, "web page"),
    "html after space": (b"\n <HTML>", NotACheckpointError, "web page"),
    "text": (b"hello world\nmore", NotACheckpointError, "text that begins with 'hello world'"),
    "json": (b'{"model_type": "llama"}', NotACheckpointError, "text that begins"),
    "gzip": (b"\x1f\x8b\x08\x00", UnsupportedError, "gunzip"),
    "zstd": (b"\x28\xb5\x2f\xfd\x00", UnsupportedError, "zstd"),
    "xz": (b"\xfd7zXZ\x00\x00", UnsupportedError, "xz"),
    "bzip2": (b"BZh91AY", UnsupportedError, "bzip2"),
    "hdf5": (b"\x89HDF\r\n\x1a\n", NotACheckpointError, "HDF5"),
    "gguf": (b"GGUF\x03\x00\x00\x00", CorruptError, "the number of tensors"),
    "numpy": (b"\x93NUMPY\x01\x00", NotACheckpointError, "numpy"),
    "empty zip": (b"PK\x05\x06" + bytes(18), NotACheckpointError, "empty zip"),
    "zip cut short": (b"PK\x03\x04" + bytes(100), CorruptError, "cut short"),
    "noise": (bytes(range(200, 256)), NotACheckpointError, "c8 c9 ca"),
    "one byte": (b"P", NotACheckpointError, "text"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_says_what_it_is(tmp_path, name):
    data, error, words = CASES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        open_container(path)
    assert words in str(caught.value) and caught.value.file == str(path)


@pytest.mark.parametrize("nbytes", [0x0680, 0x0A80, 0x0280, 0x0300])
@pytest.mark.parametrize("first", [b"\0", b"}", b"\x80"])
def test_a_damaged_header_is_no_pickle(tmp_path, nbytes, first):
    """The lowest byte of its length is a pickle's first one."""
    path = tmp_path / "model.safetensors"
    header = b"{" + b" " * (nbytes - 2) + b"}"
    path.write_bytes(nbytes.to_bytes(8, "little") + header)
    assert open_container(path).kind == "safetensors"
    path.write_bytes(nbytes.to_bytes(8, "little") + first + header[1:])
    with pytest.raises(CorruptError, match="safetensors header"):
        open_container(path)


def test_what_is_no_file(tmp_path):
    for path, words in [(tmp_path, "directory"), (tmp_path / "missing", "No such file"), ("a\0b", "null byte")]:
        with pytest.raises(NotACheckpointError, match=words):
            open_container(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotACheckpointError, match="pipe"):
        open_container(tmp_path / "pipe")


def test_what_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_):  # the tests may run as root, who may read everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotACheckpointError, match="denied"):
        open_container(tmp_path / "x")


def test_suffixes_say_nothing(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert open_container(tmp_path / "x.safetensors").kind == "torch_zip"


def test_the_store_knows_the_file(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    store = open_container(tmp_path / "x.pt").store
    status = os.stat(tmp_path / "x.pt")
    assert (store.size, store.identity) == (status.st_size, (status.st_dev, status.st_ino, status.st_mtime_ns))


def test_no_file_is_left_open(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    open_container(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CorruptError):
        open_container(tmp_path / "y.pt")
    assert open_below(tmp_path) == []
