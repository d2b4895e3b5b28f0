"""Threads are a communicator's, opt-in; what cannot work is said."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.plugin_bridge.threads import thread_variables, threads

NAMES = ("NCCL_NTHREADS", "NCCL_LL128_NTHREADS")


def _said() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_what_processes_export() -> None:
    assert thread_variables(0) == {}
    assert thread_variables(64) == {
        "NCCL_NTHREADS": "64",
        "NCCL_LL128_NTHREADS": "160",
        "NCCL_NO_CACHE": "NCCL_NTHREADS,NCCL_LL128_NTHREADS",
    }
    with pytest.raises(ConfigError, match=r"threads is 100; there are 0, 64, 128, 256, 512"):
        thread_variables(100)


def test_the_command_prints_them_only_where_asked() -> None:
    for options, expected in (([], set()), (["--threads", "256"], {*NAMES, "NCCL_NO_CACHE"})):
        result = CliRunner().invoke(app, ["plugin", "env", "--json", *options])
        assert {name for name in json.loads(result.stdout) if name.endswith(("THREADS", "CACHE"))} == expected
    refused = CliRunner().invoke(app, ["plugin", "env", "--threads", "96"])
    assert "threads is 96" in str(refused.exception)


def test_within_it_the_environment_says_so_and_after_it_what_it_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in thread_variables(512).items():
        monkeypatch.setenv(name, value)

    def fails() -> None:
        with threads(128):
            assert _said() == ["128", "160"]
            with threads(0):
                assert _said() == [None, None]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert _said() == ["512", "512"]
    monkeypatch.setenv("NCCL_NO_CACHE", "NCCL_NTHREADS")
    with pytest.raises(RuntimeError, match="would keep the threads of its first communicator"), threads(64):
        pass
