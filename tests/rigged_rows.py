"""A table of measurements that is just enough to be played."""

from __future__ import annotations

from pathlib import Path

_HEADER = "source_id,collective,nodes,ranks,gpus_per_node,gpu,intra,inter,algo,proto,nchannels,bytes,time_us\n"
_SETTINGS = {"default,default": 30.0, "Ring,LL": 20.0, "Tree,LL": 25.0, "Tree,Simple": 60.0}


def write_rows(path: Path, *, gpu: str) -> None:
    """All-reduce of two sizes on two nodes of eight, under NCCL's own choice and three pairs."""
    rows = [
        f"s,all_reduce,2,16,8,{gpu},NVLink,InfiniBand,{setting},,{size},{us * size / 1024}"
        for setting, us in _SETTINGS.items()
        for size in (1024, 4096)
    ]
    path.write_text(_HEADER + "\n".join(rows) + "\n")
