"""What tests cost: seconds of processors, with those of all programs that they start, so that a busy machine does not count."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import BUDGET
from proofs import IS_WHOLE

_TICKS = os.sysconf("SC_CLK_TCK")
_SLOW_S = 0.25
"""Only of a test that took so long is it asked what the processes that still run have spent: that takes milliseconds."""
_PROPERTY = "cpu seconds"


def _spent_by_running() -> float:
    """CPU seconds of the processes below this one that still run, with those that they have waited for."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
            seconds[int(name)] = sum(map(int, fields[11:15])) / _TICKS
    below = [os.getpid()]
    for process in below:
        below += children.get(process, [])
    return sum(seconds[process] for process in below[1:])


def _spent() -> float:
    """CPU seconds of this process and of those below it that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


class Costs:
    """A plugin: every test's report has what it cost, and a run of several files ends with the twenty that cost most."""

    def __init__(self) -> None:
        self._of_tests: Counter[str] = Counter()
        self._spent, self._running, self._at = _spent(), 0.0, time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Adds to the last report of a test what was spent since the test before it."""
        if call.when == "teardown":
            spent, at = _spent(), time.monotonic()
            cost = spent - self._spent
            if max(cost, at - self._at) > _SLOW_S and os.path.isdir("/proc/self"):
                running = _spent_by_running()
                cost += running - self._running
                self._running = running
            self._spent, self._at = spent, at
            item.user_properties.append((_PROPERTY, round(cost, 4)))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_tests[report.nodeid] += dict(report.user_properties).get(_PROPERTY, 0.0)  # type: ignore[arg-type]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of_files: Counter[str] = Counter()
        for test, cost in self._of_tests.items():
            of_files[test.partition("::")[0]] += cost
        if len(of_files) > 1:
            terminalreporter.section(f"seconds of processors by file: {sum(of_files.values()):.0f} in all")
            for file, cost in of_files.most_common(20):
                much = 2 * BUDGET.get(file, 10) < cost and not IS_WHOLE
                terminalreporter.line(f"{cost:8.1f} {file}{': over twice its budget' * much}")
        if path := os.environ.get("ZCKPT_COSTS"):
            Path(path).write_text(json.dumps(dict(self._of_tests.most_common()), indent=0))
