"""Which run serves a job, as the whole Ray cluster knows it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from small import small_experiment

from dynamiccl_ray.actors import registry, remote
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.registry import ask_coordinator
from dynamiccl_ray.errors import RunError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def _start(job: str, run: str) -> Any:
    class Silent:
        """In the place of a coordinator: it says whose it is. Ray's workers cannot import it from here."""

        def __init__(self, plan: Plan, _store: Any) -> None:
            self.run = plan.run

        def ask(self, question: dict[str, Any]) -> dict[str, Any]:
            time.sleep(question.get("busy_s", 0))
            return {"run": self.run}

    coordinator = remote.start_coordinator(Plan(run=run, experiment=small_experiment(job)), Silent)  # type: ignore[arg-type]
    # A worker may take longer to start than a person waits for an answer.
    ray.get(coordinator.ask.remote({}))
    return coordinator


def test_a_second_run_of_a_job_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HANDOVER_S", 0.3)
    first = _start("twice", "first")
    said = r"job 'twice' has a run on this Ray cluster already \(first\); end it first"
    with pytest.raises(RunError, match=said):
        _start("twice", "second")
    assert ask_coordinator("twice", {}) == {"run": "first"}, "the refused run took the job over"
    other = _start("another", "beside")
    assert ask_coordinator("another", {}) == {"run": "beside"}

    ray.kill(first)
    second = _start("twice", "second")
    assert ask_coordinator("twice", {}) == {"run": "second"}
    for coordinator in (second, other):
        ray.kill(coordinator)


def test_a_run_that_is_about_to_end_is_waited_for() -> None:
    first = _start("handed over", "early")
    ray.get(first.ask.remote({}))
    # As where `dynamiccl online` was told to end, and gives its ranks back before it does.
    threading.Timer(0.5, ray.kill, [first]).start()
    second = _start("handed over", "late")
    assert ask_coordinator("handed over", {}) == {"run": "late"}
    ray.kill(second)


def test_a_run_that_does_not_answer_in_time_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = _start("busy", "slow")
    assert ask_coordinator("busy", {}) == {"run": "slow"}
    monkeypatch.setattr(registry, "ASK_LIMIT_S", 0.2)
    with pytest.raises(RunError, match=r"job 'busy': its run has not answered for 0.2 s; ask again"):
        ask_coordinator("busy", {"busy_s": 1})
    ray.kill(busy)


def test_where_no_run_is_it_is_said() -> None:
    with pytest.raises(RunError, match="no run of job 'nobody' on this Ray cluster: no run has begun"):
        ask_coordinator("nobody", {})


def test_a_question_loads_nothing_of_the_control_plane() -> None:
    """It is asked again and again, by people and by scripts."""
    code = (
        "import sys, dynamiccl_ray.actors.registry, dynamiccl_ray.trainers.online.desk; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'scipy', 'pandas') "
        "or m.startswith(('dynamiccl_ray.control', 'dynamiccl_ray.agent', 'ray.rllib'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
