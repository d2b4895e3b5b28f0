"""``dynamiccl status``, ``top``, ``mode``, ``off``, ``rollback``, ``canary``: a run, seen and steered as it goes on."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamiccl_ray.cli.output import AsJson, console, directory_for, emit, stdout
from dynamiccl_ray.errors import RunError

Job = Annotated[str, typer.Option("--job", help="DYNAMICCL_JOB_ID of the training processes.")]
_EVERY_S: Final = 1.0
_POLL_S: Final = 0.02
_IN_FORCE_S: Final = 30.0


def status(
    job: Job = "default",
    keys: Annotated[bool, typer.Option("--keys", help="Every key, with what is in force and what it gains.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a run does now: communicators, phases, what it has gained so far, what is off and why."""
    from dynamiccl_ray.trainers.online.desk import ask

    said = ask(job, {})
    if as_json:
        emit(said)
    else:
        stdout().print(_page(said, keys=keys))


def top(
    job: Job = "default",
    keys: Annotated[bool, typer.Option("--keys", help="Every key, too.")] = False,
) -> None:
    """``status``, again every second until Ctrl-C."""
    from dynamiccl_ray.trainers.online.desk import ask

    with Live(_page(ask(job, {}), keys=keys), console=stdout(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_EVERY_S)
                live.update(_page(ask(job, {}), keys=keys), refresh=True)
        except KeyboardInterrupt:
            pass


def report(
    name: Annotated[str, typer.Argument(help="DYNAMICCL_JOB_ID of the training processes, or the name of a sweep.")],
    sweep: Annotated[bool, typer.Option("--sweep", help="NAME is that of a sweep.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write; runs/NAME-TIME by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch what the newest run of a job, or a sweep, has written, from the node of the Ray cluster where it ran."""
    if not os.environ.get("RAY_ADDRESS"):
        raise RunError("RAY_ADDRESS is not set: name the Ray cluster that the run was submitted to, as HEAD:6379")
    from dynamiccl_ray.trainers.online.outputs import JOB, SWEEP, fetch

    directory = directory_for(out, name)
    said = fetch(name, directory, SWEEP if sweep else JOB) | {"directory": str(directory)}
    if as_json:
        emit(said)
        return
    page = directory / "report.html"
    console.print(f"fetched from {said['path']} on node {said['name']}", highlight=False, soft_wrap=True)
    print(page if page.exists() else directory)
    if not said["over"]:
        what = "sweep" if sweep else "run"
        console.print(f"the {what} goes on: its results and report come at its end", highlight=False)


def mode(
    wanted: Annotated[str, typer.Argument(metavar="MODE", help="observe, shadow, active or off.")],
    job: Job = "default",
    as_json: AsJson = False,
) -> None:
    """Changes what a run does; ``active`` also ends ``off`` and ``rollback``."""
    _order(job, {"order": "mode", "mode": wanted}, as_json)


def off(job: Job = "default", as_json: AsJson = False) -> None:
    """All ranks go back to NCCL's own choice at once, and next to nothing is measured; ``mode active`` ends it."""
    _order(job, {"order": "mode", "mode": "off"}, as_json)


def rollback(job: Job = "default", as_json: AsJson = False) -> None:
    """Every key goes back to what was exploited before it last learned anew, else to NCCL's own choice, and stays
    there until ``mode active``."""
    _order(job, {"order": "rollback"}, as_json)


def canary(
    share: Annotated[float | None, typer.Option(help="Of each communicator's keys; 1 for all.")] = None,
    communicator: Annotated[
        list[str] | None,
        typer.Option("--communicator", "-c", help="By name or first digits of its id; may be given several times."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Ends the canary: everything is tuned.")] = False,
    job: Job = "default",
    as_json: AsJson = False,
) -> None:
    """Tunes only some keys; the others go back to NCCL's own choice. Widens by itself where it does no harm."""
    order: dict[str, Any] = {"order": "canary"}
    if everything:
        order |= {"share": 1.0, "communicators": []}
    if share is not None:
        order["share"] = share
    if communicator:
        order["communicators"] = communicator
    if len(order) == 1:
        raise typer.BadParameter("say what is to be tuned: --share, --communicator or --all")
    _order(job, order, as_json)


def _order(job: str, order: dict[str, Any], as_json: bool) -> None:
    """Gives an order and waits until it is followed."""
    from dynamiccl_ray.trainers.online.desk import ask

    began, order = time.monotonic(), order | {"id": uuid.uuid4().hex}
    said = ask(job, order)
    while not (done := _followed(said, order)) and time.monotonic() - began < _IN_FORCE_S:
        time.sleep(_POLL_S)
        said = ask(job, {})
    took_s = time.monotonic() - began
    if as_json:
        emit({"followed": done, "seconds": took_s, "in_force": said["in_force"], "ranks": said["ranks"]})
    elif done:
        console.print(f"{_in_words(said)}; {took_s:.2f} s", highlight=False)
    else:
        late = f"taken, but not in force yet after {took_s:.0f} s:"
        console.print(Text.assemble((late, "yellow"), f" {_in_words(said)}"))
    if not done:
        raise typer.Exit(1)


def _followed(said: dict[str, Any], order: dict[str, Any]) -> bool:
    taken = any(of.get("id") == order["id"] for of in said["orders"])
    own = order["order"] == "mode" and order["mode"] in ("off", "observe")
    return taken and not (own and any(said["in_force"].values()))


def _in_words(said: dict[str, Any]) -> str:
    tuned = sum(said["in_force"].values())
    what = f"a table for {tuned} keys is in force" if tuned else "NCCL's own choice is in force"
    how = "rolled back" if said["rolled_back"] else said["mode"]
    return f"{how}: {what} on {said['ranks']} ranks of {len(said['in_force'])} communicators"


def _page(said: dict[str, Any], *, keys: bool) -> Group:
    gain = "not known yet" if said["speedup"] is None else f"{said['speedup']:.3f}x faster than NCCL's own choice"
    percent = said["overhead"].get("percent")
    took = "not measured yet" if percent is None else f"{percent:.2f} % of a step"
    coverage = {name: value for name, value in said["coverage"].items() if isinstance(value, int) and value}
    waited = f"; ranks have waited {said['hold_wait_s']:.1f} s for decisions" if said["hold_wait_s"] else ""
    run = (
        f", run {said['run']}: {'rolled back' if said['rolled_back'] else said['mode']}, "
        f"{said['phase']}; round {said['round']}, {said['collectives']:,} collectives, {said['switches']} switches"
    )
    lines: list[str | Text] = [
        Text.assemble((f"job {said['job']}", "bold"), run),
        f"communication so far, exploration included: {gain}; the plugin takes {took}{waited}",
        f"drift: {said['alarms']} alarms{_last(said['last_alarm'])}; coverage: "
        + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in coverage.items()),
    ]
    if said["lossless_saturated"]:
        lines.append(
            f"a step takes {said['tuned_step_s']:.3g} s with the best that was found, well above its computation "
            "alone: NCCL has nothing better to choose; compress gradients, or synchronise less often"
        )
    if said["canary"] is not None:
        of = said["canary"]
        where = ", ".join(of["communicators"]) or "every communicator"
        lines.append(f"canary: {of['share']:.0%} of the keys of {where}" + (f"; {of['waits']}" if of["waits"] else ""))
    if not said["ranks"]:
        lines.append(Text("no rank is served: are the training processes running?", style="yellow"))
    parts: list[Any] = [*lines, _communicators(said["communicators"])]
    if keys:
        parts += [_keys(comm) for comm in said["communicators"]]
    return Group(*parts)


def _last(alarm: dict[str, Any] | None) -> str:
    return "" if alarm is None else f" (last at call {alarm['dseq']:,})"


def _communicators(comms: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("communicator", "ranks", "keys by phase", "tuned", "gain", "exploring", "note"):
        table.add_column(name, overflow="fold")
    for comm in comms:
        phases: dict[str, int] = {}
        for key in comm["keys"]:
            phases[key["phase"]] = phases.get(key["phase"], 0) + 1
        tuned = sum(key["in_force"] != comm["own"] for key in comm["keys"])
        note = comm["off"] or ("" if comm["served"] == comm["ranks"] else f"{comm['served']} ranks are served")
        table.add_row(
            comm["name"] or comm["communicator"],
            f"{comm['ranks']} on {comm['nodes']} nodes",
            ", ".join(f"{n} {phase}" for phase, n in phases.items()),
            f"{tuned} of {len(comm['keys'])}",
            "" if comm["speedup"] is None else f"{comm['speedup']:.3f}x",
            f"{comm['explored']:.1%} of {comm['may_explore']:.1%}"
            + (f", {comm['resting']} keys rest" if comm["resting"] else ""),
            note or ", ".join(["in band"] * comm["in_band"] + [f"like {comm['like']}"] * (comm["like"] is not None)),
        )
    return table


def _keys(comm: dict[str, Any]) -> Table:
    watched = ", ".join(f"{name} {score:.2f}" for name, score in comm["watched"].items())
    table = Table(title=f"communicator {comm['name'] or comm['communicator']}; as a whole: {watched}")
    for name in ("key", "phase", "collectives", "NCCL's own, us", "in force", "time over NCCL's", "drift"):
        table.add_column(name)
    for key in comm["keys"]:
        table.add_row(
            key["key"],
            key["phase"],
            f"{key['collectives']:,}",
            "" if key["own_us"] is None else f"{key['own_us']:.1f}",
            key["in_force"],
            "" if key["time_vs_nccl"] is None else f"{key['time_vs_nccl']:.3f}x",
            f"{key['cusum']:.2f}",
        )
    return table
