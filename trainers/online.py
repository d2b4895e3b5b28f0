"""An online run: the emulated job if there is one, the control plane, rounds until it is over, and what came of it."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.coordinator import Plan
from dynamiccl_ray.errors import ConfigError, RunError
from dynamiccl_ray.experiment import NcclFabric, Online, PlayedJob
from plugin_bridge import plugin_path
from plugin_bridge.channel import remove_stale, segments
from plugin_bridge.emulation import FREE_RUNNING, PEER_DIED_CODE, EmulatedJob, HostError, agreement_violations
from plugin_bridge.played import PlayedFabric, play
from trainers.backends import Backend, RayBackend, SerialBackend
from trainers.recorder import Recorder
from trainers.summary import summarise

Progress = Callable[[dict[str, Any]], None]

CHECKPOINT_ROUNDS = 20
CLAIM_ROUNDS = 3
# What the summary looks back on: all of a run of an hour, the end of a longer one. The Parquet file has everything.
SUMMARY_EPOCHS = 50_000


@dataclass
class _Events:
    """What was done to the fabric, and what is still to come."""

    done: list[dict[str, Any]] = field(default_factory=list)
    exploited: int = 0
    """Rounds of exploitation since learning last ended."""


def run_online(
    experiment: Online,
    directory: Path,
    *,
    serial: bool = False,
    resume: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Runs an experiment to its end and returns its summary, which is also written to ``directory``.

    ``directory`` receives experiment.json, samples.parquet, rewards.parquet, checkpoint.pkl and summary.json.
    ``serial`` runs the control plane in this process without Ray and an emulated job in lockstep, so that the run can
    be repeated exactly. ``resume`` is the directory of an earlier run to go on from. Raises ConfigError for bad input
    and RunError if the run cannot go on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fabric = None
    if isinstance(experiment.fabric, PlayedJob):
        fabric = play(experiment.fabric, seed=experiment.seed, channels=experiment.actions.channels)
    run = f"{experiment.name}-{experiment.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = _plan(experiment, run, fabric)
    checkpoint = read_checkpoint(resume) if resume is not None else None
    (directory / "experiment.json").write_text(experiment.model_dump_json(indent=1))
    remove_stale(experiment.job)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(_job(experiment, fabric, directory)) if fabric else None
        recorder = stack.enter_context(Recorder(directory, run, experiment.seed))
        backend: Backend
        if serial:
            backend = SerialBackend(plan, advance=job.add_credit if job is not None else None, resume=checkpoint)
        else:
            ranks = len(fabric.ranks) if fabric is not None else len(list(segments(experiment.job)))
            backend = RayBackend(plan, ranks=ranks, resume=checkpoint)
        stack.callback(backend.close)
        events = _Events()
        if job is not None:
            _event(experiment, job, {}, events)
            if not serial:
                job.set_credit(FREE_RUNNING)
        status: dict[str, Any] = {}
        observed: deque[dict[str, Any]] = deque(maxlen=SUMMARY_EPOCHS)
        # An interrupted run is one that was ended early: what it found out is kept.
        with contextlib.suppress(KeyboardInterrupt):
            while not _over(experiment, status, events):
                status = backend.round()
                for epoch in backend.observed():
                    recorder.add(epoch)
                    observed.append(epoch)
                if job is not None:
                    _check(job)
                    _check_claimed(status)
                    _event(experiment, job, status, events)
                if status["round"] % CHECKPOINT_ROUNDS == 0:
                    _write_checkpoint(directory, backend)
                progress({**status, "events": events.done, "seconds": time.monotonic() - started})
        _write_checkpoint(directory, backend)
        violations = _finish(job, fabric)
    summary = summarise(run, experiment, fabric, list(observed), status, events.done, violations)
    summary["seconds"] = time.monotonic() - started
    (directory / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    return summary


def _plan(experiment: Online, run: str, fabric: PlayedFabric | None) -> Plan:
    if fabric is not None:
        return Plan(
            run=run,
            experiment=experiment,
            topology=fabric.topology,
            played=frozenset(fabric.ranks),
            sms=fabric.sms,
            valid=fabric.valid,
        )
    described = experiment.fabric
    assert isinstance(described, NcclFabric)
    return Plan(
        run=run,
        experiment=experiment,
        sms=described.sms,
        topology={
            "kind": described.topology,
            **described.model_dump(include={"intra", "inter", "nvls", "tier_max", "ina_active", "library"}),
        },
    )


@contextlib.contextmanager
def _job(experiment: Online, fabric: PlayedFabric, directory: Path) -> Iterator[EmulatedJob]:
    if not plugin_path().exists():
        raise RunError(f"the plugin is not built: {plugin_path()} is missing; run `make native`")
    job = EmulatedJob(
        fabric.program,
        ranks=fabric.ranks,
        job_id=experiment.job,
        plugin=plugin_path(),
        directory=directory / "job",
        seed=experiment.seed,
    )
    with job:
        # Nothing runs before somebody measures it; without lockstep the run frees the job once it is set up.
        job.set_credit(0)
        job.start()
        deadline = time.monotonic() + 20
        while set(job.states()) - {"running", "waiting"}:
            _check(job)
            if time.monotonic() > deadline:
                raise RunError(f"the emulated ranks did not start within 20 s: {job.states()}")
            time.sleep(0.01)
        if not list(segments(experiment.job)):
            raise RunError(f"no rank made a channel: {job.stderr(0).strip() or 'the plugin said nothing'}")
        yield job


def _check(job: EmulatedJob) -> None:
    codes = job.returncodes()
    # Ranks that ended because a peer did are not the cause.
    for index in sorted(range(len(codes)), key=lambda i: codes[i] == PEER_DIED_CODE):
        if codes[index]:
            raise RunError(f"rank process {index} ended with {codes[index]}: {job.stderr(index).strip()}")


def _event(experiment: Online, job: EmulatedJob, status: dict[str, Any], events: _Events) -> None:
    """Schedules the events of the fabric whose time is known by now; ``status`` is empty before the first round."""
    assert isinstance(experiment.fabric, PlayedJob)
    events.exploited = events.exploited + 1 if status.get("phase") == "exploit" else 0
    for event in experiment.fabric.events[len(events.done) :]:
        if event.exploit_rounds is not None and events.exploited < event.exploit_rounds:
            return
        phase = len(events.done) + 1
        try:
            # The host counts collectives from 0, decisions count from 1.
            at = job.schedule_phase(phase, at=event.at_collective) + 1
        except ValueError as e:
            raise ConfigError(f"fabric.events: {event.name}: {e}") from None
        round_, epoch = status.get("round", 0), status.get("epoch", 0)
        events.done.append({"phase": phase, "at": at, "round": round_, "epoch": epoch, "name": event.name})
        events.exploited = 0


def _over(experiment: Online, status: dict[str, Any], events: _Events) -> bool:
    if not status:
        return False
    stop = experiment.stop
    if stop.rounds is not None and status["round"] >= stop.rounds:
        return True
    if not isinstance(experiment.fabric, PlayedJob):
        # The job has come and gone.
        return bool(status["collectives"] > 0 and status["ranks"] == 0)
    if stop.exploit_rounds_after_last_event is None or len(events.done) < len(experiment.fabric.events):
        return False
    adapted = not events.done or any(alarm["dseq"] >= events.done[-1]["at"] for alarm in status["alarms"])
    return adapted and events.exploited >= stop.exploit_rounds_after_last_event


def _finish(job: EmulatedJob | None, fabric: PlayedFabric | None) -> int | None:
    """Ends the emulated job and compares what every rank really used, call by call."""
    if job is None or fabric is None:
        return None
    try:
        job.stop()
    except HostError as e:
        raise RunError(str(e)) from None
    return agreement_violations([job.used(i) for i in range(len(fabric.ranks))])


def _check_claimed(status: dict[str, Any]) -> None:
    """The ranks of a played job are there before the first round; runners that cannot serve them never will."""
    if status["ranks"] == 0 and status["round"] >= CLAIM_ROUNDS:
        raise RunError(
            "no runner has claimed a rank; are the same version of the package and its plugin installed on the "
            "cluster's nodes? See `dynamiccl doctor` there"
        )


def _write_checkpoint(directory: Path, backend: Backend) -> None:
    """Whole or not at all: a run may be killed at any time."""
    unfinished = directory / "checkpoint.tmp"
    unfinished.write_bytes(pickle.dumps(backend.checkpoint()))
    unfinished.replace(directory / "checkpoint.pkl")


def read_checkpoint(directory: Path) -> dict[str, Any]:
    """What a run left to go on from. Raises ConfigError if the directory has none."""
    try:
        checkpoint: dict[str, Any] = pickle.loads((directory / "checkpoint.pkl").read_bytes())
        return checkpoint
    except OSError as e:
        raise ConfigError(f"{directory}: not a run to resume from: {e.strerror} (checkpoint.pkl)") from None
