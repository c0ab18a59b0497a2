"""Verbs of torch's process groups that `zero.Collectives` lacks, as steps of messages.

All take flat contiguous tensors in host memory, and one tag of the communicator.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mntrain.comm.engine import Steps
from mntrain.comm.messages import receive_all
from mntrain.comm.mpi import Communicator, FoundMessage, Requests
from mntrain.comm.resources import as_bytes
from zero.kernels import sum_dtype
from zero.layout import split

Combine = Callable[[Tensor, Tensor], Tensor]
OPERATIONS: dict[ReduceOp.RedOpType, Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def check(operation: ReduceOp.RedOpType, dtype: torch.dtype) -> None:
    """Raise ValueError for an operation that tensors of a dtype do not have."""
    if operation not in OPERATIONS:
        raise ValueError(f"{operation} is no operation of this backend: give {_names()}")
    if operation == ReduceOp.AVG and dtype == torch.bool:
        raise ValueError("AVG takes numbers, not torch.bool")
    if dtype in torch.storage._new_dtypes() and not dtype.is_complex:
        raise ValueError(
            f"{operation} takes no {dtype}, with which torch does not compute: give another dtype, "
            "such as torch.int64 or torch.float32"
        )
    if operation in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise ValueError(f"{operation} takes numbers that have an order, not {dtype}")
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if operation in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and not whole:
        raise ValueError(f"{operation} takes integers and bool, not {dtype}")


def _names() -> str:
    return ", ".join(str(it).rpartition(".")[2] for it in OPERATIONS)


def exchange(
    comm: Communicator, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int
) -> Steps[None]:
    """Send one tensor to each rank, and receive one from each; sizes may differ, also be 0.

    Raises RuntimeError if a rank sends more or less than this one receives from it.
    """
    own = comm.rank
    if sent[own].numel() != received[own].numel():
        raise RuntimeError(
            f"this rank sends itself {sent[own].numel()} elements, and receives "
            f"{received[own].numel()}: the lists of sizes must agree"
        )
    peers = [(own + step) % comm.size for step in range(1, comm.size)]
    requests = [comm.send(p, as_bytes(sent[p]), tag, ended=True) for p in peers]
    received[own].copy_(sent[own])
    unlike = ""
    for peer in reversed(peers):
        data, found = as_bytes(received[peer]), FoundMessage(comm.as_mpi4py, peer, tag)
        yield found.arrived
        last, nbytes = yield from receive_all(found, data)
        requests.append(last)
        if nbytes != data.nbytes:
            unlike = f"rank {peer} of the group has sent {nbytes} bytes, and this rank receives "
            unlike += f"{data.nbytes}: their lists of sizes must agree"
    yield Requests.of(*requests).test
    if unlike:
        raise RuntimeError(unlike)


def reduce_parts(
    comm: Communicator, parts: Sequence[Tensor], operation: ReduceOp.RedOpType, tag: int
) -> Steps[Tensor]:
    """Return a new tensor: this rank's part of all ranks' tensors, combined in the order of ranks.

    Results of 16-bit floats are rounded once.
    """
    own = parts[comm.rank]
    rows = [torch.empty_like(own) for _ in range(comm.size)]
    yield from exchange(comm, parts, rows, tag)
    return combine(rows, operation)


def combine(rows: Sequence[Tensor], operation: ReduceOp.RedOpType) -> Tensor:
    """Return the tensors combined, in their order. AVG of integers rounds towards 0, as NCCL's."""
    function, dtype = OPERATIONS[operation], rows[0].dtype
    total, rounding = rows[0], None
    if dtype.is_floating_point:
        total = total.to(sum_dtype(dtype))
    elif operation == ReduceOp.AVG and not dtype.is_complex:
        total, rounding = total.long(), "trunc"
    for row in rows[1:]:
        total = function(total, row)
    if operation == ReduceOp.AVG:
        total = total.div(len(rows), rounding_mode=rounding)
    return total.to(dtype)


def all_reduce(
    comm: Communicator, tensor: Tensor, operation: ReduceOp.RedOpType, tags: Sequence[int]
) -> Steps[None]:
    """Combine a tensor over all ranks, in place, in the order of ranks. Takes two tags."""
    bounds = split(tensor.numel(), comm.size)
    parts = [tensor[low:high] for low, high in pairwise(bounds)]
    own = yield from reduce_parts(comm, parts, operation, tags[0])
    yield from exchange(comm, [own] * comm.size, parts, tags[1])
