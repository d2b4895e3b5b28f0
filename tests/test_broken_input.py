"""Whatever a user gets wrong ends in one short message and exit code 2: never a traceback, never accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl_ray.cli.app import main
from dynamiccl_ray.fabric.presets import DIRECTORY

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_CHARS = 6, 600
FABRIC = "fabric: {kind: measured}\n"
GOOD = f"name: x\n{FABRIC}stop: {{rounds: 1}}\n"
CALLS = "collectives: [{collective: all_reduce, sizes_bytes: [%s]}]"
EMULATED = "name: x\nstop: {rounds: 1}\nfabric: {kind: emulated, cluster: %s, " + CALLS + "}\n"
COMM = "{name: a, ranks: 4, nodes: 2, step: [{collective: all_reduce, bytes: 4KiB}]}"
TRACE = "kind: trace\nname: x\ncommunicators: [%s]\n"
PRESET = (DIRECTORY / "dgx-h100-ndr.yaml").read_text()
CURRICULUM = (ROOT / "experiments" / "curricula" / "default.yaml").read_text()
WORKLOAD = (ROOT / "experiments" / "workloads" / "phi2-tp.yaml").read_text()
STAGED = "name: x\nheld_out: [{cluster: cloud-tcp, nodes: [2]}]\n"
STAGED += "stages: [{name: a, places: [{cluster: %s, nodes: [1]}]%s}]\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)

# The YAML, and what is said of it.
EXPERIMENTS = {
    "a key is misspelt": (GOOD + "epochs:\n  most: 3\n", "x.yaml:5: unknown key 'epochs.most' (value 3); did"),
    "a section is misspelt": (GOOD + "polcy: default\n", "unknown key 'polcy' (value 'default'); did you mean"),
    "a key of elsewhere": (GOOD + "lr: 1\n", "did you mean 'ppo.lr'?"),
    "a key of another kind": (GOOD.replace("measured", "nccl, rate_hz: 3"), "unknown key 'fabric.rate_hz' (value 3)"),
    "a wrong kind": (GOOD.replace("measured", "measurd"), "fabric.kind = 'measurd': must be one of 'measured'"),
    "no kind": (GOOD.replace("kind: measured", "nodes: 2"), "'fabric.kind' is required; it must be one of 'measured'"),
    "no fabric": (GOOD.replace(FABRIC, ""), "'fabric' is required"),
    "a fabric that is a number": (GOOD.replace("{kind: measured}", "3"), "x.yaml:2: fabric = 3"),
    "a wrong mode": (GOOD + "mode: activ\n", "mode = 'activ': must be one of 'off', 'observe', 'shadow', 'active'"),
    "a key twice": (GOOD + "seed: 1\nname: y\n", "x.yaml:5: 'name' is given twice, first in line 1"),
    "a key twice, deep": (GOOD + "ppo:\n  lr: 1\n  lr: 2\n", "x.yaml:6: 'lr' is given twice, first in line 5"),
    "least above most": (GOOD + "epochs: {watch_s: 3, most_s: 2}\n", "watch_s is 3; it must be at most most_s, 2"),
    "entropy that rises": (GOOD + "ppo: {entropy: 0}\n", "entropy_end is 0.001; it must be at most entropy, 0"),
    "bits": (EMULATED % ("dgx-h100-ndr", "4Gb"), "'Gb' counts bits"),
    "a size in lower case": (EMULATED % ("dgx-h100-ndr", "4gib"), "'gib' is no unit of bytes"),
    "part of a byte": (EMULATED % ("dgx-h100-ndr", "1.3B"), "no whole number of bytes"),
    "a negative size": (EMULATED % ("dgx-h100-ndr", "-4"), "sizes_bytes.0 = -4"),
    "an absurd size": (EMULATED % ("dgx-h100-ndr", "9999TiB"), "less than or equal to 1099511627776"),
    "absurdly many nodes": (EMULATED % ("dgx-h100-ndr, nodes: 99999999999", "4KiB"), "fabric.nodes = 99999999999"),
    "a thousand processes": (
        EMULATED % ("dgx-h100-ndr, nodes: 500, processes: {nodes: 250, ranks_per_node: 4}", "4KiB"),
        "1000 of them on one machine",
    ),
    "a preset is misspelt": (EMULATED % ("dgx-h100-nd", "4KiB"), "did you mean 'dgx-h100-ndr'?"),
    "no such cluster file": (EMULATED % ("no/where.yaml", "4KiB"), "cannot read the cluster"),
    "a directory as a cluster": (EMULATED % ("../", "4KiB"), "Is a directory"),
    "a directory as a policy": (GOOD + "policy: .\n", "is no file; name a policy that"),
    "a cluster said twice": (
        "name: x\nfabric: {kind: nccl, cluster: dgx-h100-ndr, inter: ib}\n",
        "inter: dgx-h100-ndr says that already",
    ),
    "no such measurements": (GOOD.replace("measured", "measured, files: [a.csv]"), "a.csv is no file; name a CSV"),
    "not a number": (GOOD + "ppo: {lr: .nan}\n", "ppo.lr = nan"),
    "a rate of learning": (GOOD + "ppo: {lr: 1.0e+99}\n", "ppo.lr = 1e+99: Input should be less than or equal to 1"),
    "a name that is a path": (GOOD.replace("x", "../../x", 1), "x.yaml:1: name = '../../x'"),
    "no name": (GOOD.replace("x", "''", 1), "x.yaml:1: name = ''"),
    "an infinite number": (GOOD + "ppo: {lr: .inf}\n", "ppo.lr = inf"),
    "a text for a number": (GOOD + "seed: one\n", "seed = 'one'"),
    "a number that is too long": (GOOD + "seed: " + "9" * 5000 + "\n", "not YAML"),
    "markup": (GOOD + "mode: '[/red]'\n", "mode = '[/red]'"),
    "many mistakes": ("".join(f"unknown{i}: 1\n" for i in range(100)), "and 99 more"),
    "a long key": (GOOD + "k" * 900 + ": 1\n", "unknown key 'kkk"),
    "a list": ("- a\n- b\n", "expected a mapping of settings, found list"),
    "nothing": ("", "expected a mapping of settings, found NoneType"),
    "an open bracket": (GOOD + "ppo: {lr: 1\n", "x.yaml:5: not YAML"),
    "a tab": (GOOD + "ppo:\n\tlr: 1\n", "x.yaml:5: not YAML"),
    "an alias bomb": (BOMB, "each alias counted as what it stands for"),
    "a python object": (GOOD + "seed: !!python/object/apply:os.getpid []\n", "not YAML"),
    "a trace and collectives": (
        EMULATED % (f"dgx-h100-ndr, trace: {{kind: trace, name: x, communicators: [{COMM}]}}", "4KiB"),
        "give exactly one of collectives and trace",
    ),
    "no such trace": (EMULATED.replace(CALLS, "trace: nowhere.yaml") % "dgx-h100-ndr", "cannot read the trace"),
    "a played job without an end": ("name: x\n" + FABRIC, "a played job runs for ever"),
}  # fmt: skip
OTHERS = {
    "stage: rounds": ("train", STAGED % ("dgx-v100", ", least_rounds: 9, most_rounds: 3"), "least_rounds is 9"),
    "stage: phases": ("train", STAGED % ("dgx-v100", ", least_phases: 3"), "least_phases is 3; it must be at most"),
    "stage: spread": ("train", STAGED % ("dgx-v100", ", spread: 3"), "stages.0.spread = 3: Input should be less than"),
    "stage: surprise": ("train", STAGED % ("dgx-v100", ", surprise: 3"), "stages.0.surprise = 3: Input should be less"),
    "a curriculum's rate": ("train", CURRICULUM + "ppo: {lr: 2}\n", "ppo.lr = 2: Input should be less than or equal"),
    "a curriculum's last rate": ("train", CURRICULUM + "ppo: {lr_end: 2}\n", "ppo.lr_end = 2: Input should be less"),
    "a curriculum's name": ("train", CURRICULUM.replace("name: default", "name: ../x"), "name = '../x'"),
    "stage: a list of mistakes": ("train", STAGED % ("dgx-v10", ", promote: 2"), "x.yaml: 2 mistakes"),
    "no stages": ("train", "name: x\nheld_out: []\nstages: []\n", "x.yaml: 2 mistakes"),
    "held out and learned": ("train", STAGED % ("cloud-tcp", ""), "held_out: cloud-tcp is learned from, too"),
    "a place without a cluster": ("train", STAGED % ("dgx-v10", ""), "did you mean 'dgx-v100'?"),
    "a huge pool": ("train", CURRICULUM + "streams: {pool: 99999999999}\n", "streams.pool = 99999999999"),
    "a teacher that comes": ("train", CURRICULUM + "ppo: {teacher: 0, teacher_end: 1}\n", "must be at most teacher, 0"),
    "an experiment for a curriculum": ("train", GOOD, "'stages' is required"),
    "cluster: a wrong link": ("fabric show", PRESET.replace("nvlink", "nvlnk"), "did you mean 'nvlink'?"),
    "cluster: no belief": ("fabric show", PRESET[: PRESET.index("belief")], "'belief' is required"),
    "workload: no such model": ("workload show", WORKLOAD.replace("Phi-2", "Phi-9"), "model = 'Phi-9'; there are"),
    "workload: absurd": ("workload show", WORKLOAD + "micro_batches: 99999999999\n", "micro_batches = 99999999999"),
    "workload: bits": ("workload show", WORKLOAD + "gradients: {bucket_bytes: 25Mb}\n", "'Mb' counts bits"),
    "trace: no communicators": ("workload show", TRACE % "", "communicators = []"),
    "trace: more nodes": ("workload show", TRACE % COMM.replace("nodes: 2", "nodes: 8"), "4 ranks cannot be on"),
    "trace: one rank": ("workload show", TRACE % COMM.replace("ranks: 4", "ranks: 1"), "ranks = 1"),
    "trace: a wrong collective": ("workload show", TRACE % COMM.replace("all_reduce", "send"), "collective = 'send'"),
    "trace: nothing is called": ("workload show", TRACE % "{name: a, ranks: 4, nodes: 2}", "a: give its calls"),
    "trace: no step": ("workload show", TRACE % COMM.replace("step", "once"), "none has a step"),
    "trace: a name twice": ("workload show", TRACE % f"{COMM}, {COMM}", "'a' is the name of two"),
    "trace: absurd": ("workload show", TRACE % COMM.replace("ranks", "repeat: 99999, ranks"), "99999 calls in step"),
    "workload: dust": (
        "workload show",
        WORKLOAD + "gradients: {schedule: partitioned, partition_bytes: 1B}\n",
        "make more than 1000000 messages",
    ),
}  # fmt: skip
OVERRIDES = {
    "learning.lr=3e-4": "--set learning.lr=3e-4: unknown key 'learning.lr'; did you mean 'ppo.lr'?",
    "ppo.lrr=1": "--set ppo.lrr=1: unknown key 'ppo.lrr' (value 1); did you mean 'lr'?",
    "ppo.lr=fast": "--set ppo.lr=fast: ppo.lr = 'fast'",
    "ppo.lr": "expected KEY=VALUE",
    "=1": "expected KEY=VALUE",
    "ppo..lr=1": "expected KEY=VALUE",
    "ppo.lr=[": "--set ppo.lr=[: not YAML",
    "fabric.kind=nccll": "--set fabric.kind=nccll: fabric.kind = 'nccll': must be one of",
    "fabric.events.3.latency=1": "the file has no list fabric.events",
    "name.x=1": "name is 'x' here, which has no settings of its own",
    "stop.rounds=0": "--set stop.rounds=0: stop.rounds = 0",
}


def _said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command line says of wrong input."""
    monkeypatch.setattr(sys, "argv", ["dynamiccl", *arguments])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    _is_short(err)
    return err


