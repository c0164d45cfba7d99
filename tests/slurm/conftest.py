"""Makes ``single_node`` importable (pytest adds no folder of tests to the path), and Slurm's daemons findable."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
# Where Debian puts slurmctld, slurmd, munged and mknod; not every root has it on the path.
os.environ["PATH"] = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
