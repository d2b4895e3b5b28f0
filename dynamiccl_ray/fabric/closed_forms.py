"""Textbook costs of collectives in the alpha-beta model, apart from the finer fabric model.

``ranks`` take part, each with ``nbytes`` (a number or an array, N below); a message of k bytes costs
``a_us + k * b_us``. Every function returns microseconds in the shape of ``nbytes``. Reductions themselves are free.
Logarithms are rounded up where ranks are no power of 2.

Sources: Thakur, Rabenseifner, Gropp 2005 (ring, trees, recursive doubling, halving-doubling, pairwise all-to-all);
Sanders, Speck, Träff 2009 (double tree); Ying et al. 2018, arXiv:1811.06992 (2D torus).
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import numpy.typing as npt

Bytes = float | npt.NDArray[np.float64]


def point_to_point(nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """a + bN."""
    return a_us + b_us * nbytes


def ring(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce: 2(n-1)a + 2(n-1)/n bN. Its bandwidth term is the least there can be."""
    return 2 * (_checked(ranks) - 1) * a_us + 2 * (ranks - 1) / ranks * b_us * nbytes


def binary_tree(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce as reduce and broadcast of whole messages: 2 log n (a + bN)."""
    return 2 * _log(ranks) * (a_us + b_us * nbytes)


def recursive_doubling(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce by exchanging whole messages: log n (a + bN)."""
    return _log(ranks) * (a_us + b_us * nbytes)


def double_binary_tree(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce over two trees, each with half of the message, in chunks small enough that filling costs only latency:
    2 log n a + 2bN."""
    return 2 * _log(ranks) * a_us + (2 * b_us * nbytes if ranks > 1 else 0.0 * nbytes)


def halving_doubling(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce after Rabenseifner: 2 log n a + 2(n-1)/n bN, exact for powers of 2."""
    return 2 * _log(ranks) * a_us + 2 * (ranks - 1) / ranks * b_us * nbytes


def hierarchical(
    groups: int,
    per_group: int,
    nbytes: Bytes,
    *,
    inside_a_us: float,
    inside_b_us: float,
    across_a_us: float,
    across_b_us: float,
) -> Bytes:
    """All-reduce: reduce-scatter inside each group, ring across groups on 1/g of the message, all-gather inside.

    2(g-1)a' + 2(g-1)/g b'N + ring(m, N/g). With one group, or groups of one, it is the ring of the other kind of link.
    """
    return ring(per_group, nbytes, inside_a_us, inside_b_us) + ring(
        groups, nbytes / per_group, across_a_us, across_b_us
    )


def torus_2d(rows: int, columns: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """All-reduce: reduce-scatter along rows, ring along columns, all-gather along rows, over links that are alike:
    2(r-1 + c-1)a + 2(n-1)/n bN with n = rc."""
    return hierarchical(rows, columns, nbytes, inside_a_us=a_us, inside_b_us=b_us, across_a_us=a_us, across_b_us=b_us)


def all_to_all(ranks: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """Pairwise exchange, each rank has N/n for every other: (n-1)a + (n-1)/n bN."""
    return (_checked(ranks) - 1) * (a_us + b_us * nbytes / ranks)


def parameter_server(workers: int, servers: int, nbytes: Bytes, a_us: float, b_us: float) -> Bytes:
    """Push and pull, the parameters spread evenly over the servers: 2a + 2bN max(1, w/s). The busier side decides, and
    the pull of a byte starts when its push has ended."""
    return 2 * (a_us + max(1.0, _checked(workers) / _checked(servers)) * b_us * nbytes)


def _checked(count: int) -> int:
    if count < 1:
        raise ValueError(f"count = {count}: expected at least 1 rank, worker or server")
    return count


def _log(ranks: int) -> int:
    return ceil(log2(_checked(ranks)))
