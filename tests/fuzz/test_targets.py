"""The fuzz targets for a while: what is in the corpus, and 50,000 inputs from there. ``make fuzz`` goes on."""

from __future__ import annotations

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
