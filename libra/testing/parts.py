"""Contract tests of your own loss, advantage, rate schedule, model loader, policy and environment.

Write a test file like this:

    class TestMyLoss(LossContract):
        name = "my_package.losses:one_sided"

Each class names its part as the configuration does; `EnvironmentContract` makes its environment.
Tests of engines are in `libra.testing.engines`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.config import config_from_dict, resolve_model
from libra.config.trainer import TrainerSection
from libra.envs import Environment, run_action, run_grader
from libra.envs.state import StateCopy, begin_state, check_state, decode_state, has_steps, run_step
from libra.model_loader import loader_of
from libra.policy import OnlineLearner, Ordering
from libra.rollout.chat_format import load_chat_format
from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.weight_loading import ExpectedWeights
from libra.sim.configured import drawn_workload, simulator_of
from libra.sim.simulator import Simulator
from libra.train import GroupRewards, Replica, TrainSettings
from libra.train.logprobs import load_model
from libra.train.losses import Sequences
from libra.train.own_parts import (
    check_advantage,
    check_loss,
    check_schedule,
    estimator_of,
    group_of,
    own_losses,
)
from libra.types import EndReason, Episode, Late, Prompt, ToolReturn, ToolStatus, Turn, TurnRequest
from libra.user_orderings import check_ordering, own_ordering

TOLERANCE = 1e-6
"""Largest difference of the loss of a token between two ways of packing its sequence."""


class _NamedPart:
    name: str
    """``package.module:attribute``."""
    check: Callable[[str], Any]

    def test_it_is_accepted_before_a_run(self) -> None:
        type(self).check(self.name)


class LossContract(_NamedPart):
    """Tests of a `libra.train.own_parts.TokenLoss`."""

    check = staticmethod(check_loss)

    def losses(self, tokens: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and gradients (N,) of ``tokens`` (3, N), sequences of these lengths. Rows of
        ``tokens``: logp, old logp and advantage."""
        logp_N, old_N, advantage_N = tokens[0].clone().requires_grad_(), tokens[1], tokens[2]
        sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        settings = TrainSettings(loss=self.name)
        loss_N = own_losses(settings, logp_N, old_N, advantage_N, Sequences(sequence_N, len(lengths)))
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
        return loss_N.detach(), gradient_N

    def tokens(self, lengths: list[int]) -> torch.Tensor:
        """Tokens (3, N) of sequences of these lengths, with ratios near 1 and mixed advantages."""
        generator = torch.Generator().manual_seed(0)
        old_N = -3.0 * torch.rand(sum(lengths), generator=generator) - 0.01
        logp_N = (old_N + 0.5 * torch.randn(sum(lengths), generator=generator)).clamp(max=-1e-3)
        advantage_S = torch.randn(len(lengths), generator=generator)
        return torch.stack([logp_N, old_N, torch.repeat_interleave(advantage_S, torch.tensor(lengths))])

    def test_it_is_finite_and_the_same_again(self) -> None:
        tokens = self.tokens([7, 1, 20])
        first, again = self.losses(tokens, [7, 1, 20]), self.losses(tokens, [7, 1, 20])
        assert all(bool(torch.isfinite(each).all()) for each in first)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))

    def test_far_ratios_stay_finite(self) -> None:
        tokens = torch.tensor([[-1e-6, -60.0, -0.1, -30.0], [-60.0, -1e-6, -30.0, -0.1], [1.0, 1.0, -1.0, -1.0]])
        assert all(bool(torch.isfinite(each).all()) for each in self.losses(tokens, [2, 2]))

    def test_it_does_not_depend_on_what_else_is_in_the_micro_batch(self) -> None:
        lengths = [5, 3, 9]
        tokens = self.tokens(lengths)
        together = self.losses(tokens, lengths)
        alone = [self.losses(part, [part.shape[1]]) for part in tokens.split(lengths, dim=1)]
        for index, each in enumerate(together):
            assert torch.allclose(each, torch.cat([one[index] for one in alone]), atol=TOLERANCE)


class AdvantageContract(_NamedPart):
    """Tests of a `libra.train.own_parts.AdvantageEstimator`."""

    check = staticmethod(check_advantage)

    def advantages(self, groups: list[GroupRewards]) -> list[np.ndarray[Any, Any]]:
        """Advantages as a batch gets them."""
        estimate = estimator_of(TrainerSection(advantage=self.name))
        assert callable(estimate)
        return estimate(groups)

    def test_groups_of_failures_and_of_one_sample_have_finite_advantages(self) -> None:
        nothing = float("nan")
        groups = [group_of([nothing] * 4), group_of([nothing, 1.0, nothing, nothing]), group_of([0.5])]
        assert all(np.isfinite(each).all() for each in self.advantages(groups))

    def test_the_order_of_groups_changes_nothing(self) -> None:
        groups = [group_of([1.0, 0.0, 0.25, 0.5]), group_of([0.0, 0.0, 1.0]), group_of([2.0, -1.0])]
        forward, backward = self.advantages(groups), self.advantages(groups[::-1])[::-1]
        assert all(np.allclose(one, other) for one, other in zip(forward, backward, strict=True))

    def test_it_leaves_the_rewards_as_they_were(self) -> None:
        groups = [group_of([1.0, 0.0, float("nan")])]
        before = [group.reward.copy() for group in groups]
        self.advantages(groups)
        assert all(np.array_equal(group.reward, old, equal_nan=True) for group, old in zip(groups, before, strict=True))


