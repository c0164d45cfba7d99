"""A corpus: passages with a title, and facts by which questions are made of it. It is read from a file, or generated.

The generated one is a small made-up world of people, cities, countries, companies and books, so that no model knows it beforehand:
what is asked for has to be found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libra.errors import ConfigError
from libra.seals import parsed_json

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
    """A text about ``title``; ``facts`` are names of other things by relation, e.g. {"author": "Kelo Vasa"}."""

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
    """The passages of a file of JSON lines with "title", "text" and, if questions are to be made of it, "facts"."""
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
    """A start, ``hops`` relations from one passage to the next, and where they lead; None if it ends early or in a circle."""
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
