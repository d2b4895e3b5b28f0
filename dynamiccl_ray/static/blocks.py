"""Static tables: blocks of decisions, one per communicator, and the text that holds them.

docs/static_tables.md has the format; the plugin reads the same text by itself (native/static_table.c).
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.control.table import ENTRY_DTYPE, OWN, DecisionTable
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import N_BINS, N_KEYS, bin_bytes, bytes_name, size_bin
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol

FIRST_LINE: Final = "dynamiccl-table 1"
FIELDS: Final = "collective min_bytes max_bytes pipelined algorithm protocol channels chunk_bytes"
MOST_BYTES: Final = 1 << 20
MOST_CHANNELS: Final = 64
MOST_CHUNK_LOG2: Final = 26
_MOST_LINE: Final = 255
_MOST_BLOCKS: Final = 256
_MOST_RANKS: Final = 1 << 20
_MOST_NAME: Final = 63
_WAYS: Final = {"no": (False,), "yes": (True,), "any": (False, True)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """What one communicator does: ``entries`` has shape (N_KEYS,) and dtype ``ENTRY_DTYPE``."""

    ranks: int
    nodes: int
    max_channels: int
    name: str = ""
    """NCCL's; empty: whatever it is called."""
    entries: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, int, str]:
        """What a communicator is matched by."""
        return self.ranks, self.nodes, self.name

    @property
    def about(self) -> str:
        """``64 ranks on 8 nodes, name dp``."""
        return f"{self.ranks} ranks on {self.nodes} nodes" + (f", name {self.name}" if self.name else "")

    @property
    def table(self) -> DecisionTable:
        return DecisionTable(1, self.entries, self.max_channels)

    @property
    def digest(self) -> str:
        """Of everything that it decides, as the plugin logs it."""
        return f"{self.table.digest:016x}"


@dataclass(frozen=True, kw_only=True)
class Range:
    """Adjacent size bins of a collective, from ``first`` to ``last``, with the same decision."""

    collective: Collective
    pipelined: str
    """no, yes, or any."""
    first: int
    last: int
    entry: np.void
    """Of ``ENTRY_DTYPE``."""

    @property
    def bytes(self) -> tuple[int, int | None]:
        """Smallest and largest message; None for no limit."""
        return bin_bytes(self.first), bin_bytes(self.last + 1) - 1 if self.last + 1 < N_BINS else None

    @property
    def is_own_pair(self) -> bool:
        return int(self.entry["algo"]) == OWN

    @property
    def pair(self) -> tuple[str, str]:
        """Names of algorithm and protocol; ``-`` twice where they are NCCL's own."""
        if self.is_own_pair:
            return "-", "-"
        return Algorithm(int(self.entry["algo"])).name.lower(), Protocol(int(self.entry["proto"])).name.lower()

    @property
    def channels(self) -> int:
        """0 for NCCL's own."""
        return int(self.entry["channels"])

    @property
    def chunk_bytes(self) -> int:
        """0 for NCCL's own."""
        return 1 << int(self.entry["chunk_log2"]) if self.entry["chunk_log2"] else 0


def ranges(entries: npt.NDArray[Any]) -> Iterator[Range]:
    """Everything that ``entries`` (N_KEYS,) say, in the order of collectives and sizes."""
    words = entries.view("<u8").reshape(len(Collective), 2, N_BINS)
    for collective in Collective:
        alone, pipelined = words[collective]
        both = np.where(alone == pipelined, alone, 0)
        found = []
        for way, of in (("any", both), ("no", np.where(both, 0, alone)), ("yes", np.where(both, 0, pipelined))):
            edges = np.flatnonzero(np.diff(of, prepend=~of[:1], append=~of[-1:]))
            for first, behind in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                if of[first]:
                    entry = entries[(collective * 2 + (way == "yes")) * N_BINS + first]
                    found.append(Range(collective=collective, pipelined=way, first=first, last=behind - 1, entry=entry))
        yield from sorted(found, key=lambda r: (r.first, r.pipelined))


def entry_text(entry: np.void) -> str:
    """``ring/ll 4ch chunk 64KiB``; what is NCCL's own is left out."""
    if not entry["set"]:
        return "nothing"
    of = Range(collective=Collective.ALL_REDUCE, pipelined="any", first=0, last=0, entry=entry)
    parts = ["nccl" if of.is_own_pair else "/".join(of.pair)]
    parts += [f"{of.channels}ch"] if of.channels else []
    parts += [f"chunk {bytes_name(of.chunk_bytes)}"] if of.chunk_bytes else []
    return " ".join(parts)


# ---- writing ----