class ScheduleContract(_NamedPart):
    """Tests of a `libra.train.own_parts.LRSchedule`."""

    check = staticmethod(check_schedule)
    steps = 2000
    """Steps that are tried."""

    def test_it_is_a_finite_factor_and_the_same_at_the_same_step(self) -> None:
        settings = TrainSettings(lr=1.0, lr_schedule=self.name)
        factors = [settings.lr_at(step) for step in range(self.steps)]
        assert factors == [settings.lr_at(step) for step in reversed(range(self.steps))][::-1]


class LoaderContract(_NamedPart):
    """Tests of a `libra.model_loader.ModelLoader`."""

    check = staticmethod(loader_of)
    model = "libra/tiny-arithmetic"
    """``model.path`` of the model that is tried; its weights are one file."""

    @property
    def directory(self) -> Path:
        """The model's directory."""
        found = resolve_model(self.model)
        assert isinstance(found, Path), f"{self.model}: fetch it before"
        return found

    def test_the_model_has_the_tensors_of_its_directory_and_is_the_same_again(self) -> None:
        first, again = (load_model(self.directory, torch.float32, self.name) for _ in range(2))
        ExpectedWeights.of_model(first).check(self.directory)
        own, other = first.state_dict(), again.state_dict()
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
        assert any(parameter.requires_grad for parameter in first.parameters()), "nothing could be trained"

    def test_the_model_has_the_type_that_is_asked_for(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = load_model(self.directory, dtype, self.name)
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}

    def test_trainer_and_engine_give_tokens_the_same_probabilities(self) -> None:
        chat = load_chat_format(self.directory, loader=self.name)
        ids = chat.prompt_ids([{"role": "user", "content": "What is 2 + 3?"}])
        replica = Replica(self.directory, TrainSettings(), loader=self.name)

        async def scored() -> np.ndarray[Any, Any]:
            engine = TransformersEngine(self.directory, slots=1, max_context_tokens=len(ids) + 8, loader=self.name)
            await engine.start()
            try:
                return await engine.score(ids)
            finally:
                await engine.close()

        assert np.allclose(replica.score(ids), asyncio.run(scored()), atol=1e-4)


class PolicyContract(_NamedPart):
    """Tests of a `libra.policy.Ordering`, with the simulator."""

    check = staticmethod(check_ordering)

    def simulator(self, ordering: Ordering | None = None) -> Simulator:
        """Two iterations of 8 groups of 4 on one small engine, under the policy or ``ordering``."""
        config = config_from_dict({
            "run": {"eta": 1}, "trainer": {"prompts": 8, "group_size": 4}, "policy": {"name": self.name},
            "model": {"path": "Qwen3-0.6B"}, "rollout": {"slots": 4}, "planner": {"lengths": {"turns": 5}},
            "simulation": {"iterations": 2},
        })  # fmt: skip
        around = simulator_of(config)
        own = own_ordering(self.name) if ordering is None else ordering
        return Simulator(drawn_workload(config), around.engines, own, options=around.options)

    def test_every_trajectory_ends_and_a_second_run_decides_the_same(self) -> None:
        first, again = self.simulator().run(), self.simulator().run()
        assert first.trajectories == 2 * 8 * 4
        assert first.digest() == again.digest()

    def test_it_goes_on_from_its_snapshot(self) -> None:
        """Every 25 events a copy from JSON replaces the ordering, and no decision changes."""
        learns = isinstance(own_ordering(self.name), OnlineLearner)
        restored: Any = (_RestoredLearner if learns else _Restored)(self.name)
        assert self.simulator(restored).run().digest() == self.simulator().run().digest()
        assert restored.restored > 0


class _Restored:
    """An ordering that is repeatedly replaced by a copy from its own snapshot."""

    def __init__(self, name: str) -> None:
        self.name, self.events, self.restored = name, 0, 0
        self.ordering: Any = own_ordering(name)

    def handle(self, event: Any) -> Any:
        self.events += 1
        if self.events % 25 == 0:
            snapshot = json.loads(json.dumps(self.ordering.snapshot()))
            self.ordering = own_ordering(self.name)
            self.ordering.restore(snapshot)
            self.restored += 1
        return self.ordering.handle(event)

    def snapshot(self) -> Any:
        return self.ordering.snapshot()

    def restore(self, snapshot: Any) -> None:
        self.ordering.restore(snapshot)


class _RestoredLearner(_Restored):
    def learn(self) -> None:
        self.ordering.learn()

    def forget_live(self) -> None:
        self.ordering.forget_live()


