import pytest
import torch

from mntrain.comm.mpi import Traffic
from mntrain.comm.resources import MAX_VIEWS, MIN_BYTES, BufferPool


def test_a_returned_buffer_is_leased_again_where_it_fits():
    pool = BufferPool(Traffic())

    def address(numel, dtype):
        with pool.lease() as take:
            first, second = take(numel, dtype).tensor, take(1, dtype).tensor
            first.fill_(1)
            second.fill_(2)  # which is elsewhere
            assert set(first.tolist()) == {1}
            return first.data_ptr()

    first = address(3000, torch.float32)
    assert address(2048, torch.float64) == first  # 16 KiB hold both
    assert address(4097, torch.float32) != first
    for numel in range(MAX_VIEWS + 2):  # also one that had many lengths
        with pool.lease() as take:
            assert len(take(numel, torch.uint8).tensor) == numel


def test_a_buffer_is_not_leased_again_after_an_error():
    pool = BufferPool(Traffic())
    kept = []

    def fail():
        with pool.lease() as take:
            kept.append(take(1, torch.float32).tensor)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pool.lease() as take:
        assert take(MIN_BYTES // 8, torch.float64).tensor.data_ptr() != kept[0].data_ptr()
