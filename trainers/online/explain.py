"""``dynamiccl explain``: what is in force for each key of a finished or interrupted run, and the evidence for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dynamiccl_ray.actions import action_of
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.agent.observation import decode, encode
from dynamiccl_ray.control.loop import Loop, Phase
from dynamiccl_ray.errors import ConfigError, short
from dynamiccl_ray.keys import bytes_name, key_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, pair_name
from dynamiccl_ray.trainers.online.left import left_coordinator


def explain_run(run: Path, wanted: str = "") -> dict[str, Any]:
    """Communicators -> keys -> the action in force, its measured gain, and every alternative that was measured.

    Ratios are measured times over NCCL's own choice, both since the last shift. Raises ConfigError if ``run`` is not
    a run, or has no key whose name contains ``wanted``.
    """
    coordinator = left_coordinator(run)
    names = {key_name(int(key)) for comm in coordinator.comms.values() for key in comm.keys}
    if wanted and not any(wanted in name for name in names):
        such = min(names, default="no key at all")
        raise ConfigError(f"--key {short(wanted)}: no key of the run has that in its name; there is {such}")
    comms = []
    for comm_id, comm in coordinator.comms.items():
        chosen = [at for at in np.argsort(comm.keys).tolist() if wanted in key_name(int(comm.keys[at]))]
        comms.append(
            {
                "communicator": f"{comm_id:016x}",
                "ranks": comm.example.ranks,
                "nodes": comm.example.nodes,
                "version": comm.version,
                "off": comm.off,
                "keys": [_key(coordinator.loop, comm, at) for at in chosen],
            }
        )
    return {"run": str(run), "phase": coordinator.phases.phase.name.lower(), "communicators": comms}


def _key(loop: Loop, comm: Communicator, at: int) -> dict[str, Any]:
    key, row = int(comm.keys[at]), comm.rows[at : at + 1]
    action = action_of(comm.in_force.get(key, 0))
    tried = np.flatnonzero(loop.evidence.samples[row[0]])
    allowed = loop.allowed(row)[0].ravel()
    baseline = float(loop.evidence.baseline[row[0]])
    ratio = np.exp(loop.evidence.mean(np.repeat(row, len(tried)), tried) - baseline)
    measured: list[dict[str, Any]] = [
        {
            "action": action_of(int(flat)).name,
            "time_vs_nccl": float(ratio[i]),
            "collectives": int(loop.evidence.samples[row[0], flat]),
            "ruled_out": not bool(allowed[flat]),
        }
        for i, flat in enumerate(tried)
    ]
    measured.sort(key=lambda m: m["time_vs_nccl"])
    mine = [m["time_vs_nccl"] for m in measured if m["action"] == action.name]
    return {
        "key": key_name(key),
        "bytes": int(loop.keys.nbytes[row[0]]),
        "phase": Phase(int(loop.phase[row[0]])).name.lower(),
        "in_force": action.name,
        "path": action.path.name.lower(),
        "pair": pair_name(action.pair),
        "channels": CHANNEL_VALUES[action.channels],
        "time_vs_nccl": mine[0] if mine else None,
        "nccl_us": float(np.exp(baseline)) if np.isfinite(baseline) else None,
        "measured": measured,
        "observation": decode(encode(loop.keys.context[row], loop.view(row, loop.allowed(row)))[0]),
    }


def observation_table(comm: dict[str, Any], key: dict[str, Any]) -> Table:
    """What the policy would see of a key if it had to decide now, in words and natural units."""
    saw = dict(key["observation"])
    pairs = [pair for pair in enumerate(saw.pop("pairs")) if pair[1]["available"]]
    table = Table(title=f"what the policy sees of {key['key']} on communicator {comm['communicator']}")
    table.add_column("what")
    table.add_column("value")
    for name, value in saw.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    for index, of in pairs:
        said = ", ".join(f"{name} {value:.3g}" for name, value in of.items() if name != "available")
        table.add_row(pair_name(index), said)
    return table


def explanation_table(explanation: dict[str, Any]) -> list[Table]:
    """One table per communicator."""
    tables = []
    for comm in explanation["communicators"]:
        table = Table(
            title=f"communicator {comm['communicator']}: {comm['ranks']} ranks on {comm['nodes']} nodes, "
            f"table version {comm['version']}, {explanation['phase']}"
            + (f", OFF: {comm['off']}" if comm["off"] else "")
        )
        for column in ("size", "NCCL us", "phase", "in force", "time vs NCCL", "why: measured alternatives"):
            table.add_column(column)
        for key in comm["keys"]:
            why = ", ".join(
                f"{m['action']} {m['time_vs_nccl']:.2f}x{' (ruled out)' if m['ruled_out'] else ''}"
                for m in key["measured"][:4]
            )
            table.add_row(
                f"{key['key'].split('/')[0]} {bytes_name(key['bytes'])}",
                f"{key['nccl_us']:.1f}" if key["nccl_us"] else "",
                key["phase"],
                key["in_force"],
                f"{key['time_vs_nccl']:.3f}" if key["time_vs_nccl"] else "",
                why or "never measured: NCCL's own",
            )
        tables.append(table)
    return tables
