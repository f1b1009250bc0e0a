"""One thread, and the models and data that the tests of runs share."""

from run_toy import data, llama, opt, single_thread  # noqa: F401 (fixtures)
