"""The experiment that the script writes is one that `dynamiccl online` takes, and the command's end is understood."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu import online
from benchmarks.gpu.online import Loop, essence, experiment
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, load
from dynamiccl_ray.config.fabrics import NcclFabric
from dynamiccl_ray.errors import RunError

ABOUT = {"intra": "nvlink", "inter": "none", "nvls": True, "tier_max": 1, "sms": 132}


def described(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "job": "j",
        "per_key": 600,
        "seed": 1,
        "fabric": ABOUT,
        "most_channels": 24,
        "ranks": 8,
    }
    return experiment(**{**given, **changes})


@pytest.mark.parametrize("per_key", [16, 100, 600, 5000])
@pytest.mark.parametrize("most_channels", [1, 2, 24, 64])
def test_the_experiment_is_valid_and_bounded(tmp_path: Path, per_key: int, most_channels: int) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(described(per_key=per_key, most_channels=most_channels)))
    read = load(path)
    assert isinstance(read.fabric, NcclFabric)
    assert read.policy == DEFAULT_POLICY
    assert read.mode == "active"
    assert read.stop.exploit_rounds_after_last_event
    learning = read.control.learning
    takes = learning.draws * learning.draw_samples + learning.compares * learning.compare_samples
    assert learning.baseline_samples + takes <= max(per_key, 14)
    assert max(read.actions.channels) <= max(most_channels, 1)
    assert 0 in read.actions.channels


def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Runs ``code`` in the place of the command; it takes its ranks when it calls ``up``."""
    file = tmp_path / "up"
    code = f"up = lambda: open({str(file)!r}, 'w').close()\n{code}"
    monkeypatch.setattr(online, "dynamiccl", lambda *arguments: [sys.executable, "-c", code, *arguments])
    monkeypatch.setattr(online, "segments", lambda job: [file])
    monkeypatch.setattr(online, "_claimed", Path.exists)


def test_the_loop_is_fed_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "epochs": 3,
        "switches": 2,
        "dropped_records": 0,
        "rounds": 1,
        "seconds": 1.0,
        "history": [{"phase": "exploit"}],
    }
    stub(
        monkeypatch,
        tmp_path,
        f"import time; up(); time.sleep(0.3); print('Ray says hello'); print('''{json.dumps(said)}''')",
    )
    loop = Loop(described(), tmp_path, serial=True)
    ran = loop.feed(lambda: 7, job="j", most_s=60)
    assert ran > 0
    assert ran % 7 == 0
    assert essence(loop.summary()) == {
        "epochs": 3,
        "switches": 2,
        "dropped_records": 0,
        "phase_at_the_end": "exploit",
        "rounds": 1,
        "seconds": 1.0,
    }
    assert load(tmp_path / "experiment.yaml").job == "j"


def test_a_loop_that_takes_too_long_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs the tests in the background may have them ignore SIGINT.
    listens = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listens}\ntry: up(); time.sleep(60)\nexcept KeyboardInterrupt: print('{{}}')"
    stub(monkeypatch, tmp_path, code)
    loop = Loop(described(), tmp_path, serial=False)
    loop.feed(lambda: _slept(0.5), job="j", most_s=1.0)
    assert essence(loop.summary())["phase_at_the_end"] is None


def test_a_loop_that_does_not_listen_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, tmp_path, "import signal, time; signal.signal(2, signal.SIG_IGN); up(); time.sleep(60)")
    monkeypatch.setattr(online, "END_S", 0.5)
    loop = Loop(described(), tmp_path, serial=False)
    with pytest.raises(RunError, match=r"did not end within 0\.5 s"):
        loop.feed(lambda: _slept(0.5), job="j", most_s=0.5)


def test_a_loop_that_fails_says_what_it_complained_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, tmp_path, "import sys; print('no segments of job j', file=sys.stderr); sys.exit(1)")
    loop = Loop(described(), tmp_path, serial=False)
    loop.feed(lambda: _slept(0.05), job="j", most_s=60)
    with pytest.raises(RunError, match="ended with 1: no segments of job j"):
        loop.summary()


def _slept(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return 1
