"""Learns, while a PyTorch job trains, which NCCL configuration each collective should use.

What is named here is the public interface, explained in docs/extending.md. A name is imported when it is first used, so
that a training script which only reports its steps loads neither PyTorch's distributed parts nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dynamiccl_ray.actions import Action, action_of
    from dynamiccl_ray.baselines.method import Method
    from dynamiccl_ray.baselines.run import Trace
    from dynamiccl_ray.baselines.run import run as run_method
    from dynamiccl_ray.config.curriculum import load_curriculum
    from dynamiccl_ray.config.experiment import load as load_experiment
    from dynamiccl_ray.errors import DynamicclError
    from dynamiccl_ray.evaluation.suite import assess as evaluate
    from dynamiccl_ray.fabric.physics import Physics
    from dynamiccl_ray.fabric.presets import find_cluster
    from dynamiccl_ray.plugin_bridge.job import report_fault, report_step
    from dynamiccl_ray.plugin_bridge.threads import threads
    from dynamiccl_ray.report.data import read_run
    from dynamiccl_ray.report.page import write_report
    from dynamiccl_ray.simulation.scenario import Scenario
    from dynamiccl_ray.simulation.scenario import modelled as model_scenario
    from dynamiccl_ray.trainers.model.curriculum import run_curriculum as train
    from dynamiccl_ray.trainers.online.run import run_online

__all__ = [
    "Action",
    "DynamicclError",
    "Method",
    "Physics",
    "Scenario",
    "Trace",
    "action_of",
    "evaluate",
    "find_cluster",
    "load_curriculum",
    "load_experiment",
    "model_scenario",
    "read_run",
    "report_fault",
    "report_step",
    "run_method",
    "run_online",
    "threads",
    "train",
    "write_report",
]

_HOMES: Final = {
    "Action": "actions:Action",
    "DynamicclError": "errors:DynamicclError",
    "Method": "baselines.method:Method",
    "Physics": "fabric.physics:Physics",
    "Scenario": "simulation.scenario:Scenario",
    "Trace": "baselines.run:Trace",
    "action_of": "actions:action_of",
    "evaluate": "evaluation.suite:assess",
    "find_cluster": "fabric.presets:find_cluster",
    "load_curriculum": "config.curriculum:load_curriculum",
    "load_experiment": "config.experiment:load",
    "model_scenario": "simulation.scenario:modelled",
    "read_run": "report.data:read_run",
    "report_fault": "plugin_bridge.job:report_fault",
    "report_step": "plugin_bridge.job:report_step",
    "run_method": "baselines.run:run",
    "run_online": "trainers.online.run:run_online",
    "threads": "plugin_bridge.threads:threads",
    "train": "trainers.model.curriculum:run_curriculum",
    "write_report": "report.page:write_report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _HOMES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), original)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
