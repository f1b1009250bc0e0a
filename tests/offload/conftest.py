"""Tiny decoders of the engine's tests, and the models, data and runs of the tests of runs."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("engine", "train")]

from loop_toy import models  # noqa: F401 (fixtures)

from run_toy import data, llama, single_thread  # noqa: F401 (fixtures)
