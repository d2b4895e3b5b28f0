"""A cluster of our own is nobody else's: whoever gets into Ray runs code as its user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# What a driver gets that knows the token, and one that has none.
_CODE = """
from dynamiccl_ray.trainers.common.cluster import ask_for_a_token, start_ray
ask_for_a_token()
import os, subprocess, sys
import ray
start_ray()
address = ray.get_runtime_context().gcs_address
code = f"import ray; ray.init({address!r}); print(ray.get(ray.remote(lambda: 8).remote()))"
ours = dict(os.environ)
without = {k: v for k, v in ours.items() if not k.startswith("RAY_AUTH")}
# Ray asks 20 times, a second apart.
for env in (ours, without | {"RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "1"}):
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=150)
    print(done.returncode == 0 and done.stdout.strip())
"""


@pytest.mark.timeout(180)
def test_a_local_cluster_asks_for_a_token() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["8", "False"]


def test_what_the_environment_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamiccl_ray.trainers.common.cluster import ask_for_a_token

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ask_for_a_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    ask_for_a_token()
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_cluster_that_somebody_else_has_started_here_is_not_joined() -> None:
    """Nobody named it; Ray would find it in its own folder."""
    code = "from dynamiccl_ray.trainers.common import cluster\ncluster.start_ray()\n"
    code += "import ray\nprint(ray.nodes()[0]['Alive'])"
    # Ray's sockets are below it, and their names may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        (Path(directory) / "ray").mkdir()
        (Path(directory) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": directory}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@pytest.mark.timeout(180)
def test_what_ray_notices_of_a_cluster_is_not_said_on_stdout() -> None:
    """Where a node is lost while a command asks, its JSON stays JSON."""
    # The driver hears of it once it has subscribed, which Ray does at some time after it has started: it is said until
    # it was heard.
    code = "from dynamiccl_ray.trainers.common import cluster\ncluster.start_ray(log_to_driver=False)\n"
    code += "import sys, threading, ray\nfrom ray._private.utils import publish_error_to_driver\n"
    code += "heard = threading.Event()\n"
    code += "threading.Thread(target=lambda: (sys.stdin.read(), heard.set()), daemon=True).start()\n"
    code += "while not heard.wait(0.2):\n"
    code += "    client = ray._private.worker.global_worker.gcs_client\n"
    code += "    publish_error_to_driver('node', 'a node is lost', client)\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as running:
        try:
            assert running.stderr
            assert any("a node is lost" in line for line in running.stderr)
            # Ends it, for there is nothing more to read.
            assert running.communicate(timeout=150)[0] == ""
        finally:
            running.kill()
