"""Checks of the teacher (``distil``) in the driver, before any worker starts."""

from __future__ import annotations

from typing import Any

from libra.config import RunConfig
from libra.config.distil_checks import teacher_model
from libra.driver.model_checks import ModelFiles, check_positions, checked_model
from libra.errors import ConfigError, ModelError


def check_teacher(config: RunConfig, student: ModelFiles) -> None:
    """Check that the teacher is a whole model with the student's tokenizer, and has as many tokens as are asked of it.

    Raises
    ------
    ModelError
        ``distil.teacher`` names no model, or a damaged one.
    ConfigError
        It has another tokenizer, fewer tokens than ``distil.top_k``, or fewer positions than a context of the run.
    """
    distil, named = config.distil, teacher_model(config)
    if named is None:
        return
    try:
        teacher = checked_model(named)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "distil.teacher")) from error
    try:
        check_positions(teacher, config.rollout.max_context_tokens)
    except ConfigError as error:
        raise ConfigError(f"distil.teacher: {error}") from error
    if (difference := tokenizer_difference(student, teacher)) is not None:
        raise ConfigError(
            f"distil.teacher: {named} has another tokenizer than model.path={config.model.path} ({difference}), so that "
            "it cannot score what the student wrote; type a distil.teacher of the same family"
        )
    if distil.estimator == "top_k" and (most := most_tokens(student, teacher)) is not None and distil.top_k > most:
        raise ConfigError(
            f"distil.top_k: {distil.top_k}, and the teacher's vocabulary has {most} tokens that the student has; type "
            f"distil.top_k={most} or less"
        )


def tokenizer_difference(student: ModelFiles, teacher: ModelFiles) -> str | None:
    """The first token that the tokenizers of two models number differently, in words; None if there is none.

    Models without ``tokenizer.json`` are compared by the sizes of their vocabularies.
    """
    ours, theirs = _ids(student.tokenizer), _ids(teacher.tokenizer)
    if not ours or not theirs:
        sizes = student.config.get("vocab_size"), teacher.config.get("vocab_size")
        return None if sizes[0] == sizes[1] else f"vocab_size is {sizes[0]} and {sizes[1]}"
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, -1), theirs.get(token, -1))):
        if ours.get(token) != theirs.get(token):
            is_, there = (f"has number {ids[token]}" if token in ids else "is not there" for ids in (ours, theirs))
            return f"token {token!r} {is_} in the student and {there} in the teacher"
    if student.tokenizer.get("pre_tokenizer") != teacher.tokenizer.get("pre_tokenizer"):
        return "they cut text into words differently (pre_tokenizer)"
    return None


def most_tokens(student: ModelFiles, teacher: ModelFiles) -> int | None:
    """Tokens that a top-k may have: the teacher's, or the student's if those are fewer; None: not known. Where the two differ, one
    less, so that "any other token" is never empty for the teacher alone."""
    sizes = [size for each in (student, teacher) if isinstance(size := each.config.get("vocab_size"), int)]
    if len(sizes) < 2:
        return None
    return min(sizes) - (sizes[0] != sizes[1])


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Number of each token of a ``tokenizer.json``, added ones included; empty without it."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    return {**vocabulary, **added}
