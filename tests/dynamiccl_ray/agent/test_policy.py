"""The action distribution is exact, and masks hold."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent import observation, policy
from dynamiccl_ray.agent.observation import Context, Floats, KeyView, Topology
from dynamiccl_ray.control.mixing import gumbel
from dynamiccl_ray.knobs import N_PAIRS


def _view(rng: np.random.Generator, keys: int = 5) -> KeyView:
    valid = rng.random((keys, N_PAIRS, N_CHANNELS)) < 0.3
    valid[:, 0, 0] = True
    chunks = rng.random((keys, N_PAIRS, N_CHUNKS)) < 0.5
    chunks[:, :, 0] = True
    return KeyView(
        collective=rng.integers(0, 5, keys),
        nbytes=rng.integers(1, 1 << 34, keys),
        pipelined=rng.random(keys) < 0.5,
        last_time=rng.normal(0, 1, keys).astype(np.float32),
        idle_epochs=rng.integers(0, 9, keys).astype(np.float32),
        last_pair=rng.integers(-1, N_PAIRS, keys),
        cost=rng.random((keys, N_PAIRS)).astype(np.float32),
        samples=rng.integers(0, 3, (keys, N_PAIRS, N_CHANNELS)).astype(np.float32),
        channels=_evidence(rng, valid.shape),
        chunks=_evidence(rng, chunks.shape),
        noise=rng.uniform(0.005, 0.2, keys).astype(np.float32),
        excess=rng.normal(0, 1, keys).astype(np.float32),
        congestion=rng.random(keys).astype(np.float32),
        cusum=rng.random(keys).astype(np.float32),
        skew=rng.random(keys).astype(np.float32),
        heat=float(rng.random()),
        valid_channels=valid,
        valid_chunks=chunks,
    )


def _evidence(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Times, and how sure they are; of half of the actions nothing is known."""
    known = rng.random(shape) < 0.5
    time, sure = rng.normal(0, 1, shape), rng.uniform(0, 1.2, shape)
    return (time * known).astype(np.float32), (sure * known).astype(np.float32)


def _made(seed: int) -> tuple[KeyView, policy.PolicyNetwork, torch.Tensor, torch.Tensor]:
    """A view of random keys, a random network, its observations and its features."""
    view = _view(np.random.default_rng(seed))
    torch.manual_seed(seed)
    net = policy.PolicyNetwork(16)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    context = Context(topology=Topology(ranks=64, nodes=8, intra="nvlink", inter="efa"))
    obs = torch.from_numpy(observation.encode(context, view))
    with torch.no_grad():
        state = {k: v.unsqueeze(0).repeat(len(obs), 1, 1) for k, v in net.initial_state().items()}
        features, _ = net.features(obs.unsqueeze(1), state)
    return view, net, obs.unsqueeze(1), features


def _noise(rows: int, draw: int) -> torch.Tensor:
    """(rows, 1, N_NOISE), of a draw's own."""
    return torch.from_numpy(gumbel(np.arange(rows, dtype=np.uint64) + np.uint64(draw << 32), policy.N_NOISE)).unsqueeze(
        1
    )


def _logits(seed: int) -> torch.Tensor:
    _, net, obs, features = _made(seed)
    with torch.no_grad():
        return net.logits(obs, features)[:, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_probabilities_of_all_actions_add_up_to_one_and_entropy_is_exact(seed: int) -> None:
    logits = _logits(seed)
    grid = torch.cartesian_prod(*(torch.arange(n) for n in policy.ACTION_HEADS))
    for row in logits.double():
        log_p = policy.log_prob(row.expand(len(grid), -1), grid)
        p = log_p.exp()
        assert torch.isclose(p.sum(), torch.ones((), dtype=torch.double), atol=1e-9)
        assert torch.isclose(policy.entropy(row), -(p[p > 0] * log_p[p > 0]).sum(), atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 10**6))
