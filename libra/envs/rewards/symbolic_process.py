"""The process of math-verify: one JSON object a line in, one answer a line out.

math-verify's time-out is ``SIGALRM``, which needs a main thread, and only the end of its process
stops sympy.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TextIO


def compare(text: str, answer: str) -> float:
    """1.0 if an expression in ``text`` equals an expression in the boxed ``answer``, else 0.0."""
    from math_verify.grader import verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

    wanted = parse(f"\\boxed{{{answer}}}", (LatexExtractionConfig(),))
    given = parse(text, (ExprExtractionConfig(), LatexExtractionConfig()))
    return float(any(verify(one, other) for other in given for one in wanted))


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until standard input ends."""
    for line in requests:
        try:
            reply: dict[str, float | str] = {"score": compare(*json.loads(line))}
        except Exception as error:  # noqa: BLE001 boundary: sympy and ANTLR raise anything; the parent decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be read as an answer
    serve(sys.stdin, answers)
