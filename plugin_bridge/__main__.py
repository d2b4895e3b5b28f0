"""``python -m dynamiccl_ray.plugin_bridge --job NAME`` prints what ``dynamiccl plugin env`` does, in a training image
that has neither Ray nor the command line's libraries."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from dynamiccl_ray.errors import DynamicclError
from dynamiccl_ray.plugin_bridge.doctor import plugin_variables, static_variables


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dynamiccl_ray.plugin_bridge",
        description='The variables to export in every training process: eval "$(... --job NAME)".',
    )
    parser.add_argument("--job", default="default", help="job id that the run will look for")
    parser.add_argument("--table", type=Path, help="a static table, instead of a job that a run finds")
    parser.add_argument(
        "--threads", type=int, default=0, help="of NCCL's kernels, for all communicators; 0: NCCL's own"
    )
    given = parser.parse_args()
    try:
        job, table, threads = given.job, given.table, given.threads
        variables = static_variables(table, threads) if table else plugin_variables(job, threads)
    except DynamicclError as e:
        sys.exit(f"error: {e}")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
