"""An online run: the emulated job if there is one, the control plane, rounds until it is over, and what came of it."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.status import Status
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.config.fabrics import (
    EmulatedFabric,
    EmulatedJob,
    MeasuredFabric,
    NcclFabric,
    PlayedJob,
    RealNcclFabric,
)
from dynamiccl_ray.control.agreement import MemoryStore
from dynamiccl_ray.errors import ConfigError, RunError, short
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.emulated_replay import EmulatedReplay
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, LOG, HostError, NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.played import PlayedFabric, play
from dynamiccl_ray.plugin_bridge.real_job import ModelledJob, cluster_of, real_job
from dynamiccl_ray.plugin_bridge.segments import claimed_by, remove_stale, segments
from dynamiccl_ray.report.data import came_after
from dynamiccl_ray.trainers.common import checkpoint
from dynamiccl_ray.trainers.online.backends import Backend, Checkpoint, RayBackend, SerialBackend, others
from dynamiccl_ray.trainers.online.desk import Desk
from dynamiccl_ray.trainers.online.ending import Disk, Ending
from dynamiccl_ray.trainers.online.outputs import register
from dynamiccl_ray.trainers.online.recorder import Recorder
from dynamiccl_ray.trainers.online.summary import Recent, summarise
from dynamiccl_ray.trainers.online.warm import read_earlier, unlike

log = logging.getLogger("dynamiccl.online")

Played = PlayedFabric | ModelledJob
Progress = Callable[[dict[str, Any]], None]

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_ROUNDS = 20
CLAIM_ROUNDS = 3
FOUND_S = 30.0
"""Beside a job of which no rank appears for so long, a run gives up."""
HANDOVER_S = 5.0
"""A control plane that was told to end takes so long to let go of its ranks."""
RELEASE_S = 10.0
"""For an epoch that is under way, and for the call of the last switch to come."""


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
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs an experiment to its end and returns its summary, which is also written to ``directory``.

    ``directory`` receives experiment.json, what ``Recorder`` writes, checkpoint.pt and summary.json. ``serial`` runs
    the control plane in this process without Ray and an emulated job in lockstep, so that the run can be repeated
    exactly. ``resume`` is the directory of an earlier run to go on from; where it is ``directory``, and the job is
    still the same, what was recorded stays. Raises ConfigError for bad input and RunError if the run cannot go on.
    """
    # To its end: a second signal costs nothing that the first has saved.
    with Ending() as ending:
        return _served(ending, experiment, directory, serial=serial, resume=resume, progress=progress, say=say)


