"""Fuzzes the plugin's C code: ``python3 tests/fuzz/targets.py [--runs N] [TARGET ...]``, or ``make fuzz``.

Each target is built from the project's own sources with libFuzzer, ASan and UBSan, and run from the corpus beside this
file, an input a line. What it finds to be new lies in build/fuzz/found, and ``--keep`` makes the corpus anew of it.
Needs clang, and nothing of ours. docs/fuzzing.md says what each target is about.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NATIVE = ROOT / "plugin_bridge" / "native"
BUILD = ROOT / "build" / "fuzz"

TARGETS = ("segment_open", "runner_words", "table", "records", "inband", "static_table")
SHARED = ("memory", "scribble", "nccl", "events", "file")
# All of the plugin and of the reader, but for the creation of the file: see memory.h.
SOURCES = (
    *("table", "static_table", "comm", "govern", "decide", "join", "calls", "coll_start", "children", "measure"),
    *("tuner", "profiler"),
    *("reader", "inband"),
)
# What would reach the kernel is answered by the targets: no execution makes a system call.
REPLACED = ("aligned_alloc", "nanosleep", "fstat", "pread", "mmap", "munmap", "geteuid")
FLAGS = (
    *("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer", "-DDCC_STRESS"),
    # Comparisons are not traced: a digest has thousands, and the inputs are made up of words that fit anyway.
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize-coverage=trace-cmp"),
)
LONGEST_INPUT = 256
# libFuzzer's limit is of the most memory its process ever had, and Linux counts there what the process had before exec:
# of a child that Python starts by vfork, Python's own. What a shell forks begins with nothing.
FORKED = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
SAID = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+)")


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    target: str
    executions: int
    seconds: float
    edges: int
    places: int
    """Edges that there are."""
    inputs: int
    input_bytes: int
    failed: str
    """The last lines of a run that failed; empty for one that did not."""

    @property
    def row(self) -> str:
        rate = self.executions / max(self.seconds, 1.0)  # libFuzzer counts whole seconds
        covered = f"{self.edges} of {self.places}"
        corpus = f"{self.inputs}, {self.input_bytes / 1024:.1f} KiB"
        return f"{self.target:14}{self.executions:>12,}{rate:>14,.0f}{covered:>14}  {corpus}"


def clang() -> str | None:
    """The compiler, whatever its version; None without one that has libFuzzer."""
    given = os.environ.get("CLANG")
    names = [given] if given else ["clang", *(f"clang-{version}" for version in range(22, 13, -1))]
    for name in names:
        if (path := shutil.which(name)) and _has_fuzzer(path):
            return path
    return None


def _has_fuzzer(compiler: str) -> bool:
    """The library comes in a package of its own; its name depends on the version."""
    for name in (f"libclang_rt.fuzzer-{os.uname().machine}.a", "libclang_rt.fuzzer.a"):
        asked = [compiler, f"-print-file-name={name}"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if Path(said).is_file():
            return True
    return False


def build(compiler: str, target: str, into: Path = BUILD, native: Path = NATIVE) -> Path:
    """Compiles one target. Raises CalledProcessError, with what the compiler said on stderr."""
    into.mkdir(parents=True, exist_ok=True)
    binary = into / target
    sources = [HERE / f"{name}.c" for name in (target, *SHARED)] + [native / f"{name}.c" for name in SOURCES]
    replaced = [f"-D{name}=fuzz_{name}" for name in REPLACED]
    subprocess.run([compiler, *FLAGS, *replaced, f"-I{native}", f"-I{HERE}", "-o", binary, *sources], check=True)
    return binary


def run(binary: Path, runs: int, seed: int, say: Callable[[str], None]) -> Outcome:
    """So many executions after those of the corpus; ``say`` is told of progress. What is found lies beside the
    binary."""
    target = binary.name
    found, corpus = _folders(binary)
    command = [
        *FORKED,
        str(binary),
        f"-runs={runs}",
        f"-seed={seed}",
        f"-max_len={LONGEST_INPUT}",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-detect_leaks=0",
        "-print_final_stats=1",
        f"-artifact_prefix={binary}-",
        str(found),
        str(corpus),
    ]
    executions = edges = places = 0
    seconds = 0.0
    last: list[str] = []
    with subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        for line in process.stderr:
            line = line.rstrip()
            if match := SAID.match(line):
                executions, edges = int(match[1]), int(match[3])
                if match[2] in ("pulse", "INITED", "DONE"):
                    say(f"{target}: {line}")
            elif match := re.search(r"PC tables \((\d+) PCs\)", line):
                places = int(match[1])
            elif match := re.match(r"Done (\d+) runs in (\d+) second", line):
                executions, seconds = int(match[1]), float(match[2])
            elif not line.startswith(("INFO", "stat::", '"', "######")):
                last = [*last[-40:], line]
    inputs = [path for path in corpus.iterdir() if path.is_file()]
    failed = "\n".join(last) if process.returncode else ""
    return Outcome(
        target, executions, seconds, edges, places, len(inputs), sum(path.stat().st_size for path in inputs), failed
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=8", "NCCL_ALGO": "", "NCCL_PROTO": ""}


def _folders(binary: Path) -> tuple[Path, Path]:
    """Where new inputs lie, and those of the corpus, which is one input a line here."""
    found, corpus = (binary.parent / folder / binary.name for folder in ("found", "corpus"))
    found.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    for number, line in enumerate(_lines(binary.name)):
        (corpus / str(number)).write_bytes(bytes.fromhex(line))
    return found, corpus


def _lines(target: str) -> list[str]:
    path = HERE / "corpus" / f"{target}.txt"
    return path.read_text().splitlines() if path.exists() else []


def keep(binary: Path) -> int:
    """Makes a corpus anew of all that is known: the fewest short inputs that reach every edge. Returns how many."""
    with tempfile.TemporaryDirectory() as kept:
        merge = [str(binary), "-merge=1", "-use_counters=0", "-detect_leaks=0", kept, *map(str, _folders(binary))]
        subprocess.run(merge, env=_environment(), capture_output=True, check=True)
        inputs = sorted((path.read_bytes() for path in Path(kept).iterdir()), key=lambda raw: (len(raw), raw))
    (HERE / "corpus" / f"{binary.name}.txt").write_text("".join(f"{raw.hex()}\n" for raw in inputs))
    return len(inputs)


def main(arguments: list[str]) -> int:
    """Prints progress, then a line for each target; the exit status is 1 if one failed, 2 without clang."""
    parser = argparse.ArgumentParser(description="Fuzzes the plugin's C code under ASan and UBSan.")
    parser.add_argument("--runs", type=int, default=10_000_000, help="executions of each target")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--keep", action="store_true", help="make the corpus anew of all that was found so far")
    parser.add_argument("target", nargs="*", help=f"of {', '.join(TARGETS)}; all without one")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.target if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    compiler = clang()
    if compiler is None:
        print("fuzz: no clang with libFuzzer: apt-get install clang-14 libclang-rt-14-dev, or name one in CLANG")
        return 2
    outcomes = []
    for target in asked.target or TARGETS:
        if asked.keep:
            print(f"{target}: {keep(build(compiler, target))} inputs")
            continue
        outcomes.append(run(build(compiler, target), asked.runs, asked.seed, lambda line: print(line, flush=True)))
        if outcomes[-1].failed:
            print(f"{outcomes[-1].failed}\n{target}: FAILED; the input lies in {BUILD}", flush=True)
    if asked.keep:
        return 0
    print(f"\n{'target':14}{'executions':>12}{'a second':>14}{'edges':>14}  corpus")
    print("\n".join(outcome.row for outcome in outcomes))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
