"""Facts of a run: what happened, and what was decided. One struct for each, declared once.

Workers and the driver send facts, the scheduler's plugin logs them and passes the same objects to the policies, and replay reads
them back.

1. A fact has neither run nor time: `Line` adds them, so that a policy sees no clock.
2. ``from_json(to_json(line)) == line``. Sequences are tuples; numbers are finite, and None means "not known".
3. Each line begins with ``schema``. An unknown schema, name, field or type is refused, never skipped.
4. The log has every fact that the policy objects receive, in the order in which they receive it, and each command that they answer
   right after it, so that `libra.policy.log_replay` can repeat the decisions.

Nothing here reads a clock or writes a file: the caller gives the time of a line.
"""

from libra.facts.codec import *
from libra.facts.commands import *
from libra.facts.fact import *
from libra.facts.roles import *
from libra.facts.runs import *
from libra.facts.trajectory_facts import *
from libra.facts.words import *
from libra.facts.worker_facts import *
