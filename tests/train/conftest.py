"""One thread, and the models and data that the tests of runs share."""

import sys
from pathlib import Path

from loop_toy import models  # noqa: F401 (fixtures)

from run_toy import data, llama, opt, single_thread  # noqa: F401 (fixtures)

sys.path.append(str(Path(__file__).parents[1] / "ranks"))  # the pool of ranks
