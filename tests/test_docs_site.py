"""What the documentation site makes from the code. `make docs` builds it, and checks every link."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from dynamiccl_ray.actors.metrics import series
from dynamiccl_ray.config.experiment import Online

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import hooks  # noqa: E402
import reference  # noqa: E402

PAGES = reference.pages()


def test_the_reference_has_every_command_setting_and_metric() -> None:
    for command in ("demo", "online", "table check", "plugin env", "bench activation"):
        assert f"`dynamiccl {command}`" in PAGES["reference/cli.md"]
    assert all(f"| `{name}` |" in PAGES["reference/yaml.md"] for name in Online.model_fields)
    assert all(f"`{metric['name']}`" in PAGES["reference/metrics.md"] for metric in series())


def test_the_environment_variables_are_those_of_the_code() -> None:
    used = set()
    for folder in ("dynamiccl_ray", "plugin_bridge", "actors", "trainers"):
        for path in (ROOT / folder).rglob("*.[chp]*"):
            if path.suffix in (".c", ".h", ".py"):
                used |= set(re.findall(r"\"(DYNAMICCL_[A-Z_]+)\"", path.read_text()))
    assert used == {name for name in reference.ENVIRONMENT if name.startswith("DYNAMICCL_")}


def test_links_are_as_the_site_has_its_pages() -> None:
    assert hooks.linked("[a](docs/soak.md#the-bound)", "README.md") == "[a](soak.md#the-bound)"
    assert hooks.linked("[a](../README.md)", "examples/README.md") == "[a](index.md)"
    assert hooks.linked("[a](../benchmarks/README.md)", "docs/costs.md") == "`benchmarks/README.md`"
    assert hooks.linked("[a](https://example.org/x.md)", "README.md") == "[a](https://example.org/x.md)"


def test_every_page_has_its_place() -> None:
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"'{path.name}'" not in nav] == []
