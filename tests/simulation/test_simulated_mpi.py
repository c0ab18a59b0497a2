"""The simulated MPI itself: order, times, and the errors of programs that are wrong."""

import pickle

import numpy as np
import pytest
from network import Link, NetworkModel
from simulated_mpi import MisuseError
from simulated_ranks import SimulatedRanks, SimulationError
from virtual_time import DeadlockError, current

from mntrain.comm import clock

EAGER = 64 << 10  # the longest message that is sent at once


def number(value, nbytes=8):
    """A message that begins with a number."""
    return np.concatenate([np.array([value]).view(np.uint8), np.zeros(nbytes - 8, np.uint8)])


def value_of(data):
    return int(data[:8].view(np.int64)[0])


def complete(*requests):
    while not all(request.Test() for request in requests):
        clock.pause(1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_a_pair_are_received_in_the_order_of_their_sends(seed):
    late = NetworkModel(late_s=1e-3)
    sizes = [8, EAGER + 1, 16, 8, EAGER + 1, 24]

    def program(comm):
        if comm.Get_rank() == 2:
            data = {peer: [number(0, size) for size in sizes] for peer in (0, 1)}
            complete(*(comm.Irecv(one, peer, 5) for peer in data for one in data[peer]))
            return {peer: list(map(value_of, several)) for peer, several in data.items()}
        sent = [number(place, size) for place, size in enumerate(sizes)]
        complete(*(comm.Isend(one, 2, 5) for one in sent))
        return None

    found = SimulatedRanks([1, 1, 1], seed, network=late).run_on_mpi(program)[2]
    assert found == {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3, 4, 5]}


def test_a_job_counts_what_ranks_send_and_receive_and_to_whom():
    def program(comm):
        if comm.Get_rank() == 0:
            complete(comm.Isend(number(1, 24), 2, 5))
        elif comm.Get_rank() == 2:
            complete(comm.Irecv(number(0, 24), 0, 5))
        comm.allgather(None)

    ranks, of_one = SimulatedRanks([1, 1, 1]), len(pickle.dumps(None))
    ranks.run_on_mpi(program)
    assert ranks.job.bytes == [24, 0, 0]
    assert ranks.job.received == [3 * of_one, 3 * of_one, 24 + 3 * of_one]
    assert ranks.job.peers == [{2}, set(), set()]


@pytest.mark.parametrize("nbytes", [8, EAGER, EAGER + 1, 1 << 20])
def test_a_message_takes_its_latency_and_its_bytes_and_a_long_one_waits_for_its_receive(nbytes):
    model = NetworkModel(between=Link(5e-6, 1e9))

    def program(comm):
        if comm.Get_rank() == 0:
            complete(comm.Isend(number(1, nbytes), 1, 0))
        else:
            if nbytes > EAGER:
                current().time.sleep(20e-6)
            complete(comm.Irecv(number(0, nbytes), 0, 0))

    ranks = SimulatedRanks([1, 1], network=model)
    ranks.run_on_mpi(program)
    took_s = 5e-6 + nbytes / 1e9
    if nbytes > EAGER:
        took_s += 20e-6 + 5e-6  # the sender learns of the receive
    assert ranks.time.now == pytest.approx(took_s, abs=1e-6)


def test_a_link_carries_one_message_after_the_other_in_each_direction():
    model = NetworkModel(between=Link(5e-6, 1e9), eager_bytes=1 << 20)

    def program(comm):
        own, count = comm.Get_rank(), 4
        receives = [comm.Irecv(number(0, 100_000), 1 - own, 0) for _ in range(count)]
        complete(*receives, *(comm.Isend(number(1, 100_000), 1 - own, 0) for _ in range(count)))

    ranks = SimulatedRanks([1, 1], network=model)
    ranks.run_on_mpi(program)
    assert ranks.time.now == pytest.approx(405e-6, abs=1e-6)


def test_a_deadlock_is_found_at_once_and_says_who_waits_for_what():
    def program(comm):
        rank = comm.Get_rank()
        complete(comm.Irecv(number(0), 1 - rank, 7))
        complete(comm.Isend(number(rank), 1 - rank, 7))

    with pytest.raises(DeadlockError) as caught:
        SimulatedRanks([1, 1], seed=3, watched=False).run_on_mpi(program)
    text = str(caught.value)
    assert text.startswith("seed 3: no rank can go on, and no message is under way")
    for rank in (0, 1):
        assert f"rank {rank}: a receive of 8 bytes from rank {1 - rank}, tag 7" in text
        assert f"rank {rank}, program: waits for something to happen" in text
        assert f"rank {rank}: starts program" in text


def change_of_a_long_message(comm):
    data = number(1, EAGER + 1)
    if comm.Get_rank() == 0:
        request = comm.Isend(data, 1, 0)
        current().time.sleep(30e-6)  # the receive is posted by now
        data[:] = 2
        complete(request)
    else:
        complete(comm.Irecv(data, 0, 0))


def unlike_collectives(comm):
    (comm.Ibarrier if comm.Get_rank() else comm.Dup)()


def unequal_lengths(comm):
    complete(comm.Iallgatherv(b"ab", (bytearray(5), [2 + comm.Get_rank(), 2])))


def use_after_free(comm):
    comm.Free()
    comm.Get_size()


def a_long_message_for_a_short_receive(comm):
    if comm.Get_rank() == 0:
        complete(comm.Isend(number(1, 16), 1, 0))
    else:
        complete(comm.Irecv(number(0, 8), 0, 0))


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (change_of_a_long_message, MisuseError, "rank 0 has changed a message that it is sending"),
        (unlike_collectives, SimulationError, "on communicator 0"),
        (unequal_lengths, SimulationError, "unequal lists of lengths"),
        (use_after_free, SimulationError, "used after it was freed"),
        (a_long_message_for_a_short_receive, SimulationError, "of 16 bytes is too long for 8"),
    ],
)
def test_a_wrong_use_of_mpi_ends_the_run(program, kind, text):
    model = NetworkModel(between=Link(5e-6, 1e9))
    with pytest.raises(kind, match=text):
        SimulatedRanks([1, 1], network=model).run_on_mpi(program)


def test_a_lost_rank_does_nothing_more():
    def program(comm):
        rank, data = comm.Get_rank(), number(0)
        if rank == 0:
            for step in range(10):
                complete(comm.Isend(number(step), 1, 0))
                current().time.sleep(1e-3)
        for _ in range(10 * (rank == 1)):
            complete(comm.Irecv(data, 0, 0))

    ranks = SimulatedRanks([1, 1], watched=False)
    ranks.time.at(4.5e-3, lambda: ranks.time.lose(0))
    with pytest.raises(DeadlockError, match="rank 1: a receive of 8 bytes from rank 0"):
        ranks.run_on_mpi(program)
    assert ranks.job.messages[0] == 5
