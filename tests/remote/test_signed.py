"""Outputs at addresses that are signed: `model_signing` accepts a copy, also where files of an interrupted run were kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from addresses import FIXTURES, tree
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import zckpt
from zckpt.base.errors import RemoteError
from zckpt.storage import uploads

RUN = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    path = tmp_path / "key.pem"
    path.write_bytes(made.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(made.public_key().public_bytes(pem, info))
    return path


def accepted(address: str, copy: Path, public: Path) -> bool:
    from model_signing import verifying

    files = tree(address if not address.endswith(".bin") else address.rpartition("/")[0])
    copy.mkdir(parents=True)
    for name, data in files.items():
        (copy / name).write_bytes(data)
    model, signature = copy, copy / "model.sig"
    if address.endswith(".bin"):
        model = copy / address.rpartition("/")[2]
        signature = model.with_name(f"{model.name}.sig")
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(model, signature)
    except ValueError:
        return False
    return True


def test_directories_files_and_deltas(root: str, key: Path, tmp_path: Path) -> None:
    public, signed = key.with_suffix(".pub"), zckpt.Options(sign=key, max_shard_size=500, overwrite=True)
    out, one = f"{root}/out", f"{root}/one/w.bin"
    for number, dtype in enumerate(("bf16", "fp32")):
        zckpt.convert(RUN, out, dtype=dtype, options=signed)
        zckpt.convert(RUN, one, dtype=dtype, options=signed)
        assert accepted(out, tmp_path / f"out{number}", public) and accepted(one, tmp_path / f"one{number}", public)
        assert zckpt.verify(RUN, out).ok and zckpt.verify(RUN, one).ok
    assert zckpt.convert(RUN, out, dtype="fp32", options=signed).already_done
    zckpt.delta(RUN, RUN, f"{root}/delta", options=zckpt.DeltaOptions(sign=key))
    assert accepted(f"{root}/delta", tmp_path / "delta", public)
    for place in (out, one):
        zckpt.convert(RUN, place, dtype="bf16", options=zckpt.Options(overwrite=True))
    assert not [name for name in (*tree(out), *tree(f"{root}/one")) if name.endswith(".sig")]


def test_what_an_interrupted_run_had_sent_is_signed_too(
    impatient: None, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed, complete, calls = zckpt.Options(sign=key, max_shard_size=500), uploads.Upload.complete, 0

    def dies(upload: uploads.Upload) -> None:
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise RemoteError("the store is gone")
        complete(upload)

    monkeypatch.setattr(uploads.Upload, "complete", dies)
    with pytest.raises(RemoteError):
        zckpt.convert(RUN, "memory://m/out", dtype="bf16", options=signed)
    monkeypatch.undo()
    report = zckpt.convert(RUN, "memory://m/out", dtype="bf16", options=signed)
    assert report.kept
    assert accepted("memory://m/out", tmp_path / "copy", key.with_suffix(".pub"))
