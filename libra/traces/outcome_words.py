"""The words that formats of recorded agents have for how a tool came back, each as a `libra.types.ToolOutcome`: a table per format.

Behind this border there is one vocabulary, `libra.types.ToolStatus`. What Libra writes itself (event log, store, workload file) has
its words and needs no table. A word that is in no table is an error: a forecaster that takes it for anything else learns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra.types import NO_TOOL, ToolOutcome, ToolStatus

AGENT_TURNS: Mapping[str, ToolOutcome] = {
    "success": ToolStatus.OK,  # return code 0, or a result that is not marked as an error
    "failure": ToolStatus.ERROR,
    "timeout": ToolStatus.TIMEOUT,
    "format_error": ToolStatus.MALFORMED,  # mini-swe-agent: the reply held no command, or more than one
    "end": NO_TOOL,  # the trajectory was over with this turn
    "": NO_TOOL,
    **{str(status): status for status in ToolStatus},
}
"""``status`` of files of agents' turns (`libra.traces.agent_turns`): those of recorded agents, and of runs of Libra itself."""


def outcome_of(word: str, words: Mapping[str, ToolOutcome]) -> ToolOutcome:
    """What ``word`` means in a format; ValueError with the words that it has where this is none of them."""
    try:
        return words[word]
    except KeyError:
        raise ValueError(
            f"status {word!r} is no word of this format; it has {', '.join(known or 'nothing' for known in words)}; a new word "
            "needs a place in libra/traces/outcome_words.py"
        ) from None
