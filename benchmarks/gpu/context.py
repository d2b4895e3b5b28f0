"""What every section is handed: the machine, the options, and a way to start ranks with the plugin or without."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.gpu.machine import ROOT, Facts
from benchmarks.gpu.options import Options
from benchmarks.gpu.plan import CHECK_SIZES, TIME_SIZES
from benchmarks.gpu.ranks import Ranks, environment
from benchmarks.gpu.staging import Communicator, communicators
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.plugin_bridge.segments import remove_stale

Loaded = Literal["none", "tuner", "both", "switched", "swallowed"]
"""What a job's NCCL loads: nothing; our tuner; tuner and profiler; these with events.c between NCCL and the profiler,
which can turn events off, or keeps them to itself."""

# NCCL's word for no plugin; without it, it would look for one under its default name.
NO_PLUGIN: Final = {"NCCL_TUNER_PLUGIN": "none", "NCCL_PROFILER_PLUGIN": "none"}


def dynamiccl(*arguments: str) -> list[str]:
    """A public command of this checkout."""
    return [sys.executable, "-m", "dynamiccl_ray.cli", *arguments]


def checkout_environment() -> dict[str, str]:
    """For processes of this checkout that are no ranks."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def plugin_variables(job: str) -> dict[str, str]:
    """What `dynamiccl plugin env` prints. Raises RunError where the plugin was not built."""
    return {**_plugin_variables(), "DYNAMICCL_JOB_ID": job}


@functools.cache
def _plugin_variables() -> dict[str, str]:
    done = subprocess.run(
        dynamiccl("plugin", "env", "--json"),
        env=checkout_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"dynamiccl plugin env: {done.stderr.strip() or done.stdout.strip()}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


@dataclass(kw_only=True)
class Context:
    """One run of the script."""

    options: Options
    facts: Facts
    ranks: int
    directory: Path
    """For logs and temporary files."""
    say: Callable[[str], None] = lambda _: None
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Whatever makes the exit code 1: section, what, and what repeats it."""
    notes: list[str] = field(default_factory=list)
    _jobs: Iterator[int] = field(default_factory=itertools.count)

    @property
    def one_gpu(self) -> bool:
        return len(self.facts["gpus"]) == 1

    @property
    def check_sizes(self) -> tuple[int, ...]:
        sizes = CHECK_SIZES["one" if self.one_gpu else "several"]
        return sizes[1:4] if self.options.quick else sizes

    @property
    def time_sizes(self) -> tuple[int, ...]:
        sizes = TIME_SIZES["one" if self.one_gpu else "several"]
        return sizes[1:3] if self.options.quick else sizes

    def fail(self, section: str, what: str, **repeat: Any) -> None:
        self.failures.append({"section": section, "what": what, **repeat})
        self.say(f"{section}: FAILED: {what}")

    def new_job(self) -> str:
        """A job id that no other job has."""
        return f"gpu_bench_{os.getpid()}_{next(self._jobs)}"

    @contextlib.contextmanager
    def start(self, job: str, loaded: Loaded = "both", extra: Mapping[str, str] | None = None) -> Iterator[Ranks]:
        """Ranks of a job, each with an environment for where it runs. They end with the block."""
        ours = plugin_variables(job)
        plugin = {
            "none": {},
            "tuner": {**ours, "NCCL_PROFILER_PLUGIN": "none"},
            "both": ours,
            "switched": ours,
            "swallowed": ours,
        }[loaded]
        gpus = len(self.facts["gpus"])
        environments = [
            environment(
                os.environ,
                rank,
                one_gpu=self.one_gpu,
                nccl=self.facts["nccl"],
                plugin={**NO_PLUGIN, **plugin, **(extra or {})},
            )
            for rank in range(self.ranks)
        ]
        ranks = Ranks(
            environments,
            devices=[rank % gpus for rank in range(self.ranks)],
            directory=self.directory / job,
            timeout_s=self.options.timeout_s,
        )
        try:
            with ranks:
                yield ranks
        finally:
            remove_stale(job)

    @contextlib.contextmanager
    def claimed(self, job: str, *, size: int | None = None) -> Iterator[list[Communicator]]:
        """The job's communicators, claimed for the block; ``size`` is one that must be among them."""
        found = communicators(job, ranks=size)
        try:
            yield found
        finally:
            for communicator in found:
                communicator.close()

    @contextlib.contextmanager
    def world(self, job: str) -> Iterator[Communicator]:
        """The job's only communicator, of all ranks."""
        with self.claimed(job, size=self.ranks) as found:
            if len(found) != 1:
                raise RunError(f"job {job} has {len(found)} communicators; one was expected")
            yield found[0]

    def timed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Says what is done, and how long it took."""
        return _timed(what, self.say)


@contextlib.contextmanager
def _timed(what: str, say: Callable[[str], None]) -> Iterator[None]:
    say(what)
    began = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - began:.1f} s")
