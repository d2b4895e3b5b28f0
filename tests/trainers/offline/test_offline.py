"""A policy is trained from what was recorded: by each method towards what it is for, and always the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import episodes, recorded
from small import small_experiment
from typer.testing import CliRunner

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.cli.app import app
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, Stop
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.offline import Method, learning
from dynamiccl_ray.trainers.offline import run as training
from dynamiccl_ray.trainers.offline.data import initial
from dynamiccl_ray.trainers.offline.recorded import Recorded, read_recorded
from dynamiccl_ray.trainers.offline.run import likelihood, run_offline
from dynamiccl_ray.trainers.online.run import run_online


def _reward(heads: Int64) -> Float32:
    """The first half of the pairs is better."""
    return (heads[:, 0] < policy.ACTION_HEADS[0] // 2).astype(np.float32)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned nothing."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("start") / "policy.pt"
    policy.save(policy.PolicyNetwork(16), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """What was drawn from it."""
    return recorded(tmp_path_factory.mktemp("recorded") / "run", episodes(policy.load(start), _reward, count=32))


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """As many updates as a run that is 16 times as long would bring in as many passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "_MINIBATCH", 32)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, run: Path, start: Path) -> dict[Method, dict[str, Any]]:
    """The summary of each method."""
    out = tmp_path_factory.mktemp("trained")
    return {method: run_offline([run], out / method.value, method=method, start=start) for method in Method}


def _of_better(path: Path, of: Recorded) -> float:
    """Mean probability of a better pair under a policy."""
    net, obs = policy.load(path), torch.from_numpy(of.observations[:, :-1])
    with torch.no_grad():
        features, _ = net.features(obs, initial(net, len(obs)))
        pair = net.pairs(obs, features)[0].exp()
    return float(pair[..., : policy.ACTION_HEADS[0] // 2].sum(-1).numpy()[of.valid].mean())


def test_cloning_makes_what_was_recorded_likelier(run: Path, trained: dict[Method, dict[str, Any]]) -> None:
    summary, of = trained[Method.BC], read_recorded([run])
    assert summary["after"]["log_prob"] > summary["before"]["log_prob"] + 0.005
    assert likelihood(policy.load(Path(summary["policy"])), of) == summary["after"]
    # The policy that drew it is the one that it begins with.
    assert summary["before"]["log_prob"] == pytest.approx(float(of.log_probs[of.valid].mean()), abs=1e-5)


@pytest.mark.parametrize("method", [Method.PPO, Method.MARWIL])
def test_what_brought_more_becomes_likelier(
    run: Path, start: Path, trained: dict[Method, dict[str, Any]], method: Method
) -> None:
    of = read_recorded([run])
    before, cloned, reached = (
        _of_better(path, of) for path in (start, *(Path(trained[name]["policy"]) for name in (Method.BC, method)))
    )
    assert reached > before + 0.005
    assert reached > cloned + 0.003


@pytest.mark.parametrize(("method", "seed"), [(Method.PPO, 0), (Method.MARWIL, 0), (Method.PPO, 1)])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    tmp_path: Path, run: Path, start: Path, trained: dict[Method, dict[str, Any]], method: Method, seed: int
) -> None:
    run_offline([run], tmp_path, method=method, start=start, seed=seed)
    first, again = (
        policy.load(path).state_dict() for path in (Path(trained[method]["policy"]), tmp_path / "policy.pt")
    )
    assert all(torch.equal(first[name], again[name]) for name in first) == (seed == 0)


@pytest.mark.parametrize(("count", "decisions"), [(2, 40), (49, 32)])
def test_a_sequence_may_be_as_long_as_a_minibatch_and_longer(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, count: int, decisions: int
) -> None:
    monkeypatch.setattr(training, "PASSES", 1)
    run = recorded(tmp_path / "run", episodes(policy.load(start), _reward, count=count, decisions=decisions))
    summary = run_offline([run], tmp_path / "out", method=Method.BC, start=start)
    assert summary["after"]["log_prob"] > summary["before"]["log_prob"]


def test_a_run_that_is_learned_from_keeps_its_summary(tmp_path: Path, run: Path, start: Path) -> None:
    (tmp_path / "run").symlink_to(run)
    with pytest.raises(ConfigError, match="is one of the runs that are learned from, and has its summary; name anoth"):
        run_offline([run], tmp_path / "run", method=Method.BC, start=start)
    assert not (run / "policy.pt").exists()


@pytest.mark.filterwarnings("ignore:.*encountered")
def test_a_policy_from_which_nothing_can_be_learned_is_said_to_be_none(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PASSES", 1)
    net = policy.PolicyNetwork(8)
    with torch.no_grad():
        for weights in net.parameters():
            weights.fill_(1e38)
    policy.save(net, tmp_path / "huge.pt")
    with pytest.raises(ConfigError, match=r"huge\.pt: its weights are too large to learn from it; name another"):
        run_offline([run], tmp_path / "out", method=Method.PPO, start=tmp_path / "huge.pt")
    assert not (tmp_path / "out" / "policy.pt").exists()


def test_from_a_recorded_run_to_a_policy_that_the_next_one_starts_from(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PASSES", 2)
    reduced = [{"collective": "all_reduce", "sizes_bytes": [1 << 14, 1 << 20]}]
    fabric = {"kind": "emulated", "cluster": "dgx-h100-ndr", "nodes": 2, "collectives": reduced}
    experiment = small_experiment(job, fabric=fabric, policy=str(DEFAULT_POLICY), stop={"rounds": 3})
    run_online(experiment, tmp_path / "run", serial=True)
    of = read_recorded([tmp_path / "run"])
    assert of.valid.sum(1).tolist() == [32, 32, 31, 31], "two sequences of each key; its last draw is NCCL's own choice"
    # What is drawn first was drawn from the policy that the run began with, whatever it learned later.
    obs, actions = (torch.from_numpy(x[:2]) for x in (of.observations[:, :-1], of.actions))
    net = policy.load(DEFAULT_POLICY)
    features, _ = net.features(obs, initial(net, 2))
    drawn = policy.log_prob(net.logits(obs, features), actions).detach().numpy()
    np.testing.assert_allclose(drawn, of.log_probs[:2], atol=1e-4)
    out = tmp_path / "trained"
    said = ["offline", str(tmp_path / "run"), "--out", str(out)]
    result = CliRunner().invoke(app, [*said, "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["method"], summary["decisions"], summary["episodes"]) == ("ppo", 126, 4)
    assert not torch.equal(policy.load(out / "policy.pt").score.weight, net.score.weight)
    went_on = experiment.model_copy(update={"policy": out / "policy.pt", "stop": Stop(rounds=1)})
    assert run_online(went_on, tmp_path / "next", serial=True)["collectives"] > 0
    shown = CliRunner().invoke(app, [*said, "--from", str(out / "policy.pt")])
    assert "126 decisions, 2 passes" in shown.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "no episodes.parquet in it"),
        (("--from", "nowhere.pt"), "nowhere.pt does not exist; name a policy"),
        (("--method", "sac"), "'sac' is not one of 'bc', 'marwil', 'ppo'"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["offline", str(tmp_path), "--out", str(tmp_path / "out"), *more])
    assert result.exit_code != 0
    assert said in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())
