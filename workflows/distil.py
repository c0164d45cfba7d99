"""On-policy distillation: ``python workflows/distil.py``. The quick start makes a teacher; a student learns from it in fewer steps.

Teacher and student begin as the same model. The teacher learns from rewards; the student is told none: for each token that it
writes it learns what the teacher would have said. ``python workflows/distil.py DIRECTORY`` takes a teacher that is there;
``section.key=value`` changes settings of both runs.
"""

from __future__ import annotations

import sys

import libra
from libra.config import typed_settings

STUDENT = {"run__iterations": 10, "trainer__algorithm": "opd"}


def main(arguments: list[str]) -> int:
    """Exit code 1 where the student did not come nearer to its teacher."""
    settings = typed_settings([argument for argument in arguments if "=" in argument])
    teachers = [argument for argument in arguments if "=" not in argument]
    if not teachers:
        made = libra.train(config="libra/quickstart", **settings)
        print(made)
        teachers = [str(made.best or made.checkpoint)]
    learned = libra.train(config="libra/quickstart", distil__teacher=teachers[0], **{**STUDENT, **settings})
    print(learned)
    first, last = (learned.iterations[at]["kl_teacher"] for at in (0, -1))
    print(f"divergence from the teacher: {first:.4f} nats per token in the first iteration, {last:.4f} in the last")
    return 0 if last < first else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
