"""Every destination of an output does what `destinations` demands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from destinations import KINDS, Conformance, Place
from s3_server import KEYS, S3Server

from zckpt.storage import fsspec_io

pytestmark = pytest.mark.usefixtures("every_file_counts")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    path = tmp_path / "key.pem"
    path.write_bytes(made.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(made.public_key().public_bytes(pem, info))
    return path


@pytest.fixture(scope="module")
def accepts() -> Callable[[Path, Path], bool]:
    from model_signing import verifying

    def accepted(model: Path, key: Path) -> bool:
        config = verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub"))
        try:
            config.verify(model, model / "model.sig" if model.is_dir() else model.with_name(f"{model.name}.sig"))
        except ValueError:
            return False
        return True

    return accepted


class TestDestinations(Conformance):
    @pytest.fixture(params=KINDS)
    def place(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
        if request.param == "s3":
            running = request.getfixturevalue("server")
            for name, value in {"AWS_ENDPOINT_URL": running.url, **KEYS}.items():
                monkeypatch.setenv(name, value)
            fs = fsspec.filesystem("s3")
            fs.invalidate_cache()
            if fs.exists("bkt"):
                fs.rm("bkt", recursive=True)
            fs.mkdir("bkt")
        monkeypatch.setattr(fsspec_io, "_TRIES", 1)
        place = Place(request.param, tmp_path, monkeypatch)
        yield place
        place.close()
        memory = fsspec.filesystem("memory")
        if memory.exists("/m"):
            memory.rm("/m", recursive=True)
