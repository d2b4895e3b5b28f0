"""What of a run becomes a static table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.actions import N_ACTIONS, Action
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index
from dynamiccl_ray.static.blocks import entry_text
from dynamiccl_ray.trainers.online import export

KEYS = [key_of(4, 1 << k, False) for k in range(20, 24)]
RING = Action(pair=pair_index(Algorithm.RING, Protocol.LL), channels=3).flat
TREE = Action(pair=pair_index(Algorithm.TREE, Protocol.LL), chunk=3).flat
MANY = Action(pair=pair_index(Algorithm.TREE, Protocol.LL), channels=8).flat
EXPLOIT, LEARN, CHECK = Phase.EXPLOIT, Phase.LEARN, Phase.CHECK

Keys = list[tuple[Phase, int, int, int]]
"""Phase, what is wanted or was until the check, in force, samples of both."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a run of communicators, each with its keys."""

    def make(*comms: tuple[dict[str, Any], Keys]) -> Path:
        rows = [row for _, keys in comms for row in keys]
        samples = np.zeros((len(rows), N_ACTIONS))
        for row, (_, wanted, in_force, n) in enumerate(rows):
            samples[row, [wanted, in_force]] = n
        exploited = np.array([wanted if phase in (EXPLOIT, CHECK) else -1 for phase, wanted, *_ in rows])
        loop = SimpleNamespace(exploited=lambda: exploited, evidence=SimpleNamespace(samples=samples))
        made, first = {}, 0
        for number, (changes, keys) in enumerate(comms):
            about = {"ranks": 8, "nodes": 2, "name": "", "off": "", "max_channels": 16} | changes
            used = KEYS[: len(keys)]
            made[number] = SimpleNamespace(
                example=SimpleNamespace(**{name: about[name] for name in ("ranks", "nodes", "name")}),
                off=about["off"], max_channels=about["max_channels"], keys=np.array(used),
                rows=np.arange(first, first + len(keys)),
                in_force={key: row[2] for key, row in zip(used, keys, strict=True) if row[2]},
            )  # fmt: skip
            first += len(keys)
        monkeypatch.setattr(export, "left_coordinator", lambda _: SimpleNamespace(comms=made, loop=loop))
        return Path("run")

    return make


def said(exported: export.Exported) -> list[dict[int, str]]:
    return [
        {n: entry_text(block.entries[key]) for n, key in enumerate(KEYS) if block.entries["set"][key]}
        for block in exported.blocks
    ]


def test_only_what_is_settled_is_exported_and_all_on_demand(run: Any) -> None:
    keys = [(EXPLOIT, RING, 0, 5), (LEARN, TREE, RING, 5), (CHECK, TREE, RING, 5), (EXPLOIT, 0, 0, 5)]
    exported = export.export_run(run(({}, keys)))
    settled = {0: "ring/ll 4ch", 2: "tree/ll chunk 64KiB"}
    assert said(exported) == [settled], "also where the run has given its ranks back to NCCL"
    assert exported.warnings == [
        "communicator 0000000000000000: 1 keys had not settled and are left to NCCL; --all takes them, too"
    ]
    exported = export.export_run(run(({}, keys)), everything=True)
    assert said(exported) == [{0: "ring/ll 4ch", 1: "ring/ll 4ch", 2: "tree/ll chunk 64KiB"}]
    assert exported.warnings == []


def test_communicators_of_one_shape_are_one_block_and_the_best_known_is_right(run: Any) -> None:
    exported = export.export_run(
        run(
            ({"name": "dp"}, [(EXPLOIT, RING, 0, 5), (EXPLOIT, RING, 0, 5), (LEARN, 0, 0, 50), (EXPLOIT, 0, 0, 9)]),
            ({"name": "dp"}, [(EXPLOIT, TREE, 0, 6), (EXPLOIT, RING, 0, 1), (EXPLOIT, TREE, 0, 1), (LEARN, 0, 0, 1)]),
            ({"name": "tp"}, [(EXPLOIT, TREE, 0, 1)]),
            ({"ranks": 16}, [(EXPLOIT, RING, 0, 1)]),
        )
    )
    assert [block.shape for block in exported.blocks] == [(8, 2, "dp"), (8, 2, "tp"), (16, 2, "")]
    tree, ring = "tree/ll chunk 64KiB", "ring/ll 4ch"
    assert said(exported) == [{0: tree, 1: ring, 2: tree}, {0: tree}, {0: ring}]
    assert any("2 communicators of 8 ranks on 2 nodes, name dp differ on 1 keys" in said for said in exported.warnings)


def test_what_is_left_out_is_said(run: Any) -> None:
    settled = [(EXPLOIT, RING, 0, 5), (EXPLOIT, MANY, 0, 5)]
    exported = export.export_run(
        run(({}, settled), ({"off": "ranks differ"}, settled), ({"name": "caf\u00e9"}, settled))
    )
    assert said(exported) == [{0: "ring/ll 4ch"}]
    assert [warning.partition(":")[0] for warning in exported.warnings] == [
        "communicator 0000000000000001 is left out",
        "communicator 0000000000000002 is left out",
        "8 ranks on 2 nodes",
    ]


def test_nothing_to_export_is_an_error(run: Any) -> None:
    # As a run that only observes does.
    with pytest.raises(ConfigError, match="run: nothing to export: NCCL's own choice is all that it has measured"):
        export.export_run(run(({}, [(EXPLOIT, 0, 0, 5)])))
    with pytest.raises(ConfigError, match="run: nothing to export: NCCL's own choice was the best of every key"):
        export.export_run(run(({}, [(EXPLOIT, 0, RING, 5)])))
    with pytest.raises(ConfigError, match=r"nothing to export: .* 1 keys had not settled"):
        export.export_run(run(({}, [(LEARN, RING, RING, 5)])))


def test_names_and_the_sizes_between_are_left_out_on_demand(run: Any) -> None:
    named = ({"name": "dp"}, [(EXPLOIT, RING, 0, 5), (EXPLOIT, RING, 0, 5), (EXPLOIT, 0, 0, 5), (EXPLOIT, RING, 0, 5)])
    (block,) = export.export_run(run(named), any_name=True, between=True).blocks
    assert block.name == ""
    assert np.flatnonzero(block.entries["set"]).tolist() == [*range(KEYS[0], KEYS[1] + 1), KEYS[3]], (
        "not where NCCL's own choice lies between"
    )
    both = ({"name": "dp"}, [(EXPLOIT, RING, 0, 5)]), ({"name": "tp"}, [(EXPLOIT, TREE, 0, 6)])
    (block,) = export.export_run(run(*both), any_name=True).blocks
    assert entry_text(block.entries[KEYS[0]]) == "tree/ll chunk 64KiB", "what rests on more measurements"
