"""``dynamiccl explain``: what is in force for each key of a finished or interrupted run, and the evidence for it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dynamiccl_ray.actions import Action
from dynamiccl_ray.book import KeyBook
from dynamiccl_ray.experiment import Online
from dynamiccl_ray.keys import bytes_name, key_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, pair_name
from trainers.online import read_checkpoint


def explain_run(run: Path, wanted: str = "") -> dict[str, Any]:
    """Communicators -> keys -> the action in force, its measured gain, and every alternative that was measured.

    Ratios are measured times over NCCL's own choice, both since the last shift. Raises ConfigError if ``run`` is not
    a run.
    """
    state = pickle.loads(read_checkpoint(run)["coordinator"])
    experiment = Online.model_validate_json((run / "experiment.json").read_text())
    comms = []
    for comm_id, comm in state["comms"].items():
        book = KeyBook(
            arl0=experiment.trigger.arl0,
            guardrail_margin=experiment.guardrail.margin,
            guardrail_samples=experiment.guardrail.samples,
            valid={},
            valid_chunks=np.ones(1, np.bool_),
        )
        book.restore(comm["book"])
        member = next(iter(comm["members"].values()))
        keys = [
            _key(book, row, comm["actions"]) for row in np.argsort(book.keys) if wanted in key_name(int(book.keys[row]))
        ]
        comms.append(
            {
                "communicator": f"{comm_id:016x}",
                "ranks": member.ranks,
                "nodes": member.nodes,
                "version": comm["version"],
                "off": comm["off"],
                "keys": keys,
            }
        )
    return {"run": str(run), "phase": state["phase"].value, "communicators": comms}


def _key(book: KeyBook, row: int, actions: dict[int, Action]) -> dict[str, Any]:
    key = int(book.keys[row])
    action = actions.get(key, Action())
    ratios, samples, out = book.log_ratio()[row], book.samples[row], book.ruled_out()[row]
    measured: list[dict[str, Any]] = [
        {
            "action": Action(pair=int(p), channels=int(c)).name,
            "time_vs_nccl": float(np.exp(ratios[p, c])),
            "collectives": int(samples[p, c]),
            "ruled_out": bool(out[p, c]),
        }
        for p, c in zip(*np.nonzero(samples), strict=True)
    ]
    measured.sort(key=lambda m: m["time_vs_nccl"])
    return {
        "key": key_name(key),
        "bytes": int(book.nbytes[row]),
        "in_force": action.name,
        "path": action.path.name.lower(),
        "pair": pair_name(action.pair),
        "channels": CHANNEL_VALUES[action.channels],
        "time_vs_nccl": float(np.exp(ratios[action.pair, action.channels])),
        "nccl_us": float(np.exp(book.baseline[row])),
        "measured": measured,
    }


def explanation_table(explanation: dict[str, Any]) -> list[Table]:
    """One table per communicator."""
    tables = []
    for comm in explanation["communicators"]:
        table = Table(
            title=f"communicator {comm['communicator']}: {comm['ranks']} ranks on {comm['nodes']} nodes, "
            f"table version {comm['version']}, {explanation['phase']}"
            + (f", OFF: {comm['off']}" if comm["off"] else "")
        )
        for column in ("size", "NCCL us", "in force", "time vs NCCL", "why: measured alternatives"):
            table.add_column(column)
        for key in comm["keys"]:
            why = ", ".join(
                f"{m['action']} {m['time_vs_nccl']:.2f}x{' (ruled out)' if m['ruled_out'] else ''}"
                for m in key["measured"][:4]
            )
            table.add_row(
                f"{key['key'].split('/')[0]} {bytes_name(key['bytes'])}",
                f"{key['nccl_us']:.1f}",
                key["in_force"],
                f"{key['time_vs_nccl']:.3f}",
                why,
            )
        tables.append(table)
    return tables