class EnvironmentContract:
    """Tests of a `libra.envs.Environment`. A subclass defines `make_environment`."""

    prompts = 16
    """Prompts of each split that are tried."""
    splits: tuple[str, ...] = ("train", "eval")
    turns: tuple[str, ...] = ("", "no", '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>')
    """Generated texts of an episode that is tried, one a turn."""

    def make_environment(self) -> Environment:
        """A new object, as each worker makes it."""
        raise NotImplementedError

    def given(self) -> list[Prompt]:
        """All prompts of the tests."""
        environment = self.make_environment()
        return [environment.prompt(split, index) for split in self.splits for index in range(self.prompts)]

    def test_prompts_are_the_same_on_every_worker_and_can_be_stored(self) -> None:
        first, again = self.given(), self.given()
        assert first == again
        for prompt in first:
            json.dumps(prompt.facts)
            assert prompt.messages and all(isinstance(message["content"], str) for message in prompt.messages)

    def test_prompt_ids_are_of_one_question_each(self) -> None:
        by_id: dict[str, Prompt] = {}
        for prompt in self.given():
            assert by_id.setdefault(prompt.prompt_id, prompt) == prompt

    def test_a_state_begins_alike_and_survives_its_record(self) -> None:
        environment, other = (check_state(self.make_environment()) for _ in range(2))
        for prompt in self.given():
            first = asyncio.run(begin_state(environment, prompt, prompt.prompt_id))
            again = asyncio.run(begin_state(other, prompt, prompt.prompt_id))
            assert decode_state(environment, first) == decode_state(other, again)

    def test_an_episode_of_given_turns_is_graded(self) -> None:
        """Two runs, each turn on a new object as after a lost worker, give equal finite rewards."""
        for prompt in self.given():
            assert asyncio.run(self.reward(prompt)) == asyncio.run(self.reward(prompt))

    async def reward(self, prompt: Prompt) -> float | Late:
        """Reward of `turns`; each turn is taken by a new object."""
        where, played, end = prompt.prompt_id, list[Turn](), EndReason.MAX_TURNS
        data = await begin_state(self.make_environment(), prompt, where)
        for number, text in enumerate(self.turns):
            environment = self.make_environment()
            await environment.setup()
            copy, calls = StateCopy(environment, data, where), tuple(environment.parse(text))
            returns = [
                await run_action(environment, prompt, call, action_id=f"{where}/{number}/{index}", state=copy)
                for index, call in enumerate(calls)
            ]
            if not calls:
                reply = await run_step(environment, text, copy, where) if has_steps(environment) else None
                returns = [] if reply is None else [ToolReturn("step", ToolStatus.OK, reply)]
                end = EndReason.ANSWERED if reply is None else end
            data = copy.data
            played.append(Turn(text, calls, tuple(returns), num_tokens=len(text)))
            await environment.close()
            if end is EndReason.ANSWERED:
                break
        environment = self.make_environment()
        episode = Episode(where, prompt, tuple(played), end, decode_state(environment, data))
        return await run_grader(environment, episode)


VOCAB = 48


@dataclass
class Models:
    """Random two-layer float32 models with a tied head: two of one shape, one of another shape."""

    directory: Path
    _loaded: dict[Path, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first, self.second = self._save("first", 0), self._save("second", 1)
        self.other = self._save("other", 2, hidden_size=96)

    def _save(self, name: str, seed: int, **changed: Any) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None,
            "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2, "tie_word_embeddings": True,
        }  # fmt: skip
        model = Qwen3ForCausalLM(Qwen3Config(**(shape | changed)))
        for parameter_name, parameter in model.named_parameters():  # ones would hide a missing norm
            if "norm" in parameter_name:
                parameter.data.uniform_(0.5, 1.5)
        model.save_pretrained(self.directory / name)
        return self.directory / name

    def logits(self, directory: Path, context: NDArray[np.int32], new: NDArray[np.int32]) -> Any:
        """Logits (T, VOCAB) of plain transformers before each new token."""
        import torch
        from transformers import AutoModelForCausalLM

        if directory not in self._loaded:
            self._loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
        ids = torch.from_numpy(np.concatenate([context, new]).astype(np.int64))[None]
        with torch.no_grad():
            return self._loaded[directory](ids).logits[0, len(context) - 1 : -1].float()

    def logprobs(
        self, directory: Path, context: NDArray[np.int32], new: NDArray[np.int32], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Log-probability (T,) of each new token under plain transformers."""
        import torch

        table = torch.log_softmax(self.logits(directory, context, new) / temperature, -1)
        found: NDArray[np.float32] = table.gather(1, torch.from_numpy(new.astype(np.int64))[:, None])[:, 0].numpy()
        return found


def ask(name: str, *, length: int = 40, new: int = 8, context: Any = None, **fields: Any) -> TurnRequest:
    """A request of trajectory ``name``, whose random context depends only on the name."""
    if context is None:
        context = np.random.default_rng([ord(letter) for letter in name]).integers(0, VOCAB, length)
    return TurnRequest(name, fields.pop("turn", 0), np.asarray(context, np.int32), new, **fields)
