"""Agent-2, the configuration agent: a recurrent network that scores every action of a key by what is known of it.

An LSTM over the decision epochs of a key reads the key's own features; every (algorithm, protocol) pair is then
scored by one shared network from the LSTM's output and that pair's own features (NCCL's predicted cost, the time
measured with it, how often). Sharing the scorer makes what is learned of one pair or one machine hold for another.

The action distribution is autoregressive: pair first, then channels and chunk given the pair. Decisions and updates ask
the network for what follows the pairs that were chosen, and for no others; ``PolicyNetwork.logits`` has it for all,
``ACTION_LOGITS = N_PAIRS * (1 + N_CHANNELS + N_CHUNKS)`` numbers per key. A masked action has logit ``MASKED``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.lending import SURE_SCALE, WIDE
from dynamiccl_ray.agent.observation import HEAD_SIZE, N_PAIR_FIELDS, SIZE, part
from dynamiccl_ray.errors import DAMAGED, ConfigError, RunError, reason
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.settings import MOST_EXPERTS, MOST_HIDDEN
from dynamiccl_ray.tensors import read_tensors

MASKED: Final = -1e9
# Logits per unit of log time at the start, and what one unit of the learned parameter is worth: its gradient steps are
# as small as everyone's, and it has far to go.
TIME_WEIGHT: Final = (2.0, 1.0, 1.0)
TIME_SCALE: Final = 20.0
# The same for NCCL's own prediction, of which a unit of the feature is four of log time.
COST_WEIGHT: Final = 4.0
# Of NCCL's own channels and chunk, in logits.
OWN_BIAS: Final = 2.0
ACTION_LOGITS: Final = N_PAIRS * (1 + N_CHANNELS + N_CHUNKS)
ACTION_HEADS: Final = (N_PAIRS, N_CHANNELS, N_CHUNKS)
N_NOISE: Final = sum(ACTION_HEADS)


def split_logits(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., ACTION_LOGITS) -> pair (..., P), channels given pair (..., P, C), chunk given pair (..., P, H)."""
    head = logits.shape[:-1]
    pair, channels, chunks = torch.split(
        logits,
        [N_PAIRS, N_PAIRS * N_CHANNELS, N_PAIRS * N_CHUNKS],
        dim=-1,
    )
    return pair, channels.reshape(*head, N_PAIRS, N_CHANNELS), chunks.reshape(*head, N_PAIRS, N_CHUNKS)


