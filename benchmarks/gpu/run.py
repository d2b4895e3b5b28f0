"""The plugin and the loop on this machine's GPUs: python benchmarks/gpu/run.py. See README.md beside it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# As a script only its own folder is on the path, and that one must not be: its modules have common names.
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent)]

from benchmarks.gpu import machine, report  # noqa: E402
from benchmarks.gpu.options import Options, parse, ranks_for  # noqa: E402
from dynamiccl_ray.errors import ConfigError, DynamicclError  # noqa: E402


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout can be piped."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 for right or skipped, 1 for wrong, 2 for what cannot be run as asked."""
    try:
        options = parse(arguments)
        if options.dry_run:
            return dry_run(options)
        facts = machine.ask()
        why = machine.why_not(facts)
        if why is not None:
            print(json.dumps({"skipped": why}) if options.as_json else f"skipped: {why}")
            return 0
        return run(options, facts, ranks_for(options.ranks, len(facts["gpus"])))
    except (DynamicclError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def dry_run(options: Options) -> int:
    """Prints the plan. NCCL is not asked what it offers, so a usual set is assumed."""
    from benchmarks.gpu import plan

    one = ranks_for(options.ranks, 1)
    lines = plan.outline(one, quick=options.quick, sections=options.sections, runs=options.runs)
    print(json.dumps({"plan": lines}, indent=1) if options.as_json else "\n".join(lines))
    return 0


def run(options: Options, facts: machine.Facts, ranks: int) -> int:
    """Runs the sections; the report is written after each of them, so that a crash leaves what was found."""
    from benchmarks.gpu import check, communicators, graphs, measure, overhead
    from benchmarks.gpu.context import Context

    sections: dict[str, Any] = {}
    modules = {"check": check, "measure": measure, "overhead": overhead, "graphs": graphs}
    runs = {name: module.run for name, module in modules.items()} | {"communicators": communicators.run}
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as scratch:
        context = Context(options=options, facts=facts, ranks=ranks, directory=Path(scratch), say=say)

        def found() -> report.Document:
            return report.document(
                date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
                command=shlex.join(["python", "benchmarks/gpu/run.py", *sys.argv[1:]]),
                commit=machine.commit(),
                ranks=ranks,
                facts=facts,
                environment={k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_"))},
                sections=sections,
                failures=context.failures,
                notes=context.notes,
            )

        name = report.free_name(options.out, report.name_of(found()))
        for section in ("check",) if options.repeat else options.sections:
            try:
                sections[section] = runs[section](context)
            except ConfigError:
                raise
            except DynamicclError as e:
                sections[section] = {"error": str(e)}
                context.fail(section, str(e))
            paths = report.write(found(), options.out, name)
        if context.failures:
            shutil.copytree(scratch, options.out / f"{name}-logs", dirs_exist_ok=True)
        if options.as_json:
            print(json.dumps(found(), indent=1, allow_nan=False))
        say(f"report: {', '.join(map(str, paths))}")
        return 1 if context.failures else 0


if __name__ == "__main__":
    sys.exit(main())
