"""``dynamiccl doctor`` and ``dynamiccl plugin``: is everything there that a run needs, and if not, the fix."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynamiccl_ray.errors import ChannelError, ConfigError, RunError
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel, Status
from dynamiccl_ray.plugin_bridge.coverage import Coverage
from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments, shm_dir
from dynamiccl_ray.plugin_bridge.threads import thread_variables
from dynamiccl_ray.static.blocks import read_blocks, unsafe

TUNER_VERSIONS = range(2, 7)
PROFILER_VERSIONS = range(1, 7)
# A channel, and what NCCL's own shared-memory transport needs besides.
NEEDED_SHM_BYTES = 80 << 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def require_plugin() -> Path:
    """The plugin's path. Raises RunError if it was never built."""
    path = plugin_path()
    if not path.exists():
        raise RunError(f"{path} is missing: run `make native`, or reinstall the package")
    return path


def plugin_variables(job: str, threads: int = 0) -> dict[str, str]:
    """What every training process must export. NCCL loads each half by its own variable; both are needed.

    Raises ConfigError for a number of threads that does not exist.
    """
    more = thread_variables(threads)
    path = str(require_plugin())
    return {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path, "DYNAMICCL_JOB_ID": job, **more}


def static_variables(table: Path, threads: int = 0) -> dict[str, str]:
    """The same for a job that a static table decides for. Raises ConfigError, too, for one that the plugin would
    refuse."""
    more = thread_variables(threads)
    read_blocks(table)
    if problem := unsafe(table.absolute()):
        raise ConfigError(f"{table}: {problem}")
    path = str(require_plugin())
    return {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path, "DYNAMICCL_TABLE": str(table.absolute()), **more}


def diagnose(*, fix: bool = False) -> list[Check]:
    """All checks, in the order in which a user should look at them. With ``fix``, stale segments are removed."""
    checks: list[Callable[[], Check]] = [
        _plugin,
        _variables,
        _user_choice,
        _nccl,
        _shared_memory,
        lambda: _segments(fix),
        _ray,
    ]
    if os.environ.get("DYNAMICCL_TABLE"):
        checks.append(_static_table)
    return [check() for check in checks] + _jobs()


def _static_table() -> Check:
    path = Path(os.environ["DYNAMICCL_TABLE"])
    name, fix = "static table", "NCCL decides until it is mended; `dynamiccl table check` reads it as the plugin does"
    try:
        blocks = read_blocks(path)
        problem = unsafe(path)
    except ConfigError as e:
        return Check(name=name, status="fail", found=str(e), fix=fix)
    if problem:
        return Check(name=name, status="fail", found=f"DYNAMICCL_TABLE={path}: {problem}", fix=fix)
    found = "; ".join(f"{block.about}, digest {block.digest}" for block in blocks)
    ignored = " (DYNAMICCL_JOB_ID is not looked at)" if os.environ.get("DYNAMICCL_JOB_ID") else ""
    return Check(name=name, status="ok", found=f"{path} decides{ignored}: {found}")


