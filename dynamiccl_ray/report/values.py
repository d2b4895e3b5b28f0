"""Numbers and values of settings in tables and figures."""

from __future__ import annotations

import json
from typing import Any


def number(x: float | None) -> str:
    """Four significant digits."""
    return "-" if x is None else f"{x:.4g}"


def value_name(value: Any) -> str:
    """A value of a setting, short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:23]}\u2026"
