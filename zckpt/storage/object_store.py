"""Buckets of S3 and Google, through obstore where it is installed: the operations that `fsspec_io` and `uploads` need, under
fsspec's names.

obstore's requests run on threads of its own, without Python. s3fs and gcsfs have one Python thread for all of them, which takes
twice the processor time for each byte; gcsfs sends the parts of a file one after the other (docs/push.md has the figures). What
obstore cannot be told, such as fsspec's own configuration, is left to these.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from zckpt.base.dataclass import dataclass

if TYPE_CHECKING:
    from http.client import HTTPConnection

_STALLS = "30s"
"""The time after which a request that moves no byte has failed."""

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}

_OTHERS_SETTINGS = {
    "s3": re.compile(r"FSSPEC_(S3|S3A)(_.*)?|FSSPEC_CONFIG_DIR"),
    "gs": re.compile(r"FSSPEC_(GS|GCS)(_.*)?|FSSPEC_CONFIG_DIR|GCSFS_.*|STORAGE_EMULATOR_HOST"),
}
"""Names of variables in the environment that say what obstore would not know."""

_GOOGLE_KEYS = re.compile(r"GOOGLE_(SERVICE_ACCOUNT(_PATH|_KEY)?|BEARER_TOKEN)")
"""Names of variables in which obstore finds keys by itself."""

_SETTINGS = ("AWS_", "FSSPEC_", "GOOGLE_", "GCSFS_", "STORAGE_", "CLOUDSDK_", "GCE_")

_FILES = {"endpoint_url", "services", "s3"}
"""Keys of a profile in AWS's own files that say how S3 is reached."""


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """One bucket."""

    bucket: str
    store: Any
    protocol: str = "s3"

    def info(self, path: str) -> dict[str, Any]:
        """Facts of a file, or of what is a directory because files lie under it. Raises FileNotFoundError if it is
        neither.
        """
        import obstore

        key = self._key(path)
        if key:
            try:
                return _facts(self.bucket, obstore.head(self.store, key))
            except FileNotFoundError:
                pass
        for found in obstore.list(self.store, key or None, chunk_size=1):
            if found:
                return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """Facts of all entries of a directory."""
        import obstore

        found = obstore.list_with_delimiter(self.store, self._key(path) or None)
        names = [{"name": f"{self.bucket}/{name}", "type": "directory", "size": 0} for name in found["common_prefixes"]]
        entries = [_facts(self.bucket, one) for one in found["objects"]] + names
        if not entries:
            raise FileNotFoundError(path)
        return entries

    def find(self, path: str) -> list[str]:
        """Paths of all files under a directory."""
        import obstore

        found = obstore.list(self.store, self._key(path) or None, chunk_size=1000)
        return [f"{self.bucket}/{one['path']}" for chunk in found for one in chunk]

    def read_range(self, path: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file, or fewer at its end."""
        import obstore

        return memoryview(obstore.get_range(self.store, self._key(path), start=start, end=stop))

    def rm_file(self, path: str) -> None:
        """Removes a file if it exists."""
        import obstore

        obstore.delete(self.store, self._key(path))

    def open_parts(self, path: str, part_bytes: int, parts: int) -> Any:
        """Opens obstore's writer, which sends `parts` parts of a file at a time.

        The file appears when it is closed; the store forgets all parts where its `with` block ends by an error.
        """
        import obstore

        return obstore.open_writer(self.store, self._key(path), buffer_size=part_bytes, max_concurrency=parts)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Does nothing: no listing is kept."""

    def _key(self, path: str) -> str:
        return path.strip("/").removeprefix(self.bucket).lstrip("/")


def find_store(address: str) -> tuple[ObjectStore, str] | None:
    """The bucket of an address, and the path that `ObjectStore` takes; None where fsspec is asked."""
    kind, _, path = address.partition("://")
    bucket = path.partition("/")[0]
    if (kind := kind.lower()) not in _KINDS or not bucket or "?" in path or not _is_installed():
        return None
    told = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)))
    store = _open(_KINDS[kind], bucket, os.getpid(), told)
    return None if store is None else (store, path)


@functools.cache
def _is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("obstore") is not None


