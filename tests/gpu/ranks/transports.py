"""TransportWorlds on the device by transport. A transport that cannot work here is skipped."""

import pytest
from oracle import SHARED
from worlds import RANKS

import mntrain
from gpu.place import CUDA, ON
from mntrain import AgreedError

# One rank alone sends nothing.
TRANSPORTS = ["host", "cuda-aware", "nccl"] if CUDA and RANKS > 1 else ["host"]
transports = pytest.mark.parametrize("transport", TRANSPORTS)


def make_world(transport="host", algorithm="lanes", ranks_per_node=2, bucket_mb=SHARED):
    """Collective; AgreedError for a transport that cannot work here. "host" always can."""
    named = {"transport": transport} if CUDA else {}
    return mntrain.init(
        device=ON,
        algorithm=algorithm,
        ranks_per_node=ranks_per_node,
        bucket_mb=bucket_mb,
        **named,
    )


class TransportWorlds:
    """TransportWorlds by transport, algorithm, layout and bucket size, each made once. Collective.

    One over CUDA-aware MPI takes seconds, in which a child tries the library: ask for few.
    """

    def __init__(self):
        self._worlds = {}
        self._refused = {}

    def __call__(self, transport="host", algorithm="lanes", layout=2, bucket_mb=SHARED):
        key = transport, algorithm, layout, bucket_mb
        if key not in self._worlds and transport not in self._refused:
            try:
                self._worlds[key] = make_world(*key)
            except AgreedError as refusal:
                if transport == "host":
                    raise
                self._refused[transport] = str(refusal)
        if transport in self._refused:
            pytest.skip(f"{transport}: {self._refused[transport]}")
        return self._worlds[key]

    def close(self):
        for world in self._worlds.values():
            world.close()
