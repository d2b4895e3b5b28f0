"""Checks the models exhaustively: ``python3 model/check.py [--fast] [NAME ...]``, or ``make model``.

Every configuration is one run of spin's verifier over all states: what must hold holds in every one of them, and what
is known to be wrong, or was broken on purpose, must be found out. Fails if either is not so, or if a search ends before
it has seen everything. docs/agreement_model.md says what each configuration is about.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY_MB = 5000
DEPTH = 200_000
LIMIT_S = 400

TABLES = "two tables at one call"
TOLD = "told differently"
WAITS = "waits without a promise"
WHOLE = "the table is not whole"
LEFT = "left alone and not taken"
# What an assertion says in the source -> what it is about; the first that fits.
ASSERTIONS = {
    "version_of(word)==want": TABLES,
    "(word/2)==want": TABLES,
    "told[": TABLES,
    "chosen<outcome": TABLES,
    "fate[": TOLD,
    "given[": WAITS,
    "tables[": WHOLE,
    ".half[": WHOLE,
    "left_alone": LEFT,
    "in_force": "decided and not taken",
    "dseq==": "waits for ever",
}


@dataclass(frozen=True)
class Check:
    """One run. ``found``: the property that must turn out to be violated; None if all must hold."""

    name: str
    model: str
    defines: str
    holds: str = "no two tables at a call, nobody told differently"
    found: str | None = None
    fast: bool = False


_WORDS = "no two tables at a call, no wait without a promise, tables whole"
_WAIT = "nobody waits for ever, what was decided is taken"


def _segment(name: str, defines: str, found: str | None = None, *, fast: bool = False) -> Check:
    return Check(name, "segment", f"CALLS=5 {defines}", _WORDS, found, fast)


def _broken(name: str, defines: str, found: str = TOLD, *, fast: bool = False) -> Check:
    return Check(name, "agreement", f"RANKS=2 CALLS=2 {defines}", found=found, fast=fast)


def _inband(name: str, defines: str, found: str | None = None, *, fast: bool = False) -> Check:
    holds = "no two tables at a step, no wait but for ranks, left alone is taken"
    return Check(name, "inband", defines, holds, found, fast)


CHECKS = (
    _segment("words of one rank", "VERSIONS=2", fast=True),
    Check("words of one rank, three versions", "segment", "CALLS=4 VERSIONS=3 TRIES=1", _WORDS),
    Check("words of one rank, it ends", "segment", "CALLS=4 VERSIONS=2 CRASHES=2", "nobody waits for ever"),
    Check("2 ranks, 2 switches", "agreement", "SYMMETRIC RANKS=2 VERSIONS=2 CALLS=3", fast=True),
    Check("3 ranks, 2 switches", "agreement", "SYMMETRIC RANKS=3 VERSIONS=2 CALLS=2"),
    Check("3 ranks, 1 switch, more calls", "agreement", "SYMMETRIC RANKS=3 VERSIONS=1 CALLS=3"),
    Check("2 ranks, it ends", "agreement", "CALM SYMMETRIC RANKS=2 VERSIONS=2 CALLS=2", _WAIT, fast=True),
    Check("3 ranks, it ends", "agreement", "CALM SYMMETRIC RANKS=3 VERSIONS=1 CALLS=2", _WAIT),
    _broken("two control planes at once", "VERSIONS=1 PLANES=2", fast=True),
    _broken("a standing that arrives late", "VERSIONS=1 LATE", fast=True),
    Check("terms: two control planes", "agreement", "FENCED SYMMETRIC RANKS=2 VERSIONS=1 CALLS=2 PLANES=2"),
    Check("terms: late standings", "agreement", "FENCED LATE SYMMETRIC RANKS=2 VERSIONS=1 CALLS=2", fast=True),
    Check("terms: 3 ranks", "agreement", "FENCED SYMMETRIC RANKS=3 VERSIONS=1 CALLS=2"),
    _broken("the old protocol", "VERSIONS=1 OLD", fast=True),
    _inband("in band: copied", "STEPS=4 TABLES=2", fast=True),
    _inband("in band: copied, three tables", "FINE=0 STEPS=4 TABLES=3"),
    _inband("in band: copied, 3 ranks", "RANKS=3 FINE=0 STEPS=3 TABLES=2"),
    _inband("in band: handshake", "HANDSHAKE STEPS=4 TABLES=2"),
    _inband("in band: checked again, and refused", "RECHECK", TABLES, fast=True),
    _inband("in band: not checked again", "TRUST", TABLES),
    # One rule broken each.
    _segment("dseq is stored after hold_at is loaded", "VERSIONS=2 M_DSEQ_LATE", TABLES),
    _segment("no second look at dseq", "VERSIONS=2 M_NO_SECOND_LOOK", TABLES),
    _segment("pending before decision", "VERSIONS=2 M_PENDING_FIRST", TABLES),
    _segment("promised without compare-and-swap", "VERSIONS=2 M_PROMISE_WITHOUT_SWAP", TABLES),
    _segment("taken back without compare-and-swap", "VERSIONS=2 M_REFUSE_WITHOUT_SWAP", TABLES),
    _segment("never waits", "VERSIONS=2 M_NEVER_WAIT", TABLES),
    _segment("always waits", "VERSIONS=2 M_ALWAYS_WAIT", WAITS),
    _segment("COMMIT of what was not promised", "VERSIONS=2 M_COMMIT_UNPROMISED", TABLES),
    _segment("COMMIT below the hold", "VERSIONS=2 M_BELOW_HOLD", TABLES),
    _segment("folded before S", "VERSIONS=2 M_FOLD_EARLY", TABLES),
    _segment("written over the table in force", "VERSIONS=2 M_SLOT_IN_FORCE", WHOLE),
    _broken("resolve() without all ranks", "VERSIONS=1 M_SILENT", fast=True),
    _broken("base_at is not kept", "VERSIONS=1 M_BASE_AT"),
    _broken("ABORT while a reply is on its way", "VERSIONS=1 M_ASKS_WHILE_IT_WAITS"),
    _broken("switch at the own hold", "VERSIONS=1 M_OWN_HOLD", TABLES),
    _broken("a COMMIT is not remembered", "VERSIONS=1 M_FORGETS_COMMIT"),
    _broken("opened before all were heard", "VERSIONS=1 M_OPEN_UNHEARD"),
    _broken("terms without an order", "VERSIONS=1 FENCED PLANES=2 M_ANY_MARK"),
    _broken("nobody asks what holds", "VERSIONS=1 CALM M_NEVER_ASKS", "waits for ever"),
    _inband("in band: only versions are compared", "M_VERSION_ONLY", TABLES),
    _inband("in band: the copy is not checked", "M_NO_DIGEST", TABLES),
    _inband("in band: a result is not waited for", "NOBODY_LEAVES M_USES_WHAT_HAS_COME", TABLES),
    _inband("in band: a result may be passed over", "M_USES_WHAT_HAS_COME", LEFT),
    _inband("in band: checked before it is said", "HANDSHAKE M_CHECKS_FIRST", WHOLE),
    _inband("in band: looked at before it is taken away", "HANDSHAKE M_LOOKS_FIRST", WHOLE),
)


@dataclass(frozen=True)
class Outcome:
    """What one run came to. ``wrong`` is empty if that is what it should have."""

    states: int
    depth: int
    seconds: float
    found: str | None
    wrong: str


def missing() -> str | None:
    """The name of a tool that is not there."""
    return next((tool for tool in ("spin", "gcc") if shutil.which(tool) is None), None)


def run(check: Check) -> Outcome:
    """Generates the verifier, compiles it and lets it see every state."""
    begin = time.monotonic()
    calm = "CALM" in check.defines.split()
    # No hash that could take two states for one, no bit for a state: what was not seen was not there.
    flags = [f"-D{define}" for define in check.defines.split()]
    with tempfile.TemporaryDirectory() as directory:
        for command in (
            ["spin", "-a", *flags, str(HERE / f"{check.model}.pml")],
            [
                "gcc",
                "-O1" if check.found else "-O2",
                "-w",
                f"-DMEMLIM={MEMORY_MB}",
                "-DNOSTUTTER" if calm else "-DSAFETY",
                "-o",
                "pan",
                "pan.c",
            ],
        ):
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            if done.returncode:
                return Outcome(0, 0, 0.0, None, f"{command[0]}: {(done.stdout + done.stderr).strip()[-300:]}")
        searched = [f"{directory}/pan", f"-m{DEPTH}", *(["-a"] if calm else [])]
        try:
            out = subprocess.run(searched, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S).stdout
        except subprocess.TimeoutExpired:
            return Outcome(0, 0, LIMIT_S, None, f"not done after {LIMIT_S} s")
    return _judge(check, out, time.monotonic() - begin)


def _judge(check: Check, out: str, seconds: float) -> Outcome:
    states = re.search(r"(\d+) states, stored", out)
    depth = re.search(r"depth reached (\d+), errors: (\d+)", out)
    if states is None or depth is None:
        return Outcome(0, 0, seconds, None, "no result: " + out[-300:])
    found = None
    if depth[2] != "0":
        said = re.search(r"pan:1: (.*)", out)
        found = _about(said[1] if said else "")
    incomplete = "Search not completed" in out and found is None
    wrong = ""
    if incomplete or "max search depth too small" in out or "MEMLIM bound" in out:
        wrong = "the search is not complete"
    elif found != check.found:
        wrong = f"found: {found}" if found else f"not found: {check.found}"
    return Outcome(int(states[1]), int(depth[1]), seconds, found, wrong)


def _about(said: str) -> str:
    if "acceptance cycle" in said:
        return "goes on for ever"
    said = said.replace(" ", "")
    return next((about for part, about in ASSERTIONS.items() if part in said), said)


def main(arguments: list[str]) -> int:
    """Prints a line for each configuration; the exit status is 1 if one is wrong."""
    parser = argparse.ArgumentParser(description="Checks the models of the agreement exhaustively.")
    parser.add_argument("--fast", action="store_true", help="only what takes seconds")
    parser.add_argument("name", nargs="*", help="only configurations with this in their names")
    asked = parser.parse_args(arguments)
    if tool := missing():
        print(f"model: skipped, {tool} is not installed: apt-get install spin gcc")
        return 0
    wrong = 0
    print(f"{'configuration':44}{'states':>10}{'depth':>8}{'s':>7}  property: result", flush=True)
    for check in CHECKS:
        if (asked.fast and not check.fast) or (asked.name and not any(name in check.name for name in asked.name)):
            continue
        it = run(check)
        wrong += bool(it.wrong)
        told = f"{check.holds}: holds" if it.found is None else f"{it.found}: violated, as it must be"
        told = f"WRONG, {it.wrong}" if it.wrong else told
        print(
            f"{check.name:44}{it.states:>10}{it.depth:>8}{it.seconds:>7.1f}  {told}",
            flush=True,
        )
    print(f"model: {wrong} wrong" if wrong else "model: all as it must be")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
