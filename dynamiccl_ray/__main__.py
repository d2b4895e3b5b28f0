"""``dynamiccl`` and ``python -m dynamiccl_ray`` are the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a command. In an installation without dependencies, as in a training image, it says what is there."""
    try:
        from dynamiccl_ray.cli.app import main as run
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("dynamiccl_ray"):
            raise
        sys.exit(
            f"error: {e.name} is not installed, so there is only what training processes need: `python -m "
            "dynamiccl_ray.plugin_bridge --job NAME` prints their environment; for the commands install the package "
            "with its dependencies"
        )
    run()


if __name__ == "__main__":
    main()
