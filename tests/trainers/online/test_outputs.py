"""What a run has written is fetched through Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from dynamiccl_ray.errors import RunError
from dynamiccl_ray.trainers.online.outputs import SWEEP, fetch, register


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_outputs_are_fetched_while_a_run_goes_on_and_after_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "job").mkdir(parents=True)
    (run / "job" / "log").write_text("a")
    register("fetched", run)
    said = fetch("fetched", tmp_path / "first")
    assert said["path"] == str(run)
    assert not said["over"]
    assert (tmp_path / "first" / "job" / "log").read_text() == "a"
    (run / "summary.json").write_text("{}")
    assert fetch("fetched", tmp_path / "second")["over"]


def test_of_a_sweep_the_results_are_fetched_and_nothing_that_runs_code(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for name in ("tune/search/state.pkl", "trials/a-seed-0/score.json", "report.html"):
        (sweep / name).parent.mkdir(parents=True, exist_ok=True)
        (sweep / name).write_text("{}")
    register("swept", sweep, SWEEP)
    assert fetch("swept", tmp_path / "out", SWEEP)["over"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    with pytest.raises(RunError, match="no run of job 'swept' has written"):
        fetch("swept", tmp_path / "out")


def test_what_cannot_be_fetched_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run of job 'unknown'"):
        fetch("unknown", tmp_path / "out")
    register("deleted", tmp_path / "deleted")
    with pytest.raises(RunError, match=rf"not there any more: {tmp_path}/deleted on node "):
        fetch("deleted", tmp_path / "out")
