"""The public interface is what docs/extending.md says, and its examples run."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import dynamiccl_ray
from dynamiccl_ray.agent import reward

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
TERM = next(block for block in BLOCKS if block.startswith("# in Reward"))
PUBLIC = {
    "Action": None,
    "DynamicclError": None,
    "Method": ["scenario", "rng"],
    "Physics": None,
    "Scenario": None,
    "Trace": None,
    "action_of": ["flat"],
    "evaluate": ["curriculum", "nets", "scenarios", "procedure", "processes", "measured_nodes", "progress", "played"],
    "find_cluster": ["name", "overrides"],
    "load_curriculum": ["path", "overrides"],
    "load_experiment": ["path", "overrides"],
    "model_scenario": None,
    "read_run": ["directory"],
    "report_fault": [],
    "report_step": ["step", "iteration_s", "loss"],
    "run_method": ["scenario", "factory", "steps", "seed"],
    "run_online": ["experiment", "directory", "serial", "resume", "progress", "say"],
    "threads": ["count"],
    "train": ["curriculum", "out", "resume", "runners", "learners", "processes", "progress"],
    "write_report": ["run"],
}


def test_the_public_interface_changes_only_on_purpose() -> None:
    assert sorted(dynamiccl_ray.__all__) == sorted(PUBLIC)
    for name, parameters in PUBLIC.items():
        found = getattr(dynamiccl_ray, name)
        assert found.__doc__
        if parameters is not None:
            assert list(inspect.signature(found).parameters) == parameters, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynamiccl_ray.nothing


def test_no_module_takes_a_public_name() -> None:
    """Once imported, a module is an attribute of its package, and what was there under its name is gone."""
    assert not {module.name for module in pkgutil.iter_modules(dynamiccl_ray.__path__)} & PUBLIC.keys()


def test_reporting_a_step_loads_neither_torch_nor_ray() -> None:
    code = "import sys, dynamiccl_ray; dynamiccl_ray.report_step(0, 0.1); print({'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block is not TERM], ids=lambda block: block.split()[1])
def test_an_example_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/extending.md", "exec"), {})


def test_a_new_term_is_two_lines_of_one_file() -> None:
    weight, entry = re.match(r"# in Reward\n(.*)# in _COST\n(.*)", TERM, re.DOTALL).groups()  # type: ignore[union-attr]
    source = inspect.getsource(reward)
    last_weight, last_entry = "    fault: NotNegative = 1.0\n", '    "fault": lambda _, x: x.fault,\n'
    assert source.count(last_weight) == source.count(last_entry) == 1
    changed = ModuleType("changed")
    sys.modules["changed"] = changed
    try:
        patched = source.replace(last_weight, weight + last_weight).replace(last_entry, last_entry + entry)
        exec(compile(patched, "reward.py", "exec"), changed.__dict__)
        inputs = changed.Inputs(
            log_speedup=np.array([0.1, 0.2]),
            switched=np.zeros(2, np.bool_),
            probed=np.zeros(2, np.bool_),
            congestion=np.zeros(2),
            tier=np.zeros(2),
            sm_share=np.array([0.05, 0.5]),
        )
        assert "wide" in changed.TERMS
        parts = changed.terms(changed.Reward(), inputs)
        assert parts["wide"].tolist() == [0.0, -0.25]
        assert "wide" not in changed.terms(changed.Reward().without(["wide"]), inputs)
    finally:
        del sys.modules["changed"]
