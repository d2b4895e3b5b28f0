"""A context whose ranks are the fake ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_nccl import FakeRanks

from benchmarks.gpu.context import Context, Loaded
from benchmarks.gpu.options import SECTIONS, Options

FACTS: dict[str, Any] = {
    "torch": "2.13.0+cu130",
    "nccl_backend": True,
    "cuda": "13.0",
    "gpus": [{"name": "NVIDIA Fake 100", "memory": 80 << 30, "sms": 132, "capability": [9, 0]}],
    "nccl": [2, 30, 7],
    "nccl_path": None,
    "driver": "580.1",
    "compute_mode": "Default",
    "links": "none",
    "mps": False,
    "python": "3.11.7",
    "kernel": "6.1",
    "cpu": "a CPU",
    "cores": 2,
}


@dataclass(kw_only=True)
class FakeContext(Context):
    """Starts fake ranks, with ``fakes`` as their arguments, in this process."""

    monkeypatch: pytest.MonkeyPatch
    fakes: dict[str, Any] = field(default_factory=dict)
    started: list[FakeRanks] = field(default_factory=list)

    @contextlib.contextmanager
    def start(  # type: ignore[override]
        self, job: str, loaded: Loaded = "both", extra: Mapping[str, str] | None = None
    ) -> Iterator[FakeRanks]:
        # Where the plugin makes its segments, and under which name.
        self.monkeypatch.setenv("DYNAMICCL_JOB_ID", job)
        ranks = FakeRanks(self.ranks, **self.fakes)
        self.started.append(ranks)
        try:
            yield ranks
        finally:
            ranks.close()


def fake_context(monkeypatch: pytest.MonkeyPatch, directory: Path, *, ranks: int = 2, **changes: Any) -> FakeContext:
    fakes = changes.pop("fakes", {})
    options: dict[str, Any] = {"out": directory / "out", "sections": SECTIONS, "quick": True, "runs": 2, "seed": 3}
    return FakeContext(
        options=Options(**{**options, **changes}),
        facts=FACTS,
        ranks=ranks,
        directory=directory,
        monkeypatch=monkeypatch,
        fakes=fakes,
    )
