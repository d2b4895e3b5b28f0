"""``dynamiccl advise``: is tuning worth it on your machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dynamiccl_ray.cli.output import AsJson, console, emit, stdout
from dynamiccl_ray.errors import ConfigError

if TYPE_CHECKING:
    from dynamiccl_ray.calibration.advice import Row


def advise(
    directory: Annotated[Path, typer.Argument(help="CSV tables of measurements, or logs of nccl-tests.")],
    name: Annotated[
        str | None, typer.Option(help="Of the machine whose logs these are; their directory's by default.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write: the gains over sizes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether tuning is worth it on machines that were measured, if only NCCL's own choice: for which sizes, how much,
    and what to do next."""
    from dynamiccl_ray.calibration.advice import advise as advice
    from dynamiccl_ray.calibration.cells import joined
    from dynamiccl_ray.calibration.samples import read_library
    from dynamiccl_ray.calibration.verdict import verdict

    library = read_library(directory, name)
    machines, rows = joined(library.machines), []
    with console.status("reading") as status:
        for machine in machines:
            status.update(f"{machine.name}: {len(machine)} rows")
            rows += advice(machine)
    if not rows:
        raise ConfigError(f"{directory}: a tuner chose in every row; measure NCCL's own choice and forced settings")
    said = verdict(rows, str(directory))
    if plot is not None:
        from dynamiccl_ray.calibration.advice_plot import draw_gains

        try:
            plot.write_bytes(draw_gains(rows))
        except OSError as e:
            raise ConfigError(f"--plot {plot}: cannot write it: {e.strerror}") from None
    if as_json:
        emit(
            {
                "rows": [row.as_dict() for row in rows],
                "verdict": vars(said),
                "left_out": dict(library.skipped),
                **({"plot": str(plot)} if plot else {}),
            }
        )
        return
    for shape in dict.fromkeys(_shape(row) for row in rows):
        _print([row for row in rows if _shape(row) == shape])
    for reason, count in library.skipped.items():
        console.print(f"left out, {count}: {reason}", highlight=False)
    stdout().print(str(said), highlight=False, soft_wrap=True)
    if plot is not None:
        stdout().print(f"plot: {plot}", highlight=False)


def _shape(row: Row) -> tuple[str, str, str, int, int]:
    return row.machine, row.run, row.collective, row.nodes, row.gpus_per_node


def _print(rows: list[Row]) -> None:
    from dynamiccl_ray.keys import bytes_name

    first = rows[0]
    table = Table(
        "size",
        "NCCL us",
        "best",
        "best us",
        "gain",
        "90 %",
        "from",
        title=f"{first.machine}: {first.collective} on {first.nodes}x{first.gpus_per_node} GPUs",
    )
    for row in rows:
        forecast = row.basis in ("model", "own times")
        table.add_row(
            bytes_name(row.bytes),
            _us(row.default_us),
            (row.best or "?") + (" ?" if row.best and forecast else ""),
            _us(row.best_us),
            "?" if row.gain is None else f"{row.gain:.2f}",
            f"{row.low:.2f} to {row.high:.2f}" if forecast else "",
            row.basis,
        )
    stdout().print(table)
    if why := next((row.why for row in rows if row.why), ""):
        stdout().print(f"nothing can be said of a gain: {why}", highlight=False)


def _us(time: float | None) -> str:
    return "?" if time is None else f"{time:.1f}" if time < 1000 else f"{time:.0f}"