def _is_short(said: str) -> None:
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= MOST_LINES, said
    assert 0 < len(said) <= MOST_CHARS, said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "says"), EXPERIMENTS.values(), ids=EXPERIMENTS.keys())
def test_a_broken_experiment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (here / "x.yaml").write_text(text)
    assert says in _said(capsys, monkeypatch, "online", "x.yaml", "--serial", "--out", "run")
    assert not (here / "run" / "summary.json").exists()


@pytest.mark.parametrize(("command", "text", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_another_broken_yaml(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, text: str, says: str
) -> None:
    (here / "x.yaml").write_text(text)
    assert says in _said(capsys, monkeypatch, *command.split(), "x.yaml")


@pytest.mark.parametrize(("override", "says"), OVERRIDES.items(), ids=OVERRIDES.keys())
def test_a_broken_override(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, override: str, says: str
) -> None:
    (here / "x.yaml").write_text(GOOD)
    assert says in _said(capsys, monkeypatch, "online", "x.yaml", "--set", override)


def test_an_override_of_a_list_that_is_too_short(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _said(capsys, monkeypatch, "train", "default", "--set", "stages.7.promote=1")
    assert "stages is a list of 3; give an index below that" in said


def _latin1(path: Path) -> None:
    path.write_bytes("name: Zürich\n".encode("latin-1"))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_latin1, "not UTF-8: invalid start byte at byte 7"),
        (_huge, "a file of settings may have 4194304 bytes"),
        (lambda path: path.symlink_to("/dev/zero"), "a file of settings may have 4194304 bytes"),
        (lambda path: path.mkdir(), "cannot read the experiment: Is a directory"),
        (lambda path: path.symlink_to(path), "cannot read the experiment: Too many levels of symbolic links"),
        (lambda path: None, "cannot read the experiment: No such file or directory"),
    ],
    ids=["latin-1", "huge", "a device", "a directory", "a loop", "missing"],
)
def test_a_file_that_is_none(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    says: str,
) -> None:
    make(here / "x.yaml")
    assert says in _said(capsys, monkeypatch, "online", "x.yaml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("online x.yaml --serial --out x.yaml", "--out x.yaml: cannot write there: File exists"),
        ("online x.yaml --serial --out x.yaml/run", "--out x.yaml/run: cannot write there: Not a directory"),
        ("train default --out x.yaml", "--out x.yaml: cannot write there: File exists"),
        ("online x.yaml --serial --resume none", "none"),
        ("online default", "no experiment 'default'; give the path of a YAML, or one of emulated-dgx-h100"),
        ("online p5en-16node", "did you mean 'p5en-16nodes'?"),
        ("train defaults", "did you mean 'default'?"),
        ("evaluate default --checkpoint none.pt", "none.pt"),
        ("evaluate default --checkpoint .", "Is a directory"),
        ("fabric show dgx-v10", "did you mean 'dgx-v100'?"),
        ("fabric show dgx-v100 --collective all_redue", "--collective is 'all_redue'"),
        ("fabric show dgx-v100 --nodes 2 --out none/map.png", "--out none/map.png: cannot write it"),
        ("fabric show dgx-v100 --nodes 2 --out .", "--out .: cannot write it: Is a directory"),
        ("fabric belief --cases . --out out", "."),
        ("fabric calibrate x.yaml --out y.yaml", "x.yaml is not a directory"),
        ("fabric validate . --params x.yaml", "holds no measurements"),
        ("workload show phi2-pt", "did you mean 'phi2-tp'?"),
        ("workload show phi2-tp --rank 9", "--rank 9"),
        ("workload reproduce --facts .", "."),
        ("explain x.yaml", "x.yaml"),
        ("online x.yaml --serial --set fabric.nodes=7", "all_reduce on 7 nodes of 8 GPUs"),
        ("online x.yaml --serial --set job=''", "job"),
        ("demo --nccl x.yaml", "x.yaml: cannot be unpacked"),
        ("init x.yaml", "x.yaml"),
        ("init --set a=b", "No such option"),
        ("schema experment", "experment"),
        ("demo --seed -1", "--seed"),
        ("online", "Missing argument"),
        ("onlin x.yaml", "onlin"),
    ],
)
def test_broken_arguments(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, says: str
) -> None:
    (here / "x.yaml").write_text(GOOD)
    assert says in _said(capsys, monkeypatch, *arguments.split())


def test_a_directory_that_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not stop root, a file system without directories does.
    said = _said(capsys, monkeypatch, "train", "default", "--out", "/proc/1/run")
    assert "--out /proc/1/run: cannot write there" in said


def test_a_directory_whose_name_is_not_utf_8(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "x.yaml").write_text(GOOD)
    said = _said(capsys, monkeypatch, "online", "x.yaml", "--serial", "--out", os.fsdecode(b"run\xff"))
    assert r"--out 'run\udcff': not UTF-8, and Parquet wants that; name another" in said


@pytest.mark.parametrize("arguments", ["online x.yaml --set ppo.rl=1", "online none.yaml"])
def test_as_a_process(here: Path, arguments: str) -> None:
    (here / "x.yaml").write_text(GOOD)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl_ray", *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert (done.returncode, done.stdout) == (2, "")
    _is_short(done.stderr)
    assert done.stderr.startswith("error: ")
