"""Facts of a run: what happened, and what was decided. Each is a struct, declared once.

1. A fact has neither run nor time: `Line` adds them, so that a policy sees no clock.
2. ``from_json(to_json(line)) == line``: tuples, finite numbers, and None for unknown numbers.
3. Each line begins with ``schema``. An unknown schema, name, field or type is refused.
4. The log has every fact that the policy objects receive, in order, each followed by the commands
   that answer it, so that `libra.policy.log_replay` can repeat the decisions.
"""

from libra.facts.commands import *
from libra.facts.fact import *
from libra.facts.runs import *
from libra.facts.sentences import *
from libra.facts.trajectory_facts import *
from libra.facts.worker_facts import *
