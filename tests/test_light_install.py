"""What a training image needs: the wheel without its dependencies, beside the PyTorch that is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from dynamiccl_ray.plugin_bridge import native_dir

ROOT = Path(__file__).parents[1]
LIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
TABLE = "dynamiccl-table 1\ncommunicator ranks=8 nodes=2 max_channels=16\nall_reduce 1024 - any tree ll - -\nend\n"
# What a training process may load beside Python's own: PyTorch, NumPy and what they bring.
_TRAIN = """
import sys
import dynamiccl_ray.torch
import dynamiccl_ray
dynamiccl_ray.report_step(0, 0.1, 1.0)
dynamiccl_ray.torch.step(loss=1.0)
dynamiccl_ray.torch.step(loss=1.0)
assert dynamiccl_ray.torch._boundaries.count == 2
print(dynamiccl_ray.__file__)
"""


@pytest.mark.parametrize("name", ["libnccl-tuner-dynamiccl.so", "libdynamiccl-channel.so"])
def test_what_training_processes_load_needs_libc_and_nothing_else(name: str) -> None:
    said = subprocess.run(["readelf", "-d", str(native_dir() / name)], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", said.stdout)
    assert needed
    assert set(needed) <= LIBC


def test_the_one_line_loads_torch_and_numpy_and_no_other_library_of_ours() -> None:
    code = "import sys, torch, numpy; before = set(sys.modules)\nimport dynamiccl_ray.torch\n"
    code += "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) <= {"dynamiccl_ray", "numpy", "torch"}


def printed(*command: str) -> str:
    return subprocess.run((sys.executable, "-m", *command), capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("options", [("--job", "light"), ("--threads", "256"), ("--table", "TABLE")])
def test_what_an_image_without_ray_exports_is_what_the_command_does(options: tuple[str, ...], tmp_path: Path) -> None:
    table = tmp_path / "my.table"
    table.write_text(TABLE)
    table.chmod(0o600)
    options = tuple(str(table) if of == "TABLE" else of for of in options)
    light = printed("dynamiccl_ray.plugin_bridge", *options)
    assert light == printed("dynamiccl_ray", "plugin", "env", *options)
    assert options[1] in light


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_without_dependencies_serves_a_training_process(tmp_path: Path) -> None:
    """As docs/cluster.md says it, in an environment that has PyTorch and nothing else that the package asks for."""
    source = tmp_path / "source"
    # Without what is built: the wheel builds its own.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "lib", "runs", "shared")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    build = ("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}", str(source))
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", f"--python={python}")
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True, capture_output=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in _with_dependencies("torch", "numpy"):
        if not (packages / name).exists():
            (packages / name).symlink_to(distribution("torch").locate_file(name))

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DYNAMICCL"))}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    for absent in ("ray", "pydantic", "typer"):
        assert run(str(python), "-c", f"import {absent}").returncode == 1
    trained = run(str(python), "-c", _TRAIN)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.strip().startswith(str(packages))
    said = run("bash", "-ec", f'eval "$({python} -m dynamiccl_ray.plugin_bridge --job light)" && ls $NCCL_TUNER_PLUGIN')
    assert said.stdout.strip() == str(packages / "dynamiccl_ray/plugin_bridge/lib/libnccl-tuner-dynamiccl.so")
    (tmp_path / "my.table").write_text(TABLE)
    (tmp_path / "my.table").chmod(0o600)
    said = run(str(python), "-m", "dynamiccl_ray.plugin_bridge", "--table", "my.table")
    assert f"DYNAMICCL_TABLE={tmp_path}/my.table" in said.stdout, said.stderr
    refused = run(str(python.with_name("dynamiccl")), "online", "x.yaml")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: typer is not installed"), refused.stderr
    assert refused.stderr.count("\n") == 1


def _with_dependencies(*names: str) -> set[str]:
    """What lies in site-packages of these distributions, and of all that they need."""
    found: set[str] = set()
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            of = distribution(name)
        except PackageNotFoundError:
            continue  # for another system, or a choice
        found |= {file.parts[0] for file in of.files or () if not file.parts[0].startswith(("..", "__pycache__"))}
        waiting += [re.split(r"[^\w.-]", needed)[0] for needed in of.requires or () if "extra ==" not in needed]
    return found