def test_a_masked_action_is_never_drawn(seed: int, draw: int) -> None:
    view, net, obs, features = _made(seed)
    noise = _noise(len(obs), draw)
    with torch.no_grad():
        drawn = [policy.decide(net, obs, features, with_noise)[0] for with_noise in (None, noise)]
        drawn.append(policy.sample(net, obs, features, torch.Generator().manual_seed(seed))[0])
    for actions in drawn:
        for i, (pair, channels, chunk) in enumerate(actions[:, 0].tolist()):
            assert view.valid_channels[i, pair, channels]
            assert view.valid_chunks[i, pair, chunk]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_what_is_asked_about_chosen_pairs_is_what_all_pairs_say(seed: int) -> None:
    _, net, obs, features = _made(seed)
    logits = _logits(seed)
    noise = _noise(len(obs), 0)
    with torch.no_grad():
        actions, log_p, entropy = (x[:, 0] for x in policy.decide(net, obs, features, noise))
        most_likely = policy.decide(net, obs, features)[0][:, 0]
    assert torch.allclose(log_p, policy.log_prob(logits, actions), atol=1e-4)
    assert torch.equal(most_likely, policy.greedy(logits))
    pair, channels, chunks = policy.split_logits(logits)
    rows = torch.arange(len(obs))
    heads = (pair, channels[rows, actions[:, 0]], chunks[rows, actions[:, 0]])
    assert torch.allclose(entropy, sum(-(head.exp() * head).sum(-1) for head in heads), atol=1e-4)


def test_gumbel_noise_makes_a_decision_an_exact_sample() -> None:
    _, net, obs, features = _made(3)
    count = 20_000
    noise = _noise(count, 9)
    many = [x[:1].expand(count, *x.shape[1:]) for x in (obs, features)]
    with torch.no_grad():
        drawn = policy.decide(net, *many, noise)[0][:, 0]
    pair, channels, _ = policy.split_logits(_logits(3)[0])
    likely = int(pair.argmax())
    for index, expected, of in ((0, pair, drawn), (1, channels[likely], drawn[drawn[:, 0] == likely])):
        seen = torch.bincount(of[:, index], minlength=len(expected)) / len(of)
        assert torch.allclose(seen, expected.exp(), atol=0.02)


def test_an_untrained_policy_that_has_measured_nothing_is_close_to_uniform_over_what_is_valid() -> None:
    view = _view(np.random.default_rng(0))
    for evidence in (*view.channels, *view.chunks):
        evidence[:] = 0
    net = policy.PolicyNetwork()
    obs = torch.from_numpy(observation.encode(Context(topology=Topology(ranks=64, nodes=8)), view)).unsqueeze(1)
    state = {k: v.unsqueeze(0).repeat(len(obs), 1, 1) for k, v in net.initial_state().items()}
    with torch.no_grad():
        features, _ = net.features(obs, state)
        pair = torch.softmax(policy.split_logits(net.logits(obs, features))[0][:, 0], -1)
    count = view.valid_channels.any(-1).sum(-1)
    for p, n, valid in zip(pair.numpy(), count, view.valid_channels.any(-1), strict=True):
        assert np.allclose(p[valid], 1 / n, atol=0.05)


def test_observations_are_bounded_and_decode() -> None:
    rng = np.random.default_rng(7)
    view = _view(rng)
    obs = observation.encode(Context(topology=Topology(ranks=64, nodes=8, intra="pcie", inter="ib", nvls=True)), view)
    assert obs.shape == (5, observation.SIZE)
    assert np.isfinite(obs).all()
    assert np.abs(obs).max() <= 4
    said = observation.decode(obs[0])
    assert (said["ranks"], said["nodes"], said["intra"], said["inter"], said["nvls"]) == (64, 8, "pcie", "ib", True)
    assert said["collective"] == view.collective[0]
    assert said["pipelined"] == view.pipelined[0]
    assert abs(int(str(said["bytes"])) / view.nbytes[0] - 1) < 1e-3


def test_the_network_reads_its_history() -> None:
    net = policy.PolicyNetwork(16)
    view = _view(np.random.default_rng(1))
    obs = torch.from_numpy(observation.encode(Context(topology=Topology(ranks=8, nodes=2)), view)).unsqueeze(1)
    state = {k: v.unsqueeze(0).repeat(len(obs), 1, 1) for k, v in net.initial_state().items()}
    first, after = net.features(obs, state)
    second, _ = net.features(obs, after)
    assert not torch.allclose(first, second)
    twice, _ = net.features(obs.repeat(1, 2, 1), state)
    assert torch.allclose(twice[:, 1:], second, atol=1e-6)