def _served(
    ending: Ending,
    experiment: Online,
    directory: Path,
    *,
    serial: bool,
    resume: Path | None,
    progress: Progress,
    say: Callable[[str], None],
) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    with ending.interruptible():
        fabric = _played(experiment, say)
        warm = read_earlier(experiment.warm)
    # Runs of two jobs may begin in the same second from one YAML, and on one cluster a name is that of one run.
    run = f"{experiment.name}-{experiment.seed}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    plan = replace(plan_of(experiment, run, fabric), earlier=warm)
    earlier = read_checkpoint(resume) if resume is not None else None
    (directory / "experiment.json").write_text(experiment.model_dump_json(indent=1))
    remove_stale(experiment.job)
    _refuse_a_second(experiment.job)
    started, disk = time.monotonic(), Disk()
    with contextlib.ExitStack() as stack:
        with ending.interruptible():
            job = stack.enter_context(_job(experiment, fabric, directory)) if fabric else None
        here = resume is not None and resume.resolve() == directory.resolve()
        # A job that is played begins anew with its run.
        goes_on = here and job is None
        if not here:
            _forget(directory)
        recorder = stack.enter_context(Recorder(directory, run, experiment.seed, disk, goes_on=goes_on))
        backend: Backend
        with ending.interruptible():
            if serial:
                advance = _stepper(job) if job is not None else None
                backend = SerialBackend(plan, advance=advance, resume=earlier)
            else:
                backend = RayBackend(plan, resume=earlier)
                register(experiment.job, directory)
            stack.callback(backend.close)
        ending.listen()
        stack.enter_context(Desk(experiment.job, backend.ask))
        events = _Events()
        status = Status()
        if job is not None and fabric is not None:
            _event(experiment, job, fabric, status, events)
            if not serial:
                job.set_credit(FREE_RUNNING)
        observed = Recent()

        compared = not experiment.warm

        def record() -> None:
            nonlocal compared
            epochs = backend.observed()
            for epoch in epochs:
                recorder.add(epoch)
                observed.add(epoch)
            recorder.learned(backend.learned())
            if epochs and not compared:
                compared = True
                if cold := unlike(plan.earlier, {(of.ranks, of.nodes, of.name) for of in epochs}):
                    say(cold)

        def give_back(_: object, error: BaseException | None, __: object) -> None:
            if isinstance(error, Exception) and job is None:
                _release(experiment, backend, status, say)

        stack.push(give_back)
        found_by, checkpoint_at = time.monotonic() + FOUND_S, CHECKPOINT_ROUNDS
        # An interrupted run is one that was ended early: what it found out is kept.
        while not _over(experiment, backend, status, events):
            with contextlib.suppress(KeyboardInterrupt), ending.interruptible():
                status = backend.round()
            record()
            if ending.told:
                break
            if status.ranks:
                # Nodes may be lost before anything was measured, and come back.
                found_by = time.monotonic() + FOUND_S
            if job is None and status.collectives == 0 and status.ranks == 0 and time.monotonic() > found_by:
                _, jobs = backend.found()
                raise RunError(
                    f"no ranks of job {experiment.job!r} were found in {FOUND_S:.0f} s: {others(jobs)}; name "
                    'the job in the experiment (job: NAME) as in `eval "$(dynamiccl plugin env --job NAME)"`'
                )
            events.exploited = events.exploited + 1 if status.phase == "exploit" else 0
            if job is not None and fabric is not None:
                with _failures():
                    job.check()
                _check_claimed(status)
                _event(experiment, job, fabric, status, events)
            if status.round >= checkpoint_at:
                checkpoint_at = status.round + CHECKPOINT_ROUNDS
                _write_checkpoint(directory, disk, backend)
            progress({**status.as_dict(), "events": events.done, "seconds": time.monotonic() - started})
        if ending.told:
            say("told to end: what was found out is written")
        status = status if job is not None else _release(experiment, backend, status, say)
        record()
        left = _write_checkpoint(directory, disk, backend)
        log = _finish(job)
    prices = None
    if fabric is not None and log is not None:
        prices = fabric.priced(log, experiment.actions, _offered(plan, left))
    violations = None if log is None else agreement_violations(log)
    summary = summarise(run, experiment, prices, list(observed.epochs), status, events.done, violations)
    if fabric is not None:
        summary["stands_for"] = fabric.sample()
    summary["seconds"] = time.monotonic() - started
    summary["unwritten_samples"] = recorder.unwritten
    text = json.dumps(summary, indent=1, allow_nan=False)
    disk.write("summary.json", lambda: (directory / "summary.json").write_text(text))
    return summary


def _forget(directory: Path) -> None:
    """What another run wrote at its end: readers would take it for this one's until that ends, too."""
    for name in (CHECKPOINT, "summary.json", "report.html", "summary.png"):
        (directory / name).unlink(missing_ok=True)


def _played(experiment: Online, say: Callable[[str], None]) -> Played | None:
    fabric = experiment.fabric
    if isinstance(fabric, RealNcclFabric):
        return real_job(fabric, seed=experiment.seed, say=say)
    if isinstance(fabric, EmulatedFabric) and fabric.trace is not None:
        return EmulatedReplay(fabric=fabric, seed=experiment.seed)
    if isinstance(fabric, EmulatedJob):
        return play(fabric, seed=experiment.seed, channels=experiment.actions.channels)
    return None


