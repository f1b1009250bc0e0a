"""One thread, and the models and data that the tests of runs share."""

from loop_toy import models  # noqa: F401 (fixtures)

from run_toy import data, llama, opt, single_thread  # noqa: F401 (fixtures)
