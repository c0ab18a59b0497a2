import pytest


@pytest.fixture(scope="session")
def worlds():
    from gpu.ranks.transports import TransportWorlds  # it imports MPI

    kept = TransportWorlds()
    yield kept
    kept.close()
