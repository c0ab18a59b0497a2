"""Every script leaves here what it leaves under DDP: within rounding, and the same on all ranks.

In fp64 a gradient summed twice or a batch weighted wrongly is far above the tolerance, and the
order of sums far below it.
"""

import hashlib
import re
import shutil
from contextlib import suppress
from functools import cache

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import mntrain
from contract.kits import Here, PlainTorch, UnderDDP
from contract.script import SCRIPTS
from contract.scripts import data, gradients, model_kinds, param_uses, passes, transformers_models
from mntrain.errors import AgreedError

SCRIPT_MODULES = (data, gradients, model_kinds, param_uses, passes, transformers_models)  # register

COMM = MPI.COMM_WORLD
TOLERANCE = 1e-10
LOCAL = "local "  # begins the name of a value that differs between ranks
KEPT = []  # the world of the last script, unless that was refused

pytestmark = [
    pytest.mark.mpi,
    # Of torch where a machine has fewer cores, and of newer Pythons at a fork beside threads.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Of torch's own modules, which the compiler imports.
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning"),
    # Of DDP, for scripts that use all parameters in some of their steps.
    pytest.mark.filterwarnings("ignore:find_unused_parameters:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def close_world():
    yield
    for world in KEPT:
        world.close()


def marks_of(script, stage, turn):
    """The quick set leaves out each script at one of the three stages, in turn."""
    left_out = script.thorough or (len(script.stages) > 2 and stage == turn % 3)
    return [pytest.mark.thorough] if left_out else []


# One parameter, so that the quick set decides about pairs.
CASES = [
    pytest.param((one, stage), id=f"{one}-{stage}", marks=marks_of(one, stage, turn))
    for turn, one in enumerate(SCRIPTS)
    for stage in one.stages
]


@pytest.mark.parametrize("case", CASES)
def test_script(case):
    script, stage = case
    if script.needs and shutil.which(script.needs) is None:
        pytest.skip(f"there is no {script.needs} here")
    refused = stage in script.refused and (COMM.size > 1 or script.refused_alone)
    # After a failure the world is not closed: pytest reports, and then the job is ended.
    world = KEPT.pop() if KEPT else mntrain.init(device="cpu", bucket_mb=2e-4, ranks_per_node=2)
    if refused:
        assert_refused(script.train, Here(world, stage), script.refused[stage])
        with suppress(AgreedError):  # of ranks that disagree, raised again
            world.close()
        world.close()
    else:
        actual = values(script.train(Here(world, stage)))
        assert_same_bits_on_all_ranks(actual)
        assert_close(actual, reference(script))
        KEPT.append(world)


@cache
def reference(script):
    """The values that the script leaves under DDP, or in a single process."""
    return values(script.train(UnderDDP() if script.reference == "ddp" else PlainTorch()))


def values(outcome):
    """Copies of all tensors that a script returns, by name."""
    found = {}
    for name, item in outcome.items():
        if isinstance(item, nn.Module):
            module = getattr(item, "module", item) if hasattr(item, "no_sync") else item
            found |= {f"{name}.{key}": p for key, p in module.named_parameters()}
            found |= {f"{name} buffer {key}": b for key, b in module.named_buffers()}
        else:
            found[name] = torch.as_tensor(item)
    assert all(isinstance(value, Tensor) for value in found.values())
    return {name: value.detach().clone() for name, value in found.items()}


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if " buffer " in name and COMM.rank > 0:
            continue  # DDP sends rank 0's before each forward, and so the last ones are its alone
        tolerance = 1e-5 if value.dtype == torch.float32 else TOLERANCE
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_bits_on_all_ranks(found):
    digest = hashlib.sha256()
    for name, value in found.items():
        if not name.startswith(LOCAL):
            digest.update(value.contiguous().numpy().tobytes())
    assert len(set(COMM.allgather(digest.hexdigest()))) == 1


def assert_refused(train, kit, words):
    """Every rank raises the same error but for its own numbers."""
    with pytest.raises(Exception, match=words) as caught:
        train(kit)
    assert len(set(COMM.allgather(re.sub(r"\d+", "", str(caught.value))))) == 1