def _untrained(view: KeyView) -> list[torch.Tensor]:
    """Log-probabilities of the first key: pairs, channels given pairs, chunks given pairs."""
    net = policy.PolicyNetwork()
    obs = torch.from_numpy(observation.encode(Context(topology=Topology(ranks=64, nodes=8)), view)).unsqueeze(1)
    state = {k: v.unsqueeze(0).expand(len(obs), *v.shape) for k, v in net.initial_state().items()}
    with torch.no_grad():
        features, _ = net.features(obs, state)
        return [x[0, 0] for x in policy.split_logits(net.logits(obs, features))]


def _nothing_measured() -> KeyView:
    """One key that may have pairs 0, 4 and 5 with any channels and chunks, at no heat."""
    view = replace(_view(np.random.default_rng(0), keys=1), heat=0.0)
    view.valid_channels[:] = False
    view.valid_channels[0, (0, 4, 5)] = view.valid_chunks[:] = True
    for evidence in (*view.channels, *view.chunks):
        evidence[:] = 0
    view.cost[:] = 0
    return view


def test_nccls_belief_counts_until_something_was_measured() -> None:
    view = _nothing_measured()
    view.cost[0, 5] = 2.0
    pair = _untrained(view)[0]
    # The feature is a quarter of it; 4 logits for each unit of that.
    assert pair[4] - pair[5] == pytest.approx(2.0, abs=0.3)
    view.channels[1][0, (4, 5), 0] = 0.5
    pair = _untrained(view)[0]
    assert pair[4] - pair[5] == pytest.approx(0, abs=0.3)


def test_heat_makes_a_policy_less_sure() -> None:
    view = _nothing_measured()
    view.cost[0, 5] = 2.0
    hot = _untrained(replace(view, heat=1.0))[0]
    assert hot[4] - hot[5] == pytest.approx(1.0, abs=0.2)


def test_nccls_own_channels_and_chunk_are_where_an_untrained_policy_starts_from() -> None:
    _, channels, chunks = _untrained(_nothing_measured())
    for head in (channels, chunks):
        ahead = head[4, 0] - head[4, 1:]
        assert torch.allclose(ahead, torch.full_like(ahead, policy.OWN_BIAS), atol=0.3)


def test_every_head_has_weights_of_its_own() -> None:
    _, net, obs, features = _made(4)
    with torch.no_grad():
        before = policy.split_logits(net.logits(obs, features))
        net.time_weight[2] += 1
        after = policy.split_logits(net.logits(obs, features))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False]


def test_a_head_by_hand() -> None:
    """Score, less the measured time, less standard errors behind the best; halved at a heat of 1."""
    net, (view, _, _, _) = policy.PolicyNetwork(16), _made(0)
    deviation = torch.full((5,), 0.1 / 2**0.5)
    sure = torch.log(policy.WIDE / deviation) / policy.SURE_SCALE
    time, score = torch.tensor([0.0, 0.2, 0.0, 0.0, 0.5]), torch.tensor([1.0, 2.0, 3.0, 9.0, 0.0])
    valid = torch.tensor([True, True, True, False, True])
    for heat in (0.0, 1.0):
        context = Context(topology=Topology(ranks=8, nodes=2))
        obs = torch.from_numpy(observation.encode(context, replace(view, heat=heat)))[0]
        for head, weight in enumerate(policy.TIME_WEIGHT):
            with torch.no_grad():
                out = net._log_probs(obs, score, time, sure, valid, head)
            logits = (score - weight * time - 10 * time)[valid] / (1 + heat)
            assert torch.allclose(out[valid], torch.log_softmax(logits, -1), atol=1e-4)
            assert out[3] < -1e8


def test_experts_are_weighed_and_pairs_have_names() -> None:
    _, net, obs, features = _made(5)
    with torch.no_grad():
        before = net.logits(obs, features)
        net.gate.bias[0] += 3
        assert not torch.allclose(net.logits(obs, features), before, atol=1e-2)
        net.gate.bias[0] -= 3
        net.pair_names[0] += 1
        after = net.logits(obs, features)
    assert not torch.allclose(after, before, atol=1e-2)


