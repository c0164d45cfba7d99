"""Answer questions by searching a local corpus with BM25, after Search-R1 (arXiv:2503.09516):
passages between the model's turns.

The reward is an exact match after normalisation. Unlike in the paper the corpus is small and local,
its facts make the questions, and a search is a tool call. Without a file the corpus is a made-up
world of people, cities, countries, companies and books, which no model knows beforehand.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.envs.environment import BIN, Environment, question_class
from libra.envs.tool import tool
from libra.errors import ConfigError, one_of, pip_install
from libra.seals import parsed_json
from libra.types import Episode, Prompt

EXTRA = pip_install("search")
ENDINGS = {
    "text": "Then reply with the answer only.",
    "tags": "Then give the answer between <answer> and </answer>.",
}
_HELD_OUT, _SHOWN = 0, 1
_MAX_ATTEMPTS = 2000
_NOT_FOUND = "nothing found"
_TAGGED = re.compile(r"<answer>([^<]*)</answer>")

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeo"]
_ENDINGS = {"person": "", "city": "burg", "country": "land", "company": "corp", "book": ""}
_FACTS = {
    "person": {"birthplace": "city", "employer": "company", "teacher": "person"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"capital": "city", "largest company": "company"},
    "company": {"founder": "person", "seat": "city"},
    "book": {"author": "person", "publisher": "company"},
}
"""Relations of each kind of thing, and the kind that each leads to."""
_SENTENCES = {
    "birthplace": "{0} was born in {1}.",
    "employer": "{0} works for {1}.",
    "teacher": "{0} was taught by {1}.",
    "country": "{0} lies in {1}.",
    "mayor": "The mayor of {0} is {1}.",
    "capital": "The capital of {0} is {1}.",
    "largest company": "The largest company of {0} is {1}.",
    "founder": "{0} was founded by {1}.",
    "seat": "{0} has its seat in {1}.",
    "author": "{0} was written by {1}.",
    "publisher": "{0} was published by {1}.",
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A text about ``title``; ``facts`` are names of other things by relation, e.g. {"author":
    "Kelo Vasa"}."""

    title: str
    text: str
    facts: Mapping[str, str]


def generated(size: int, seed: int) -> list[Passage]:
    """A world with ``size`` things, as many of each kind; the same for the same arguments."""
    draw = random.Random(f"corpus/{seed}")
    kinds = [list(_FACTS)[number % len(_FACTS)] for number in range(size)]
    names: dict[str, list[str]] = {kind: [] for kind in _FACTS}
    taken: set[str] = set()
    for kind in kinds:
        names[kind].append(_new_name(kind, draw, taken))
    passages = []
    for kind, own in names.items():
        for name in own:
            facts = {
                relation: draw.choice([each for each in names[other] if each != name])
                for relation, other in _FACTS[kind].items()
            }
            text = " ".join(_SENTENCES[relation].format(name, value) for relation, value in facts.items())
            passages.append(Passage(name, text, facts))
    return passages


def read_corpus(path: str) -> list[Passage]:
    """The passages of a file of JSON lines with "title", "text" and, if questions are to be made of
    it, "facts"."""
    where = "environment.args.corpus"
    passages = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read {path!r} ({error}); type {where}=FILE, or {where}=null") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = parsed_json(line)
            facts = {str(relation): str(value) for relation, value in dict(row.get("facts", {})).items()}
            passages.append(Passage(str(row["title"]), str(row["text"]), facts))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where}: {path}, line {number}: {type(error).__name__}: {error}; a line is e.g. "
                '{"title": "Hamlet", "text": "Hamlet was written by ...", "facts": {"author": "William Shakespeare"}}'
            ) from error
    if not passages:
        raise ConfigError(f"{where}: {path} has no passage; write at least one, a JSON object a line")
    return passages


def walk(passages: Mapping[str, Passage], hops: int, draw: random.Random) -> tuple[str, list[str], str] | None:
    """A start, ``hops`` relations from one passage to the next, and where they lead; None if it
    ends early or in a circle."""
    start = name = draw.choice(list(passages))
    relations: list[str] = []
    seen = {start}
    for _ in range(hops):
        facts = passages[name].facts if name in passages else {}
        if not facts:
            return None
        relation = draw.choice(list(facts))
        name = facts[relation]
        if name in seen:
            return None
        relations.append(relation)
        seen.add(name)
    return start, relations, name


def question_of(start: str, relations: list[str]) -> str:
    """E.g. "What is the country of the birthplace of the author of Hamlet?"."""
    return f"What is the {' of the '.join(reversed(relations))} of {start}?"


def _new_name(kind: str, draw: random.Random, taken: set[str]) -> str:
    while True:
        words = 2 if kind in ("person", "book") else 1
        name = " ".join("".join(draw.choices(_SYLLABLES, k=2)).capitalize() for _ in range(words)) + _ENDINGS[kind]
        name = f"The {name}" if kind == "book" else name
        if name not in taken:
            taken.add(name)
            return name


class PassageIndex:
    """Passages by BM25 over the words of title and text."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigError(
                f"environment.name: search needs the package bm25s, which is not installed ({error}); type {EXTRA}"
            ) from error
        self._passages = list(passages)
        self._words: set[str] = set()
        texts = [words_of(f"{each.title} {each.text}") for each in passages]
        self._words.update(word for text in texts for word in text)
        self._ranking = bm25s.BM25()
        self._ranking.index(texts, show_progress=False)

    def best(self, query: str, count: int) -> list[Passage]:
        """The passages that fit best, the best first; those without a word of the query are left
        out."""
        words = [word for word in words_of(query) if word in self._words]
        if not words:
            return []
        count = min(count, len(self._passages))
        numbers, scores = self._ranking.retrieve([words], k=count, show_progress=False)
        return [self._passages[int(number)] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]


def words_of(text: str) -> list[str]:
    """Words in small letters."""
    return re.findall(r"\w+", text.lower())


class CorpusSearch(Environment):
    """Needs the package bm25s. In a configuration: ``examples.search.corpus:CorpusSearch``.

    Questions follow 1 to some relations from one passage to the next: "What is the country of the
    birthplace of the author of X?". A hash of its text decides a question's split: 1 in 8 is
    evaluation. Facts: ``answer``, ``hops``. The bin of an evaluation is the number of hops.

    Parameters
    ----------
    corpus : str, optional
        A file of JSON lines with "title", "text" and "facts". All workers must be able to read it.
        By default a generated world.
    size : int
        Passages of the generated world; its seed is the run's.
    hops : list of int
        Numbers of relations of a question; each question draws one evenly.
    top : int
        Passages that a search returns.
    answer : str
        Graded part of the last turn: its whole "text", or the text between answer "tags". A turn
        that ends in a call has no answer.
    partial : bool
        Whether an answer that is not exact has the F1 of its words as reward.
    examples : int
        Worked examples before the question, as a conversation with searches. Small models need
        some.
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
