"""Passages found by their words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from libra.envs.search.corpus import Passage
from libra.errors import ConfigError

EXTRA = "pip install 'libra-rl[search]'"


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
        """The passages that fit best, the best first; those without a word of the query are left out."""
        words = [word for word in words_of(query) if word in self._words]
        if not words:
            return []
        count = min(count, len(self._passages))
        numbers, scores = self._ranking.retrieve([words], k=count, show_progress=False)
        return [self._passages[int(number)] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]


def words_of(text: str) -> list[str]:
    """Words in small letters."""
    return re.findall(r"\w+", text.lower())