def text_of(blocks: Iterable[Block]) -> str:
    """A whole table. Raises ConfigError for more blocks or bytes than the plugin reads."""
    lines = [FIRST_LINE]
    every = list(blocks)
    for block in every:
        header = f"communicator ranks={block.ranks} nodes={block.nodes} max_channels={block.max_channels}"
        lines += ["", header + (f" name={block.name}" if block.name else ""), f"# {FIELDS}"]
        lines += [_line(of) for of in ranges(block.entries)]
    text = "\n".join([*lines, "end", ""])
    if len(every) > _MOST_BLOCKS or len(text) > MOST_BYTES:
        raise ConfigError(
            f"{len(every)} communicators in {len(text)} bytes; a table has {_MOST_BLOCKS} in {MOST_BYTES} at "
            "most: write the communicators of one job only"
        )
    return text


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, and so that nobody else may write to it. A link of that name is replaced, not followed:
    others may have put it there. Raises ConfigError where there is no way, and for what is there and is no file: a
    device would be one afterwards."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no regular file; name another with --out")
    unfinished: Path | None = None
    try:
        # Of a name that nobody can know before.
        file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        unfinished = Path(name)
        with os.fdopen(file, "w") as out:
            out.write(text)
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except OSError as e:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {e.strerror}; name another with --out") from None


def _line(of: Range) -> str:
    least, most = of.bytes
    fields = (
        *(of.collective.name.lower(), least, "-" if most is None else most, of.pipelined, *of.pair),
        *(of.channels or "-", of.chunk_bytes or "-"),
    )
    return " ".join(map(str, fields))


def can_be_named(name: str) -> bool:
    """Whether a table can say this name of a communicator's."""
    return len(name) <= _MOST_NAME and all(32 <= ord(c) < 127 for c in name)


# ---- reading ----


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a table. Raises ConfigError with file, line and what is wrong, as the plugin does."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: it is larger than {MOST_BYTES} bytes; no table is")
    return _Parser(str(path)).parse(raw)


def unsafe(path: Path) -> str:
    """Why the plugin would not believe a file of this name, owner and mode; empty if it would. OSError if it is not
    there.
    """
    about = path.stat()
    if not path.is_absolute():
        return "it must be an absolute path"
    if not stat.S_ISREG(about.st_mode):
        return "it is not a file"
    if about.st_uid not in (0, os.geteuid()):
        return "it belongs to another user; it must be this user's or root's"
    return "others than its owner may write to it: chmod go-w" if about.st_mode & 0o022 else ""


