"""The order of the tests of this folder, and their fixtures."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of this folder on a single rank, which is the subject of tests/unit.

    Run last what keeps the memory of pending collectives, which tests of memory would find.

    A world that was abandoned, or whose ranks disagreed, keeps it for the life of its process.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.mpi(min_size=2))
    items.sort(key=lambda item: item.path.stem in ("test_abandon", "test_disagreement"))


@pytest.fixture(scope="session", autouse=True)
def in_chunks() -> Iterator[None]:
    """Cut small tensors into chunks, progressed by the engine's thread, as large ones are.

    test_small_messages.py and some of test_collectives.py test the other ways.
    """
    if "torch" not in sys.modules:  # no test uses collectives, and the import takes seconds
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        cut_in_chunks(patch)
        yield


def cut_in_chunks(patch: pytest.MonkeyPatch) -> None:
    """Let no tensor be small."""
    from mntrain.comm import world_collectives

    patch.setattr(world_collectives, "SMALL_MESSAGE_BYTES", 0)
    patch.setattr(world_collectives, "NO_WAKE_BYTES", 0)


@pytest.fixture(scope="session", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Leave out of all collections what modules hold, which take a quarter of a second each.

    A job of `mntrain.train` also collects before its steps, and freezes all objects for them.
    """
    with pytest.MonkeyPatch.context() as patch:
        freeze_modules(patch)
        yield


def freeze_modules(patch: pytest.MonkeyPatch) -> None:
    """Leave what there is now out of all collections."""
    gc.collect()
    gc.freeze()
    patch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="module")
def ways():
    from cases import Ways  # it imports MPI, which the collecting session has no use for

    cache = Ways()
    yield cache
    cache.close()


# For tests of training; a module of other worlds has a fixture of the same name of its own.


@pytest.fixture(scope="module")
def worlds():
    from oracle import keep_worlds  # it imports MPI, which the collecting session has no use for

    yield from keep_worlds()


@pytest.fixture
def world(worlds):
    made = worlds()
    made._shards.begin_anew()  # orders do not depend on the tests before
    return made


@pytest.fixture
def make(world):
    from oracle import make_optimizers

    yield from make_optimizers(world)


@pytest.fixture
def pair(world, make):
    """Make a `Pair` of a model, in the world of the test or a given one."""
    from models import net
    from oracle import ADAMW, Pair

    def pair_of(model=None, kind=ADAMW, *, world=world, **options):
        in_world = functools.partial(make, world=world)
        return Pair(world, in_world, net() if model is None else model, kind, **options)

    return pair_of


@pytest.fixture
def rig() -> Iterator[Callable[..., Any]]:
    """Make a `Rig` of ranks with emulated devices, of which it closes all."""
    from devices import PromptDevice  # it imports MPI
    from mpi4py import MPI
    from rig import Rig

    made: list[Any] = []

    def make(ranks_per_node: int = 2, device: Any = None) -> Any:
        made.append(Rig(ranks_per_node, device or PromptDevice(MPI.COMM_WORLD.rank)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same new folder on all ranks."""
    from worlds import shared_folder  # it imports MPI

    with shared_folder() as path:
        yield path
