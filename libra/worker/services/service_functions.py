"""Built-in functions of a model service: ``judge``, ``logprob``, ``score``, ``embed``, ``teach``.

Each input is answered alone, without batch padding: an input has the same answer, bit for bit, in
any batch. An input is a text, or a mapping with "prompt" (a text) or "messages", and "completion".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import ServiceFault

if TYPE_CHECKING:
    from libra.worker.services.service_models import Scored, ToTeach

QUESTION = "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nIs this answer right? Say yes or no."


def judge(
    model: Any, tokenizer: Any, given: Any, *, question: str = QUESTION, yes: str = "yes", no: str = "no"
) -> float:
    """Probability (0 to 1) of ``yes`` against ``no`` as answer to ``question``.

    Keys of the input in braces in ``question`` are replaced by their values.
    """
    asked = _ids(tokenizer, [{"role": "user", "content": _said(tokenizer, _filled(question, given))}])
    nats = [float(_logp(model, asked, _plain_ids(tokenizer, answer)).sum()) for answer in (yes, no)]
    if not all(map(math.isfinite, nats)):
        raise ServiceFault(
            f"judge: the model's log-probabilities of {yes!r} and {no!r} are {nats[0]} and {nats[1]}, so it judges nothing; "
            "its weights are damaged, or too large for their type"
        )
    return 1.0 / (1.0 + math.exp(min(700.0, nats[1] - nats[0])))


def logprob(model: Any, tokenizer: Any, given: Any) -> float:
    """Mean log-probability in nats of the completion's tokens and end of turn, given the prompt."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    completion = np.append(_plain_ids(tokenizer, _part(given, "completion")), np.asarray(end, np.int32))
    if not len(completion):
        raise ServiceFault("logprob: the completion is empty, and the tokenizer has no end of a turn; ask about a text")
    return float(_logp(model, _ids(tokenizer, _messages(given)), completion).mean())


def score(model: Any, tokenizer: Any, given: Any) -> float:
    """A reward model's number (sequence classification, one label) for prompt and completion."""
    said = [*_messages(given), {"role": "assistant", "content": _part(given, "completion")}]
    return float(_run(model, _ids(tokenizer, said, answers=False)).logits[0, 0])


def embed(model: Any, tokenizer: Any, given: Any) -> list[float]:
    """Mean over a text's tokens of the last layer's hidden states."""
    text = given if isinstance(given, str) else f"{_part(given, 'prompt')}\n{_part(given, 'completion')}"
    hidden_TH = _run(model.base_model, _plain_ids(tokenizer, text), use_cache=False).last_hidden_state[0]
    return [float(number) for number in hidden_TH.float().mean(0).cpu()]


def teach(model: Any, tokenizer: Any, given: ToTeach) -> Scored:
    """A teacher's scores of each generated token of a group (``distil.teacher`` only)."""
    return given.scores(model)


def _each(answer: Callable[..., Any]) -> Callable[..., list[Any]]:
    @wraps(answer)
    def answers(model: Any, tokenizer: Any, inputs: Sequence[Any], **args: Any) -> list[Any]:
        return [answer(model, tokenizer, given, **args) for given in inputs]

    return answers


FUNCTIONS: Mapping[str, Callable[..., list[Any]]] = {
    answer.__name__: _each(answer) for answer in (judge, logprob, score, embed, teach)
}
"""From a model, its tokenizer and inputs to answers, by the names of `libra.config.task_sections.MODEL_FUNCTIONS`."""


def _run(model: Any, ids: NDArray[np.int32], **options: Any) -> Any:
    import torch

    with torch.no_grad():
        device = next(model.parameters()).device
        return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device), **options)


def _logp(model: Any, before: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    from libra.heads import score_alone  # imports torch, which a driver that checks arguments does without

    return score_alone(model, np.concatenate([before, tokens]), first=len(before))


def _part(given: Any, name: str) -> str:
    if isinstance(given, str):
        return given if name == "prompt" else ""
    return str(given.get(name, ""))


def _messages(given: Any) -> list[dict[str, str]]:
    if isinstance(given, Mapping) and given.get("messages"):
        return [dict(message) for message in given["messages"]]
    return [{"role": "user", "content": _part(given, "prompt")}]


def _filled(question: str, given: Any) -> str:
    values = {"prompt": given, "completion": ""} if isinstance(given, str) else {"completion": "", **given}
    try:
        return question.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ServiceFault(
            f"judge: its question cannot be filled in ({error!r}); an input has {', '.join(sorted(values))}; type braces as "
            "{{ and }}"
        ) from error


def _said(tokenizer: Any, text: str) -> str:
    """Break up special tokens that ``text`` spells."""
    if getattr(tokenizer, "chat_template", None) is None:
        return text
    from libra.rollout.chat_format import SpecialTokens

    return SpecialTokens(tokenizer).broken(text)


def _plain_ids(tokenizer: Any, text: str) -> NDArray[np.int32]:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _ids(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, answers: bool = True) -> NDArray[np.int32]:
    if getattr(tokenizer, "chat_template", None) is None:
        return _plain_ids(tokenizer, "\n".join(message["content"] for message in messages) + ("\n" if answers else ""))
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers)
    return _plain_ids(tokenizer, text)
