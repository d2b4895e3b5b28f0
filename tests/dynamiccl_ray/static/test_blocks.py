"""The text of static tables: what is written is read again, and the plugin's parser reads the same as ours."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import N_KEYS, bin_bytes, key_of
from dynamiccl_ray.static.blocks import Block, read_blocks, text_of, unsafe, write_text

NATIVE = Path(__file__).parents[3] / "plugin_bridge" / "native"
HEADER = "dynamiccl-table 1\ncommunicator ranks=8 nodes=2 max_channels=16\n"
LINE = "all_reduce 1024 1151 any ring simple 4 65536\n"
GOOD = HEADER + LINE + "end\n"


def block_of(entries: dict[int, tuple[int, int, int, int]], name: str = "", **options: Any) -> Block:
    """(algorithm, protocol, channels, chunk's exponent) by key."""
    table = DecisionTable.of(1, {}, max_channels=16).entries
    for key, (algo, proto, channels, chunk) in entries.items():
        table[key] = (1, 0, algo, proto, channels, 0, chunk, 0)
    return Block(**{"ranks": 8, "nodes": 2, "max_channels": 16, "name": name, "entries": table} | options)


# ---- the plugin's parser ----


class Parser:
    """static_table_parse() of the plugin."""

    def __init__(self, library: Path) -> None:
        self._parse = ctypes.CDLL(str(library)).static_table_parse

    def __call__(self, text: bytes, ranks: int, nodes: int, name: str) -> tuple[str, DecisionTable | None]:
        """Why it was refused, and the communicator's block."""

        class Comm(ctypes.Structure):
            _fields_ = (("ranks", ctypes.c_size_t), ("nodes", ctypes.c_size_t), ("name", ctypes.c_char_p))

        table, error = ctypes.create_string_buffer(32 + 8 * N_KEYS), ctypes.create_string_buffer(512)
        comm = Comm(ranks, nodes, name.encode())
        result = self._parse(text, ctypes.c_size_t(len(text)), ctypes.byref(comm), table, error)
        assert (result == 0) == bool(error.value)
        return error.value.decode(), DecisionTable.from_bytes(table.raw) if result == 2 else None


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Parser:
    path = tmp_path_factory.mktemp("native") / "parser.so"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["cc", *flags, "-o", path, NATIVE / "static_table.c", NATIVE / "table.c"], check=True)
    return Parser(path)


def check_same(plugins: Parser, text: bytes, path: Path) -> None:
    """Both read the same, or refuse in the same words."""
    path.write_bytes(text)
    why, _ = plugins(text, 8, 2, "")
    if why:
        with pytest.raises(ConfigError) as refused:
            read_blocks(path)
        assert str(refused.value) == f"{path}:{why}"
        return
    blocks = read_blocks(path)
    for ranks, nodes, name in {*(block.shape for block in blocks), (8, 2, ""), (8, 2, "none of these")}:
        why, found = plugins(text, ranks, nodes, name)
        assert not why
        mine = {of.name: of for of in blocks if (of.ranks, of.nodes) == (ranks, nodes)}
        expected = mine.get(name) or mine.get("")
        assert (found and f"{found.digest:016x}") == (expected and expected.digest)


