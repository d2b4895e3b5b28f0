"""Builds the native parts into ``plugin_bridge/lib``; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def compile_native(out: Path) -> None:
    """Runs ``make native``: one place holds the compiler flags."""
    if shutil.which("make") is None or shutil.which(os.environ.get("CC", "gcc")) is None:
        raise SystemExit("building the NCCL plugin needs make and a C compiler (Debian: apt-get install gcc make)")
    subprocess.run(["make", "--no-print-directory", "-C", str(ROOT), "native", f"LIB={out.resolve()}"], check=True)


class BuildWithPlugin(build_py):
    def run(self) -> None:
        super().run()
        editable = getattr(self, "editable_mode", False)
        compile_native((ROOT if editable else Path(self.build_lib)) / "dynamiccl_ray" / "plugin_bridge" / "lib")
        if not editable:
            # A checkout reads them where they are.
            copy = Path(self.build_lib) / "dynamiccl_ray" / "data" / "experiments"
            shutil.copytree(ROOT / "experiments", copy, dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """Any Python 3, but one platform: the plugin is C."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": PlatformWheel})
