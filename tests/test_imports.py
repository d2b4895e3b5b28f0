"""The layers: who may import whom, and what a training process would pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dynamiccl_ray"
# From the bottom up. A layer imports itself and those below; those in one line import no other of their line.
LAYERS = (
    ("errors", "knobs", "arrays", "figures", "heap", "tensors", "cores"),
    ("overrides", "sizes"),
    ("validation",),
    ("settings", "keys"),
    ("shipped",),
    ("actions",),
    ("agent",),
    ("fabric",),
    ("workloads",),
    ("calibration", "config"),
    ("control",),
    ("static",),
    ("simulation",),
    ("baselines",),
    ("evaluation",),
    ("report",),
    ("plugin_bridge",),
    ("actors", "torch"),
    ("trainers",),
    ("cli",),
    ("__main__",),
)
# The command line and the public names reach every layer, but only inside their functions.
LAZY = {"cli", "__init__"}


def _modules() -> dict[str, Path]:
    """Every module's path, by name."""
    files = list(PACKAGE.glob("*.py"))
    for folder in PACKAGE.iterdir():
        if folder.is_dir():
            files += folder.resolve().rglob("*.py")
    return {_name(path): path for path in files}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "dynamiccl_ray" else ("dynamiccl_ray", *parts)
    return ".".join(parts).removesuffix(".__init__")


def _layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path, modules: dict[str, Path], *, top_only: bool) -> set[str]:
    """The project's modules that a file imports; only where it is loaded, or in its functions, too."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found


def test_layers_import_downwards_only() -> None:
    modules = _modules()
    height = {layer: n for n, line in enumerate(LAYERS) for layer in line}
    wrong = []
    for module, path in modules.items():
        layer = _layer(module)
        if layer == "__init__":
            continue
        for other in _imports(path, modules, top_only=layer in LAZY):
            if not other.startswith("dynamiccl_ray."):
                continue
            below = _layer(other)
            if below != layer and height[below] >= height[layer]:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = _modules()
    imports = {name: _imports(path, modules, top_only=False) & modules.keys() for name, path in modules.items()}
    # What only imports what is placed is placed; in a circle nothing ever is.
    placed: set[str] = set()
    while new := {name for name, of in imports.items() if name not in placed and of <= placed | {name}}:
        placed |= new
    assert sorted(modules.keys() - placed) == []


@pytest.mark.parametrize("folder", ["actors", "trainers", "plugin_bridge"])
def test_nothing_is_imported_by_a_name_that_a_user_may_have(folder: str) -> None:
    for path in [*_modules().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert folder not in {name.split(".")[0] for name in _imports(path, {}, top_only=False)}, path


def test_a_users_folders_of_the_same_names_are_not_ours(tmp_path: Path) -> None:
    for folder in ("actors", "trainers", "plugin_bridge"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('the user\\'s')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dynamiccl_ray.trainers.online.run"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)


def test_the_command_line_starts_without_torch_or_ray() -> None:
    code = (
        "import sys, dynamiccl_ray.cli.app; "
        "print([m for m in ('torch', 'ray', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_runner_does_not_import_torchs_compiler() -> None:
    """RLlib has torch do so where a runner has a seed, and there are as many runners as there are nodes."""
    code = (
        "import sys\n"
        "from dynamiccl_ray.actors.runner import Bystander\n"
        "from dynamiccl_ray.config.experiment import Online\n"
        "from dynamiccl_ray.trainers.online.learning import ppo_config\n"
        "experiment = Online.model_validate({'name': 'x', 'seed': 1, 'fabric': {'kind': 'nccl'}})\n"
        "Bystander(config=ppo_config(experiment, coordination=None))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
