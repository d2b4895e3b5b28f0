"""Logs of nccl-tests (all_reduce_perf and its siblings) as rows of measurements.

The header says which GPUs took part and where; NCCL's own lines, where ``NCCL_DEBUG=INFO`` printed them, say what was
forced. What a log does not say (the links) stays empty; one host of a cluster is of the same machine as many, so that
all logs have a network. A file may hold several runs, one after the other.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dynamiccl_ray.calibration.nccl_tests_json import as_log

_RANK: Final = re.compile(
    r"^[ \t]*#?\s*Rank\s+(?P<rank>\d+)(?:\s+Group\s+(?P<group>\d+))?.*?\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+"
    r"\[[^\]]*\]\s+(?P<gpu>.+?)\s*$",
    re.MULTILINE,
)
_HEADER: Final = re.compile(
    r"^[ \t]*#\s+size\s+count\s+type\s+(redop\s+)?(root\s+)?(?P<cpu>cpu)?time\s+algbw\s+busbw(?P<wrong>\s+#wrong)?",
    re.MULTILINE,
)
# The header of rccl-tests -O 0, without times out of place.
_IN_PLACE: Final = re.compile(r"^[ \t]*#\s+size\s+count\s+type(?!.*\btime\b.*\btime\b)", re.MULTILINE)
_BEGINS: Final = re.compile(r"\s*#\s+(nThread|Collective test starting)\b")
# What a run says before its table, and where it fails before it has one.
_OF_A_START: Final = re.compile(
    r"\s*#\s+(nThread|Collective test starting|Using devices|Rank\s)|.*NCCL (INFO|WARN) |.*\bTest (\w+ )?failure\b"
)
# A line of the table, what nccl-tests says behind it, and NCCL's own lines.
_OF_A_RUN: Final = re.compile(r"\s*\d|\s*#\s+(Out of bounds|Avg bus|Collective test concluded)|.*NCCL INFO")
# Of an older nccl-tests no line says how many of its results were wrong.
_FAILED: Final = re.compile(r"Out of bounds values\s*:\s*\d+\s+FAILED")
_STARTED: Final = re.compile(r"Collective test starting:\s*(\w+)_perf")
_COMMAND: Final = re.compile(r"\b([a-z_]+)_perf(?:_mpi)?\b")
_SET: Final = re.compile(r"NCCL_(\w+) set by environment to (\S+?)\.?\s*$", re.MULTILINE)
# On a command line, or in a printed environment. What a shell exports holds for all runs that follow.
_WRITTEN: Final = re.compile(r"\bNCCL_(\w+)=['\"]?((?:(?!,NCCL_)[^\s'\"`])*[^\s'\"`,.;:)])")
_EXPORTS: Final = re.compile(r"\b(?:export|unset|declare -x) .*")
_EXPORTED: Final = re.compile(r"\bNCCL_([A-Z]\w*)(?:=['\"]?([^\s'\"]*)|(?![^\s'\"]))")
# Named, but not to say that it is empty.
_NAMED: Final = re.compile(r"\bNCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS)\b(?!=(?:''|\"\")?(?:\s|$))")
# A run's own command, or a setting that it names, if only to say that it is empty.
_SHOWS: Final = re.compile(r"^(?![ \t]*#).*_perf\b|\bNCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS)\b", re.MULTILINE)
_AFTER_OTHERS: Final = (
    "it does not say what was forced, and a run before it in the file does; write its command before it, or NCCL_ALGO= "
    "where nothing was"
)
_NAMES: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv")
_OF_LOGS: Final = re.compile(r"\.(txt|log|out|o\d+)", re.IGNORECASE)
# Programs that read logs have some in their texts.
_OF_PROGRAMS: Final = re.compile(r"\.(py|ipynb|sh|go|jsx?|tsx?|cc?|cu|cpp|h|hpp|rs|html?|ya?ml)", re.IGNORECASE)
_OF_PAGES: Final = re.compile(r"\.(md|markdown|rst)", re.IGNORECASE)
_BEGINNING: Final = 8192
_MOST_BYTES: Final = 2**26
# What mpirun --tag-output puts before each piece of a line; colours.
_TAG: Final = re.compile(r"\[[^\s\[\]]*\b\d+,\d+\]<std\w+>:|\x1b\[[\d;]*[A-Za-z]")
# What others put before each line: a time, srun -l, mpiexec -l, kubectl logs --prefix, Ray and SkyPilot.
_BEFORE_LINE: Final = re.compile(
    r"^[ \t]*(?:(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?|\d+:|\[\d+\]|\[pod/\S+\]"
    r"|\([^()\n]*\bpid=\d+[^()\n]*\))[ \t])+",
    re.MULTILINE,
)
# Time comes after size, count, type and, where the header names them, redop and root; then two bandwidths.
_BEFORE_TIME, _TO_WRONG = 3, 3
_NUMBER: Final = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?")
# A tuner that a library brings, which NCCL looks for by itself.
_TUNER: Final = re.compile(
    r"NCCL INFO (?:TUNER/Plugin: Using (?:tuner plugin )?|Using tuner plugin: )'?(?!internal)([\w-]+)"
)
# Lines of other subsystems than NCCL's own choice of them, so that NCCL_DEBUG_SUBSYS was set, perhaps without ENV.
_ASKED_FOR: Final = re.compile(r"NCCL INFO .*( Bytes -> Algo |: opCount |=== System )")
_ONLY_NAMED: Final = (
    "only its name or a folder's says what was forced; run it with NCCL_DEBUG=INFO and ENV in NCCL_DEBUG_SUBSYS, if "
    "that is set, or write NCCL_ALGO=..., NCCL_PROTO=... on a line at its beginning"
)
_SPOKEN: Final = (
    "a page that speaks of {}, of which log is not sure; put each log, behind its command, into a file of its own"
)
_FORCED: Final = ("ALGO", "PROTO", "MIN_NCHANNELS", "MAX_NCHANNELS")
# Of what else is set, this changes neither what NCCL chooses nor how fast that is.
_OF_NO_EFFECT: Final = re.compile(
    r"DEBUG|DUMP|IFNAME|COMM_ID|HOSTID|IB_HCA|SOCKET_FAMILY|^(HOME|ROOT|PATH|DIR|INCLUDE\w*|LIB\w*)$"
)
# In a name: an algorithm, a protocol, both, or a number of channels.
_WORD_OF_A_SETTING: Final = re.compile(
    r"(ring|tree|collnet(direct|chain)?|nvls(tree)?|pat)?(ll128|ll|simple)?(\d+n?ch(annels?)?|n?ch\d+|n?channels?\d*)?"
)


def is_nccl_tests(path: Path) -> bool:
    """Whether a file is a log with a table of nccl-tests in it. One that is not called so must have all that it takes,
    and be text of no more than 64 MiB."""
    if _OF_LOGS.fullmatch(path.suffix):
        return bool(_HEADER.search(_text(path)))
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    if _OF_PROGRAMS.fullmatch(path.suffix) or b"\0" in beginning or path.stat().st_size > _MOST_BYTES:
        return False
    text = _text(path)
    return bool(_HEADER.search(text) and _RANK.search(text))


def read_nccl_tests(path: Path, within: Path, skipped: Counter[str]) -> Iterable[tuple[str, Mapping[str, str]]]:
    """(where, row) for every line of the tables, out of place, in the columns of a CSV of measurements; ``environment``
    has what else NCCL was told. What is left out, as a run that does not say which collective it is or which GPUs took
    part, is counted in ``skipped``, by why. ``within``: the directory of all measurements; the folders below it may be
    named after what was forced.
    """
    exported: dict[str, str] = {}
    shown = False
    page = _text(path)
    spoken = _OF_PAGES.fullmatch(path.suffix) and re.search(rf"NCCL_({'|'.join(_FORCED)})", page)
    for first, text in _runs(page):
        exported |= dict(_EXPORTED.findall(" ".join(_EXPORTS.findall(text))))
        told, left_out = _told(str(path.relative_to(within).with_suffix("")), text, exported)
        if spoken and not _SET.search(text):
            left_out = left_out or _SPOKEN.format(spoken[0])
        if shown and exported.keys().isdisjoint(_FORCED) and "NCCL INFO" not in text and not _SHOWS.search(text):
            left_out = left_out or _AFTER_OTHERS
        shown = shown or any(name in _FORCED for name, _ in _WRITTEN.findall(text))
        try:
            about = _about(path, text)
        except ValueError as e:
            about, left_out = {}, left_out or str(e)
        rows = 0
        for where, size, time, wrong in _rows(path, text, first):
            rows += 1
            if why := left_out or wrong:
                skipped[f"{path.name}: {why}"] += 1
            else:
                yield where, {**about, **told, "bytes": size, "time_us": time}
        if not rows:
            skipped[f"{path.name}: no line of a table; each must begin with a size, as nccl-tests prints it"] += 1


def _rows(path: Path, text: str, first: int) -> Iterator[tuple[str, str, str, str]]:
    """(where, size, time, why it is not to be believed) of every line of a run's table."""
    position = of_wrong = alike = None
    of_cpu = False
    failed = _FAILED.search(text) is not None
    for number, line in _whole_lines(text, first):
        if header := _HEADER.match(line):
            position = _time_at(header)
            of_wrong = position + _TO_WRONG if header["wrong"] else None
            of_cpu = header["cpu"] is not None
        words = line.split()
        if position is None or not words or not _is_row(words, position):
            continue
        why = "times of the CPU, not of the collective; run it without -C" if of_cpu else ""
        if not all(map(_NUMBER.fullmatch, words[position : position + 3])):
            why = why or "lines that other output cuts"
        if of_wrong is not None and len(words) <= of_wrong:
            why = why or "lines that other output cuts"
        if failed if of_wrong is None else words[of_wrong : of_wrong + 1] not in (["0"], ["N/A"]):
            why = why or "results that were wrong"
        if not why and not float(words[position]):
            why = "a time of 0"
        # What is behind the count: the type, and what the header names of operation and root.
        if not why:
            alike = alike or words[2:position]
            if words[2:position] != alike:
                why = f"types, operations or roots other than {' '.join(alike)}, the first; run them apart"
        yield f"{path}, line {number}", words[0], words[position], why