def _plugin() -> Check:
    path = plugin_path()
    if not path.exists():
        return Check(
            name="plugin", status="fail", found=f"{path} is missing", fix="make native, or reinstall the package"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        return Check(name="plugin", status="fail", found=str(e), fix="rebuild it on this machine: make native")
    missing = [
        name
        for name in (
            *(f"ncclTunerPlugin_v{v}" for v in TUNER_VERSIONS),
            *(f"ncclProfiler_v{v}" for v in PROFILER_VERSIONS),
        )
        if not hasattr(library, name)
    ]
    if missing:
        return Check(name="plugin", status="fail", found=f"{path} lacks {missing}", fix="make -B native")
    return Check(
        name="plugin",
        status="ok",
        found=f"{path}: tuner v{TUNER_VERSIONS[0]}-v{TUNER_VERSIONS[-1]}, "
        f"profiler v{PROFILER_VERSIONS[0]}-v{PROFILER_VERSIONS[-1]}",
    )


def _variables() -> Check:
    ours = plugin_path()
    names = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN")
    found = {name: os.environ.get(name) for name in names}
    fix = 'in every training process: eval "$(dynamiccl plugin env --job NAME)"'
    if not any(found.values()):
        return Check(name="variables", status="warn", found=f"{' and '.join(names)} are not set here", fix=fix)
    wrong = [n for n, v in found.items() if v is None or not _is_ours(v, ours)]
    if wrong:
        return Check(
            name="variables",
            status="fail",
            found=", ".join(f"{n}={found[n] or '(not set)'}" for n in wrong) + "; tuner and profiler must both be ours",
            fix=fix,
        )
    return Check(name="variables", status="ok", found=f"both point at {ours.name}")


def _is_ours(value: str, ours: Path) -> bool:
    if value in ("dynamiccl", "libnccl-tuner-dynamiccl.so", "libnccl-profiler-dynamiccl.so"):
        return True
    return Path(value).exists() and Path(value).resolve() == ours.resolve()


def _user_choice() -> Check:
    chosen = [f"{n}={os.environ[n]}" for n in ("NCCL_ALGO", "NCCL_PROTO") if os.environ.get(n)]
    if chosen:
        return Check(
            name="NCCL_ALGO",
            status="warn",
            found=f"{' '.join(chosen)} wins over every tuner: collectives are measured, not tuned",
            fix="unset " + " ".join(c.split("=")[0] for c in chosen),
        )
    return Check(name="NCCL_ALGO", status="ok", found="NCCL_ALGO and NCCL_PROTO are not set")


def _nccl() -> Check:
    try:
        import torch

        version: Any = torch.cuda.nccl.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    except (ImportError, RuntimeError, AttributeError) as e:
        return Check(name="NCCL", status="warn", found=f"cannot be asked: {e}")
    if version is None:
        return Check(name="NCCL", status="warn", found="no GPU here: only emulated and measured fabrics can run")
    if version < (2, 21):
        return Check(name="NCCL", status="fail", found=f"{version}: too old", fix="NCCL 2.21 or later")
    if version < (2, 23):
        return Check(
            name="NCCL", status="warn", found=f"{version} has no profiler: static tables only", fix="NCCL 2.27"
        )
    if version < (2, 27):
        return Check(
            name="NCCL", status="warn", found=f"{version} has no GPU timers: host times", fix="NCCL 2.27 or later"
        )
    return Check(name="NCCL", status="ok", found=str(version))


def _shared_memory() -> Check:
    directory = shm_dir()
    try:
        fs = os.statvfs(directory)
    except OSError as e:
        return Check(name="shared memory", status="fail", found=f"{directory}: {e.strerror}", fix="mount a tmpfs there")
    free = fs.f_bavail * fs.f_frsize
    if not os.access(directory, os.W_OK):
        return Check(
            name="shared memory", status="fail", found=f"{directory} is not writable", fix=f"chmod 1777 {directory}"
        )
    if free < NEEDED_SHM_BYTES:
        return Check(
            name="shared memory",
            status="fail",
            found=f"{directory} has {free >> 20} MiB free; a rank and NCCL itself need {NEEDED_SHM_BYTES >> 20} MiB",
            fix="in a container: --shm-size=1g, or mount a larger tmpfs",
        )
    return Check(name="shared memory", status="ok", found=f"{directory}: {free >> 20} MiB free")


def _segments(fix: bool) -> Check:
    live, stale, foreign = 0, [], []
    for path in segments():
        try:
            with Channel(path, claim=False) as channel:
                if channel.alive:
                    live += 1
                else:
                    stale.append(path.name)
        except ChannelError as e:
            foreign.append(str(e))
    if foreign:
        return Check(
            name="segments",
            status="warn",
            found="; ".join(foreign),
            fix="plugin and control plane must be of one build: restart the job with this installation's plugin",
        )
    if stale and not fix:
        return Check(
            name="segments",
            status="warn",
            found=f"{len(stale)} left by dead processes: {', '.join(stale)}",
            fix="dynamiccl doctor --fix",
        )
    removed = len(remove_stale()) if fix else 0
    return Check(
        name="segments", status="ok", found=f"{live} live" + (f", {removed} stale ones removed" if removed else "")
    )


def _jobs() -> list[Check]:
    """By job: what becomes of its collectives, and what that costs."""
    seen: dict[str, list[Status]] = {}
    for path in segments():
        # Whatever is wrong with it has been said.
        with contextlib.suppress(ChannelError), Channel(path, claim=False) as channel:
            if channel.alive:
                seen.setdefault(channel.identity.job, []).append(channel.status)
    return [Check(name=f"job {job}", status="ok", found=_of_job(of)) for job, of in sorted(seen.items())]


def _of_job(segments: list[Status]) -> str:
    coverage = Coverage.sum(map(Coverage.of, segments))
    if not coverage.calls:
        return "no collective yet"
    bypassed = ", ".join(f"{cause} {coverage.share(n):.1%}" for cause, n in sorted(coverage.bypassed.items()))
    counts = (
        f"{coverage.calls:,} collectives over its ranks here: {coverage.share(coverage.tuned):.1%} tuned"
        + (f", bypassed: {bypassed}" if bypassed else "")
        + f"; {coverage.share(coverage.measured):.1%} measured, {coverage.share(coverage.not_profiled):.1%} not "
        f"profiled, {coverage.share(coverage.lost):.1%} lost"
    )
    duties = sorted({1 << status.duty for status in segments})
    one_in = " to ".join(str(n) for n in dict.fromkeys((duties[0], duties[-1])))
    share = max(status.overhead for status in segments)
    cost = f"the plugin takes {share:.2%} of a process's time" if share else "what the plugin takes is not measured yet"
    return f"{counts}; 1 window in {one_in} is profiled; {cost}"


def _ray() -> Check:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="Ray", status="fail", found="not installed", fix="pip install 'ray[rllib]'")
    address = os.environ.get("RAY_ADDRESS")
    if address and os.environ.get("RAY_AUTH_MODE", "token") == "token" and not _ray_token():
        return Check(
            name="Ray",
            status="warn",
            found=f"{version}, cluster at {address}, but no token",
            fix="RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token; or RAY_AUTH_MODE=disabled on both sides",
        )
    return Check(name="Ray", status="ok", found=f"{version}, {address or 'a local one will be started'}")


def _ray_token() -> bool:
    return bool(
        os.environ.get("RAY_AUTH_TOKEN")
        or os.environ.get("RAY_AUTH_TOKEN_PATH")
        or (Path.home() / ".ray" / "auth_token").exists()
    )
