"""Wrong arguments of every other command."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.case import BadInput, write


def _directory(at: Path) -> None:
    (at / "mine").mkdir()


def _events(at: Path) -> None:
    write(at, {"mine/events.jsonl": ""})


def _not_events(at: Path) -> None:
    write(at, {"mine/events.jsonl": "hello\n"})


def _resolved(at: Path) -> None:
    write(at, {"mine/config.resolved.yaml": "run: 3\n"})


def command(words: str, field: str, value: str, typed: str, make: object = None) -> BadInput:
    """``libra WORDS``, separated by spaces."""
    return BadInput(tuple(words.split(" ")), field, value, typed, make)  # type: ignore[arg-type]


NO_RUN = (
    command("resume nowhere", "nowhere", "no run", "runs/NAME"),
    command("resume mine", "mine", "no run", "runs/NAME", _directory),
    command("resume mine", "mine", "no run", "runs/NAME", lambda at: write(at, {"mine": "a file"})),
    command("resume mine", "mine", "it is gone", "libra repair mine", _resolved),
    command("resume nowhere --from-checkpoint 3", "nowhere", "no run", "runs/NAME"),
    command("resume nowhere --from-checkpoint -1", "--from-checkpoint", "-1", "libra resume --help"),
    command("resume", "RUN", "Missing argument", "libra resume --help"),
    command("repair nowhere", "nowhere", "no run", "runs/NAME"),
    command("repair mine", "mine", "no run", "runs/NAME", _directory),
    command("doctor mine", "mine", "no run", "runs/NAME", _directory),
    command("inspect nowhere", "nowhere", "does not exist", "libra inspect"),
    command("inspect mine", "mine", "trajectories.zarr", "libra inspect", _directory),
    command("inspect mine", "mine", "trajectories.zarr", "libra inspect", lambda at: write(at, {"mine": "a file"})),
    command("inspect mine --order middle", "--order", "'middle'", "'best', 'worst'"),
    command("inspect mine --limit many", "--limit", "'many'", "libra inspect --help"),
    command("inspect mine --limit 0", "--limit", "0", "libra inspect --help"),
    command("inspect mine --split test", "--split", "'test'", "'train', 'eval'"),
    command("inspect mine --worst", "--worst", "No such option", "libra inspect --help"),
    command("inspect", "RUN", "Missing argument", "libra inspect --help"),
    command("replay nowhere", "nowhere", "does not exist", "libra replay"),
    command("replay mine", "mine", "events.jsonl", "libra replay", _directory),
    command("replay mine", "mine/events.jsonl", "no event", "nothing to replay", _events),
    command("replay mine", "mine/events.jsonl", "line 1", "libra doctor", _not_events),
    command("replay mine --key train", "--key", "train", "train-0-0-0", _events),
    command("replay mine --decision x", "--decision", "'x'", "libra replay --help"),
    command("replay mine --json --key a", "--json", "--key", "leave it out"),
    command("roles nowhere", "nowhere", "run", "libra"),
    command("roles mine a=b", "'a=b'", "rollout", "rollout-0=train"),
    command("roles mine --wait", "--wait", "change", "rollout-0=train"),
    command("roles mine rollout-0=train --cancel 1", "--cancel", "change", "one of them"),
)

OTHERS = (
    command("rn libra/quickstart", "'rn'", "No such command", "run"),
    command("--iterations 3", "--iterations", "No such option", "libra --help"),
    command("doctor nowhere.yaml", "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    command("doctor libra/quickstart run.seeed=1", "run.seeed", "override", "run.seed"),
    command("config libra/quickstart run.seeed=1", "run.seeed", "override", "run.seed"),
    command("config", "configuration file", "libra config", "--fields"),
    command("plan nowhere.yaml", "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    command("plan libra/quickstart planner.gpu=H1000", "planner.gpu", "'H1000'", "H100"),
    command("plan libra/quickstart planner.num_gpus=1", "planner.num_gpus", "1", "planner.num_gpus=2"),
    command("plan libra/quickstart --why fast", "--why", "'fast'", "--why train=16"),
    command("plan libra/quickstart --trace no.csv", "planner.trace", "no.csv", "give a CSV"),
    command("plan libra/quickstart --write /proc/x.yaml", "--write", "/proc/x.yaml", "type"),
    command("plan libra/quickstart --write a.yaml --what-if", "--write", "--what-if", "leave one"),
    command("plan libra/quickstart planner.tp=[1,3,4]", "planner.tp", "[1, 3, 4]", "divide"),
    command("plan libra/quickstart planner.calibration=no.json", "planner.calibration", "no.json", "libra calibrate"),
    command("simulate nowhere.yaml", "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    command("simulate libra/quickstart --from-run nowhere", "nowhere", "config.resolved.yaml", "name the directory"),
    command("simulate libra/quickstart --workload no.json", "no.json", "--workload", "--save-workload"),
    command("simulate libra/quickstart --workload a --from-run b", "--from-run", "--workload", "leave one out"),
    command("simulate libra/quickstart simulation.gpu=H1000", "simulation.gpu", "'H1000'", "H100"),
    command("simulate libra/quickstart simulation.model=Qwen", "simulation.model", "'Qwen'", "Qwen3"),
    command("simulate libra/quickstart simulation.traces=no.csv", "simulation.traces", "no.csv", "give a CSV"),
    command("calibrate nowhere", "nowhere", "no such file", "RUN"),
    command("calibrate", "FILES|RUN", "Missing argument", "libra calibrate --help"),
    command("calibrate mine", "mine", "profile", "type", _directory),
    command("calibrate a.csv", "a.csv", "columns", "docs/hardware.md", lambda at: write(at, {"a.csv": "a,b\n1,2\n"})),
    command("calibrate mine --gpu A100", "--gpu", "A100", "leave --gpu out", _events),
    command("calibrate a.csv --gpu X9", "a.csv", "columns", "docs", lambda at: write(at, {"a.csv": "a,b\n1,2\n"})),
    command("model prepare gpt2", "'gpt2'", "smollm2-135m", "libra model prepare smollm2-135m"),
    command("cluster slurm libra/quickstart start", "'start'", "'up'", "libra cluster slurm --help"),
    command("cluster slurm libra/quickstart status", "slurm", "cluster.json", "libra cluster slurm"),
    command("cluster tls a.yaml", "DIR", "a.yaml", "--help", lambda at: write(at, {"a.yaml": ""})),
    command("run libra/quickstart --scheduler tls://127.0.0.1:99999", "cluster.scheduler", "99999", "cluster.json"),
    command(
        "run libra/quickstart --scheduler tls://127.0.0.1:1",
        "cluster.scheduler",
        "127.0.0.1:1",
        "libra cluster tls DIR",
    ),
    command("run libra/quickstart --scheduler no.json", "cluster.scheduler", "no.json", "libra cluster slurm"),
    command("run libra/quickstart --from nowhere", "run.from_checkpoint", "nowhere", "--from RUN/checkpoints/best"),
)
