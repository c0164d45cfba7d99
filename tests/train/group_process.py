"""One replica in a process of its own that takes commands as JSON lines from the test (`Process`); what both ends need."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import factories
from libra.errors import LibraError
from libra.train import Replica, TrainSettings
from libra.train.hybrid_replica import HybridReplica
from libra.train.replica_group import Rendezvous, TrainGroup, whole
from libra.types import Taught, TrajectoryId

TOKEN = "of this test"


def make_batch(step):
    """Nine trajectories of very unequal token counts; one without advantage, which weighs and has no gradient."""
    rng = np.random.default_rng(1000 + step)
    made = []
    for index in range(9):
        lengths = [int(n) for n in rng.integers(1, 4 if index % 3 else 25, 2 * int(rng.integers(1, 3)))]
        advantage = 0.0 if index == 4 else float(rng.normal())
        facts = {"version": step, "seed": 100 * step + index, "reward": 0.0, "advantage": advantage}
        sizes = (lengths[0] + 3, *lengths[1:])
        made.append(factories.trajectory(TrajectoryId(step, 0, index), lengths=sizes, **facts))
    return made


def make_taught(rng, one, k=5):
    count = one.num_action_tokens
    columns = rng.random((count, 48)).argsort(axis=1)[:, :k]
    parts = np.log(rng.dirichlet(np.ones(k + 1), count)).astype(np.float32)
    return Taught(columns.astype(np.int32), parts[:, :k], parts[:, 0], parts[:, k])


class Recorded:
    """A float64 replica that keeps what it merged, before it is divided by its norm."""

    def __init__(self, model_dir, settings, group=None):
        defaults = {"lr": 1e-3, "adam_args": {"max_grad_norm": 0.5}, "max_row_tokens": 40, "micro_batch_tokens": 120}
        self.replica = Replica(
            model_dir, TrainSettings(**{**defaults, **settings}), dtype=torch.float64, threads=1, group=group
        )
        self.gradients = []
        self.published = {}
        apply = self.replica.apply_gradient

        def record(step, tally):
            grads = [p.grad for p in self.replica.optimized().values()]
            full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
            self.gradients.append(torch.cat([g.flatten() for g in full]).numpy().copy())
            apply(step, tally)

        self.replica.apply_gradient = record

    def listen(self, timeout_s=60.0):
        return self.replica.admit_hybrids(TOKEN, timeout_s=timeout_s)

    def step(self, k, waves=None):
        """Report of step ``k``, whole or in waves of these trajectories, and the gradient of each of its optimizer steps."""
        self.gradients.clear()
        batch = make_batch(k)
        if self.replica.settings.old_logp == "version":  # every third token is of older weights
            self.published[k] = {name: tensor.clone() for name, tensor in self.replica.weights().items()}
            self.replica.published = self.published.get
            for one in batch:
                old = np.flatnonzero(one.is_action)[::3]
                one.weight_version[old] = one.kv_version[old] = np.maximum(0, k - 1 - np.arange(len(old)) % 2)
        if self.replica.settings.distil is not None:  # which has not scored one of them
            for index, one in enumerate(batch):
                one.taught = None if index == 5 else make_taught(np.random.default_rng((k, index)), one)
        for wave in waves or ():
            self.replica.accumulate([batch[index] for index in wave], k)
        report = self.replica.close(k) if waves else self.replica.step(batch, k)
        return report.as_dict(), list(self.gradients)


class Process:
    """The parent's end of one process."""

    def __init__(self, model_dir, scratch):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, __file__, str(model_dir), str(scratch)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.popen = subprocess.Popen(command, text=True, env=environment, **pipes)

    def tell(self, what, **arguments):
        self.popen.stdin.write(json.dumps([what, arguments]) + "\n")
        self.popen.stdin.flush()

    def answer(self):
        line = self.popen.stdout.readline()
        if not line:
            return {"dead": self.popen.wait()}
        return json.loads(line)

    def ask(self, what, **arguments):
        self.tell(what, **arguments)
        return self.answer()

    def close(self):
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


class Member:
    """The process's end."""

    def __init__(self, model_dir, scratch):
        self.model_dir, self.scratch = model_dir, Path(scratch)
        self.group = None
        self.serving = None

    def join(self, port, rank, size, epoch=0):
        if rank == 0:
            self.rendezvous = Rendezvous(TOKEN, "127.0.0.1", port)
        self.group = TrainGroup.join(("127.0.0.1", port), rank, size, token=TOKEN, epoch=epoch, timeout_s=60)
        if hasattr(self, "recorded"):
            self.recorded.replica.group = self.group

    def new(self, settings, listen=False):
        if hasattr(self, "recorded") and self.recorded.replica.hybrids is not None:
            self.recorded.replica.hybrids.close()
        self.recorded = Recorded(self.model_dir, settings, self.group)
        return list(self.recorded.listen().address) if listen else None

    def load(self, directory):
        self.recorded.replica.load(directory)

    def save(self, directory):
        self.recorded.replica.save(directory)

    def keep(self, path):
        replica = self.recorded.replica
        weights = {f"weights/{name}": tensor for name, tensor in replica.weights().items()}
        optimized = {f"optimized/{name}": whole(tensor.detach()) for name, tensor in replica.optimized().items()}
        torch.save(weights | optimized, path)

    def wait_for(self, members, joining=False):
        pool = self.recorded.replica.hybrids
        while not members and pool.connected:
            os.sched_yield()
        return pool.wait_for(members, joining=joining)

    def step(self, k, waves=None):
        try:
            report, gradients = self.recorded.step(k, waves)
        except LibraError as error:
            return {"error": type(error).__name__, "text": str(error), "done": self.recorded.replica.steps_done}
        path = self.scratch / f"{os.getpid()}-{k}.npy"
        np.save(path, np.stack(gradients))
        return {"report": report, "gradients": str(path)}

    def serve(self, settings, address, die_at=None):
        """Become a hybrid; with ``die_at`` killed in the midst of that slice."""
        replica = Recorded(self.model_dir, settings).replica
        if die_at is not None:
            accumulate, calls = replica.gradient.micro_batch_loss, []

            def deadly(*args):
                calls.append(1)
                if len(calls) > die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return accumulate(*args)

            replica.gradient.micro_batch_loss = deadly
        self.hybrid = HybridReplica(replica, (address[0], address[1]), TOKEN)
        self.serving = threading.Thread(target=self.hybrid.run)
        self.serving.start()

    def leave(self):
        self.hybrid.leave()
        self.serving.join()
        return self.hybrid.slices_done

    def die_in_reduction(self):
        self.group.sum_ = lambda tensors: os.kill(os.getpid(), signal.SIGKILL)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    member = Member(*sys.argv[1:])
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answers.write(json.dumps(getattr(member, what)(**arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