MALFORMED = {
    "another version": (GOOD.replace("table 1", "table 2"), ":1: a table begins with dynamiccl-table 1"),
    "a line too few": (HEADER + LINE, ":4: a table ends with a line that says end"),
    "half a line": (GOOD[:-12], ":3: the last line does not end"),
    "behind the end": (GOOD + "\n", ":5: something behind the end"),
    "carriage returns": (GOOD.replace("\n", "\r\n"), ":1: byte 13"),
    "not ASCII": (GOOD.replace("end", "# ü\nend"), ":4: byte 195"),
    "a NUL": (GOOD.replace("any", "a\0y"), ":3: byte 0"),
    "a long line": (GOOD.replace("end", "#" * 256 + "\nend"), ":4: a line of 256 bytes"),
    "no block": (GOOD.replace(HEADER, "dynamiccl-table 1\n"), ":2: a line before the first communicator"),
    "no ranks": (GOOD.replace("ranks=8", "ranks=0"), ":2: expected ranks= and a number from 1 to 1048576, not ranks=0"),
    "more nodes than ranks": (GOOD.replace("nodes=2", "nodes=9"), "nodes= and a number from 1 to 8, not nodes=9"),
    "no max_channels": (GOOD.replace(" max_channels=16", ""), "max_channels= and a number from 1 to 64, not the end"),
    "65 channels": (GOOD.replace("=16", "=65"), "from 1 to 64, not max_channels=65"),
    "an empty name": (GOOD.replace("=16", "=16 name="), ":2: expected name= and 1 to 63 bytes"),
    "a long name": (GOOD.replace("=16", "=16 name=" + "x" * 64), ":2: expected name= and 1 to 63 bytes"),
    "a space behind": (GOOD.replace("=16", "=16 "), ":2: expected name= and 1 to 63 bytes"),
    "a block twice": (GOOD.replace("end", HEADER.split("\n")[1] + "\nend"), ":4: a second block for the same"),
    "a collective in capitals": (GOOD.replace("all_reduce", "AllReduce"), ":3: there is no collective AllReduce"),
    "two spaces": (GOOD.replace(" any", "  any"), ":3: expected 8 fields"),
    "a field too few": (GOOD.replace(" 65536", ""), ":3: expected 8 fields"),
    "a size with a unit": (GOOD.replace("1024", "1KiB"), ":3: min_bytes is 1KiB; it must be a number"),
    "a size of 65 bits": (GOOD.replace("1151", str(2**64)), f":3: max_bytes is {2**64}; it must be a number"),
    "a negative size": (GOOD.replace("1024", "-1"), ":3: min_bytes is -1; it must be a number"),
    "a size within a bin": (GOOD.replace("1024", "1025"), ":3: min_bytes 1025 is not where a size bin begins; 1024 is"),
    "an end within a bin": (GOOD.replace("1151", "1150"), ":3: max_bytes 1150 is not where a size bin ends; 1151 is"),
    "an end below": (GOOD.replace("1151", "1023"), ":3: min_bytes 1024 is above max_bytes 1023"),
    "an end in the last bin": (GOOD.replace("1151", str(2**42)), "is in the last size bin; it ends with -"),
    "pipelined what": (GOOD.replace("any", "some"), ":3: pipelined is some; it must be yes, no or any"),
    "half a pair": (GOOD.replace("ring", "-"), ":3: algorithm - and protocol simple: both are -, or none"),
    "no such algorithm": (GOOD.replace("ring", "rings"), ":3: there is no algorithm rings"),
    "no such protocol": (GOOD.replace("simple", "SIMPLE"), ":3: there is no protocol SIMPLE"),
    "too many channels": (GOOD.replace(" 4 ", " 17 "), ":3: channels is 17; it must be 1 to max_channels, which is 16"),
    "a chunk of three": (GOOD.replace("65536", "3"), ":3: chunk_bytes is 3; it must be a power of two"),
    "a huge chunk": (GOOD.replace("65536", str(1 << 27)), ":3: chunk_bytes is 134217728; it must be"),
    "a chunk alone": (GOOD.replace("ring simple", "- -"), ":3: chunk_bytes 65536 needs an algorithm"),
    "a line twice": (GOOD.replace(LINE, 2 * LINE), ":4: all_reduce of 1024 bytes, not pipelined, has a line already"),
    "an overlap": (GOOD.replace(LINE, LINE + LINE.replace("any", "yes")), ":4: all_reduce of 1024 bytes, pipelined"),
    "257 communicators": (
        "\n".join(
            ["dynamiccl-table 1", *(f"communicator ranks={i} nodes=1 max_channels=1" for i in range(1, 258)), "end", ""]
        ),
        ":258: more than 256 communicators",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "why"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_malformed_is_refused_in_the_same_words(plugins: Parser, tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "table"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_blocks(path)
    assert why in str(refused.value)
    check_same(plugins, text.encode(), path)


WORDS = [
    "dynamiccl-table 1\n", HEADER, HEADER.split("\n")[1] + " name=dp\n", LINE, "end\n", "all_reduce", "broadcast", " ",
    "0", "1024", "1151", "1152", "8191", str(2**64 - 1), "-", "no", "yes", "any", "tree", "ll", "simple", "4", "64",
    "2", "\n", "#", "communicator ranks=16 nodes=2 max_channels=3\n", "all_gather 0 - yes - - 3 -\n",
]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), whole=st.booleans(), cut=st.integers(0, 40))
def test_both_parsers_read_the_same(
    plugins: Parser, tmp_path_factory: pytest.TempPathFactory, words: list[str], whole: bool, cut: int
) -> None:
    text = "".join([HEADER, *words, "\nend\n"] if whole else words).encode()
    check_same(plugins, text[cut:] if not whole else text, tmp_path_factory.getbasetemp() / "table")


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_read_again(plugins: Parser, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = []
    for name in ("", "dp", "name= with spaces"):
        entries = {}
        for start in rng.integers(0, N_KEYS, 200):
            own = bool(rng.integers(2))
            pair = (255, 255) if own else (int(rng.integers(7)), int(rng.integers(3)))
            chunk = 0 if own else int(rng.integers(0, 27))
            for key in range(start, min(N_KEYS, start + int(rng.integers(1, 20)))):
                entries[key] = (*pair, int(rng.integers(1, 3)), chunk)
        blocks.append(block_of(entries, name))
    path = tmp_path / "table"
    write_text(path, text_of(blocks))
    read = read_blocks(path)
    assert [of.shape for of in read] == [of.shape for of in blocks]
    for mine, its in zip(blocks, read, strict=True):
        assert np.array_equal(mine.entries, its.entries)
        assert mine.digest == its.digest
    check_same(plugins, path.read_bytes(), path)
    assert (path.stat().st_mode & 0o777, unsafe(path)) == (0o644, "")


def test_adjacent_bins_are_one_line() -> None:
    first = key_of(4, 1024, False)
    alike = (1, 2, 4, 16)
    text = text_of([block_of(dict.fromkeys((first, first + 1, first + 312, first + 313, first + 2), alike))])
    lines = [line for line in text.splitlines() if line.startswith("all_reduce")]
    assert lines == ["all_reduce 1024 1279 any ring simple 4 65536", "all_reduce 1280 1407 no ring simple 4 65536"]


def test_the_last_bin_has_no_end() -> None:
    last = key_of(0, 2**62, True)
    (line,) = (of for of in text_of([block_of({last: (255, 255, 8, 0)})]).splitlines() if of.startswith("broadcast"))
    assert line == f"broadcast {bin_bytes(311)} - yes - - 8 -"


def test_more_than_the_plugin_reads_is_not_written() -> None:
    with pytest.raises(ConfigError, match="257 communicators"):
        text_of([block_of({}, f"n{i}") for i in range(257)])


def test_the_documented_table_is_one(plugins: Parser, tmp_path: Path) -> None:
    page = (NATIVE.parents[1] / "docs" / "static_tables.md").read_text()
    example = page.split("    dynamiccl-table 1\n")[1].split("    end\n")[0]
    text = "\n".join(line.removeprefix("    ") for line in ["    dynamiccl-table 1", *example.splitlines(), "end", ""])
    check_same(plugins, text.encode(), tmp_path / "table")
    (block,) = read_blocks(tmp_path / "table")
    assert block.about == "64 ranks on 8 nodes, name dp"
