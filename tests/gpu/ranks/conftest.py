import pytest


@pytest.fixture(scope="session")
def worlds():
    from gpu.ranks.transports import Worlds  # it imports MPI

    kept = Worlds()
    yield kept
    kept.close()
