"""The parts that several operations use: constants, one file per implementation, and the choice between these."""
