"""Tests on NCCL's own host code, once per source that is there; they end in a table.

NCCL_SRC names sources of NCCL, tarballs or trees, separated by colons; `make real-nccl` sets it. Each is built once,
which takes minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from real_jobs import Jobs
from rich.console import Console
from rich.table import Table

from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl, build_nccl

HERE = Path(__file__).parent
# By module: the subject and what is checked of it.
SUBJECTS = {
    "test_spy": ("emulated NCCL", "the same calls of both plugins, kernels and costs as NCCL itself"),
    "test_versions": ("versions", "each interface is found, asked and obeyed; what it measures is recorded"),
    "test_records": ("records", "what NCCL chose, times within 5 %; none that is wrong is believed"),
    "test_windows": ("windows", "all of a window is measured on all ranks, or nothing of it"),
    "test_tables": ("tables", "all ranks change to a table at the same call"),
    "test_static": ("static", "a static table decides as the live one; NVIDIA's CSV tuner as our CSV says"),
    "test_ends": ("ends", "every order of destroy, finalize and abort, while records are read"),
    "test_online": ("online", "a job of several groups is learned, exploited, and learned anew after a shift"),
    "test_replay_on_nccl": ("replay", "what was recorded is played, and recorded as the same"),
    "test_nthreads": ("threads", "a communicator has those that were asked for when it was made"),
    "test_leaks": ("leaks", "100 communicators leave no memory, files or segments"),
    "test_costs": ("bench", "every set-up of `bench plugin --nccl` gives numbers"),
    "test_sanitizers": ("sanitizers", "no report of the plugin's code"),
}


def sources() -> list[Path]:
    return [Path(path) for path in os.environ.get("NCCL_SRC", "").split(":") if path]


def release(source: Path) -> str:
    found = re.search(r"\d+\.\d+\.\d+", source.name)
    return found.group() if found else source.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real_nccl)
            # Building NCCL counts as a fixture of the first test.
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session", params=sources(), ids=release)
def nccl(request: pytest.FixtureRequest) -> RealNccl:
    return build_nccl(request.param, say=print)


@pytest.fixture(scope="session")
def quick_poll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See native/quick_poll.c."""
    path = tmp_path_factory.mktemp("native") / "libquick-poll.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["cc", *flags, "-o", path, HERE / "native" / "quick_poll.c"], check=True)
    return path


@pytest.fixture
def jobs(nccl: RealNccl, quick_poll: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    with TemporaryDirectory(prefix="dynamiccl-tests-", dir="/dev/shm") as shm:
        monkeypatch.setenv("DYNAMICCL_SHM_DIR", shm)
        started = Jobs(nccl, tmp_path, Path(shm), quick_poll)
        try:
            yield started
        finally:
            started.close()


# ---- the table ----

_outcomes: dict[tuple[str, str], Counter[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    module = Path(report.nodeid.split("::")[0])
    if module.parent.name != HERE.name or (report.when != "call" and report.passed):
        return
    version = re.search(r"\[([^-\]]+)", report.nodeid)
    _outcomes.setdefault((module.stem, version[1] if version else ""), Counter())[report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not any(counts["passed"] or counts["failed"] for counts in _outcomes.values()):
        return
    table = Table(title="NCCL's own host code")
    for name in ("subject", "NCCL", "what is checked", "tests", "result"):
        table.add_column(name, justify="right" if name == "tests" else "left")
    for module, (subject, checked) in SUBJECTS.items():
        for version, counts in sorted((v, c) for (m, v), c in _outcomes.items() if m == module):
            bad = [f"{counts[outcome]} {outcome}" for outcome in ("failed", "skipped") if counts[outcome]]
            result = f"[red]{', '.join(bad)}" if counts["failed"] else f"[yellow]{bad[0]}" if bad else "[green]ok"
            table.add_row(subject, version, checked, str(counts.total()), result)
    terminalreporter.write_line("")
    terminalreporter.ensure_newline()
    console = Console(file=terminalreporter._tw._file, width=120, force_terminal=terminalreporter.hasmarkup)
    console.print(table)
