"""Static tables in other tuners' formats, and what these cannot say.

CSV is what NVIDIA's example tuner reads (ext-tuner/example, from 2.29 on plugins/tuner/example, of NCCL); JSON what the
built-in tuner of NCCLX reads (comms/ncclx/meta/tuner of meta-pytorch/torchcomms, July 2026). In both the first line or
rule that matches wins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dynamiccl_ray.control.table import OWN
from dynamiccl_ray.keys import N_BINS
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol
from dynamiccl_ray.static.blocks import Block, Range, ranges

_CSV_FIELDS: Final = "colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
_UNLIMITED: Final = 2**64 - 1
_GRAIN_BYTES: Final = {Protocol.LL: 16, Protocol.LL128: 1920, Protocol.SIMPLE: 512}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A table in some format, and a line for each kind of thing that was lost."""

    text: str
    warnings: list[str]


def nccl_csv(blocks: Iterable[Block]) -> Written:
    """For NVIDIA's example tuner: no names, no chunk sizes, and one channel where no line matches."""
    lost: Counter[str] = Counter()
    lines = ["# colltype and so on as in NCCL's example tuner; channels 0 is NCCL's own count", f"# {_CSV_FIELDS}"]
    merged, warnings = _without_names(blocks)
    for block in merged:
        for of in _sayable(block, lost):
            least, most = of.bytes
            ops = -1 if of.pipelined in ("any", "yes") else 1
            if of.chunk_bytes:
                lost["with a chunk size, which CSV has no field for"] += 1
            fields = (
                *(_word(of.collective), least, _UNLIMITED if most is None else most, *of.pair, _count(of, block)),
                *(block.nodes, block.ranks, ops, -1),
            )
            lines.append(",".join(map(str, fields)))
    warnings.append(
        "NVIDIA's example tuner runs what no line matches on 1 channel: list every size that the job uses, or take our "
        "table"
    )
    return Written(text="\n".join([*lines, ""]), warnings=warnings + _said(lost))


def ncclx_json(blocks: Iterable[Block]) -> Written:
    """For NCCLX's built-in tuner, which knows bytes per rank, and neither names nor groups of operations."""
    lost: Counter[str] = Counter()
    rules: list[dict[str, Any]] = []
    merged, warnings = _without_names(blocks)
    for block in merged:
        local = block.ranks // block.nodes
        share = local * block.nodes
        if share != block.ranks:
            warnings.append(f"{block.about}: NCCLX takes it for {share} ranks, as {local} on each node")
        for of in _sayable(block, lost):
            if of.pipelined == "yes":
                lost["for groups of operations alone, which NCCLX does not tell apart"] += 1
                continue
            if of.pipelined == "no":
                lost["for single operations alone, which NCCLX also takes for groups"] += 1
            least, most = of.bytes
            first, last = -(-least // share), None if most is None else most // share
            if last is not None and last < first:
                lost["narrower than a byte per rank, in which NCCLX counts"] += 1
                continue
            config: dict[str, Any] = dict(zip(("algorithm", "protocol"), of.pair, strict=True))
            if count := _count(of, block):
                config["channels"] = count
            if of.chunk_bytes:
                config["chunkSize"] = _rounded(of)
            matched = {"bytesPerRank": f"[{first},{'' if last is None else last}{')' if last is None else ']'}"}
            topology = {"nNodes": block.nodes, "nLocalRanks": local}
            rules.append({"filter": {"collective": _word(of.collective)} | matched | topology, "config": config})
        if share > 1:
            warnings.append(
                f"{block.about}: NCCLX counts whole bytes per rank, so a size up to {share - 1} bytes beyond the end "
                "of a range still falls into it"
            )
    return Written(text=json.dumps({"rules": rules}, indent=1) + "\n", warnings=warnings + _said(lost))


def _word(collective: Collective) -> str:
    return collective.name.lower().replace("_", "")


def _count(of: Range, block: Block) -> int:
    """Of channels, 0 for NCCL's own: also where NCCL does not clamp a count, and our plugin passes none on."""
    algorithm = Algorithm(int(of.entry["algo"]))
    several = algorithm is Algorithm.NVLS and block.nodes > 1
    return 0 if several or algorithm in (Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN) else of.channels


def _rounded(of: Range) -> int:
    """The chunk as our plugin asks for it: a multiple of NCCL's grain, and at least one."""
    grain = _GRAIN_BYTES[Protocol(int(of.entry["proto"]))]
    return max(grain, of.chunk_bytes // grain * grain)


def _sayable(block: Block, lost: Counter[str]) -> Iterator[Range]:
    """Ranges with a pair of their own. Those for groups come last and match any number of operations, as neither format
    can ask for more than one: so only where single operations have a line before.
    """
    pairs = ((block.entries["set"] != 0) & (block.entries["algo"] != OWN)).reshape(len(Collective), 2, N_BINS)
    last: list[Range] = []
    for of in ranges(block.entries):
        if of.is_own_pair:
            lost["that only set the channels of NCCL's own pair"] += 1
        elif of.pipelined != "yes":
            yield of
        else:
            said = np.flatnonzero(pairs[of.collective, 0, of.first : of.last + 1]) + of.first
            if len(said) <= of.last - of.first:
                lost["for groups of operations where single ones have none, which cannot be told apart"] += 1
            if len(said):
                runs = np.split(said, np.flatnonzero(np.diff(said) > 1) + 1)
                last += [replace(of, first=int(run[0]), last=int(run[-1])) for run in runs]
    yield from last


def _said(lost: Counter[str]) -> list[str]:
    return [f"{count} {'range' if count == 1 else 'ranges'} {what}" for what, count in lost.items()]


def _without_names(blocks: Iterable[Block]) -> tuple[list[Block], list[str]]:
    """One block for each number of ranks and nodes: keys on which communicators of that size differ are left out."""
    by_size: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        by_size.setdefault((block.ranks, block.nodes), []).append(block)
    merged, warnings = [], []
    for (ranks, nodes), same in by_size.items():
        names = [block.name for block in same if block.name]
        entries = same[0].entries.view("<u8").copy()
        differing = np.zeros(len(entries), np.bool_)
        for block in same[1:]:
            differing |= block.entries.view("<u8") != entries
        entries[differing] = 0
        if names:
            left_out = f", and {np.count_nonzero(differing)} keys on which they differ are left out" if same[1:] else ""
            warnings.append(
                f"{', '.join(names)}: names cannot be said; this is for every communicator of {ranks} ranks on {nodes} "
                f"nodes{left_out}"
            )
        channels = min(block.max_channels for block in same)
        merged.append(
            Block(
                ranks=ranks,
                nodes=nodes,
                max_channels=channels,
                entries=entries.view(same[0].entries.dtype),
            )
        )
    return merged, warnings
