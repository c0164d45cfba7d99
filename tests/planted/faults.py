"""Twenty small faults, each planted at one place of a copy of the source; `run.py` says which tests catch them.

A fault is a piece of text that stands once in one file, and what replaces it. When that code moves, the fault moves with it:
`test_faults.py` fails until it does. ``looks_in`` names what is likely to catch it, and so runs first: paths under ``tests/``.
"""

from dataclasses import dataclass
from pathlib import Path


class FaultMoved(Exception):
    """The text that a fault replaces is not in its file, or there more than once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: in ``file``, a path under ``libra/``, ``wrong`` takes the place of ``right``."""

    name: str
    file: str
    right: str
    wrong: str
    looks_in: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Edit the copy of the source under ``root``; FaultMoved if the text does not stand there once."""
        path = root / "libra" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise FaultMoved(f"{self.name}: libra/{self.file} has {text.count(self.right)} times {self.right!r}")
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")


FAULTS = (
    Fault(
        "advantage_sign",
        "train/losses.py",
        "torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)",
        "torch.maximum(advantage_N * ratio_N, advantage_N * clipped_N)",
        ("train/test_losses.py",),
    ),
    Fault(
        "epoch_not_checked",
        "worker/trajectory/quanta.py",
        "        self.context.epoch.check()\n",
        "",
        ("worker/trajectory/test_quanta.py",),
    ),
    Fault(
        "gate_one_version_early",
        "policy/admission.py",
        "iteration - self.eta <= self.version",
        "iteration - self.eta <= self.version + 1",
        ("policy/test_admission.py",),
    ),
    Fault(
        "version_check_always_true",
        "weights/version_check.py",
        "            passed, method, layer, gap, tolerance,",
        "            True, method, layer, gap, tolerance,",
        ("weights/test_version_check.py",),
    ),
    Fault(
        "group_consumed_twice",
        "policy/admission.py",
        "self._committed.pop((iteration, group), None)\n            if",
        "self._committed.get((iteration, group), None)\n            if",
        ("policy/test_admission.py",),
    ),
    Fault(
        "record_checksum_skipped",
        "store/record_codec.py",
        "if len(body) != length or zlib.crc32(body) != crc:",
        "if len(body) != length:",
        ("store/test_record.py",),
    ),
    Fault(
        "normaliser_per_micro_batch",
        "train/slice_gradient.py",
        "self.objective.aggregation.weighted_sum(loss_N, batch.sequences)",
        "self.objective.aggregation(loss_N, batch.sequences)",
        ("train/test_replica.py", "train/test_aggregation.py"),
    ),
    Fault(
        "slot_of_an_ended_one_never_freed",
        "policy/dispatcher.py",
        "        self.stopped(event.key)\n        if (one := self._trajectories",
        "        if (one := self._trajectories",
        ("policy/test_dispatcher.py",),
    ),
    Fault(
        "priority_not_rewritten",
        "scheduler/command_applier.py",
        "                    scheduler_internals.set_priority(ts, command.priority)\n",
        "",
        ("scheduler/test_plugin.py",),
    ),
    Fault(
        "kv_kept_across_versions",
        "rollout/slot_batch.py",
        "        for slot in table.of_state(RETAINED):\n            self._free(slot)\n",
        "",
        ("rollout/test_slot_batch.py", "rollout/test_transformers_engine.py"),
    ),
    Fault(
        "parser_drops_an_adjacent_call",
        "envs/tool_call_formats.py",
        "calls += found\n        position = text.find(OPEN, end)",
        "calls += found\n        position = text.find(OPEN, end + 1)",
        ("envs/tool_calls",),
    ),
    Fault(
        "reward_that_raises_is_0",
        "envs/grader.py",
        '        raise RewardFault(f"{where}: the reward raised {error_text(error)}") from error\n',
        "        return 0.0\n",
        ("envs/test_grader.py",),
    ),
    Fault(
        "tp_price_forgotten",
        "planner/engine_packing.py",
        "problem.tp[:, None] * problem.load_s, np.inf",
        "problem.load_s, np.inf",
        ("planner/test_search.py", "planner/test_plan.py"),
    ),
    Fault(
        "resume_skips_a_batch",
        "worker/training/worker_trainer.py",
        "        while replica.steps_done < steps:\n",
        "        while replica.steps_done + 1 < steps:\n",
        ("driver/test_resume.py",),
    ),
    Fault(
        "hybrid_slice_added_twice",
        "train/gradient_reduction.py",
        "total += result.tensors.pop(name).to(total)",
        "total += 2 * result.tensors.pop(name).to(total)",
        ("train/test_hybrid_pool.py", "train/test_group.py"),
    ),
    Fault(
        "baseline_of_the_batch",
        "train/advantages.py",
        "groups.reward_S - groups.mean_S,",
        "groups.reward_S - groups.reward_S[groups.valid_S].mean(),",
        ("train/test_golden.py", "train/test_waves.py", "train/test_advantages.py"),
    ),
    Fault(
        "action_mask_shifted",
        "train/samples.py",
        "where = np.flatnonzero(trajectory.is_action)",
        "where = np.flatnonzero(np.roll(trajectory.is_action, 1))",
        ("train/test_replica.py", "train/test_packing.py"),
    ),
    Fault(
        "checkpoint_digest_skipped",
        "train/checkpoint.py",
        "        if got != facts[key]:\n",
        "        if not got:\n",
        ("train/test_checkpoint.py",),
    ),
    Fault(
        "cmlfq_never_demotes",
        "policy/cmlfq.py",
        "            if rank[0] != other.level:\n",
        "            if rank[0] < other.level:\n",
        ("policy/test_cmlfq.py",),
    ),
    Fault(
        "planner_ignores_memory",
        "planner/cost/rollout_cost.py",
        "fits=np.asarray(totals.final_context_tokens <= engine.kv_capacity_tokens)",
        "fits=np.ones(len(totals), bool)",
        ("planner/cost", "planner/test_search.py", "planner/test_plan.py"),
    ),
)
