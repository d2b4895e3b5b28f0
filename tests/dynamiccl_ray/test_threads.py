"""What computes in our processes takes one core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.control import Control


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a machine with two cores where nobody says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2, "blas"):
        yield
    torch.set_num_threads(before)


def _blas() -> list[int]:
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_who_decides_by_a_network_takes_one_core(two_threads: None) -> None:
    assert set(_blas()) == {2}
    learned(PolicyNetwork(8), Control())
    assert set(_blas()) == {1}
    assert torch.get_num_threads() == 1
