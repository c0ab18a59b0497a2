"""The command `doctor`: all checks, and the speed of the links between ranks, in one report."""
