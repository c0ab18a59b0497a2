"""Where the tests of this folder run: on the GPUs of this machine, which the ranks share.

    GPU_TESTS_ON=cpu python tests/helpers/launch.py 2 tests/gpu/ranks
    GPU_TESTS_ON=cpu python -m pytest tests/gpu/test_jobs.py

rehearse them on the CPU, for which most of them hold as well.
"""

import os
from contextlib import nullcontext

import pytest
import torch

ON = os.environ.get("GPU_TESTS_ON", "cuda")
CUDA = ON == "cuda"
REASON = "torch sees no CUDA device here"

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason=REASON),
    # Some versions of torch say so in the thread of the first backward, and it is of no harm.
    pytest.mark.filterwarnings("default:Attempting to run cuBLAS, but there was no current CUDA"),
]
device_memory = pytest.mark.skipif(not CUDA, reason="a rehearsal on the CPU has no device memory")


def synchronize():
    """Wait for all that the device has been given."""
    if CUDA:
        torch.cuda.synchronize()


def sleep(cycles):
    """Keep the current stream busy for so many clock cycles of the device."""
    if CUDA:
        torch.cuda._sleep(cycles)


def streams(device, count):
    """The default stream, and so many others."""
    if not CUDA:
        return [None] * (count + 1)
    others = [torch.cuda.Stream(device) for _ in range(count)]
    return [torch.cuda.default_stream(device), *others]


def on(stream):
    """Within: the current stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
