"""Makes the helper modules beside the tests importable; where tests write; what each file costs."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
if "ZCKPT_FUZZ" not in os.environ:  # reads zckpt's source for numbers to try, which takes 10 s
    providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]
sys.path.insert(0, str(Path(__file__).parent))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start thousands of programs: what they import is compiled once
sys.dont_write_bytecode = False
gc.disable()  # until all is collected: what is imported meanwhile is no garbage

from costs import Costs  # noqa: E402
from ending import share_imports  # noqa: E402
from shares import share  # noqa: E402
from temporary import use_memory  # noqa: E402

use_memory()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config.option, "dist", "no") == "loadgroup" or hasattr(config, "workerinput"):
        share(items)


def pytest_collection_finish() -> None:
    share_imports()
    gc.enable()


@pytest.fixture(autouse=True)
def no_other_family() -> Iterator[None]:
    """A family of models that a test adds is gone behind it."""
    yield
    schemes = sys.modules.get("zckpt.naming.schemes")
    if schemes is not None and schemes._added:
        schemes._added.clear()
        schemes._by_type.cache_clear()
        schemes.scheme.cache_clear()
