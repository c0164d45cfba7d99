"""Facts of a run: what happened, and what was decided. One struct for each, declared once.

1. A fact has neither run nor time: `Line` adds them, so that a policy sees no clock.
2. ``from_json(to_json(line)) == line``. Sequences are tuples; numbers are finite; a number that is
   not known is None.
3. Each line begins with ``schema``. An unknown schema, name, field or type is refused, never
   skipped.
4. The log has every fact that the policy objects receive, in their order, and right after it each
   command that they answer, so that `libra.policy.log_replay` can repeat the decisions.
"""

from libra.facts.commands import *
from libra.facts.fact import *
from libra.facts.runs import *
from libra.facts.sentences import *
from libra.facts.trajectory_facts import *
from libra.facts.worker_facts import *