class _Parser:
    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._blocks: list[Block] = []

    def parse(self, raw: bytes) -> list[Block]:
        lines = raw.split(b"\n")
        ended = False
        for self._number, line in enumerate(lines[:-1], start=1):
            if ended:
                self._refuse("something behind the end")
            ended = self._take(self._text(line))
        self._number = len(lines)
        if lines[-1]:
            self._refuse("the last line does not end: the file was cut short")
        if not ended:
            self._refuse("a table ends with a line that says end: the file was cut short")
        return self._blocks

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{self._path}:{self._number}: {what}")

    def _text(self, line: bytes) -> str:
        if len(line) > _MOST_LINE:
            self._refuse(f"a line of {len(line)} bytes; at most {_MOST_LINE} are read")
        for byte in line:
            if not 32 <= byte < 127:
                self._refuse(f"byte {byte}; a table is plain ASCII, and lines end with a newline alone")
        return line.decode("ascii")

    def _take(self, line: str) -> bool:
        """Whether it is the last one."""
        if self._number == 1:
            if line != FIRST_LINE:
                self._refuse(f"a table begins with {FIRST_LINE}, this one with {line[:40]}")
        elif line.startswith("communicator "):
            self._begin(line.removeprefix("communicator "))
        elif line and line[0] != "#" and line != "end":
            self._entries(line.split(" "))
        return line == "end"

    def _begin(self, rest: str) -> None:
        if len(self._blocks) == _MOST_BLOCKS:
            self._refuse(f"more than {_MOST_BLOCKS} communicators")
        numbers: list[int] = []
        for what, most in (("ranks=", _MOST_RANKS), ("nodes=", 0), ("max_channels=", MOST_CHANNELS)):
            word, space, rest = rest.partition(" ")
            value = _number(word.removeprefix(what)) if word.startswith(what) else None
            most = most or numbers[0]
            if value is None or not 1 <= value <= most:
                self._refuse(f"expected {what} and a number from 1 to {most}, not {word[:40] or 'the end of the line'}")
            numbers.append(value)
        if space and not (rest.startswith("name=") and 1 <= len(rest) - 5 <= _MOST_NAME):
            self._refuse(f"expected name= and 1 to {_MOST_NAME} bytes, or the end of the line, not {rest[:40]}")
        ranks, nodes, channels = numbers
        block = Block(
            ranks=ranks, nodes=nodes, max_channels=channels, name=rest.removeprefix("name="),
            entries=np.zeros(N_KEYS, ENTRY_DTYPE),
        )  # fmt: skip
        if any(other.shape == block.shape for other in self._blocks):
            named = f" name={block.name}" if block.name else ""
            self._refuse(f"a second block for the same communicator: ranks={ranks} nodes={nodes}{named}")
        self._blocks.append(block)

    def _entries(self, fields: list[str]) -> None:
        if len(fields) != 8:
            self._refuse(f"expected 8 fields, separated by single spaces: {FIELDS}")
        func, least, most, pipelined, algorithm, protocol, channels, chunk = fields
        if (collective := _place(func, Collective)) is None:
            self._refuse(f"there is no collective {func[:40]}")
        if not self._blocks:
            self._refuse("a line before the first communicator")
        if pipelined not in _WAYS:
            self._refuse(f"pipelined is {pipelined[:40]}; it must be yes, no or any")
        first, last = self._range(least, most)
        entry = np.zeros(1, ENTRY_DTYPE)
        entry["set"] = 1
        entry["algo"], entry["proto"] = self._pair(algorithm, protocol)
        entry["channels"], entry["chunk_log2"] = self._amounts(channels, chunk, own=algorithm == "-")
        entries = self._blocks[-1].entries
        for way in _WAYS[pipelined]:
            bins = slice((collective * 2 + way) * N_BINS + first, (collective * 2 + way) * N_BINS + last + 1)
            if (taken := np.flatnonzero(entries["set"][bins])).size:
                which = "pipelined" if way else "not pipelined"
                self._refuse(f"{func} of {bin_bytes(first + int(taken[0]))} bytes, {which}, has a line already")
            entries[bins] = entry[0]

    def _range(self, least: str, most: str) -> tuple[int, int]:
        low, high = _number(least), _number(most)
        if low is None:
            self._refuse(f"min_bytes is {least[:40]}; it must be a number")
        if high is None and most != "-":
            self._refuse(f"max_bytes is {most[:40]}; it must be a number, or - for no limit")
        high = _UNLIMITED if high is None else high
        if low > high:
            self._refuse(f"min_bytes {least} is above max_bytes {most}")
        first, last = size_bin(low), size_bin(high)
        if bin_bytes(first) != low:
            self._refuse(f"min_bytes {least} is not where a size bin begins; {bin_bytes(first)} is")
        end = bin_bytes(last + 1) - 1 if last + 1 < N_BINS else _UNLIMITED
        if high != end and end == _UNLIMITED:
            self._refuse(f"max_bytes {most} is in the last size bin; it ends with -")
        if high != end:
            self._refuse(f"max_bytes {most} is not where a size bin ends; {end} is")
        return first, last

    def _pair(self, algorithm: str, protocol: str) -> tuple[int, int]:
        if (algorithm == "-") != (protocol == "-"):
            self._refuse(f"algorithm {algorithm[:40]} and protocol {protocol[:40]}: both are -, or none")
        if algorithm == "-":
            return OWN, OWN
        a, p = _place(algorithm, Algorithm), _place(protocol, Protocol)
        if a is None:
            self._refuse(f"there is no algorithm {algorithm[:40]}")
        if p is None:
            self._refuse(f"there is no protocol {protocol[:40]}")
        return a, p

    def _amounts(self, channels: str, chunk: str, *, own: bool) -> tuple[int, int]:
        most = self._blocks[-1].max_channels
        count = 0 if channels == "-" else _number(channels)
        nbytes = 0 if chunk == "-" else _number(chunk)
        if count is None or count > most:
            self._refuse(
                f"channels is {channels[:40]}; it must be 1 to max_channels, which is {most}, or - for NCCL's own"
            )
        if nbytes is None or nbytes & (nbytes - 1) or nbytes == 1 or nbytes > 1 << MOST_CHUNK_LOG2:
            self._refuse(
                f"chunk_bytes is {chunk[:40]}; it must be a power of two from 2 to {1 << MOST_CHUNK_LOG2}, "
                "or - for NCCL's own"
            )
        if nbytes and own:
            self._refuse(f"chunk_bytes {chunk} needs an algorithm and a protocol")
        return count, max(0, nbytes.bit_length() - 1)


_UNLIMITED: Final = 2**64 - 1


def _number(word: str) -> int | None:
    """Digits and nothing else, of 64 bits."""
    if not word or not set(word) <= set("0123456789") or int(word) > _UNLIMITED:
        return None
    return int(word)


def _place(word: str, names: type[Collective] | type[Algorithm] | type[Protocol]) -> int | None:
    return next((int(of) for of in names if of.name.lower() == word), None)
