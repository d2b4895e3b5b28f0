"""What the build needs of NCCL's generated tables: a stub for every kernel, and what each device function is.

``tables.py stubs UNDEFINED`` reads the output of ``nm -u`` and writes assembly: a symbol per kernel, which is never
run, and behind it a byte that tells device kernels (1) from symmetric ones (2). ``tables.py functions HOST_TABLE``
reads NCCL's host_table.cc, whose comments name the function of each id, and writes the rows of ``functions`` in
kernel.cc.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# NCCL's numbers; AllGatherV is how it runs broadcasts of several roots.
FUNCS = {
    "Broadcast": 0,
    "Reduce": 1,
    "AllGather": 2,
    "ReduceScatter": 3,
    "AllReduce": 4,
    "SendRecv": 5,
    "AllGatherV": 0,
}
ALGOS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOS = ("LL", "LL128", "SIMPLE")
ROW = re.compile(r"/\*\s*\d+\*/\s*(\d+),\s*// (\w+)((?: \w+)*)")


def stubs(undefined: str) -> str:
    out = [".text"]
    for name in sorted(set(re.findall(r"\bU (\w*nccl(?:Dev|SymkDev)Kernel\w*)", undefined))):
        kind = 2 if "ncclSymkDevKernel" in name else 1
        out += [f".globl {name}", f".hidden {name}", f"{name}: .byte 0xc3, {kind}"]
    return "\n".join([*out, '.section .note.GNU-stack,"",%progbits', ""])


def element_bytes(words: list[str]) -> int:
    """Of the type among the words: i8, u32, f16, bf16, f8e4m3; 1 where NCCL counts bytes."""
    for word in words:
        if match := re.fullmatch(r"(?:i|u|f|bf)(\d+)(?:e\dm\d)?", word):
            return int(match[1]) // 8
    return 1


def functions(table: str) -> str:
    rows: dict[int, str] = {}
    for id_, func, rest in ROW.findall(table):
        words = rest.split()
        algo = next((ALGOS.index(w) for w in words if w in ALGOS), 1)
        proto = next((PROTOS.index(w) for w in words if w in PROTOS), 2)
        rows[int(id_)] = f"{{{FUNCS[func]}, {algo}, {proto}, {element_bytes(words)}}},"
    assert set(rows) == set(range(len(rows))), "NCCL's table names some functions only"
    return "\n".join(rows[i] for i in range(len(rows))) + "\n"


if __name__ == "__main__":
    what, path = sys.argv[1:]
    sys.stdout.write({"stubs": stubs, "functions": functions}[what](Path(path).read_text()))
