"""A real Slurm on this machine, in a directory of its own: munged, slurmctld and slurmd as processes, four made-up GPUs.

Needs root and Debian's packages ``slurmctld slurmd slurm-client munge``; `missing` says what is not there. Runs without
systemd and without cgroups. The GPUs are character devices like /dev/null: Slurm counts them and sets CUDA_VISIBLE_DEVICES.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge"
CONF = """\
ClusterName=libra
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={directory}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SwitchType=switch/none
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
MinJobAge=60
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=20000 Gres=gpu:4 State=UNKNOWN
PartitionName=rollout Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=train Nodes={host} MaxTime=INFINITE State=UP
"""
START_S = 30.0


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch", "munged", "mknod") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed; type apt-get install --no-install-recommends {PACKAGES}"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def single_node_slurm(directory: Path) -> Iterator[dict[str, str]]:
    """A running Slurm; yields the environment with which its commands find it. ``directory`` must have a short path."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (directory / name).mkdir()
    gpus = [directory / f"gpu{i}" for i in range(4)]
    for gpu in gpus:
        subprocess.run(["mknod", gpu, "c", "1", "3"], check=True)
    (directory / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in gpus))
    conf = directory / "slurm.conf"
    conf.write_text(CONF.format(host=host, directory=directory, ctld_port=free_port(), slurmd_port=free_port()))
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    directory.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge.socket",
         f"--pid-file={directory}/munged.pid", f"--log-file={directory}/munged.log", f"--seed-file={directory}/munged.seed"],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    ]  # fmt: skip
    log = (directory / "daemons.log").open("ab")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
            if command[0] == "munged":
                _until(lambda: (directory / "munge.socket").exists(), directory, daemons)
        _until(lambda: _idle(environment), directory, daemons)
        yield environment
    finally:
        subprocess.run(["scancel", "--me"], env=environment, check=False, capture_output=True)
        _until(lambda: not _queue(environment), directory, daemons, fatal=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        log.close()


def _idle(environment: dict[str, str]) -> bool:
    answer = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
    return "idle" in answer.stdout


def _queue(environment: dict[str, str]) -> str:
    return subprocess.run(["squeue", "-h"], env=environment, capture_output=True, text=True, check=False).stdout


def _until(condition, directory: Path, daemons, *, fatal: bool = True) -> None:  # type: ignore[no-untyped-def]
    until_s = time.monotonic() + START_S
    while not condition():
        dead = [daemon.args[0] for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > until_s:
            if not fatal:
                return
            logs = "\n".join(f"{p}:\n{p.read_text(errors='replace')[-1500:]}" for p in sorted(directory.glob("*.log")))
            raise RuntimeError(f"Slurm did not start ({dead or 'time is up'})\n{logs}")
        try:
            daemons[-1].wait(0.1)  # look again soon, or as soon as it has died
        except subprocess.TimeoutExpired:
            continue
