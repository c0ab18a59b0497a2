"""A world of two as its first rank sees it, without a second one."""

from zero import SingleProcessCollectives


class FirstOfTwo(SingleProcessCollectives):
    """The other rank has the same model, adds zeros to every sum, and updates nothing."""

    size = 2
