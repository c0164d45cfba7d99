"""Settings of a training run in virtual time besides its workload, engines and discipline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from libra.hardware.engine_tables import HostPool
from libra.policy.turning import TurningRule


class WavePrices(NamedTuple):
    """Waves of a streamed step as a live trainer adds them (`libra.policy.waves`), and what each costs besides its gradients.

    Attributes
    ----------
    most, least_groups, enough_groups : int
        As of `libra.policy.waves.Waves`.
    alone_s, shared_s : float
        Seconds until a wave's members are committed and its task has begun and reported, for which its GPUs wait: of core trainers
        alone, and with engines that turned, whose gradients are merged after each wave.
    """

    most: int
    least_groups: int = 1
    enough_groups: int = 0
    alone_s: float = 0.0
    shared_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Settings of a pipeline besides workload, engines and discipline.

    Attributes
    ----------
    eta : int
        Staleness bound in versions.
    core_gpus : int
        GPUs that always train.
    update_s, close_s, merge_s : float
        From the last gradient to the new weights on the engines; for the optimizer; to merge the gradients of GPUs that turned.
    beside_s : float
        Of ``update_s``, the seconds that pass beside the next step, which changes no weights before that, if one GPU always trains
        and ``eta`` is at least 1 (`libra.worker.publications`). Not for systems whose groups begin by themselves.
    load_s : float
        Seconds that an engine stops for new weights.
    drain_s : float
        Seconds in which an engine that turns first ends what it has begun; what it hands over goes on elsewhere at once.
    rule : TurningRule
    waves : WavePrices or None
        None: gradients of complete groups are a fluid, which begins at once and which an engine that turns can share at any moment.
    host : HostPool or None
        KV in host memory, by which trajectories take it along where the discipline says so.
    teacher_token_s : float
        As of `libra.sim.simulation_options.SimulationOptions`: no gradient of a group is computed before it has its scores.
    samples : int or None
        Samples of a group that are trained on, where the discipline begins more than these. None: all.
    num_steps : int or None
        The simulation stops after this many; None: after all iterations of the workload.
    gives_up : (int, float) or None
        It stops earlier once the mean step without the first ``int`` ones must take longer than ``float`` seconds, with
        ``num_steps`` only. None: never.
    causes : bool
        Whether GPU-seconds are counted by cause, which is a good part of the work; False: `PipelineResult.gpu_s` is empty.
    """

    eta: int = 0
    core_gpus: int = 0
    update_s: float = 10.0
    beside_s: float = 0.0
    close_s: float = 1.0
    merge_s: float = 3.0
    load_s: float = 3.0
    drain_s: float = 0.0
    rule: TurningRule = field(default_factory=TurningRule)
    waves: WavePrices | None = None
    host: HostPool | None = None
    teacher_token_s: float = 0.0
    samples: int | None = None
    num_steps: int | None = None
    gives_up: tuple[int, float] | None = None
    causes: bool = True
