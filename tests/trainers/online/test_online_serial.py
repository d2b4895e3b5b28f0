"""The whole loop in one process: real rank processes, real plugin, real channel, PPO."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small import small_experiment

from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.actors.status import Epoch, Status
from dynamiccl_ray.agent import policy
from dynamiccl_ray.agent.reward import TERMS, total
from dynamiccl_ray.errors import ChannelError, ConfigError, RunError
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import read_log
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.report.page import write_report
from dynamiccl_ray.trainers.online import run as online
from dynamiccl_ray.trainers.online.backends import SerialBackend
from dynamiccl_ray.trainers.online.explain import explain_run
from dynamiccl_ray.trainers.online.recorder import Recorder, read_rewards, read_samples
from dynamiccl_ray.trainers.online.run import run_online


def test_ppo_learns_to_beat_the_default_by_measured_times(tmp_path: Path, job: str) -> None:
    experiment = small_experiment(job, stop={"rounds": None, "exploit_rounds_after_last_event": 4})
    summary = run_online(experiment, tmp_path, serial=True)
    ratio = summary["geomean_vs_oracle"]
    assert ratio["default"] > 1.10
    assert ratio["learned"] <= 1.04
    assert ratio["learned"] < ratio["vendor"]
    assert summary["gap_closed"] > 0.5
    assert summary["agreement_violations"] == 0
    assert summary["dropped_records"] == 0
    assert summary["switches"] > 50
    assert len(summary["keys"]) == 35
    # What is reported as learned is what the ranks really used at the end.
    used = read_log(tmp_path / "job" / "log.0")[-200:]
    in_force = {k["key"]: k["in_force"] for c in explain_run(tmp_path)["communicators"] for k in c["keys"]}
    assert in_force == {row["key"]: row["action"] for row in summary["keys"]}
    saw = explain_run(tmp_path, "1MiB")["communicators"][0]["keys"][0]["observation"]
    assert (saw["ranks"], saw["nodes"], saw["bytes"], saw["inter"]) == (64, 8, 1 << 20, "efa")
    assert (used["own"] == 0).mean() > 0.5
    with pytest.raises(ConfigError, match="--key 3MiB: no key of the run has that in its name; there is all_reduce/"):
        explain_run(tmp_path, "3MiB")


def _decisions(directory: Path) -> list[np.ndarray[Any, Any]]:
    names = ["ordinal", "func", "bytes", "algo", "proto", "channels", "own", "priced_ns"]
    return [read_log(directory / "job" / f"log.{i}")[names] for i in range(4)]


def test_the_same_seed_gives_the_same_decisions_and_another_seed_others(tmp_path: Path, job: str) -> None:
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_online(small_experiment(job, seed=seed, stop={"rounds": 2}), tmp_path / name, serial=True)
        runs[name] = _decisions(tmp_path / name)
    for a, b in zip(runs["a"], runs["b"], strict=True):
        assert np.array_equal(a, b)
    assert any(not np.array_equal(a, c) for a, c in zip(runs["a"], runs["c"], strict=True))


def test_samples_and_every_term_are_written_down_and_their_sum_is_what_is_learned_from(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    learned: list[float] = []
    closed: list[Epoch] = []
    decide, sample, add = policy.decide, RankRunner.sample, Recorder.add

    def listening(net: Any, obs: Any, features: Any, noise: Any = None) -> Any:
        assert noise is not None
        drawn.append(float(noise.sum()))
        return decide(net, obs, features, noise)

    def sampled(self: RankRunner, **options: Any) -> Any:
        episodes = sample(self, **options)
        learned.extend(r for e in episodes for r in e.get_rewards())
        return episodes

    def added(self: Recorder, epoch: Epoch) -> None:
        if np.isfinite(total(epoch.terms)).any():
            closed.append(epoch)
        add(self, epoch)

    monkeypatch.setattr(policy, "decide", listening)
    monkeypatch.setattr(RankRunner, "sample", sampled)
    monkeypatch.setattr(Recorder, "add", added)
    experiment = small_experiment(job, seed=3, reward={"switch": 0.01, "tier": 0.0}, stop={"rounds": 6})
    summary = run_online(experiment, tmp_path, serial=True)
    assert len(drawn) > 8
    assert len(set(drawn)) > len(drawn) / 2, "decisions have noise of their own"

    samples = read_samples(tmp_path)
    assert len(samples["time_us"]) == summary["collectives"]
    assert set(samples["run"]) == {summary["run"]}
    assert set(samples["seed"]) == {3}
    assert (samples["comm"] > 0).all()
    assert len(np.unique(samples["version"])) == summary["switches"] + 1
    assert (samples["version"][samples["phase"] == "baseline"] == 0).all()
    assert (samples["pair"][samples["phase"] == "baseline"] == 0).all()
    assert (np.diff(samples["dseq"]) > 0).all()
    assert json.loads((tmp_path / "summary.json").read_text())["run"] == summary["run"]

    totals = np.concatenate([total(e.terms) for e in closed])
    assert len(learned) > 100
    assert np.isin(np.round(learned, 9), np.round(totals[np.isfinite(totals)], 9)).all()
    rewards = read_rewards(tmp_path)
    there = ["primary", "switch", "congestion", "probe", "sm"]
    assert len(rewards["epoch"]) == len(closed) > summary["epochs"] / 2
    np.testing.assert_allclose(rewards["reward"], sum(rewards[name] for name in there))
    assert all(np.isnan(rewards[name]).all() for name in set(TERMS) - set(there))
    for name in there:
        found = rewards[name][rewards["phase"] == "learn"]
        assert summary["reward"]["terms"]["learn"][name] == pytest.approx(found.mean())
        assert found.any(), "a term that was never anything"
    np.testing.assert_allclose(rewards["reward"], [np.nanmean(total(e.terms)) for e in closed], atol=1e-9)
    assert summary["reward"]["off"] == ["tier"]
    assert summary["reward"]["weights"]["switch"] == 0.01
    assert write_report(tmp_path).read_text().count("<h2>Reward</h2>") == 1


def test_a_job_that_reports_its_steps_is_rewarded_for_them(tmp_path: Path, job: str) -> None:
    """Steps that take 50 ms until the policy learns, and 40 ms from then on; a loss that falls by 0.5 a step."""
    over = threading.Event()

    def train() -> None:
        channels: dict[str, Channel] = {}
        for step in itertools.count():
            for path in segments(job):
                if path.name not in channels:
                    with contextlib.suppress(ChannelError):
                        channels[path.name] = Channel(path, claim=False)
            learning = any(c.status.pending_version > 0 for c in channels.values())
            for channel in channels.values():
                channel.report_step(step, 0.04 if learning else 0.05, 100 - step / 2)
            if over.wait(0.05):
                break
        for channel in channels.values():
            channel.close()

    script = threading.Thread(target=train)
    script.start()
    try:
        slow = {"learning": {"baseline_samples": 300}}
        summary = run_online(small_experiment(job, control=slow, stop={"rounds": 6}), tmp_path, serial=True)
    finally:
        over.set()
        script.join()
    terms = summary["reward"]["terms"]
    assert terms["learn"]["iteration"] == pytest.approx(0.1 * 0.2, abs=0.005)
    assert -0.001 < terms["learn"]["convergence"] < 0
    assert terms["learn"]["fault"] == 0


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    often = {"per_round": 4}
    first = run_online(small_experiment(job, epochs=often, stop={"rounds": 5}), tmp_path / "a", serial=True)
    goes_on = small_experiment(job, epochs=often, stop={"rounds": 8})
    second = run_online(goes_on, tmp_path / "b", serial=True, resume=tmp_path / "a")
    assert second["rounds"] == 8
    assert second["history"][: first["rounds"]] == first["history"]
    assert second["history"][5]["phase"] == "learn"
    assert second["agreement_violations"] == 0
    with pytest.raises(ConfigError, match="not a run to resume from"):
        run_online(small_experiment(job), tmp_path / "c", serial=True, resume=tmp_path / "nowhere")

    def fails(_: SerialBackend) -> Status:
        raise ZeroDivisionError

    monkeypatch.setattr(SerialBackend, "round", fails)
    with pytest.raises(ZeroDivisionError):
        run_online(goes_on, tmp_path / "a", serial=True, resume=tmp_path / "a")
    assert (tmp_path / "a" / "checkpoint.pt").is_file(), "what it went on from is there until it has one of its own"


def test_an_event_comes_at_the_collective_it_was_told(tmp_path: Path, job: str) -> None:
    events = [{"at_collective": 700, "link_bandwidth": 0.5}, {"at_collective": 1000, "swap_nodes": 16}]
    summary = run_online(small_experiment(job, fabric={"events": events}, stop={"rounds": 2}), tmp_path, serial=True)
    assert [event["at"] for event in summary["events"]] == [701, 1016], (
        "of the step that it falls into, or comes before"
    )
    for rank in range(4):
        used = read_log(tmp_path / "job" / f"log.{rank}")
        assert used["ordinal"][np.flatnonzero(np.diff(used["phase"].astype(int))) + 1].tolist() == [700, 1015]
    backwards = small_experiment(job, fabric={"events": events[::-1]})
    with pytest.raises(ConfigError, match="links at 50%"):
        run_online(backwards, tmp_path / "b", serial=True)


@pytest.mark.parametrize("mode", ["observe", "shadow"])
def test_observe_and_shadow_change_nothing(tmp_path: Path, job: str, mode: str) -> None:
    summary = run_online(small_experiment(job, mode=mode, stop={"rounds": 2}), tmp_path, serial=True)
    for rank in range(4):
        assert (read_log(tmp_path / "job" / f"log.{rank}")["own"] == 1).all()
    assert summary["collectives"] > 0
    assert (summary["switches"] > 0) == (mode == "shadow")
    # What was not tried is no experience.
    decided = pq.read_table(tmp_path / "decisions.parquet", columns=["action", "got_us"]).to_pylist()
    assert {of["action"] for of in decided if of["got_us"] is not None} == {"nccl"}
    assert ({of["action"] for of in decided} != {"nccl"}) == (mode == "shadow")
    assert len(pq.read_table(tmp_path / "episodes.parquet")) == 0
    worst = summary["whole_run"]["worst"]
    assert worst is None or worst["action"] == "nccl"


def test_a_users_own_choice_of_algorithm_wins(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    summary = run_online(small_experiment(job), tmp_path, serial=True)
    assert list(summary["off"].values()) == ["NCCL_ALGO or NCCL_PROTO is set and wins"]
    assert summary["switches"] == 0
    for rank in range(4):
        assert (read_log(tmp_path / "job" / f"log.{rank}")["own"] == 1).all()


def test_without_a_channel_training_goes_on_and_the_run_says_why(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match=r"no rank made a channel.*nowhere.*tuning stays off"):
        run_online(small_experiment(job), tmp_path / "run", serial=True)


def test_a_dead_rank_ends_the_run_with_its_name(tmp_path: Path, job: str) -> None:
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = sorted(segments(job))
            if len(found) == 4:
                time.sleep(1.0)
                killed.append(int(found[2].name.split("-")[2]))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(RunError, match=r"process \d ended with -9"):
        run_online(small_experiment(job, stop={"rounds": 10_000}), tmp_path, serial=True)
    killer.join()
    assert killed


def test_an_interrupt_in_the_first_round_ends_in_a_summary(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: SerialBackend) -> Status:
        raise KeyboardInterrupt

    monkeypatch.setattr(SerialBackend, "round", interrupted)
    # What another run has left here would be taken for this one's.
    (tmp_path / "report.html").write_text("another's")
    said: list[str] = []
    summary = run_online(small_experiment(job), tmp_path, serial=True, say=said.append)
    assert (summary["rounds"], summary["epochs"], summary["keys"]) == (0, 0, [])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert not (tmp_path / "report.html").exists()
    assert "told to end: what was found out is written" in said


def test_who_tells_a_run_to_end_twice_loses_nothing(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summarise = online.summarise

    def interrupted(*of: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return summarise(*of)

    monkeypatch.setattr(online, "summarise", interrupted)
    summary = run_online(small_experiment(job, stop={"rounds": 1}), tmp_path, serial=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["rounds"] == 1


def test_a_run_that_is_told_to_end_before_its_ranks_are_there_starts_none(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(online, "remove_stale", told)
    with pytest.raises(KeyboardInterrupt):
        run_online(small_experiment(job), tmp_path, serial=True)
    assert not list(segments(job))
