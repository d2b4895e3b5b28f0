"""Training from what runs beside jobs have recorded."""

from __future__ import annotations

from enum import Enum


class Method(Enum):
    """How."""

    BC = "bc"
    """Behaviour cloning."""
    MARWIL = "marwil"
    """The same, but what brought more than was expected counts more (Wang et al. 2018)."""
    PPO = "ppo"
