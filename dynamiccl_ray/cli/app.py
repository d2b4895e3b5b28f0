"""The command line. Every command takes ``--json`` and then prints one JSON document on stdout and nothing else.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys

import typer

from dynamiccl_ray.cli.bench import bench_app
from dynamiccl_ray.cli.fabric import fabric_app
from dynamiccl_ray.cli.learning import evaluate, train
from dynamiccl_ray.cli.live import canary, mode, off, rollback, status, top
from dynamiccl_ray.cli.online import demo, explain, online, release
from dynamiccl_ray.cli.output import console
from dynamiccl_ray.cli.plugin import doctor, plugin_app
from dynamiccl_ray.cli.workload import workload_app
from dynamiccl_ray.errors import DynamicclError
from dynamiccl_ray.trainers.common.cluster import ask_for_a_token, leave_signals_alone

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Learns, while a PyTorch job trains, which NCCL configuration each collective should use.",
)
for command in (demo, online, status, top, mode, off, rollback, canary, release, explain, doctor, train, evaluate):
    app.command()(command)
for name, commands in (
    ("plugin", plugin_app),
    ("bench", bench_app),
    ("fabric", fabric_app),
    ("workload", workload_app),
):
    app.add_typer(commands, name=name)


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2."""
    ask_for_a_token()
    leave_signals_alone()
    try:
        app()
    except DynamicclError as e:
        console.print(f"[bold red]error:[/] {e}", highlight=False, soft_wrap=True)
        sys.exit(2)
