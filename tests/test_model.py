"""The models of the agreement, where spin and gcc are there: what takes seconds. ``make model`` checks the rest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKER = Path(__file__).parents[1] / "model" / "check.py"


def _checker() -> Any:
    spec = importlib.util.spec_from_file_location("model_check", CHECKER)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = _checker()
FAST = [check for check in checker.CHECKS if check.fast]


@pytest.mark.skipif(checker.missing() is not None, reason="spin or gcc is not installed")
@pytest.mark.parametrize("check", FAST, ids=lambda check: check.name)
def test_a_model_is_as_it_must_be(check: Any) -> None:
    outcome = checker.run(check)
    assert not outcome.wrong
    assert outcome.found == check.found


def test_an_incomplete_search_is_an_error() -> None:
    check = checker.Check("it", "segment", "")
    told = "State-vector 64 byte, depth reached 99, errors: 0\n   12 states, stored\n"
    assert not checker._judge(check, told, 1.0).wrong
    for why in ("error: max search depth too small", "pan: reached -DMEMLIM bound"):
        assert checker._judge(check, f"{why}\n{told}", 1.0).wrong
    assert checker._judge(check, "", 1.0).wrong


def test_the_old_protocol_is_known_to_be_wrong() -> None:
    """Its check must find the violation; finding none is an error."""
    (old,) = [check for check in checker.CHECKS if "OLD" in check.defines.split()]
    assert old.fast
    assert old.found == checker.TOLD
    nothing = "State-vector 64 byte, depth reached 99, errors: 0\n   12 states, stored\n"
    assert "not found" in checker._judge(old, nothing, 1.0).wrong
