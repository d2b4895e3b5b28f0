"""The command line. Every command takes ``--json`` and then prints one JSON document on stdout and nothing else.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from dynamiccl_ray.cli.advise import advise
from dynamiccl_ray.cli.bench import bench_app
from dynamiccl_ray.cli.fabric import fabric_app
from dynamiccl_ray.cli.files import init, list_shipped, schema
from dynamiccl_ray.cli.learning import evaluate, offline, train
from dynamiccl_ray.cli.live import canary, mode, off, report, rollback, status, top
from dynamiccl_ray.cli.online import demo, explain, online, release
from dynamiccl_ray.cli.output import console
from dynamiccl_ray.cli.plugin import doctor, plugin_app
from dynamiccl_ray.cli.static import export, merge, table_app
from dynamiccl_ray.cli.sweep import sweep
from dynamiccl_ray.cli.workload import workload_app
from dynamiccl_ray.errors import DynamicclError
from dynamiccl_ray.trainers.common.cluster import ask_for_a_token, leave_signals_alone

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
_RUNS = (online, status, top, mode, off, rollback, canary, report, release, explain)
for command in (demo, init, *_RUNS, export, merge, doctor, advise, train, offline, evaluate, sweep, schema):
    app.command()(command)
app.command("list")(list_shipped)
for name, commands in (
    ("plugin", plugin_app),
    ("table", table_app),
    ("bench", bench_app),
    ("fabric", fabric_app),
    ("workload", workload_app),
):
    app.add_typer(commands, name=name)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"dynamiccl {version('dynamiccl-ray')}")
        raise typer.Exit


@app.callback()
def _about(
    show_version: Annotated[
        bool, typer.Option("--version", help="Which version this is.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Learns, while a PyTorch job trains, which NCCL configuration each collective should use."""


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2."""
    ask_for_a_token()
    leave_signals_alone()
    try:
        app()
    except SystemExit as e:
        leave_in_time(e.code if isinstance(e.code, int) else 0)
        raise
    except DynamicclError as e:
        _complain(str(e))
    except OSError as e:
        # A file that cannot be written or read is the user's to mend; without a name it is not about a file.
        if e.filename is None:
            raise
        _complain(f"{e.filename}: {e.strerror}")


def leave_in_time(code: int, limit_s: float = 10.0) -> None:
    """Everything is written and said: once the main thread is done this process ends within the limit, whatever
    libraries still wait for. Ray's own end may wait for a cluster that is gone."""

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(limit_s)
        os._exit(code)

    threading.Thread(target=leave, daemon=True).start()


def _complain(words: str) -> NoReturn:
    console.print(Text.assemble(("error:", "bold red"), f" {words}"), soft_wrap=True)
    sys.exit(2)
