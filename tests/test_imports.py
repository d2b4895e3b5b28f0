"""The layers: who may import whom, and what a training process would pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("dynamiccl_ray", "plugin_bridge", "actors", "trainers")
# The command line reaches every layer, but only inside its functions.
LAZY = {"dynamiccl_ray/cli.py", "dynamiccl_ray/cli_learning.py"}


def _imports(path: Path, *, top_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_imports_one_above_it(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    files = list((ROOT / layer).rglob("*.py"))
    assert files
    for path in files:
        name = str(path.relative_to(ROOT))
        assert not _imports(path, top_only=name in LAZY) & above, name


def test_the_command_line_starts_without_torch_or_ray() -> None:
    code = (
        "import sys, dynamiccl_ray.cli; "
        "print([m for m in ('torch', 'ray', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_plugin_links_libc_only() -> None:
    plugin = ROOT / "plugin_bridge" / "lib" / "libnccl-tuner-dynamiccl.so"
    needed = subprocess.run(["readelf", "-d", str(plugin)], capture_output=True, text=True, check=True).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert libraries == ["libc.so.6"]
