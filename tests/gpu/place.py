"""Device of the tests of this folder: the GPUs of this machine, which the ranks share.

    GPU_TESTS_ON=cpu python tests/helpers/launch.py 2 tests/gpu/ranks
    GPU_TESTS_ON=cpu python -m pytest tests/gpu/test_gpu_jobs.py

run most of them on the CPU.
"""

import os
import time
from contextlib import nullcontext

import pytest
import torch

ON = os.environ.get("GPU_TESTS_ON", "cuda")
CUDA = ON == "cuda"
REASON = "torch sees no CUDA device here"

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason=REASON),
    # Some versions of torch print this harmless warning in the thread of the first backward.
    pytest.mark.filterwarnings("default:Attempting to run cuBLAS, but there was no current CUDA"),
]
device_memory = pytest.mark.skipif(not CUDA, reason="a rehearsal on the CPU has no device memory")


def needs_cuda(test):
    """Mark a test that no other device can stand in for."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason=REASON)
    return pytest.mark.gpu(skipped(test))


def synchronize():
    """Wait for all work of the device."""
    if CUDA:
        torch.cuda.synchronize()


def sleep(cycles):
    """Keep the current stream busy for a number of clock cycles of the device."""
    if CUDA:
        torch.cuda._sleep(cycles)


def streams(device, count):
    """Return the default stream and `count` others."""
    if not CUDA:
        return [None] * (count + 1)
    others = [torch.cuda.Stream(device) for _ in range(count)]
    return [torch.cuda.default_stream(device), *others]


def on(stream):
    """Return a context with `stream` as the current stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def compute(seconds):
    """Queue work for the current stream that takes so long; the CPU does it at once."""
    if CUDA:
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles: of about 1.5 GHz
    else:
        time.sleep(seconds)