def test_standard_errors_behind_the_least_valid_time() -> None:
    deviation = torch.tensor([0.03, 0.04, 0.01, 0.04, 0.03])
    sure = torch.log(policy.WIDE / deviation) / policy.SURE_SCALE
    time = torch.tensor([-0.1, 0.0, -9.0, 9.0, -0.1])
    valid = torch.tensor([True, True, False, True, True])
    behind = policy._behind(time, sure, valid)
    assert behind[valid].tolist() == pytest.approx([0, 0.1 / 0.05, 8, 0], abs=1e-4)
    assert policy._behind(time, sure, torch.zeros(5, dtype=torch.bool)).isfinite().all()


def test_draws_are_independent_and_the_probabilities_their_own() -> None:
    # Three pairs, as good as equal.
    view, net, count = _nothing_measured(), policy.PolicyNetwork(16), 20_000
    obs = torch.from_numpy(observation.encode(Context(topology=Topology(ranks=64, nodes=8)), view)).unsqueeze(1)
    with torch.no_grad():
        features, _ = net.features(obs, {k: v.unsqueeze(0) for k, v in net.initial_state().items()})
        logits = net.logits(obs, features)[:, 0]
        many = [x.expand(count, *x.shape[1:]) for x in (obs, features)]
        drawn, log_p = (x[:, 0] for x in policy.sample(net, *many, torch.Generator().manual_seed(0)))
    pair, channels, chunks = policy.split_logits(logits[0])
    of = drawn[drawn[:, 0] == 4]
    for index, expected, rows in ((0, pair, drawn), (1, channels[4], of), (2, chunks[4], of)):
        assert expected.exp().max() < 0.8
        seen = torch.bincount(rows[:, index], minlength=len(expected)) / len(rows)
        assert torch.allclose(seen, expected.exp(), atol=0.02)
    assert torch.allclose(log_p, policy.log_prob(logits.expand(count, -1), drawn), atol=1e-3)


def test_each_head_has_noise_of_its_own() -> None:
    _, net, obs, features = _made(3)
    noise = torch.zeros(len(obs), 1, policy.N_NOISE)
    # Nothing but the chunks' part says which chunk.
    noise[..., -N_CHUNKS:] = 1e6 * torch.arange(N_CHUNKS)
    with torch.no_grad():
        quiet, loud = (policy.decide(net, obs, features, with_noise)[0] for with_noise in (None, noise))
    assert torch.equal(quiet[..., :2], loud[..., :2])
    view = _made(3)[0]
    last = [int(np.flatnonzero(view.valid_chunks[i, p])[-1]) for i, p in enumerate(loud[:, 0, 0].tolist())]
    assert loud[:, 0, 2].tolist() == last


def test_what_a_step_spends_on_communication_counts_in_the_value() -> None:
    net = policy.PolicyNetwork(16)
    features = torch.zeros(1, 1, 17)
    features[..., -1] = 3.0
    before = net.values(features)
    with torch.no_grad():
        net.value_prior += 0.5
    assert float((net.values(features) - before).detach()) == pytest.approx(1.5)


def test_even_an_untrained_policy_leans_towards_what_was_measured_to_be_fast() -> None:
    view = _view(np.random.default_rng(0), keys=1)
    view.valid_channels[:] = False
    view.valid_channels[0, (0, 4, 5), 0] = True
    time, sure = view.channels
    time[:], sure[:] = 0, 0
    sure[0, (0, 4, 5), 0] = 0.5
    time[0, 4, 0], time[0, 5, 0] = -1.0, 1.0
    net = policy.PolicyNetwork()
    obs = torch.from_numpy(observation.encode(Context(topology=Topology(ranks=64, nodes=8)), view)).unsqueeze(1)
    features, _ = net.features(obs, {k: v.unsqueeze(0) for k, v in net.initial_state().items()})
    pair = policy.split_logits(net.logits(obs, features))[0][0, 0]
    assert pair[4] > pair[0] > pair[5]