def _time_at(header: re.Match[str]) -> int:
    return _BEFORE_TIME + sum(header[i] is not None for i in (1, 2))


def _is_row(words: list[str], time: int) -> bool:
    return words[0].isdecimal() and len(words) > time + 2


def _whole_lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    """The numbered lines of a run without NCCL's own, which may begin in the middle of a line: nccl-tests prints a line
    of its table piece by piece."""
    hosts = "|".join({re.escape(m["host"]) for m in _RANK.finditer(text)})
    nccl = re.compile(rf"(\[[\d: .-]+\] )?(?:{hosts}):\d+:\d+ \[-?\d+\].* NCCL ") if hosts else None
    begun = ""
    for number, line in enumerate(text.splitlines(), first):
        if nccl and (said := nccl.search(line)):
            begun += line[: said.start()]
        else:
            yield number, begun + line
            begun = ""


def _told(called: str, text: str, exported: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """What NCCL was told in one run, as columns; and why that says nothing of what was forced, if it does not."""
    found = dict(_SET.findall(text))
    sure = bool(found) or ("NCCL INFO" in text and not _ASKED_FOR.search(text))
    said = found or {name: value for name, value in exported.items() if value} | dict(_WRITTEN.findall(text))
    forced = {name: said.pop(name).lower() for name in _FORCED if name in said}
    if tuner := _TUNER.search(text):
        said = {"TUNER_PLUGIN": tuner[1]} | said
    channels = forced.get("MAX_NCHANNELS", "")
    if channels != forced.get("MIN_NCHANNELS", ""):
        # A bound, not a number.
        said |= {name: forced[name] for name in _FORCED[2:] if name in forced}
        channels = ""
    in_place = ["in-place"] if _IN_PLACE.search(text) else []
    columns = {
        "algo": forced.get("ALGO", "default"),
        "proto": forced.get("PROTO", "default"),
        "nchannels": channels,
        "environment": " ".join(
            [f"NCCL_{name}={value}" for name, value in sorted(said.items()) if not _OF_NO_EFFECT.search(name)]
            + in_place
        ),
    }
    for name in _FORCED[:2]:
        if not re.fullmatch(r"\w+", value := forced.get(name, "default")):
            return columns, f"NCCL_{name}={value}, which is not one value"
    if not sure and not forced and any(map(_WORD_OF_A_SETTING.fullmatch, re.findall(r"[a-z0-9]+", called.lower()))):
        return columns, _ONLY_NAMED
    unread = set(_NAMED.findall(text)) - {name for name, _ in _WRITTEN.findall(text)} - exported.keys()
    if unread and not sure:
        name = f"NCCL_{min(unread)}"
        return columns, f"it names {name}, and not what it was; write {name}=... before its table"
    return columns, None


def _about(path: Path, text: str) -> dict[str, str]:
    """Of one run: which collective, and on what. Raises ValueError where it does not say."""
    ranks = list(_RANK.finditer(text))
    if not ranks:
        raise ValueError("no line '# Rank ...' says which GPUs took part; keep the header of nccl-tests")
    # NCCL_TESTS_SPLIT makes several communicators side by side. The table is the first one's.
    devices = {int(m["rank"]): (m["host"], m["gpu"]) for m in ranks if m["group"] == ranks[0]["group"]}
    hosts = {host for host, _ in devices.values()}
    if len(devices) % len(hosts):
        raise ValueError(f"{len(devices)} ranks on {len(hosts)} hosts; expected as many on each")
    return {
        "source_id": path.stem,
        "collective": _collective(path, text),
        "nodes": str(len(hosts)),
        "ranks": str(len(devices)),
        "gpus_per_node": str(len(devices) // len(hosts)),
        "gpu": devices[min(devices)][1],
        "intra": "",
        "inter": "network",
    }


def _text(path: Path) -> str:
    raw = path.read_bytes()
    coding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    text = raw.decode(coding, errors="replace")
    return as_log(text) if path.suffix.lower() == ".json" else _TAG.sub("", _BEFORE_LINE.sub("", text))


def _runs(text: str) -> Iterator[tuple[int, str]]:
    """The number of the first line of each run in a file, and its text: one begins behind the table of the one before,
    or behind what that has said if it failed before it had a table, with the command that started it, or else with its
    header."""
    lines = text.splitlines()
    begin = end = 0
    table, begun = False, set[str]()
    for at, line in enumerate(lines):
        begins = _BEGINS.match(line)
        if begins and (table or begins[1] in begun):
            yield begin + 1, "\n".join(lines[begin:end])
            begin, table, begun = end, False, set()
        if begins:
            begun.add(begins[1])
        table = table or bool(_HEADER.match(line))
        if _HEADER.match(line) or (_OF_A_RUN if table else _OF_A_START).match(line):
            end = at + 1
    yield begin + 1, "\n".join(lines[begin:])


def _collective(path: Path, text: str) -> str:
    """As the program says, or its command, or the file's name, or what it computes, or the folder's name; ValueError
    where none does."""
    if started := _STARTED.search(text):
        return started[1]
    commands: set[str] = set(_COMMAND.findall(text)) & set(_NAMES)
    if len(commands) == 1:
        return commands.pop()
    if found := _named(path.name) or _computed(text) or _named(path.parent.name):
        return found
    raise ValueError(
        f"which collective? Neither the log nor its name says; name the file after one of {', '.join(_NAMES)}"
    )


def _named(name: str) -> str | None:
    plain = name.lower().replace("_", "").replace("-", "")
    return next((known for known in _NAMES if known.replace("_", "") in plain), None)


def _computed(text: str) -> str | None:
    """What a table shows of its collective: whether it reduces, whether it has a root, and busbw over algbw, which is
    2(n-1)/n for an all-reduce and (n-1)/n for a reduce-scatter. A table of an old nccl-tests has only those columns
    that its collective needs."""
    header = _HEADER.search(text)
    if header is None:
        return None
    time = _time_at(header)
    rows = [words for _, line in _whole_lines(text, 0) if (words := line.split()) and _is_row(words, time)]
    rows = [words for words in rows if all(map(_NUMBER.fullmatch, words[time : time + 3]))]
    if not rows:
        return None
    last = max(rows, key=lambda words: float(words[time + 2]))
    reduces = header[1] is not None and last[3] != "none"
    rooted = header[2] is not None and last[time - 1] != "-1"
    if rooted:
        return "reduce" if reduces else "broadcast"
    if not reduces:
        return None
    return "all_reduce" if float(last[time + 2]) >= float(last[time + 1]) else "reduce_scatter"
