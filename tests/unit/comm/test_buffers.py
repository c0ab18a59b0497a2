import pytest
import torch

from mntrain.comm.mpi import Traffic
from mntrain.comm.resources import MAX_VIEWS, MIN_BYTES, BufferPool, as_bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1003])
def test_rows_lie_end_to_end_in_the_memory_that_mpi_and_numpy_see(numel, dtype):
    with BufferPool(Traffic()).lease() as take:
        rows = take(numel, dtype, 3)
        for number, tensor in enumerate(rows.tensors):
            assert (len(tensor), tensor.dtype) == (numel, dtype)
            tensor.fill_(number)
        arrays = [[n] * numel for n in range(3)] if dtype != torch.bfloat16 else []  # not numpy's
        assert [array.tolist() for array in rows.arrays] == arrays
        whole = torch.cat(list(rows.tensors))
        assert rows.bytes.tobytes() == whole.view(torch.uint8).numpy().tobytes()


def test_a_returned_buffer_is_leased_again_where_it_fits():
    pool = BufferPool(Traffic())

    def address(numel, dtype):
        with pool.lease() as take:
            first, second = take(numel, dtype).tensor, take(1, dtype).tensor
            first.fill_(1)
            second.fill_(2)  # which is elsewhere
            assert set(first.tolist()) == {1}
            return first.data_ptr()

    with torch.inference_mode():
        first = address(3000, torch.float32)
    assert address(2048, torch.float64) == first  # 16 KiB hold both
    assert address(4097, torch.float32) != first


def test_a_buffer_that_had_many_lengths_has_the_next_one_too():
    pool = BufferPool(Traffic())
    for numel in range(MAX_VIEWS + 2):
        with pool.lease() as take:
            assert len(take(numel, torch.uint8).tensor) == numel


def test_a_buffer_is_not_leased_again_after_an_error():
    pool = BufferPool(Traffic())
    addresses = []

    def fail():
        with pool.lease() as take:
            addresses.append(take(1, torch.float32).tensor.data_ptr())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pool.lease() as take:
        assert take(MIN_BYTES // 8, torch.float64).tensor.data_ptr() not in addresses


def test_the_bytes_of_a_tensor_are_its_memory():
    tensor = torch.arange(6, dtype=torch.int16)
    data = as_bytes(tensor[2:4])
    assert data.tobytes() == tensor[2:4].numpy().tobytes()
    data[:] = 0
    assert tensor.tolist() == [0, 1, 0, 0, 4, 5]
    assert as_bytes(torch.empty(0)).nbytes == 0