def plan_of(experiment: Online, run: str, fabric: Played | None = None) -> Plan:
    """What the coordinator is told. ``fabric`` is None for a job that is not played, or not any more."""
    if fabric is not None:
        return Plan(
            run=run,
            experiment=experiment,
            cluster=fabric.cluster,
            model=_model(experiment),
            played=fabric.processes,
            sms=fabric.sms,
            valid=fabric.valid,
        )
    described = experiment.fabric
    if isinstance(described, MeasuredFabric) and described.path is not None and not described.path.is_dir():
        # A run that is looked at elsewhere: what it learned is known, only the words for its hardware are gone.
        return Plan(run=run, experiment=experiment)
    if not isinstance(described, NcclFabric):
        return Plan(run=run, experiment=experiment, cluster=cluster_of(described), model=_model(experiment))
    if described.cluster is not None:
        cluster = described.cluster
        return Plan(
            run=run,
            experiment=experiment,
            cluster=cluster,
            model=cluster,
            sms=cluster.sms,
            recognises=described.library == "nccl",
        )
    return Plan(
        run=run,
        experiment=experiment,
        sms=described.sms,
        recognises=described.library == "nccl",
        topology={
            "kind": described.topology,
            **described.model_dump(include={"intra", "inter", "nvls", "tier_max", "ina_active", "library"}),
        },
    )


def _model(experiment: Online) -> Cluster | None:
    """What tells a played job's learner what to expect: never the model that plays it."""
    fabric = experiment.fabric
    return fabric.cluster if isinstance(fabric, MeasuredFabric) else None