class PolicyNetwork(nn.Module):
    """Observations (B, T, observation.SIZE) -> action logits (B, T, ACTION_LOGITS) and values (B, T)."""

    def __init__(self, hidden: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.hidden, self.experts = hidden, experts
        # Pooled pair features tell the recurrent part how much is known without naming any pair.
        self.encoder = nn.Sequential(nn.Linear(HEAD_SIZE + 2 * N_PAIR_FIELDS, hidden), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        # Experts by what the communicator is for: a job with three kinds of parallelism has several regimes of message
        # sizes, and what is right for their mean is wrong for each.
        self.gate = nn.Linear(_GATE_SIZE, experts)
        self.expert = nn.Linear(hidden, experts * hidden)
        self.pair_features = nn.Linear(N_PAIR_FIELDS, hidden, bias=False)
        # What no feature says of a pair.
        self.pair_names = nn.Parameter(torch.zeros(N_PAIRS, hidden))
        self.score = _last(hidden, 1)
        # Channels and chunk given the pair.
        self.details = _last(hidden, N_CHANNELS + N_CHUNKS)
        # Measured times also count directly, of pairs, channels and chunks: two of them a few per cent apart look alike
        # to a saturating network. Once as they are, and once by how many standard errors they are behind the best.
        self.time_weight = nn.Parameter(torch.tensor(TIME_WEIGHT) / TIME_SCALE)
        self.behind_weight = nn.Parameter(torch.ones(3))
        # NCCL's belief is a guess: better than none where nothing was measured.
        self.cost_weight = nn.Parameter(torch.tensor(COST_WEIGHT / TIME_SCALE))
        # NCCL's own channels and chunk are where to start from.
        self.own = nn.Parameter(torch.tensor([OWN_BIAS, OWN_BIAS]))
        self.value_head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        # How much there is to win grows with the share of a step that is communication, f(N) / (M I).
        self.value_prior = nn.Parameter(torch.zeros(1))

    def initial_state(self) -> dict[str, Tensor]:
        """The LSTM state before a key's first epoch, each (layers, hidden)."""
        return {"h": torch.zeros(1, self.hidden), "c": torch.zeros(1, self.hidden)}

    def features(self, obs: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What heads and values need, (B, T, hidden + 1), and the LSTM's state after T, each (B, layers, hidden)."""
        pairs = part(obs, "pairs")
        pooled = torch.cat([pairs.mean(-2), pairs.amax(-2)], -1)
        x = self.encoder(torch.cat([obs[..., :HEAD_SIZE], pooled], -1))
        h, c = (state[k].transpose(0, 1).contiguous() for k in ("h", "c"))
        out, (h, c) = self.lstm(x, (h, c))
        out = torch.cat([out, part(obs, "communication_ratio")], -1)
        return out, {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}

    def pairs(self, obs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of pairs (B, T, N_PAIRS), and what ``given`` needs of each, (B, T, N_PAIRS, hidden)."""
        pairs = part(obs, "pairs")
        gate = torch.softmax(self.gate(torch.cat([part(obs, name) for name in _GATED_BY], -1)), -1)
        experts = self.expert(features[..., : self.hidden]).unflatten(-1, (self.experts, self.hidden))
        mixed = (gate.unsqueeze(-1) * experts).sum(-2)
        # In place: there is a row for every pair of every key, and memory is what takes time.
        x = self.pair_features(pairs).add_(mixed.unsqueeze(-2)).add_(self.pair_names).relu_()
        available, cost, best, sure = (pairs[..., i] for i in range(4))
        believed = cost * (sure == 0)
        score = self.score(x).squeeze(-1) - TIME_SCALE * self.cost_weight * believed
        return self._log_probs(obs, score, best, sure, available > 0, 0), x

    def given(self, obs: Tensor, x: Tensor, pair: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of channels and of chunks given pairs, (B, T, N, N_CHANNELS) and (B, T, N, N_CHUNKS).

        ``pair`` (B, T, N) has the pairs' numbers; all of them where it is absent.
        """
        if pair is not None:
            x = _rows(x, pair)
        heads = torch.split(self.details(x), [N_CHANNELS, N_CHUNKS], -1)
        out = []
        for i, (score, name) in enumerate(zip(heads, ("channels", "chunks"), strict=True)):
            evidence, valid = part(obs, name), part(obs, f"valid_{name}")
            if pair is not None:
                evidence = _rows(evidence.flatten(-2), pair).reshape(*pair.shape, -1, 2)
                valid = _rows(valid, pair)
            own = torch.cat([score[..., :1] + self.own[i], score[..., 1:]], -1)
            out.append(self._log_probs(obs, own, evidence[..., 0], evidence[..., 1], valid > 0, 1 + i))
        return out[0], out[1]

    def _log_probs(self, obs: Tensor, score: Tensor, time: Tensor, sure: Tensor, valid: Tensor, head: int) -> Tensor:
        """Log-probabilities (..., V) of a head's values by their scores and what was measured of them."""
        cooling = 1 / (1 + part(obs, "heat"))
        cooling = cooling.unsqueeze(-1) if score.dim() > cooling.dim() else cooling
        direct = TIME_SCALE * self.time_weight[head] * time + self.behind_weight[head] * _behind(time, sure, valid)
        # Normalised once, and not again in each of log_prob and entropy.
        return torch.log_softmax(((score - direct) * cooling).masked_fill(~valid, MASKED), -1)

    def logits(self, obs: Tensor, features: Tensor) -> Tensor:
        """Masked logits (B, T, ACTION_LOGITS), normalised: they are the log-probabilities of each head's values."""
        pair, x = self.pairs(obs, features)
        channels, chunks = self.given(obs, x)
        return torch.cat([pair, channels.flatten(-2), chunks.flatten(-2)], -1)

    def values(self, features: Tensor) -> Tensor:
        """Expected return (B, T), in the reward's units (log time)."""
        values: Tensor = self.value_head(features[..., : self.hidden]).squeeze(-1)
        return values + self.value_prior * features[..., -1]


# What decides between the experts.
_GATED_BY: Final = ("role", "parallelism")
_GATE_SIZE: Final = sum(part(np.zeros(SIZE), name).size for name in _GATED_BY)


def save(net: PolicyNetwork, path: Path) -> None:
    """Weights and sizes, as ``load`` reads them; whole or not at all. Raises RunError where there is no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    try:
        torch.save({"hidden": net.hidden, "experts": net.experts, "weights": net.state_dict()}, unfinished)
        unfinished.replace(path)
    except RuntimeError as e:  # PyTorch's word for a full disk
        raise RunError(f"{path}: cannot be written: {reason(e)}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path) -> PolicyNetwork:
    """A saved network, ready to decide. Raises ConfigError for a file that is missing or holds something else."""
    try:
        saved = read_tensors(path)
        hidden, experts = saved["hidden"], saved["experts"]
        # Of somebody else's file: memory for a network is taken before its weights are looked at.
        if not (isinstance(hidden, int) and 1 <= hidden <= MOST_HIDDEN):
            raise ValueError(f"hidden is {hidden!r}, of 1 to {MOST_HIDDEN}")
        if not (isinstance(experts, int) and 1 <= experts <= MOST_EXPERTS):
            raise ValueError(f"experts is {experts!r}, of 1 to {MOST_EXPERTS}")
        net = PolicyNetwork(hidden, experts)
        net.load_state_dict(saved["weights"])
        if not all(torch.isfinite(weights).all() for weights in net.parameters()):
            raise ValueError("a weight is not a number")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a policy that `dynamiccl train` wrote") from None
    except DAMAGED as e:
        raise ConfigError(
            f"{path} holds no policy of this version: {reason(e)}; train one with `dynamiccl train`"
        ) from None
    return net.eval()


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (..., N) of x (..., R, F): (..., N, F)."""
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _behind(time: Tensor, sure: Tensor, valid: Tensor) -> Tensor:
    """By how many standard errors of their difference each time (..., V) is behind the least, 8 at most."""
    deviation = WIDE * torch.exp(-SURE_SCALE * sure)
    least, at = time.masked_fill(~valid, torch.inf).min(-1, keepdim=True)
    least = torch.where(torch.isfinite(least), least, 0.0)
    return ((time - least) / torch.hypot(deviation, deviation.gather(-1, at))).clamp(0, 8)


def _last(inputs: int, outputs: int) -> nn.Linear:
    """A small last layer, so that an untrained policy is close to uniform over what is valid."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.zero_()
    return layer


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability (...) of actions (..., 3) under normalised logits (..., ACTION_LOGITS)."""
    pair, channels, chunks = split_logits(logits)
    a = actions.long()
    chosen = a[..., 0:1]
    given = chosen.unsqueeze(-1)
    channels = channels.gather(-2, given.expand(*given.shape[:-1], N_CHANNELS)).squeeze(-2)
    chunks = chunks.gather(-2, given.expand(*given.shape[:-1], N_CHUNKS)).squeeze(-2)
    return (pair.gather(-1, chosen) + channels.gather(-1, a[..., 1:2]) + chunks.gather(-1, a[..., 2:3])).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Exact entropy (...) of the joint action under normalised logits, in nats."""
    pair, channels, chunks = split_logits(logits)
    p = pair.exp()
    inner = -(channels.exp() * channels).sum(-1) - (chunks.exp() * chunks).sum(-1)
    return -(p * pair).sum(-1) + (p * inner).sum(-1)


def chosen_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """``log_prob`` (...) from normalised logits (..., N_PAIRS + N_CHANNELS + N_CHUNKS): of all pairs, and of channels
    and chunks given the action's own pair.
    """
    return _chosen(torch.split(logits, list(ACTION_HEADS), -1), actions.long())


def chosen_entropy(logits: Tensor) -> Tensor:
    """Entropy (...) from the same: over pairs, and given the action's pair."""
    return torch.stack([-(head.exp() * head).sum(-1) for head in torch.split(logits, list(ACTION_HEADS), -1)]).sum(0)


def greedy(logits: Tensor) -> Tensor:
    """The most likely pair, then its most likely channels and chunk: (..., 3)."""
    pair, channels, chunks = split_logits(logits)
    chosen = pair.argmax(-1, keepdim=True)
    return torch.stack(
        [
            chosen.squeeze(-1),
            channels.argmax(-1).gather(-1, chosen).squeeze(-1),
            chunks.argmax(-1).gather(-1, chosen).squeeze(-1),
        ],
        -1,
    )


def sample(net: PolicyNetwork, obs: Tensor, features: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Actions (B, T, 3) drawn for observations (B, T, observation.SIZE), and their log-probabilities (B, T)."""

    def noise(_: int, log_p: Tensor) -> Tensor:
        return -torch.log(-torch.log(torch.rand(log_p.shape, generator=generator).clamp_(1e-12, 1 - 1e-7)))

    actions, heads = _choose(net, obs, features, noise)
    return actions, _chosen(heads, actions)


def decide(
    net: PolicyNetwork, obs: Tensor, features: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Actions (B, T, 3), their log-probabilities (B, T), and entropies (B, T) as ``chosen_entropy`` has them.

    What is most likely, head by head; with Gumbel ``noise`` (B, T, N_NOISE) an exact sample.
    """
    parts = None if noise is None else torch.split(noise, list(ACTION_HEADS), -1)
    actions, heads = _choose(net, obs, features, lambda i, _: 0.0 if parts is None else parts[i])
    return actions, _chosen(heads, actions), chosen_entropy(torch.cat(heads, -1))


def _choose(
    net: PolicyNetwork, obs: Tensor, features: Tensor, noise: Callable[[int, Tensor], Tensor | float]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Actions, and the log-probabilities of each head's values: of channels and chunk given the pair."""
    pairs, x = net.pairs(obs, features)
    pair = (pairs + noise(0, pairs)).argmax(-1)
    channels, chunks = (head.squeeze(-2) for head in net.given(obs, x, pair.unsqueeze(-1)))
    rest = [(head + noise(i, head)).argmax(-1) for i, head in enumerate((channels, chunks), 1)]
    return torch.stack([pair, *rest], -1), (pairs, channels, chunks)


def _chosen(heads: Sequence[Tensor], actions: Tensor) -> Tensor:
    return torch.cat([head.gather(-1, actions[..., i : i + 1]) for i, head in enumerate(heads)], -1).sum(-1)
