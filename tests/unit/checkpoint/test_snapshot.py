"""Snapshots hold the values of their time, whatever happens to the originals."""

import torch
from gpu.place import needs_cuda

from mntrain.checkpoint.snapshots import SnapshotBuffer, TensorRange


def ranges(device="cpu"):
    """Tensors of uneven sizes and several dtypes, one of them empty."""
    tensors = [
        torch.arange(7, dtype=torch.uint8),
        torch.randn(1001),
        torch.empty(0),
        torch.randn(3, dtype=torch.float64),
        torch.randn(5).bfloat16(),
    ]
    return [TensorRange("file", str(i), one.to(device), i) for i, one in enumerate(tensors)]


def test_copies_keep_the_values_in_memory_that_is_reused_and_grows():
    buffer, places = SnapshotBuffer(torch.device("cpu")), []
    for _ in range(2):
        originals = ranges()
        expected = [one.flat.clone() for one in originals]
        copied = buffer.copy(originals)
        for one in originals:
            one.flat.zero_()
        for copy, one, before in zip(copied, originals, expected, strict=True):
            assert torch.equal(copy.flat, before)
            assert copy._replace(flat=one.flat) == one
            assert copy.flat.data_ptr() % min(64, before.element_size()) == 0
        places.append([copy.flat.data_ptr() for copy in copied])
    assert places[0] == places[1]
    large = [TensorRange("file", "large", torch.randn(5000), 0)]
    [copy] = buffer.copy(large)
    assert torch.equal(copy.flat, large[0].flat)


@needs_cuda
def test_only_readers_wait_for_a_copy_from_a_gpu():
    originals, buffer = ranges("cuda"), SnapshotBuffer(torch.device("cuda"))
    expected = [one.flat.cpu() for one in originals]
    buffer.copy(originals)  # takes the memory
    torch.cuda._sleep(500_000_000)
    copied = buffer.copy(originals)
    for one in originals:
        one.flat.zero_()
    assert not torch.cuda.current_stream().query()
    for copy, before in zip(copied, expected, strict=True):
        assert copy.flat.is_pinned() or not copy.flat.numel()
        assert torch.equal(copy.flat, before)
