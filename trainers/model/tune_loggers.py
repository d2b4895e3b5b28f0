"""Tune's loggers for a Trainable that its caller runs: progress.csv, result.json and TensorBoard events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback
from ray.tune.result import TRAINING_ITERATION


@dataclass(eq=False)
class _Trial:
    """What the loggers ask of Tune's trial."""

    local_path: str
    config: dict[str, Any] = field(default_factory=dict)
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    checkpoint: None = None

    def init_local_path(self) -> None:
        """Made by the caller."""


class TuneLoggers:
    """Appends to what an earlier run left in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._trial = _Trial(str(directory))
        self._loggers: list[LoggerCallback] = [CSVLoggerCallback(), JsonLoggerCallback(), TBXLoggerCallback()]

    def write(self, result: dict[str, Any]) -> None:
        """One result of ``Trainable.train``; nested ones become a/b. The settings are in the checkpoint."""
        line = {name: value for name, value in result.items() if name != "config"}
        for logger in self._loggers:
            logger.log_trial_result(line[TRAINING_ITERATION], self._trial, line)

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.log_trial_start(self._trial)
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.log_trial_end(self._trial)
