"""Experiments that are quick enough for a test."""

from __future__ import annotations

from typing import Any

from dynamiccl_ray.config.experiment import Online


def small_experiment(job: str, **changes: Any) -> Online:
    """Two nodes of two ranks on the measured p5en times; quick enough for a test."""
    raw: dict[str, Any] = {
        "name": "test",
        "job": job,
        "fabric": {"kind": "measured", "processes": {"nodes": 2, "ranks_per_node": 2}, "rate_hz": 0},
        "stop": {"rounds": 4},
        "ray": {"runners_per_node": 2},
    }
    for name, value in changes.items():
        merged = {**raw[name], **value} if isinstance(raw.get(name), dict) and isinstance(value, dict) else value
        # None takes a default setting away.
        raw[name] = {k: v for k, v in merged.items() if v is not None} if isinstance(merged, dict) else merged
    return Online.model_validate(raw)
