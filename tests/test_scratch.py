import pytest
import torch

from mntrain.collectives.scratch import LEAST_BYTES, Scratch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000, 4097])
def test_a_room_has_the_length_and_dtype_that_was_asked_for(numel, dtype):
    with Scratch().lend(numel, dtype) as room:
        assert (len(room), room.dtype) == (numel, dtype)
        room.fill_(1)  # it may be written from end to end
        assert room.sum() == numel


def test_rooms_that_are_lent_together_do_not_meet():
    scratch = Scratch()
    with scratch.lend(1000, torch.float32) as a, scratch.lend(1000, torch.float32) as b:
        a.fill_(1)
        b.fill_(2)
        assert set(a.tolist()) == {1}


def test_a_room_that_came_back_is_lent_again_to_whom_it_fits():
    scratch = Scratch()
    with scratch.lend(3000, torch.float32) as room:
        address = room.data_ptr()
    with scratch.lend(2048, torch.float64) as room:  # 16 KiB hold both
        assert room.data_ptr() == address
    with scratch.lend(4097, torch.float32) as room:
        assert room.data_ptr() != address


def test_a_room_comes_back_after_an_error_too():
    scratch = Scratch()
    addresses = []

    def fail():
        with scratch.lend(1, torch.float32) as room:
            addresses.append(room.data_ptr())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with scratch.lend(LEAST_BYTES // 8, torch.float64) as room:
        assert [room.data_ptr()] == addresses
