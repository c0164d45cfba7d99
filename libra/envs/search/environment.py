"""Answer questions by searching a local corpus with BM25. After Search-R1 (arXiv:2503.09516): passages in turns between the
model's, and the reward is an exact match after normalisation.

Differs from the paper: the corpus is local and small, questions are made of its facts, and a search is a tool call.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from libra.envs.choices import one_of
from libra.envs.environment import BIN, Environment, question_class
from libra.envs.search.corpus import generated, question_of, read_corpus, walk
from libra.envs.search.passage_index import PassageIndex, words_of
from libra.envs.tool import tool
from libra.errors import ConfigError
from libra.types import Episode, Prompt

ENDINGS = {
    "text": "Then reply with the answer only.",
    "tags": "Then give the answer between <answer> and </answer>.",
}
_HELD_OUT, _SHOWN = 0, 1
_MAX_ATTEMPTS = 2000
_NOT_FOUND = "nothing found"
_TAGGED = re.compile(r"<answer>([^<]*)</answer>")


class CorpusSearch(Environment):
    """The environment registered as ``search``; needs the package bm25s.

    Questions follow 1 to some relations from one passage to the next: "What is the country of the birthplace of the author of X?".
    A hash of its text decides a question's split: 1 in 8 is evaluation. Facts: ``answer``, ``hops``. The bin of an evaluation is
    the number of hops.

    Parameters
    ----------
    corpus : str, optional
        A file of JSON lines with "title", "text" and "facts". All workers must be able to read it. None: a generated world.
    size : int
        Passages of the generated world; its seed is the run's.
    hops : list of int
        Numbers of relations of a question; each question draws one evenly.
    top : int
        Passages that a search returns.
    answer : str
        What is graded of the last turn: its whole "text", or what is between answer "tags". A turn that ends in a call has no
        answer.
    partial : bool
        Whether an answer that is not exact has the F1 of its words as reward.
    examples : int
        Worked examples before the question, as a conversation with searches. Small models need some.
    inline : bool
        Whether searches run inside the generation quantum; for small corpora.

    Raises
    ------
    ConfigError
        The package is not installed, the corpus cannot be read, or has too few facts.
    """

    def __init__(
        self,
        *,
        corpus: str | None = None,
        size: int = 200,
        hops: Sequence[int] = (1, 2),
        top: int = 3,
        answer: str = "tags",
        partial: bool = False,
        examples: int = 0,
        inline: bool = False,
        seed: int = 0,
    ) -> None:
        one_of("environment.args.answer", answer, tuple(ENDINGS))
        for name, value, least in (("size", size, 20), ("top", top, 1), ("examples", examples, 0)):
            if value < least:
                raise ConfigError(f"environment.args.{name}: got {value!r}; at least {least}")
        if not hops or min(hops) < 1:
            raise ConfigError(f"environment.args.hops: got {hops!r}; numbers of relations, at least 1, e.g. [1, 2]")
        found = read_corpus(corpus) if corpus is not None else generated(size, seed)
        self.passages = {each.title: each for each in found}
        self.seed, self.hops, self.top, self.answer = seed, tuple(hops), top, answer
        self.partial, self.examples = partial, examples
        self.index = PassageIndex(found)
        self.tools = (tool(self.search, timeout_s=10.0, inline=inline),)

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        hops = self.hops[index % len(self.hops)] if split == "eval" else 0
        question, facts = self._drawn(split, index, hops)
        messages = (
            {"role": "system", "content": f"Find the answer with the tool search. {ENDINGS[self.answer]}"},
            *(message for number in range(self.examples) for message in self._example(number)),
            {"role": "user", "content": question},
        )
        return Prompt(f"{split}-{index}", messages, {**facts, BIN: f"{facts['hops']} hops"})

    def search(self, query: str) -> str:
        """Searches the corpus.

        Args:
            query: What to look for, e.g. a name.
        """
        found = self.index.best(query, self.top)
        return "\n".join(f"{each.title}: {each.text}" for each in found) or _NOT_FOUND

    def grade(self, episode: Episode) -> float:
        if not episode.turns or episode.turns[-1].calls:
            return 0.0
        tagged = _TAGGED.findall(episode.answer) if self.answer == "tags" else [episode.answer]
        given, right = normal(tagged[-1] if tagged else ""), normal(str(episode.prompt.facts["answer"]))
        return overlap(given, right) if self.partial else float(given == right)

    def _drawn(self, split: str, index: int, hops: int = 0) -> tuple[str, dict[str, Any]]:
        """A question of ``split``, with its answer; ``hops`` 0: drawn, too."""
        draw = random.Random(f"search/{self.seed}/{split}/{index}")
        for _ in range(_MAX_ATTEMPTS):
            found = walk(self.passages, hops or draw.choice(self.hops), draw)
            if found is None:
                continue
            start, relations, answer = found
            question = question_of(start, relations)
            if _split_of(question) == split:
                return question, {"answer": answer, "hops": len(relations), "start": start, "relations": relations}
        raise ConfigError(
            f"environment.args.corpus: no question with {self.hops} hops among {_MAX_ATTEMPTS} drawn for the split {split!r}; the "
            "facts of passages must be titles of others; give more of them, or type environment.args.hops=[1]"
        )

    def _example(self, number: int) -> list[dict[str, str]]:
        """A worked question: a search for each relation, then the answer."""
        question, facts = self._drawn("example", number, self.hops[number % len(self.hops)])
        messages, name = [{"role": "user", "content": question}], facts["start"]
        for relation in facts["relations"]:
            call = json.dumps({"name": "search", "arguments": {"query": name}})
            messages += [
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                {"role": "tool", "content": self.search(name)},
            ]
            name = self.passages[name].facts[relation]
        last = f"<answer>{name}</answer>" if self.answer == "tags" else name
        return [*messages, {"role": "assistant", "content": last}]


def normal(text: str) -> list[str]:
    """Words of an answer without articles and punctuation, as exact matches are counted."""
    return [word for word in words_of(text) if word not in ("a", "an", "the")]


def overlap(given: Sequence[str], right: Sequence[str]) -> float:
    """F1 of the words of two answers."""
    shared = sum((Counter(given) & Counter(right)).values())
    return 2 * shared / (len(given) + len(right)) if shared else 0.0


def _split_of(question: str) -> str:
    kind = question_class(question)
    return "eval" if kind == _HELD_OUT else "example" if kind == _SHOWN else "train"
