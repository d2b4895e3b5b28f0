"""A policy beside the baselines: it closes the gap, finds shifts, and the guardrail holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_scenario import tcp, tiny
from torch import Tensor

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.baselines.learned import COMPARED, DRAWN, EPOCH, SETTLED, LearnedPolicy, learned
from dynamiccl_ray.baselines.run import Trace, run
from dynamiccl_ray.evaluation import Procedure, gap_closed, play
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.knobs import OWN_PAIR
from dynamiccl_ray.observation import PAIR_FIELDS, part
from dynamiccl_ray.policy import MASKED, PolicyNetwork
from dynamiccl_ray.scenario import Scenario
from dynamiccl_ray.simulation import BASELINE_SAMPLES

BUSY = Load(inter_bandwidth=0.2)
_CERTAIN = 1e4


class BestMeasured(PolicyNetwork):
    """Tries every pair with NCCL's own channels and chunk, the cheapest by NCCL's costs first; keeps the fastest."""

    def pairs(self, obs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        pairs = part(obs, "pairs")
        cost, best, samples = (pairs[..., PAIR_FIELDS.index(name)] for name in ("cost", "best", "samples"))
        # A hint from before a shift is as good as nothing.
        pair = torch.where(samples > np.log1p(1) / 4, -best, 10 - cost)
        # So certain that what is drawn is what is liked best.
        return (_CERTAIN * pair).masked_fill(pairs[..., 0] <= 0, MASKED * _CERTAIN), pairs

    def given(self, obs: Tensor, x: Tensor, pair: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own = torch.zeros(*(x.shape[:-1] if pair is None else pair.shape), N_CHANNELS + N_CHUNKS)
        own[..., 0] = own[..., N_CHANNELS] = _CERTAIN
        channels, chunks = own.split([N_CHANNELS, N_CHUNKS], -1)
        return channels, chunks


class Stubborn(BestMeasured):
    """Always wants the last pair that it may have."""

    def pairs(self, obs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        out, x = super().pairs(obs, features)
        return torch.where(out > MASKED, _CERTAIN * torch.arange(out.shape[-1]), out), x


def _played(scenario: Scenario, net: PolicyNetwork, steps: int) -> tuple[Trace, LearnedPolicy]:
    made: list[LearnedPolicy] = []

    def factory(of: Scenario, rng: np.random.Generator) -> LearnedPolicy:
        made.append(LearnedPolicy(of, rng, net))
        return made[0]

    return run(scenario, factory, steps, 0), made[0]


def test_what_is_measured_best_closes_the_gap_of_the_pairs() -> None:
    scenario, procedure = tcp(), Procedure(learn=300, warmup=2, measured=20, runs=2)
    runs = [play(scenario, learned(BestMeasured(8)), procedure)]
    closed = gap_closed(runs, procedure)
    assert closed is not None
    # Of the pairs alone; the rest of the gap is channels and chunks.
    pairs_only = np.where(np.isnan(scenario.times_us[0, :, :, 0, 0]), np.inf, scenario.times_us[0, :, :, 0, 0]).min(-1)
    reachable = float(((scenario.default_us[0] - pairs_only) @ scenario.weight).sum())
    gap = float(((scenario.default_us[0] - scenario.oracle_us[0]) @ scenario.weight).sum())
    assert closed > 0.9 * reachable / gap > 0.1
    assert runs[0][0].offline_us == 0


def test_it_begins_with_nccls_own_choice_and_decides_once_an_epoch() -> None:
    trace, method = _played(tcp(), BestMeasured(8), BASELINE_SAMPLES + 60 * DRAWN)
    assert (trace.actions[:BASELINE_SAMPLES] == OWN_ACTION).all()
    decided = trace.actions[BASELINE_SAMPLES:].reshape(-1, DRAWN, trace.actions.shape[1])
    assert (decided == decided[:, :1]).all()
    assert (decided[0] != OWN_ACTION).any()
    assert method.alarms == 0


def test_a_shift_is_found_and_learned_anew() -> None:
    # The first pair is best before the shift, the second after it.
    scenario = tiny([[[10, 8, 9]] * 3, [[20, 18, 12]] * 3], starts=[0, 400], sigma=0.01)
    trace, method = _played(scenario, BestMeasured(8), 700)
    pairs = action_parts(trace.actions)[0]
    assert method.alarms == 1
    assert (pairs[300:400] == 1).all()
    assert (pairs[600:] == 2).all()
    measured_anew = (trace.actions[400:440] == OWN_ACTION).all(-1)
    assert measured_anew.sum() == BASELINE_SAMPLES


def test_a_quiet_network_raises_no_alarm() -> None:
    _, method = _played(tiny([[[10, 8, 9]] * 16], starts=[0], sigma=0.05), BestMeasured(8), 1200)
    assert method.alarms == 0


def test_the_guardrail_forbids_what_is_worse_than_nccls_own_choice() -> None:
    trace, _ = _played(tiny([[[10, 12, 11]]], starts=[0], sigma=0.01), Stubborn(8), 100)
    pairs = action_parts(trace.actions)[0][:, 0]
    # However much it is wanted, it is tried for a few collectives and never again.
    changes = np.flatnonzero(np.diff(pairs))
    assert pairs[changes].tolist() == [OWN_PAIR, 2]
    assert changes[-1] < 20
    assert pairs[-1] == OWN_PAIR


def test_what_is_within_the_margin_passes_until_it_is_known_to_be_worse() -> None:
    unclear, _ = _played(tiny([[[10, 10.02]]], starts=[0], sigma=0.05), Stubborn(8), 100)
    assert (action_parts(unclear.actions)[0][BASELINE_SAMPLES:] == 1).all()
    clear, _ = _played(tiny([[[10, 10.3]]], starts=[0], sigma=0.001), Stubborn(8), 100)
    pairs = action_parts(clear.actions)[0][BASELINE_SAMPLES:, 0]
    # The noise is believed to be small only when it has been seen to be.
    assert (pairs[:DRAWN] == 1).all()
    assert (pairs[12 * DRAWN :] == OWN_PAIR).all()


def _by_hand(times_us: list[float]) -> LearnedPolicy:
    """A policy that wants the last pair, for one key with these pairs, before it has seen anything."""
    return LearnedPolicy(tiny([[times_us]], starts=[0]), np.random.default_rng(0), Stubborn(8))


def _told(method: LearnedPolicy, *times_us: float) -> None:
    for us in times_us:
        method.observe(method.choose(0), np.array([us]))


def test_the_guardrail_is_for_all_chunks_of_a_pair() -> None:
    class Curious(Stubborn):
        """Wants the chunk that was measured least."""

        def given(self, obs: Tensor, x: Tensor, pair: Tensor | None = None) -> tuple[Tensor, Tensor]:
            channels, _ = super().given(obs, x, pair)
            assert pair is not None
            rows = pair[..., None].expand(*pair.shape, N_CHUNKS)
            sure, valid = (x.gather(-2, rows) for x in (part(obs, "chunks")[..., 1], part(obs, "valid_chunks")))
            return channels, (-_CERTAIN * sure).masked_fill(valid <= 0, MASKED * _CERTAIN)

    plain = tiny([[[10, 12]]], starts=[0], sigma=0.001)
    plain.times_us[:, :, 1, 0, :] = 12
    trace, _ = _played(plain, Curious(8), BASELINE_SAMPLES + 3 * N_CHUNKS * DRAWN)
    # One chunk after the other, each of them new, until there are enough collectives of the pair.
    assert (action_parts(trace.actions)[0] == 1).sum() == 8


def test_what_contends_is_judged_by_both_means() -> None:
    method = _by_hand([10.0, 10.0, 10.0])
    actions = flat_action(np.arange(3), 0, 0)
    method._samples[0, actions], method._knowledge.noise[:] = (1000, 2, 1000), 0.02
    # Two standard errors: 0.028 between the first two, 0.0018 between the first and the last.
    for behind, contends in ((0.02, [True, True, False]), (0.04, [True, False, False])):
        method._sum[0, actions] = method._samples[0, actions] * (behind, 0, behind)
        best, found = method._contenders()
        assert best.tolist() == [actions[1]]
        assert found[0, actions].tolist() == [behind == 0.02, True, behind == 0.02]
        assert found.sum() == 1 + 2 * (behind == 0.02), contends


def test_one_slow_collective_and_the_differences_between_actions_are_no_noise() -> None:
    method = _by_hand([10.0, 8.0])
    _told(method, 10, 10, 10, 1000)
    # No more than four of the usual standard deviations above the fastest.
    assert method._knowledge.baseline[0] == pytest.approx(np.log(10) + 4 * 0.02 / 4)
    method = _by_hand([10.0, 8.0])
    _told(method, *[10] * BASELINE_SAMPLES)
    for _ in range(SETTLED - 6):
        _told(method, 8, 8 * np.exp(0.02))
    # The unbiased deviation of each pair of times.
    assert method._knowledge.noise[0] == pytest.approx(0.02 / np.sqrt(2), rel=0.05)


def test_after_a_shift_old_evidence_is_a_hint_and_the_detector_begins_anew() -> None:
    method = _by_hand([10.0, 8.0])
    assert method._knowledge.view().cusum.tolist() == [0]
    _told(method, *[10] * BASELINE_SAMPLES)
    assert method._knowledge.view().cusum.tolist() == [0], "the first baseline is no shift"
    _told(method, *[8] * 40)
    for _ in range(40):
        if not method.alarms:
            _told(method, 24)
    assert method._cusum.score.tolist() == [0]
    _told(method, *[30] * BASELINE_SAMPLES)
    view = method._knowledge.view()
    assert 0 < view.samples[0, 1, 0] < 1
    assert view.evidence[0, 1, 0] == pytest.approx(np.log(8 / 10), abs=0.1)
    assert (view.samples[0, 0, 0], view.cusum[0]) == (BASELINE_SAMPLES, 1)


def test_the_state_goes_from_decision_to_decision_and_begins_anew_as_in_training() -> None:
    class Remembering(BestMeasured):
        def features(self, obs: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            fresh.append(not state["h"].any())
            heat.append(float(part(obs, "heat").min()))
            return super().features(obs, state)

    fresh: list[bool] = []
    heat: list[float] = []
    _played(tcp(), Remembering(8), BASELINE_SAMPLES + 70 * DRAWN)
    assert np.flatnonzero(fresh).tolist() == [0, 32, 64]
    assert min(heat) > 0, "what is drawn is drawn with a grain of salt"


def test_what_may_still_be_the_best_is_compared_and_then_the_best_is_kept() -> None:
    # Too close to be told apart; the first has been measured only as the baseline.
    trace, method = _played(
        tiny([[[10, 9.99]]], starts=[0], sigma=0.02), Stubborn(8),
        BASELINE_SAMPLES + SETTLED * DRAWN + (COMPARED + 20) * EPOCH,
    )  # fmt: skip
    pairs = action_parts(trace.actions)[0][:, 0]
    first = BASELINE_SAMPLES + SETTLED * DRAWN
    assert (pairs[BASELINE_SAMPLES:first] == 1).all()
    assert (pairs[first : first + (COMPARED - 2) * EPOCH] == OWN_PAIR).all(), "what was measured least"
    kept = pairs[first + COMPARED * EPOCH :]
    assert method._decisions == SETTLED + COMPARED + 20 + 1, "epochs are longer from here on"
    assert np.count_nonzero(np.diff(kept)) <= 2


def test_draws_differ_between_runs() -> None:
    seeds = {
        LearnedPolicy(tcp(), np.random.default_rng(seed), BestMeasured(8))._draws.initial_seed() for seed in range(3)
    }
    assert len(seeds) == 3


def test_nothing_new_is_tried_once_it_has_settled() -> None:
    class Restless(Stubborn):
        """Wants other channels and another chunk each time."""

        def given(self, obs: Tensor, x: Tensor, pair: Tensor | None = None) -> tuple[Tensor, Tensor]:
            masks = [part(obs, f"valid_{name}") > 0 for name in ("channels", "chunks")]
            if pair is not None:
                masks = [mask.gather(-2, pair[..., None].expand(*pair.shape, mask.shape[-1])) for mask in masks]
            channels, chunks = (torch.randn(mask.shape).masked_fill(~mask, MASKED) for mask in masks)
            return channels, chunks

    torch.manual_seed(0)
    settled = BASELINE_SAMPLES + SETTLED * DRAWN
    trace, _ = _played(tcp(), Restless(8), settled + 20 * EPOCH)
    for key in trace.actions.T:
        assert set(key[settled:].tolist()) <= {OWN_ACTION, *key[:settled].tolist()}
        assert len(set(key[:settled].tolist())) > 2


@pytest.mark.parametrize("seed", [0, 1])
def test_any_network_keeps_to_the_mask_and_repeats(seed: int) -> None:
    torch.manual_seed(seed)
    net = PolicyNetwork(8)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    # run() refuses what is masked.
    first, again = (run(tcp(BUSY, every=40), learned(net), 120, seed) for _ in range(2))
    assert (first.actions == again.actions).all()
