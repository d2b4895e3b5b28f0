"""When replicas exchange gradients or parameters, with whom, and how stale they may become."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from dynamiccl_ray.settings import Count, Section

Mode = Literal["bsp", "ssp", "asp", "local-sgd", "decentralized", "hybrid", "fedavg"]
Pattern = Literal["all", "server", "neighbours", "node"]
"""all: a collective over all replicas. server: push to parameter servers and pull. neighbours: send to and receive from
the two next replicas on a ring. node: a collective over the replicas of one node."""


class Sync(Section):
    """bsp every step (Valiant 1990); ssp with a staleness bound (Ho et al. 2013); asp without (Recht et al. 2011);
    local-sgd every tau steps (Stich 2019); decentralized gossip (Lian et al. 2017); hybrid inside a node every step and
    across nodes every tau (Lin et al. 2020, hierarchical local SGD); fedavg every tau local steps (McMahan et al.
    2017)."""

    mode: Mode = "bsp"
    tau: Count = 1
    """local-sgd, hybrid, fedavg: steps between exchanges. ssp: steps that the fastest replica may be ahead."""

    @model_validator(mode="after")
    def _only_where_it_means_something(self) -> Self:
        if self.tau != 1 and self.mode not in ("ssp", "local-sgd", "hybrid", "fedavg"):
            raise ValueError(f"tau = {self.tau}: mode {self.mode!r} has no tau; use 1")
        return self

    def patterns(self, step: int) -> tuple[Pattern, ...]:
        """Exchanges at the end of step ``step``, counted from 0, in order."""
        due = (step + 1) % self.tau == 0
        match self.mode:
            case "bsp":
                return ("all",)
            case "ssp" | "asp":
                return ("server",)
            case "decentralized":
                return ("neighbours",)
            case "local-sgd":
                return ("all",) if due else ()
            case "fedavg":
                return ("server",) if due else ()
            case "hybrid":
                return ("node", "all") if due else ("node",)
