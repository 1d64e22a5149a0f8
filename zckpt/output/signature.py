"""Signatures of outputs: OpenSSF model signing, which `model_signing verify key` accepts.

For the destinations of outputs, and pages of the hub. A directory with a signature has a file `model.sig`: a sigstore
bundle with a DSSE envelope over an in-toto statement. The statement lists every file of the output by its SHA-256, `zckpt.json`
among them, and says what the output was made from: SHA-256s of the source's index. The signature of one file lies beside it, as
`model.safetensors.sig`; verifiers call that file ".".
Source: model-signing 1.1 (model_signing/_signing: `Payload`, `sign_ec_key.Signer`, `sign_sigstore_pb.pae`; _serialization/file.py
on a model that is one file); DSSE 1.0, protocol.md; sigstore bundle v0.3.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import field
from hashlib import sha256
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import AccessError, UnsupportedError, UsageError
from zckpt.output.manifest import NAME as MANIFEST
from zckpt.output.manifest import SIGNATURE

PASSWORD = "ZCKPT_SIGN_PASSWORD"
"""The environment variable with the password of an encrypted key."""

_PAYLOAD = "application/vnd.in-toto+json"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""Curve of a key -> the hash that is signed with it."""
_ONE_FILE = "."
"""What verifiers call the file of a model that is one file."""
_IGNORED = (SIGNATURE, ".git", ".gitattributes", ".github", ".gitignore")
"""Paths that a verifier leaves out."""


@dataclass(frozen=True, slots=True)
class Signing:
    """An order to sign an output.

    Attributes:
        hint: SHA-256 of the public key's PEM, by which verifiers know the key.
        key: the private key.
        provenance: what the output is made from.
    """

    hint: str
    key: Any = field(repr=False)
    provenance: Mapping[str, object] = field(default_factory=dict[str, object])

    def of(
        self, name: str, directory: str, paths: Iterable[str], known: Mapping[str, str], manifest: str, *, single: bool
    ) -> bytes:
        """The signature's file.

        Args:
            name: of the output.
            directory: that its files are in until they get their names.
            paths: of the files in it, without the manifest.
            known: path -> SHA-256, of those that were hashed while they were written; the others are read again.
            manifest: SHA-256 of the manifest.
            single: whether the output is one file.
        """
        digests = {path: known.get(path) or sha256_of(os.path.join(directory, path)) for path in paths}
        return self.bundle(name, digests, manifest, single=single)

    def bundle(self, name: str, digests: Mapping[str, str], manifest: str, *, single: bool = False) -> bytes:
        """The signature's file.

        Args:
            name: of the output.
            digests: path -> SHA-256 of its files, without the manifest.
            manifest: SHA-256 of the manifest; "" where there is none.
            single: whether the output is one file; its manifest is not signed then.
        """
        if single:
            (digest,) = digests.values()
            digests = {_ONE_FILE: digest}
        elif manifest:
            digests = {**digests, MANIFEST: manifest}
        statement = json.dumps(_statement(name, digests, self.provenance), ensure_ascii=False).encode()
        signed = b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(statement), statement)
        bundle = {
            "mediaType": _BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": self.hint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": b64encode(statement).decode(),
                "payloadType": _PAYLOAD,
                "signatures": [{"sig": b64encode(self._signed(signed)).decode(), "keyid": ""}],
            },
        }
        return (json.dumps(bundle) + "\n").encode()

    def _signed(self, data: bytes) -> bytes:
        """The signature: of the same data the same bytes, where OpenSSL can do that (RFC 6979)."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        algorithm = getattr(hashes, _CURVES[self.key.curve.name])()
        try:
            how = ec.ECDSA(algorithm, deterministic_signing=True)
        except (TypeError, UnsupportedAlgorithm):
            how = ec.ECDSA(algorithm)
        signature: bytes = self.key.sign(data, how)
        return signature


def _statement(name: str, digests: Mapping[str, str], provenance: Mapping[str, object]) -> dict[str, object]:
    """The in-toto statement; its subject has the SHA-256 of all files' digests, in the order of the paths."""
    ordered = sorted(digests.items())
    whole = sha256(b"".join(bytes.fromhex(digest) for _, digest in ordered)).hexdigest()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": whole}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(_IGNORED),
            },
            "resources": [{"name": path, "algorithm": "sha256", "digest": digest} for path, digest in ordered],
            "source": dict(provenance),
        },
    }  # fmt: skip


def signing_with(path: str | os.PathLike[str]) -> Signing:
    """An order to sign with the key in a file. Raises AccessError if the file cannot be read, or its password is missing
    or wrong; UsageError if it is not a private key of a kind that can sign; UnsupportedError if the package cryptography
    is not installed.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UnsupportedError(
            "signatures need the package cryptography, which is not installed",
            remedy="Run: pip install 'zckpt[sign]'.",
        ) from error
    place = os.fspath(path)
    try:
        with open(place, "rb") as file:
            data = file.read(1 << 16)
    except OSError as error:
        raise AccessError(
            "the key cannot be read", file=place, found=error.strerror or str(error), expected="a private key in PEM form",
            remedy="Check the path of --sign and its permissions.",
        ) from error  # fmt: skip
    password = os.environ.get(PASSWORD)
    try:
        key: Any = serialization.load_pem_private_key(data, password.encode() if password else None)
    except TypeError as error:  # a password is missing, or there is one for a key that has none
        raise AccessError(
            "the key cannot be opened", file=place, found=str(error),
            remedy=f"Put the password of an encrypted key into the environment variable {PASSWORD}; unset it for other keys.",
        ) from error  # fmt: skip
    except (ValueError, UnsupportedAlgorithm) as error:
        wrong = password is not None
        raise UsageError(
            "is not a private key", file=place, found=str(error)[:120],
            expected="a private key in PEM form" + (f", and its password in {PASSWORD}" if wrong else ""),
            remedy="Run: openssl ecparam -name prime256v1 -genkey -noout -out key.pem. Pass that file with --sign.",
        ) from error  # fmt: skip
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        kind = f"curve {key.curve.name}" if isinstance(key, ec.EllipticCurvePrivateKey) else type(key).__name__
        raise UsageError(
            "the key cannot sign models", file=place, found=kind, expected="an elliptic curve key, NIST P-256, P-384 or P-521",
            remedy="Run: openssl ecparam -name prime256v1 -genkey -noout -out key.pem. Pass that file with --sign.",
        )  # fmt: skip
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Signing(sha256(public).hexdigest(), key)


def sha256_of(path: str) -> str:
    """The SHA-256 of a file of this machine. Raises OSError."""
    digest = sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