@contextlib.contextmanager
def _job(experiment: Online, fabric: Played, directory: Path) -> Iterator[NcclJob]:
    if not plugin_path().exists():
        raise RunError(f"the plugin is not built: {plugin_path()} is missing; run `make native`")
    with fabric.job(experiment.job, directory / "job") as job:
        # Nothing runs before somebody measures it; without lockstep the run frees the job once it is set up.
        job.set_credit(0)
        job.start()
        with _failures():
            job.await_ranks()
        if not list(segments(experiment.job)):
            raise RunError(f"no rank made a channel: {job.stderr(0).strip() or 'the plugin said nothing'}")
        yield job


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What goes wrong in the job ends the run in words."""
    try:
        yield
    except HostError as e:
        raise RunError(str(e)) from None


def _stepper(job: NcclJob) -> Callable[[], None]:
    """Lets every rank take one more step, and returns when all stand still behind it."""

    def step() -> None:
        credit = job.add_credit(1)
        while job.progress().min() < credit or set(job.states()) - {"waiting", "finished"}:
            with _failures():
                job.check()
            time.sleep(0.0002)

    return step


def _refuse_a_second(job: str) -> None:
    """Two control planes would each wait for ranks that the other serves."""
    deadline = time.monotonic() + HANDOVER_S
    while (pids := {pid for path in segments(job) if (pid := claimed_by(path)) is not None}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    if pids:
        raise RunError(
            f"the ranks of job {job!r} are served by another control plane here (process "
            f"{', '.join(map(str, sorted(pids)))}); end it first, with Ctrl-C or SIGTERM: it gives them back"
        )


def _release(experiment: Online, backend: Backend, status: Status, say: Callable[[str], None]) -> Status:
    """The job goes on without us: what was being tried is taken back, and one line says what is in force."""
    deadline = time.monotonic() + RELEASE_S
    keep = experiment.stop.keep
    try:
        while True:
            status = backend.release(keep)
            if keep or not any(status.in_force.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except Exception as e:  # of whatever in the control plane is gone
        log.warning("the ranks could not be given back: %s", e)
    held = {comm: keys for comm, keys in status.in_force.items() if keys}
    if not held:
        say("in force: NCCL's own choice")
    else:
        why = "" if keep else "; `dynamiccl release` takes it back"
        tables = ", ".join(f"a table for {keys} keys on communicator {comm}" for comm, keys in held.items())
        say(f"in force: {tables}{why}")
    return status


def _event(experiment: Online, job: NcclJob, fabric: Played, status: Status, events: _Events) -> None:
    """Schedules the events of the fabric whose time is known by now; ``status`` is empty before the first round."""
    assert isinstance(experiment.fabric, PlayedJob)
    for event in experiment.fabric.events[len(events.done) :]:
        if event.exploit_rounds is not None and events.exploited < event.exploit_rounds:
            return
        phase = len(events.done) + 1
        try:
            # The fabric changes between steps, and decisions count from 1.
            step = None if event.at_collective is None else fabric.step_of(event.at_collective)
            at = fabric.call_of(job.schedule_phase(phase, at=step))
        except ValueError as e:
            raise ConfigError(f"fabric.events: {event.name}: {e}") from None
        round_, epoch = status.round, status.epoch
        by_call = fabric.counts_calls
        events.done.append(
            {"phase": phase, "at": at, "by_call": by_call, "round": round_, "epoch": epoch, "name": event.name}
        )
        events.exploited = 0


def _over(experiment: Online, backend: Backend, status: Status, events: _Events) -> bool:
    if status.round == 0:
        return False
    stop = experiment.stop
    if stop.rounds is not None and status.round >= stop.rounds:
        return True
    if not isinstance(experiment.fabric, PlayedJob) and has_gone(status, lambda: backend.found()[0]):
        return True
    to_come = experiment.fabric.events[len(events.done) :] if isinstance(experiment.fabric, PlayedJob) else ()
    if stop.exploit_rounds_after_last_event is None or to_come:
        return False
    adapted = not events.done or any(came_after(a.dseq, a.epoch, events.done[-1]) for a in status.alarms)
    return adapted and events.exploited >= stop.exploit_rounds_after_last_event


def has_gone(status: Status, lives: Callable[[], bool]) -> bool:
    """Whether the job has come and gone. A coordinator that was started anew has no ranks before its runners join
    again, and a runner has none before it claims them again: as long as a rank of the job ``lives``, it has not."""
    if status.collectives == 0 or status.ranks > 0 or not status.runners:
        return False
    return not lives()


def _finish(job: NcclJob | None) -> LOG | None:
    """Ends the played job in good order; what every rank really used, call by call."""
    if job is None:
        return None
    with _failures():
        job.stop()
    return job.logs()


def _check_claimed(status: Status) -> None:
    """The ranks of a played job are there before the first round; runners that cannot serve them never will."""
    # Where something was measured before, they have, and come again.
    if status.ranks == 0 and status.collectives == 0 and status.round >= CLAIM_ROUNDS:
        raise RunError(
            "no runner has claimed a rank; are the same version of the package and its plugin installed on the "
            "cluster's nodes? See `dynamiccl doctor` there"
        )


def _offered(plan: Plan, left: Checkpoint) -> dict[tuple[int, int], list[int]]:
    """(Communicator, key) -> pairs that NCCL offers and takes, by the coordinator's state at the end."""
    store = MemoryStore()
    store.put(f"{plan.run}/state", left["coordinator"])
    coordinator = Coordinator(plan, store)
    offers = np.asarray(~coordinator.loop.offers.forbidden.all(-1))
    return {
        (comm_id, int(key)): np.flatnonzero(offers[row]).tolist()
        for comm_id, comm in coordinator.comms.items()
        for key, row in zip(comm.keys, comm.rows, strict=True)
    }


def _write_checkpoint(directory: Path, disk: Disk, backend: Backend) -> Checkpoint:
    left = backend.checkpoint()
    disk.write(CHECKPOINT, lambda: checkpoint.write(directory / CHECKPOINT, left))
    return left


def read_checkpoint(directory: Path) -> Checkpoint:
    """What a run left to go on from. Raises ConfigError if the directory has none, or one that is damaged."""
    left = checkpoint.read(directory / CHECKPOINT)
    if left.keys() != {"learner", "coordinator"}:
        holds = short(str(sorted(map(str, left))))
        raise ConfigError(f"{directory / CHECKPOINT}: not a checkpoint of `dynamiccl online`: it holds {holds}")
    learner, coordinator = left["learner"], left["coordinator"]
    if not isinstance(learner, dict) or not isinstance(coordinator, np.ndarray):
        raise ConfigError(f"{directory / CHECKPOINT}: not a checkpoint of `dynamiccl online`: its parts are others")
    return {"learner": learner, "coordinator": coordinator.tobytes()}
