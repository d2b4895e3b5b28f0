"""Where the trials of a sweep are: a table that lives in a terminal, or a line for each thing that happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ray.tune import Callback
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dynamiccl_ray.config.sweep import Sweep
from dynamiccl_ray.report.values import value_name
from dynamiccl_ray.trainers.sweep.trials import number_of

_STATES = {"RUNNING": "running", "PENDING": "waiting", "PAUSED": "waiting", "TERMINATED": "over", "ERROR": "failed"}


class Watch:
    """What is shown of one sweep."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self._sweep, self._console = sweep, console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._told: dict[str, str] = {}

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """While the trials of one search run; ``what`` says which."""
        self._what = what
        self._console.print(what, highlight=False)
        _Told.watch = self
        try:
            if self._console.is_terminal:
                with Live(console=self._console, refresh_per_second=2, transient=True) as self._live:
                    yield
            else:
                yield
        finally:
            self._live, _Told.watch = None, None

    def show(self, trials: Sequence[Any], trial: Any, news: str | None) -> None:
        """``news`` of one of the trials; None where only a number has changed."""
        if self._live is not None:
            self._live.update(self._table(trials))
        elif news is not None:
            if (before := self._told.get(trial.trial_id)) is not None and news == "starts":
                if before == _settings(trial):
                    return  # it only waited for its turn
                news = "goes on from another"
            self._told[trial.trial_id] = _settings(trial)
            number, metric = number_of(trial.trial_id, trial.config), trial.last_result.get(self._sweep.metric)
            reached = "" if metric is None else f", {self._sweep.metric} {metric:.5g}"
            words = f"trial {number} {news}: {_settings(trial)}{reached}"
            self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {words}", highlight=False, soft_wrap=True)

    def _table(self, trials: Sequence[Any]) -> Table:
        table = Table(title=self._what, title_justify="left")
        for head in ("trial", "state", *self._sweep.space, "reports", self._sweep.metric, "seconds"):
            table.add_column(head)
        for number, trial in _numbered(trials):
            result = trial.last_result or {}
            metric = result.get(self._sweep.metric)
            table.add_row(
                str(number),
                _STATES.get(trial.status, trial.status.lower()),
                *(value_name(trial.config["values"][key]) for key in self._sweep.space),
                str(result.get("training_iteration", 0)),
                "-" if metric is None else f"{metric:.5g}",
                f"{result.get('time_total_s', 0):.0f}",
            )
        return table


class _Told(Callback):  # type: ignore[misc]
    """Tune keeps its callbacks in a file, so this one holds nothing."""

    watch: ClassVar[Watch | None] = None

    def _tell(self, trials: Sequence[Any], trial: Any, news: str | None) -> None:
        if self.watch is not None:
            self.watch.show(trials, trial, news)

    def on_trial_start(self, iteration: int, trials: Sequence[Any], trial: Any, **_: Any) -> None:
        self._tell(trials, trial, "starts")

    def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: Any, **_: Any) -> None:
        self._tell(trials, trial, None)

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **_: Any) -> None:
        self._tell(trials, trial, "is over")

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **_: Any) -> None:
        self._tell(trials, trial, "failed")


def _settings(trial: Any) -> str:
    return ", ".join(f"{key} {value_name(value)}" for key, value in trial.config["values"].items())


def callback() -> Callback:
    """For Tune, which then tells whichever ``Watch`` is on."""
    return _Told()


def _numbered(trials: Sequence[Any]) -> list[tuple[int, Any]]:
    return sorted(((number_of(trial.trial_id, trial.config), trial) for trial in trials), key=lambda pair: pair[0])
