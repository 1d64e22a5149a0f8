"""Makes the helper modules beside the tests importable; a place for tests that sync a thousand files; what each file costs."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
sys.path.insert(0, str(Path(__file__).parent))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start thousands of programs: what they import is compiled once
sys.dont_write_bytecode = False
gc.disable()  # until all is collected: what is imported meanwhile is no garbage

from costs import Costs  # noqa: E402
from ending import share_imports  # noqa: E402
from shares import share  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config.option, "dist", "no") == "loadgroup" or hasattr(config, "workerinput"):
        share(items)


def pytest_collection_finish() -> None:
    share_imports()
    gc.enable()


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """As `tmp_path`, in memory where there is such a place: nobody waits there for a disk to sync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="zckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_other_family() -> Iterator[None]:
    """A family of models that a test adds is gone behind it."""
    yield
    schemes = sys.modules.get("zckpt.naming.schemes")
    if schemes is not None and schemes._added:
        schemes._added.clear()
        schemes._by_type.cache_clear()
        schemes.scheme.cache_clear()
