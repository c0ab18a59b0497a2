"""Copies of what is to be saved: they are what was there, whatever becomes of it."""

import pytest
import torch

from mntrain.checkpoint.snapshot import ByteRange, SnapshotBuffer


def ranges(device="cpu"):
    """Tensors of odd sizes and several dtypes, one of them empty."""
    tensors = [
        torch.arange(7, dtype=torch.uint8),
        torch.randn(1001),
        torch.empty(0),
        torch.randn(3, dtype=torch.float64),
        torch.randn(5).bfloat16(),
    ]
    return [ByteRange("file", str(i), one.to(device), i) for i, one in enumerate(tensors)]


def test_copies_are_what_was_there_though_it_changes():
    there = ranges()
    expected = [one.flat.clone() for one in there]
    copied = SnapshotBuffer().copied(there)
    for one in there:
        one.flat.zero_()
    for copy, one, before in zip(copied.ranges, there, expected, strict=True):
        assert torch.equal(copy.flat, before)
        assert copy._replace(flat=one.flat) == one
        assert copy.flat.data_ptr() % min(64, before.element_size()) == 0
    copied.before_changes()  # nothing is on its way
    assert not copied.events


def test_memory_is_kept_and_grows_when_it_must():
    room, there = SnapshotBuffer(), ranges()
    room.reserve(8192, pinned_for=None)
    places = [[copy.flat.data_ptr() for copy in room.copied(there).ranges] for _ in range(2)]
    assert places[0] == places[1]
    large = [ByteRange("file", "large", torch.randn(5000), 0)]
    [copy] = room.copied(large).ranges
    assert torch.equal(copy.flat, large[0].flat)


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device here"
)


@pytest.mark.gpu
@needs_gpu
def test_nobody_waits_for_a_copy_from_a_gpu_but_who_changes_or_reads_it():
    there, room = ranges("cuda"), SnapshotBuffer()
    expected = [one.flat.cpu() for one in there]
    room.copied(there)  # takes the memory
    torch.cuda._sleep(500_000_000)
    copied = room.copied(there, soon=lambda one: one.name == "3")
    assert not torch.cuda.current_stream().query()
    there[3].flat.zero_()  # by the next forward
    copied.before_changes()
    for one in there:
        one.flat.zero_()
    assert not torch.cuda.current_stream().query()
    for copy, before in zip(copied.ranges, expected, strict=True):
        assert copy.flat.is_pinned() or not copy.flat.numel()
        assert torch.equal(copy.flat, before)
