"""The fuzz targets for a while: what is in the corpus, and 50,000 inputs from there. ``make fuzz`` goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import targets

COMPILER = targets.clang()
RUNS = 50_000
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no clang with libFuzzer is installed: see make fuzz")


@pytest.mark.parametrize("target", targets.TARGETS)
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    said: list[str] = []
    binary = targets.build(COMPILER, target, tmp_path)
    outcome = targets.run(binary, RUNS, 1, said.append)
    assert not outcome.failed, outcome.failed
    assert outcome.executions >= RUNS, said
    assert outcome.inputs, "no corpus"


def test_a_fault_is_found(tmp_path: Path) -> None:
    """A check that is gone: the number of a table is no longer compared with how many there are."""
    assert COMPILER is not None
    native = tmp_path / "native"
    native.mkdir()
    for path in targets.NATIVE.iterdir():
        (native / path.name).write_bytes(path.read_bytes())
    decide = native / "decide.c"
    whole = decide.read_text()
    check = "slot < DCC_SLOTS && "
    assert whole.count(check) == 1
    decide.write_text(whole.replace(check, ""))
    outcome = targets.run(targets.build(COMPILER, "runner_words", tmp_path, native), RUNS, 1, lambda line: None)
    assert "out of bounds" in outcome.failed
    assert next(tmp_path.glob("runner_words-crash-*"), None), "the input is kept"


def test_the_memory_of_who_starts_it_is_not_its_own(tmp_path: Path) -> None:
    """Python counts for its child's limit where it starts it itself, and pytest may be larger than that."""
    assert COMPILER is not None
    binary = targets.build(COMPILER, "table", tmp_path)
    large = "import sys, pathlib, targets; bytes(1) * (2100 << 20); "
    run = "print(targets.run(pathlib.Path(sys.argv[1]), 50_000, 1, lambda line: None).failed)"
    done = subprocess.run(
        [sys.executable, "-c", large + run, binary], cwd=HERE, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
