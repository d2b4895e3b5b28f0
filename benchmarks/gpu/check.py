"""Section check: right results under every configuration, and proof that it was in force."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cases import Case
from benchmarks.gpu.context import Context
from benchmarks.gpu.plan import (
    Step,
    action_from_json,
    action_to_json,
    actions,
    described,
    refusals,
    slots,
    steps,
)
from benchmarks.gpu.ranks import RankError, Ranks
from benchmarks.gpu.staging import Communicator
from benchmarks.gpu.verify import Verdict, verify
from dynamiccl_ray.actions import Action
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, OWN_PAIR, pair_name

SECTION = "check"
MOST_REPORTED = 50
MOST_MISSING = 0.02


def run(context: Context) -> dict[str, Any]:
    """Checks every configuration; what is wrong goes to ``context.fail``."""
    job = context.new_job()
    repeat = context.options.repeat
    with context.start(job) as ranks:
        if repeat is not None:
            step = repeated(repeat)
            _first_pass(context, ranks, step.cases)
            with context.world(job) as comm:
                comm.learn_silent([case.collective for case in step.cases])
                return _tally(context, ranks, comm, [step])
        all_slots = slots(context.check_sizes, context.ranks)
        # What NCCL offers is in the cost rows of keys that were used; float32 first, which gets every pair.
        first = [case for slot in all_slots for case in slot[:1]]
        _first_pass(context, ranks, first)
        with context.world(job) as comm:
            comm.learn_silent([case.collective for case in first])
            offered = comm.offered()
            if missing := [case.name for case in first if case.key not in offered]:
                context.notes.append(f"NCCL does not ask the tuner about {', '.join(missing)}; default choice only")
            pairs = sorted({pair for key in offered for pair in offered[key]})
            chunks = CHUNK_VALUES if comm.takes_chunks else (0,)
            if not comm.takes_chunks:
                context.notes.append("this NCCL asks no tuner for chunk sizes (2.30.3 does): none was checked")
            asked = [slot for slot in all_slots if slot[0].key in offered]
            grid = actions(pairs, CHANNEL_VALUES, chunks, cross=not context.options.quick)
            found = [*steps(asked, offered, grid), *refusals(asked, offered)]
            context.say(f"{SECTION}: {described(found)}")
            result = _tally(context, ranks, comm, found)
            result["offered"] = {
                case.name: [pair_name(pair) for pair in sorted(offered.get(case.key, ()))] for case in first
            }
            return result


def _first_pass(context: Context, ranks: Ranks, cases: Sequence[Case]) -> None:
    """NCCL's own choice, without a table. It makes the communicator, too."""
    _note_wrong(context, cases, ranks.call("check", cases=cases), Action(), None)


def repeated(text: str) -> Step:
    """The step that a report's `repeat` describes. Raises ValueError for what is none."""
    try:
        raw = json.loads(text)
        action, case = raw["action"], raw["case"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--repeat {text}: {e!r}; give an object with `action` and `case`, as in a report") from None
    return Step(action=action_from_json(action), cases=(Case.from_json(case),), refused=bool(raw.get("refused", False)))


def _tally(context: Context, ranks: Ranks, comm: Communicator, found: Sequence[Step]) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    used: dict[str, Counter[int]] = {}
    per_pair: Counter[str] = Counter()
    for index, step in enumerate(found):
        verdict, wrong = one(context, ranks, comm, step)
        totals.update(
            tables=1,
            collectives=len(step.cases),
            wrong=wrong,
            recorded=verdict.recorded,
            unrecorded=verdict.unrecorded,
            missing=verdict.missing,
            not_offered_for_type=verdict.refused,
            left_alone=len(step.cases) if step.refused else 0,
        )
        if step.action.channels and step.action.pair != OWN_PAIR and not step.refused:
            asked = str(CHANNEL_VALUES[step.action.channels])
            used.setdefault(asked, Counter()).update(verdict.channels)
        if not step.refused:
            per_pair[pair_name(step.action.pair)] += len(step.cases)
        if (index + 1) % 50 == 0:
            context.say(f"{SECTION}: {index + 1} of {len(found)} tables")
    if comm.silent:
        names = ", ".join(sorted(collective.name.lower() for collective in comm.silent))
        context.notes.append(
            f"NCCL reported no events of {names} (of broadcasts it does not from 2.29.2 on): that their tables were in "
            "force is known from the plugin's counters alone"
        )
    expected = totals["recorded"] + totals["missing"]
    if totals["missing"] > MOST_MISSING * expected:
        context.fail(
            SECTION, f"{totals['missing']} of {expected} calls have no record; {MOST_MISSING:.0%} may miss theirs"
        )
    dropped = Counter[str]()
    for status in comm.status():
        dropped.update(status.dropped)
    return {
        **totals,
        "ranks": comm.size,
        "nodes": comm.identity.nodes,
        "tuner_abi": comm.identity.tuner_abi,
        "profiler_abi": comm.identity.profiler_abi,
        "per_pair": dict(per_pair),
        # Asked for -> used, and how often: NCCL takes fewer for small messages, and no more than it has.
        "channels": {asked: dict(sorted(counts.items())) for asked, counts in used.items()},
        "dropped": dict(dropped),
    }


def one(context: Context, ranks: Ranks, comm: Communicator, step: Step) -> tuple[Verdict, int]:
    """Runs one step. Returns what the records say, and how many results were wrong on some rank."""
    before = comm.status()
    version = comm.stage(step.table)
    try:
        answers = ranks.call("check", cases=step.cases)
    except RankError as e:
        raise RankError(
            f"{e}\nunder table {version}, {_repeat(step, step.cases[0])} or one of {len(step.cases)}"
        ) from e
    wrong = _note_wrong(context, step.cases, answers, step.action, version, refused=step.refused)
    records = comm.drain([case.collective for case in step.cases])
    verdict = verify(step, records, version, silent=comm.silent, since=1 + before[0].dseq)
    for old, new in zip(before, comm.status(), strict=True):
        applied = new.applied - old.applied
        if not step.refused and applied + verdict.refused < len(step.cases):
            verdict.problems.append(f"the table was applied to {applied} calls of {len(step.cases)}")
    for problem in verdict.problems[:MOST_REPORTED]:
        context.fail(SECTION, f"not in force: {problem}", repeat=_repeat(step, step.cases[0]))
    return verdict, wrong


def _note_wrong(
    context: Context,
    cases: Sequence[Case],
    answers: Sequence[Sequence[dict[str, Any] | None]],
    action: Action,
    version: int | None,
    *,
    refused: bool = False,
) -> int:
    bad = 0
    for index, case in enumerate(cases):
        by_rank = {rank: answer[index] for rank, answer in enumerate(answers) if answer[index] is not None}
        if by_rank:
            bad += 1
            if len(context.failures) < MOST_REPORTED:
                step = Step(action=action, cases=(case,), refused=refused)
                context.fail(
                    SECTION,
                    f"wrong result of {case.name} under {action.name} on ranks {sorted(by_rank)}",
                    version=version,
                    differences=by_rank,
                    repeat=_repeat(step, case),
                )
    return bad


def _repeat(step: Step, case: Case) -> str:
    """What --repeat takes."""
    parts = {"action": action_to_json(step.action), "case": case.to_json()}
    return json.dumps({**parts, "refused": True} if step.refused else parts)