@functools.lru_cache(64)
def _open(kind: str, bucket: str, process: int, told: tuple[tuple[str, str], ...]) -> ObjectStore | None:
    """The bucket as the environment says it is reached; `process`, because obstore's threads do not outlive a fork."""
    global _owner
    if (
        _owner not in (0, process)
        or any(_OTHERS_SETTINGS[kind].fullmatch(name) for name, _ in told)
        or _has_fsspec_settings()
    ):
        return None
    store = (_open_s3 if kind == "s3" else _open_google)(bucket, dict(told))
    if store is None:
        return None
    _owner = process
    return ObjectStore(bucket, store, kind)


def _open_s3(bucket: str, environment: dict[str, str]) -> Any:
    from obstore.store import S3Store

    keys, region = None, environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if "AWS_PROFILE" in environment or not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= environment.keys():
        found = _keys_of_botocore()
        if found is None:
            return None
        keys, region = found[0], found[1] or region
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if not endpoint:
        from http.client import HTTPSConnection

        region = region or "us-east-1"
        if region.startswith("cn-"):
            return None
        region = bucket_region(HTTPSConnection(f"s3.{region}.amazonaws.com", timeout=5), bucket) or region
    client = _client_options()
    if (bundle := environment.get("AWS_CA_BUNDLE")) and not (endpoint or "").startswith("http:"):
        with open(bundle, "rb") as file:
            client["root_certificate"] = file.read()
    options: dict[str, Any] = {"region": region, "endpoint": endpoint, "credential_provider": keys}
    return S3Store(
        bucket, **{name: value for name, value in options.items() if value}, client_options=cast("Any", client),
        retry_config=_retries(environment.get("AWS_MAX_ATTEMPTS", "")),
    )  # fmt: skip


def _open_google(bucket: str, environment: dict[str, str]) -> Any:
    from obstore.store import GCSStore

    options: dict[str, Any] = {}
    if not any(map(_GOOGLE_KEYS.fullmatch, environment)):
        keys = _keys_of_google()
        if keys is None:
            return None
        options["credential_provider"] = keys
    return GCSStore(bucket, **options, client_options=cast("Any", _client_options()), retry_config=_retries())


def _client_options() -> dict[str, Any]:
    return {"allow_http": True, "timeout": "1h", "read_timeout": _STALLS, "connect_timeout": "10s"}


def _retries(tries: str = "") -> Any:
    from datetime import timedelta

    return {
        "max_retries": max(0, int(tries) - 1) if tries.isdigit() else 3, "retry_timeout": timedelta(seconds=100),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 3},
    }  # fmt: skip


def _keys_of_google() -> Callable[[], Any] | None:
    """What gives the tokens of the credentials that Google's own client finds; None where gcsfs should be asked."""
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from google.auth.transport.requests import Request
    except ImportError:
        return None
    from datetime import datetime, timedelta, timezone

    try:
        found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except DefaultCredentialsError:
        return None

    def keys() -> dict[str, Any]:
        if not found.valid:
            found.refresh(Request())
        until = (
            found.expiry.replace(tzinfo=timezone.utc)
            if found.expiry
            else datetime.now(timezone.utc) + timedelta(minutes=10)
        )
        return {"token": found.token, "expires_at": until}

    return keys


_owner = 0
"""The process that obstore's threads belong to; 0 before there are any."""


def _has_fsspec_settings() -> bool:
    return os.path.isdir(os.path.expanduser("~/.config/fsspec"))


def _keys_of_botocore() -> tuple[Callable[[], Any], str | None] | None:
    """What gives the keys that AWS's own client finds, and its region; None where s3fs should be asked."""
    try:
        from botocore.session import Session
    except ImportError:
        return None
    from datetime import datetime, timedelta, timezone

    session = Session()
    found = None if _FILES & session.get_scoped_config().keys() else session.get_credentials()
    if found is None:
        return None

    def keys() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        until = datetime.now(timezone.utc) + timedelta(minutes=10)
        return {
            "access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token, "expires_at": until,
        }  # fmt: skip

    return keys, session.get_config_variable("region")


def bucket_region(connection: HTTPConnection, bucket: str) -> str | None:
    """Where a bucket of AWS is, by its answer to a request without keys; None where it does not say."""
    from http.client import HTTPException

    try:
        connection.request("HEAD", f"/{bucket}")
        found = connection.getresponse().getheader("x-amz-bucket-region")
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
    return str(found) if found else None


def _facts(bucket: str, found: Any) -> dict[str, Any]:
    return {
        "name": f"{bucket}/{found['path']}", "type": "file", "size": found["size"], "ETag": found["e_tag"],
        "VersionId": found["version"], "LastModified": str(found["last_modified"]),
    }  # fmt: skip
