"""Signatures: what `model_signing` accepts and refuses, what is in them, and keys that cannot sign."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from typer.testing import CliRunner

import zckpt
from zckpt.base.errors import AccessError, UsageError
from zckpt.cli import app
from zckpt.output import signature

FIXTURES = Path(__file__).parents[2] / "fixtures"
RUN = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"


def saved(key: object, path: Path, password: bytes = b"") -> Path:
    pem = serialization.Encoding.PEM
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))  # type: ignore[attr-defined]
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    path.with_suffix(".pub").write_bytes(public)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return saved(ec.generate_private_key(ec.SECP256R1()), tmp_path / "key.pem")


@pytest.fixture(scope="module")
def accepts() -> Callable[[Path, Path], bool]:
    """Whether `model_signing` accepts the signature of a directory or of one file."""
    from model_signing import verifying

    def accepted(directory: Path, public: Path) -> bool:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public)
        signature = directory / "model.sig" if directory.is_dir() else directory.with_name(f"{directory.name}.sig")
        try:
            config.verify(directory, signature)
        except ValueError:
            return False
        return True

    return accepted


def predicate_of(directory: Path) -> dict[str, object]:
    bundle = json.loads((directory / "model.sig").read_text())
    found: dict[str, object] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))["predicate"]
    return found


def test_every_kind_of_output_is_signed(key: Path, tmp_path: Path, accepts: Callable[[Path, Path], bool]) -> None:
    def run(*words: object) -> None:
        result = CliRunner().invoke(app, [*map(str, words), "--sign", str(key)])
        assert result.exit_code == 0, result.output

    run("to-bf16", RUN, tmp_path / "bf16", "--max-shard-size", "300")
    run("to-fp32", RUN, tmp_path / "bin", "--format", "bin")
    run("reshard", RUN, tmp_path / "resumable", "--world-size", 3)
    run("to-universal", RUN, tmp_path / "universal")
    run("to-dcp", RUN, tmp_path / "dcp")
    run("to-peft", FIXTURES / "peft" / "lora_zero2" / "checkpoint", tmp_path / "adapter")
    run("slim", RUN, tmp_path / "slim", "--drop", "optimizer")
    run("average", RUN, RUN, tmp_path / "average")
    run("delta", tmp_path / "bf16", RUN, tmp_path / "weight_v000001")
    run("apply", tmp_path / "bf16", tmp_path / "weight_v000001", tmp_path / "applied")
    public = key.with_suffix(".pub")
    for name in (
        "bf16",
        "bin",
        "resumable",
        "universal",
        "dcp",
        "adapter",
        "slim",
        "average",
        "weight_v000001",
        "applied",
    ):
        out = tmp_path / name
        files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"model.sig"}
        assert {resource["name"] for resource in predicate_of(out)["resources"]} == files  # type: ignore[union-attr, index]
        assert accepts(out, public), name
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 1
    assert zckpt.verify(RUN, tmp_path / "bf16").ok
    words = ["verify", "key", tmp_path / "bf16", "--signature", tmp_path / "bf16" / "model.sig", "--public_key", public]
    done = subprocess.run([sys.executable, "-m", "model_signing", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "Verification succeeded" in done.stdout, done.stderr


def test_a_change_is_found(key: Path, tmp_path: Path, accepts: Callable[[Path, Path], bool]) -> None:
    out, public = tmp_path / "out", key.with_suffix(".pub")
    zckpt.convert(RUN, out, dtype="bf16", options=zckpt.Options(sign=key))
    assert accepts(out, public)
    assert not accepts(out, saved(ec.generate_private_key(ec.SECP256R1()), tmp_path / "other.pem").with_suffix(".pub"))
    for name in ("model.safetensors", "zckpt.json"):
        before = (out / name).read_bytes()
        (out / name).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        assert not accepts(out, public)
        (out / name).write_bytes(before)
    (out / "more.bin").write_bytes(b"")
    assert not accepts(out, public)
    (out / "more.bin").unlink()
    assert accepts(out, public)


def test_the_source_is_in_it(key: Path, tmp_path: Path) -> None:
    zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=zckpt.Options(sign=key))
    [source] = predicate_of(tmp_path / "out")["source"]["made_from"]  # type: ignore[index, call-overload]
    tag = RUN / (RUN / "latest").read_text()
    assert source["layout"] == "zero2" and source["tag"] == tag.name
    small = {file["name"]: file for file in source["files"] if file["bytes"] <= 1 << 20}
    assert small
    for name, file in small.items():
        assert file["sha256"] == hashlib.sha256((tag / name).read_bytes()).hexdigest() and file["index"] == "whole"


def test_indexes_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    from zckpt.jobs import planned
    from zckpt.storage.location import locate

    monkeypatch.setattr(planned, "_WHOLE_BYTES", 10)
    torch_file = next((RUN / (RUN / "latest").read_text()).glob("*.pt"))
    with zipfile.ZipFile(torch_file) as file:
        [pickle] = [name for name in file.namelist() if name.endswith("/data.pkl")]
        expected = hashlib.sha256(file.read(pickle)).hexdigest()
    facts = planned._facts("a", locate(torch_file))
    assert (facts["index"], facts["sha256"]) == ("pickle", expected)
    zckpt.convert(RUN, tmp_path / "out", dtype="bf16")
    weights = tmp_path / "out" / "model.safetensors"
    header = weights.read_bytes()[: 8 + int.from_bytes(weights.read_bytes()[:8], "little")]
    facts = planned._facts("a", locate(weights))
    assert (facts["index"], facts["sha256"]) == ("header", hashlib.sha256(header).hexdigest())


def test_without_a_key_nothing_changes_and_an_old_signature_goes(key: Path, tmp_path: Path) -> None:
    signed = zckpt.Options(sign=key)
    for name in ("plain", "out"):
        zckpt.convert(RUN, tmp_path / name, dtype="bf16")
    assert not (tmp_path / "out" / "model.sig").exists()
    with pytest.raises(zckpt.OutputError, match="already exists"):  # the same weights, but not the same output
        zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=signed)
    zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=zckpt.Options(sign=key, overwrite=True))
    assert json.loads((tmp_path / "out" / "zckpt.json").read_text())["signature"] == "model.sig"
    assert zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=signed).already_done
    zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=zckpt.Options(overwrite=True))
    same = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == same


def test_files_are_hashed_while_they_are_written(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepts: Callable[[Path, Path], bool]
) -> None:
    """No safetensors file is read again; a torch file, which has checksums in it, is."""
    again: list[str] = []
    read = signature.sha256_of
    monkeypatch.setattr(signature, "sha256_of", lambda path: again.append(Path(path).name) or read(path))
    zckpt.convert(RUN, tmp_path / "out", dtype="bf16", options=zckpt.Options(sign=key))
    assert "model.safetensors" not in again and accepts(tmp_path / "out", key.with_suffix(".pub"))
    zckpt.convert(RUN, tmp_path / "bin", dtype="bf16", options=zckpt.Options(sign=key, format="bin"))
    assert "pytorch_model.bin" in again


def test_keys_that_cannot_sign(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error before anything is opened: the checkpoint is none."""

    def refused(path: Path, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            zckpt.convert(tmp_path / "nothing", tmp_path / "out", options=zckpt.Options(sign=path))

    refused(tmp_path / "missing.pem", AccessError, "cannot be read")
    refused(tmp_path, AccessError, "cannot be read")
    refused(key.with_suffix(".pub"), UsageError, "is not a private key")
    (tmp_path / "text.pem").write_text("no key")
    refused(tmp_path / "text.pem", UsageError, "is not a private key")
    refused(saved(rsa.generate_private_key(65537, 2048), tmp_path / "rsa.pem"), UsageError, "RSAPrivateKey")
    refused(saved(ed25519.Ed25519PrivateKey.generate(), tmp_path / "ed.pem"), UsageError, "Ed25519")
    refused(saved(ec.generate_private_key(ec.SECP256K1()), tmp_path / "k1.pem"), UsageError, "secp256k1")
    locked = saved(ec.generate_private_key(ec.SECP384R1()), tmp_path / "locked.pem", b"secret")
    refused(locked, AccessError, "cannot be opened")
    monkeypatch.setenv(signature.PASSWORD, "wrong")
    refused(locked, UsageError, "is not a private key")
    monkeypatch.setenv(signature.PASSWORD, "secret")
    zckpt.convert(RUN, tmp_path / "out", options=zckpt.Options(sign=locked))
    assert (tmp_path / "out" / "model.sig").exists()


def test_one_file_has_its_signature_beside_it(key: Path, tmp_path: Path, accepts: Callable[[Path, Path], bool]) -> None:
    signed, public = zckpt.Options(sign=key, overwrite=True), key.with_suffix(".pub")
    for name in ("one.safetensors", "one.bin"):
        out = tmp_path / name
        for dtype in ("bf16", "fp32"):
            zckpt.convert(RUN, out, dtype=dtype, options=signed)
            assert accepts(out, public) and zckpt.verify(RUN, out).ok
        assert zckpt.convert(RUN, out, dtype="fp32", options=signed).already_done
        data = bytearray(out.read_bytes())
        data[-3] ^= 1
        out.write_bytes(data)
        assert not accepts(out, public)
        zckpt.convert(RUN, out, dtype="bf16", options=zckpt.Options(overwrite=True))
        assert {path.name for path in tmp_path.glob("one.*")} == {name, f"{name}.zckpt.json"}
        for path in tmp_path.glob("one.*"):
            path.unlink()
    (tmp_path / "other.bin.sig").write_bytes(b"somebody's")
    with pytest.raises(zckpt.OutputError, match="name of the signature is taken"):
        zckpt.convert(RUN, tmp_path / "other.bin", options=signed)
    assert {path.name for path in tmp_path.glob("other.*")} == {"other.bin.sig"}


def test_a_merge_names_all_that_it_is_made_of(key: Path, tmp_path: Path) -> None:
    home = FIXTURES / "peft" / "dora_zero1"
    zckpt.to_peft(home / "checkpoint", tmp_path / "adapter")
    lora = zckpt.LoraMerge(adapters=[tmp_path / "adapter"])
    zckpt.convert(home / "base", tmp_path / "out", options=zckpt.Options(sign=key, lora=lora))
    other = zckpt.LoraMerge(base=home / "base")
    zckpt.convert(home / "checkpoint", tmp_path / "with-base", options=zckpt.Options(sign=key, lora=other))
    for name, places in (("out", [home / "base", tmp_path / "adapter"]), ("with-base", [None, home / "base"])):
        sources = predicate_of(tmp_path / name)["source"]["made_from"]  # type: ignore[index, call-overload]
        assert len(sources) == 2
        for source, place in zip(sources, places, strict=True):
            for file in source["files"] if place else ():
                assert file["sha256"] == hashlib.sha256((place / file["name"]).read_bytes()).hexdigest()
            assert source["files"]
