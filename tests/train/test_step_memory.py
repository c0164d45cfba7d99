import sys

import pytest
import torch

from libra.train.step_report import LARGE_MODEL_BYTES, StepMemory, resident_bytes

LARGE = 64_000_000
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from Linux's /proc")


@linux
def test_the_most_of_a_step_counts_and_not_that_of_the_step_before():
    before = torch.ones(LARGE // 4)  # what was there before the model does not count
    memory = StepMemory()
    memory.model_loaded(LARGE_MODEL_BYTES)
    assert memory.peak_bytes() == 0  # no step has begun
    memory.start()
    torch.ones(LARGE // 4)
    assert LARGE * 0.7 < memory.peak_bytes() < 3 * LARGE  # what others gave back meanwhile does not count
    memory.start()
    assert memory.before_bytes > LARGE and resident_bytes() >= before.nbytes
    assert memory.peak_bytes() < LARGE * 0.5  # it was given back, and the mark was set back
