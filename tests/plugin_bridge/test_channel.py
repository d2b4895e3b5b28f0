"""The channel: its layout, who may claim it, what is not one, the record ring, and machines without room."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import CALLS, Rig, play, stage, table_key, write_at

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import ENTRY_DTYPE, DecisionTable
from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.plugin_bridge.channel import Channel, JobReport, c_digest
from dynamiccl_ray.plugin_bridge.layout import COST_ROW_DTYPE, RECORD_DTYPE
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, NcclJob

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "plugin_bridge" / "native"

# docs/channel.md, byte for byte; nothing here comes from the code under test.
SEGMENT_BYTES = 1147200
RECORDS, RECORD_BYTES = 16384, 64
MAGIC, ABI, STATE = 0, 8, 32
DSEQ, APPLIED, PASSTHROUGH = 256, 320, 328
DROPPED_FULL = 448
UNPROFILED, PROFILE_NS, SPARED = 432, 440, 496
FINGERPRINTS = 504
COST_ROWS_USED, COST_ROWS = 760, 764
HOLD_AT, BASE, BASE_AT, PENDING, DECISION, PROMISE = 23296, 23304, 23312, 23320, 23328, 23336
TAIL, DUTY, OVERHEAD_PPM, HEAD = 23360, 23376, 23384, 23424
TABLES, TABLE_BYTES, RING, JOB = 23488, 24992, 98496, 1147072
RECORD = struct.Struct("<QQQQIIIHBBBBBBBBBBQ")
RECORD_FIELDS = [
    "dseq",
    "bytes",
    "exec_ns",
    "start_ns",
    "version",
    "plan",
    "clock",
    "key",
    "flags",
    "timing",
    "func",
    "algo",
    "proto",
    "channels",
    "asked_algo",
    "asked_proto",
    "asked_channels",
    "asked_chunk_log2",
    "ticket",
]


def word(memory: mmap.mmap, offset: int) -> int:
    return int(struct.unpack_from("<Q", memory, offset)[0])


# ---- digest ----


@settings(max_examples=150, deadline=None)
@given(
    version=st.integers(0, 2**64 - 1),
    max_channels=st.integers(0, 2**32 - 1),
    apply=st.booleans(),
    rows=st.dictionaries(st.integers(0, N_KEYS - 1), st.binary(min_size=8, max_size=8), max_size=40),
)
def test_both_sides_digest_alike(version: int, max_channels: int, apply: bool, rows: dict[int, bytes]) -> None:
    words = np.zeros(N_KEYS, "<u8")
    for key, row in rows.items():
        words[key] = int.from_bytes(row, "little")
    table = DecisionTable(version, words.view(ENTRY_DTYPE), max_channels, apply)
    assert c_digest(table) == table.digest


@settings(max_examples=100, deadline=None)
@given(
    key=st.integers(0, N_KEYS - 1),
    other=st.integers(0, N_KEYS - 1),
    bit=st.integers(0, 63),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_digest_sees_every_bit_and_every_place(key: int, other: int, bit: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(1, 2**63, N_KEYS, np.uint64)
    digest = DecisionTable(1, words.view(ENTRY_DTYPE), 8).digest
    flipped = words.copy()
    flipped[key] ^= np.uint64(1) << np.uint64(bit)
    assert DecisionTable(1, flipped.view(ENTRY_DTYPE), 8).digest != digest
    if key != other:
        swapped = words.copy()
        swapped[[key, other]] = swapped[[other, key]]
        assert DecisionTable(1, swapped.view(ENTRY_DTYPE), 8).digest != digest
    assert DecisionTable(2, words.view(ENTRY_DTYPE), 8).digest != digest
    assert DecisionTable(1, words.view(ENTRY_DTYPE), 9).digest != digest
    assert DecisionTable(1, words.view(ENTRY_DTYPE), 8, apply=False).digest != digest


# ---- layout ----


def test_the_documented_layout_is_the_one_in_use(rig: Rig) -> None:
    """A decoder that knows nothing but the documented offsets reads what channel.py reads."""
    calls = CALLS[:4]
    total = 275 * len(calls)
    job = rig.start(play(calls, steps=275))
    ((channel,),) = rig.channels(job)
    table = DecisionTable.of(1, {table_key(CALLS[0]): Action(pair=6, channels=4)}, max_channels=16)
    with channel.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert len(memory) == SEGMENT_BYTES
        header = struct.unpack_from("<QIIIIQI", memory, MAGIC)
        assert header == (0x4C43434D414E5944, 6, RECORD_BYTES, RECORDS, TABLE_BYTES, SEGMENT_BYTES, 1)
        identity = struct.unpack_from("<QQ8I64s64s", memory, 40)
        seen = channel.identity
        assert identity[:6] == (seen.comm_id, seen.start_time, seen.pid, seen.ordinal, seen.rank, seen.ranks)
        assert identity[6:10] == (seen.nodes, 6, 6, 0)
        assert [text.rstrip(b"\0").decode() for text in identity[10:]] == [seen.comm_name, seen.job]
        assert (word(memory, HOLD_AT), word(memory, BASE)) == (2**64 - 1, 0)

        switch_at = stage(channel, table, 50)
        assert word(memory, HOLD_AT) == switch_at == word(memory, DECISION) == 51
        assert (word(memory, PENDING), word(memory, PROMISE)) == (1 << 8, 1 << 2 | 1)
        assert memory[TABLES : TABLES + TABLE_BYTES] == table.to_bytes()
        job.set_credit(FREE_RUNNING)
        job.wait(60)
        assert channel.fold()
        assert (word(memory, HOLD_AT), word(memory, BASE), word(memory, BASE_AT)) == (2**64 - 1, 1 << 8, switch_at)

        status = channel.status
        assert status.dseq == word(memory, DSEQ) == total
        assert status.applied == word(memory, APPLIED) > 0
        assert struct.unpack_from("<6Q", memory, PASSTHROUGH) == tuple(status.passthrough.values())
        assert status.records == word(memory, HEAD) == total
        assert (status.backlog, word(memory, TAIL)) == (total, 0)
        assert struct.unpack_from("<4Q", memory, DROPPED_FULL) == (0, 0, 0, 0)
        (window, fingerprint), *_ = struct.iter_unpack("<QQ", memory[FINGERPRINTS : FINGERPRINTS + 256])
        assert channel.fingerprints() == {window - 1: fingerprint}

        rows = channel.cost_rows()
        assert struct.unpack_from("<I", memory, COST_ROWS_USED) == (len(rows),)
        assert memory[COST_ROWS : COST_ROWS + 88 * len(rows)] == rows.tobytes()
        assert COST_ROW_DTYPE.itemsize == 88

        raw = list(RECORD.iter_unpack(memory[RING : RING + RECORD_BYTES * total]))
        records = channel.drain()
        assert word(memory, TAIL) == total
        for position, (fields, record) in enumerate(zip(raw, records, strict=True)):
            assert dict(zip(RECORD_FIELDS, fields, strict=True)) == {n: record[n] for n in RECORD_FIELDS}
            assert record["ticket"] == position + 1

        channel.report_step(7, 0.25, 1.5)
        channel.report_fault()
        assert struct.unpack_from("<QQQdQ", memory, JOB) == (2, 7, 250_000_000, 1.5, 1)
        assert channel.job == JobReport(reports=1, step=7, iteration_s=0.25, loss=1.5, faults=1)
    assert RECORD_DTYPE.itemsize == RECORD.size == RECORD_BYTES


# ---- claims ----


CLAIM = """
import sys
from pathlib import Path
from dynamiccl_ray.plugin_bridge.channel import Channel
channel = Channel(Path(sys.argv[1]))
"""


def test_one_runner_at_a_time(segment: tuple[NcclJob, Path]) -> None:
    _, path = segment
    with Channel(path):
        with pytest.raises(ChannelError, match="claimed by another runner"):
            Channel(path)
        other = subprocess.run(
            [sys.executable, "-c", CLAIM, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert other.returncode == 1
        assert "ChannelBusyError" in other.stderr
        assert "claimed by another runner" in other.stderr
        with Channel(path, claim=False) as onlooker:
            assert onlooker.alive
    Channel(path).close()


def test_a_killed_runner_gives_its_claim_back(segment: tuple[NcclJob, Path]) -> None:
    _, path = segment
    script = CLAIM + "print('ok', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"ok\n"
        with pytest.raises(ChannelError, match="claimed"):
            Channel(path)
        runner.kill()
        runner.wait()
    Channel(path).close()


def test_a_closed_channel_says_so(segment: tuple[NcclJob, Path]) -> None:
    channel = Channel(segment[1])
    channel.close()
    channel.close()
    for use in (lambda: channel.status, lambda: channel.identity, channel.drain, channel.fold, channel.beat):
        with pytest.raises(ChannelError, match="closed"):
            use()


def test_drain_takes_no_other_buffer(segment: tuple[NcclJob, Path]) -> None:
    with Channel(segment[1]) as channel:
        for buffer in (np.empty(64, np.uint8), np.empty(64, RECORD_DTYPE)[::2]):
            with pytest.raises(ValueError, match="RECORD_DTYPE"):
                channel.drain(buffer)
        assert len(channel.drain(np.empty(0, RECORD_DTYPE))) == 0


# ---- what is not a channel ----


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (MAGIC, b"\1", "not a channel: magic"),
        (ABI, b"\x63\0\0\0", "channel ABI 99, this side speaks 6"),
        (STATE, b"\0\0\0\0", "still starting"),
        (12, b"\x80", "layout of another build: record 128"),
        (16, b"\1", "layout of another build"),
        (20, b"\1", "layout of another build"),
        (24, b"\1", "layout of another build"),
    ],
    ids=["magic", "abi", "starting", "record", "ring", "table", "segment"],
)
def test_a_header_of_another_kind(
    segment: tuple[NcclJob, Path], tmp_path: Path, offset: int, data: bytes, message: str
) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(segment[1].read_bytes())
    copy.chmod(0o600)
    write_at(copy, offset, data)
    with pytest.raises(ChannelError, match=message):
        Channel(copy)
    # The claim is not kept: the same answer, not "claimed".
    with pytest.raises(ChannelError, match=message):
        Channel(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, expected 1147200"),
        (b"short", "5 bytes, expected"),
        (bytes(SEGMENT_BYTES - 1), "expected 1147200"),
        (bytes(SEGMENT_BYTES), "still starting"),
        (np.random.default_rng(1).bytes(SEGMENT_BYTES), "not a channel: magic"),
        (np.random.default_rng(1).bytes(32) + bytes(SEGMENT_BYTES - 32), "not a channel: magic"),
    ],
    ids=["empty", "short", "truncated", "zeros", "noise", "noise-not-ready"],
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "dynamiccl-x-1-0"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ChannelError, match=message) as caught:
        Channel(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_a_directory_and_a_link(tmp_path: Path, segment: tuple[NcclJob, Path]) -> None:
    link = tmp_path / "link"
    link.symlink_to(segment[1])
    for path in (tmp_path / "none", tmp_path, link):
        with pytest.raises(ChannelError, match="cannot open"):
            Channel(path)


def test_a_file_cut_short_after_it_was_found(segment: tuple[NcclJob, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(segment[1].read_bytes()[:-4096])
    with pytest.raises(ChannelError, match="expected 1147200"):
        Channel(copy)


# ---- names and leftovers ----
