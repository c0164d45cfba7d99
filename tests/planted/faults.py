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
    looks_in: tuple[str, ...]
    right: str
    wrong: str

    def plant(self, root: Path) -> None:
        """Edit the copy of the source under ``root``; FaultMoved if the text does not stand there once."""
        path = root / "libra" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise FaultMoved(f"{self.name}: libra/{self.file} has {text.count(self.right)} times {self.right!r}")
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")


FAULTS = (
    Fault("advantage_sign", "train/losses.py", ("train/test_losses.py",),
          "torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)",
          "torch.maximum(advantage_N * ratio_N, advantage_N * clipped_N)"),
    Fault("epoch_not_checked", "worker/trajectory/quanta.py", ("worker/trajectory/test_quanta.py",),
          "        self.context.epoch.check()\n", ""),
    Fault("gate_one_version_early", "policy/admission.py", ("policy/test_admission.py",),
          "iteration - self.eta <= self.version", "iteration - self.eta <= self.version + 1"),
    Fault("version_check_always_true", "weights/version_check.py", ("weights/test_version_check.py",),
          "            passed, method, layer, gap, tolerance,",
          "            True, method, layer, gap, tolerance,"),
    Fault("group_consumed_twice", "policy/admission.py", ("policy/test_admission.py",),
          "self._committed.pop((iteration, group), None)\n            if",
          "self._committed.get((iteration, group), None)\n            if"),
    Fault("record_checksum_skipped", "store/record_codec.py", ("store/test_record.py",),
          "if len(body) != length or zlib.crc32(body) != crc:", "if len(body) != length:"),
    Fault("normaliser_per_micro_batch", "train/slice_gradient.py", ("train/test_replica.py", "train/test_losses.py"),
          "self.objective.aggregation.weighted_sum(loss_N, batch.sequences)",
          "self.objective.aggregation(loss_N, batch.sequences)"),
    Fault("slot_of_an_ended_one_never_freed", "policy/dispatcher.py", ("policy/test_dispatcher.py",),
          "        self.stopped(event.key)\n        if (one := self._trajectories",
          "        if (one := self._trajectories"),
    Fault("priority_not_rewritten", "scheduler/command_applier.py", ("scheduler/test_plugin.py",),
          "                    scheduler_internals.set_priority(ts, command.priority)\n", ""),
    Fault("kv_kept_across_versions", "rollout/slot_batch.py", ("rollout/test_slot_batch.py", "rollout/test_transformers_engine.py"),
          "        for slot in table.of_state(RETAINED):\n            self._free(slot)\n", ""),
    Fault("parser_drops_an_adjacent_call", "envs/tool_call_formats.py", ("envs/tool_calls",),
          "calls += found\n        position = text.find(OPEN, end)",
          "calls += found\n        position = text.find(OPEN, end + 1)"),
    Fault("reward_that_raises_is_0", "envs/grader.py", ("envs/test_grader.py",),
          '        raise RewardFault(f"{where}: the reward raised {error_text(error)}") from error\n',
          "        return 0.0\n"),
    Fault("tp_price_forgotten", "planner/engine_packing.py", ("planner/test_search.py", "planner/test_plan.py"),
          "problem.tp[:, None] * problem.load_s, np.inf", "problem.load_s, np.inf"),
    Fault("resume_skips_a_batch", "worker/training/worker_trainer.py", ("driver/test_resume.py",),
          "        while replica.steps_done < steps:\n", "        while replica.steps_done + 1 < steps:\n"),
    Fault("hybrid_slice_added_twice", "train/gradient_reduction.py", ("train/test_hybrid_pool.py", "train/test_group.py"),
          "total += result.tensors.pop(name).to(total)", "total += 2 * result.tensors.pop(name).to(total)"),
    Fault("baseline_of_the_batch", "train/advantages.py",
          ("train/test_golden.py", "train/test_waves.py", "train/test_advantages.py"),
          "groups.reward_S - groups.mean_S,", "groups.reward_S - groups.reward_S[groups.valid_S].mean(),"),
    Fault("action_mask_shifted", "train/samples.py", ("train/test_replica.py", "train/test_packing.py"),
          "where = np.flatnonzero(trajectory.is_action)",
          "where = np.flatnonzero(np.roll(trajectory.is_action, 1))"),
    Fault("checkpoint_digest_skipped", "train/checkpoint.py", ("train/test_checkpoint.py",),
          "        if got != facts[key]:\n", "        if not got:\n"),
    Fault("cmlfq_never_demotes", "policy/cmlfq.py", ("policy/test_cmlfq.py",),
          "            if rank[0] != other.level:\n", "            if rank[0] < other.level:\n"),
    Fault("planner_ignores_memory", "planner/cost/rollout_cost.py",
          ("planner/cost", "planner/test_search.py", "planner/test_plan.py"),
          "fits=np.asarray(totals.final_context_tokens <= engine.kv_capacity_tokens)",
          "fits=np.ones(len(totals), bool)"),
)  # fmt: skip
