"""Every collective on simulated nodes of every shape, against closed forms."""

import random
from functools import partial

import pytest
import torch
from drawn_calls import VERBS, Call, run_calls
from network import NetworkModel
from simulated_ranks import SimulatedRanks, SimulationError

from mntrain.comm import algorithms
from mntrain.comm.link import Link
from mntrain.comm.ticket import AlgorithmChoice

MORE = pytest.mark.thorough


@pytest.mark.parametrize(
    "nodes", [[2, 1, 2], *(pytest.param(n, marks=MORE) for n in ([2, 2], [1] * 8))], ids=str
)
def test_no_link_changes_the_bits_of_a_sum(nodes):
    def program(rank, link, found):
        choice = AlgorithmChoice("lanes", 8 << 10, min_chunks=3, link=link)
        collectives = rank.collectives.replace(choice=choice, small_message_bytes=0)
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(rank.rank)
            tensor = torch.randn(150_001, generator=generator).to(dtype)
            collectives.all_reduce(tensor).wait()
            if rank.rank == 0:
                found.append(tensor)

    def cuts(link):
        plan = algorithms.load("lanes").plan(SimulatedRanks(nodes).topology, 0)
        lengths = plan.lengths(600_004, AlgorithmChoice("lanes", 8 << 10, min_chunks=3, link=link))
        return plan.all_reduce(150_001, 4, lengths)

    links = None, Link.of("100gbit,20us"), Link.of("400gbit,200us")
    sums = []
    for link in links:
        sums.append([])
        SimulatedRanks(nodes, 1).run(partial(program, link=link, found=sums[-1]))
    assert cuts(links[0]) != cuts(links[-1])
    for others in sums[1:]:
        assert all(map(torch.equal, others, sums[0]))


def test_a_seed_gives_the_same_run_again_and_another_one_another_order():
    common = random.Random(1)
    calls = [
        Call(verb, 5003, torch.bfloat16, AlgorithmChoice("lanes", 4096), delays=delays)
        for verb in VERBS
        for delays in [tuple(common.choices([0.0, 1e-5, 2e-5], k=5))]
    ]
    late = NetworkModel(late_s=20e-6, message_s=1e-6)
    runs = []
    for seed in (5, 5, 6):
        ranks = SimulatedRanks([2, 1, 2], seed, network=late, keep=True)
        ranks.run(partial(run_calls, calls=calls))
        runs.append((ranks.time.now, list(ranks.time.trace)))
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]
    assert len(runs[0][1]) > 300


def test_ranks_whose_waits_are_stepped_have_the_same_results_in_about_the_same_time():
    """All verbs, and errors of a wait, from one thread of the host and from one for each rank."""
    numel, network = 50_003, NetworkModel(message_s=1e-6)

    def program(rank, stepped):
        rank.engine.stepped = stepped
        found = []
        for verb in VERBS:
            tensor = torch.arange(numel, dtype=torch.float32) * (rank.rank + 1)
            rank.comm.as_mpi4py.Barrier()
            begun_s = rank.ranks.time.local_now()
            getattr(rank.collectives, verb)(tensor).wait()
            own = rank.collectives.slot(rank.rank)
            shard = slice(own * numel // rank.size, (own + 1) * numel // rank.size)
            mine = tensor[shard if verb == "reduce_scatter" else slice(None)]
            found.append((mine.tolist(), rank.ranks.time.local_now() - begun_s))
        with pytest.raises(ZeroDivisionError):
            rank.engine.call(lambda: 1 / 0).wait()
        return found

    runs = []
    for stepped in (False, True):
        ranks = SimulatedRanks([2, 1, 3], network=network, watched=False, threads=False, switches=0)
        runs.append(ranks.run(partial(program, stepped=stepped)))
        assert not ranks.job.unreceived()
    for one, other in zip(*runs, strict=True):
        for (values, took_s), (stepped_values, stepped_s) in zip(one, other, strict=True):
            assert values == stepped_values
            assert stepped_s == pytest.approx(took_s, rel=0.15, abs=3e-6)


def test_a_step_that_blocks_is_an_error_and_no_endless_loop():
    def program(rank):
        rank.engine.stepped = True
        rank.collectives.call_together(rank.comm.as_mpi4py.Barrier, "a barrier").wait()

    ranks = SimulatedRanks([1, 1], watched=False, threads=False, switches=0)
    with pytest.raises(SimulationError, match="a step blocks: it waits for Barrier"):
        ranks.run(program)


@pytest.mark.thorough
def test_a_large_all_reduce_by_several_lanes_takes_little_more_than_its_bytes():
    """Parts of many chunks do not queue up on the way to one node, while other links are free."""
    nodes, length, model = 4, 25 << 18, NetworkModel(message_s=1e-6)
    choice = AlgorithmChoice("lanes", link=Link(7e-6, model.between.rate))
    options = {"watched": False, "threads": False, "switches": 0}
    ranks = SimulatedRanks([2] * nodes, network=model, choice=choice, **options)

    def program(rank):
        tensor = torch.ones(length)
        rank.collectives.call_together(lambda: None, "the start").wait()
        begun_s = rank.ranks.time.local_now()
        rank.collectives.all_reduce(tensor).wait()
        return begun_s, rank.ranks.time.local_now()

    begun, ended = zip(*ranks.run(program), strict=True)
    bound_s = (
        2 * model.between.latency_s + 2 * 4 * length * (nodes - 1) / nodes / model.between.rate
    )
    assert max(ended) - max(begun) < 1.02 * bound_s


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather"])
def test_shards_of_a_large_tensor_by_several_lanes_take_little_more_than_their_bytes(verb):
    """Ranks that do not call at the same moment do not hold up each other's links."""
    nodes, length, model = 8, 25 << 17, NetworkModel(message_s=1e-6)
    choice = AlgorithmChoice("lanes", link=Link(7e-6, model.between.rate))
    options = {"watched": False, "threads": False, "switches": 0}
    ranks = SimulatedRanks([2] * nodes, network=model, choice=choice, **options)
    late = random.Random(0)
    delays_s = [late.uniform(0, 20e-6) for _ in range(2 * nodes)]

    def program(rank):
        rank.engine.stepped = True
        tensor = torch.ones(length)
        rank.comm.as_mpi4py.Barrier()
        rank.compute(delays_s[rank.rank])
        begun_s = rank.ranks.time.local_now()
        getattr(rank.collectives, verb)(tensor).wait()
        return begun_s, rank.ranks.time.local_now()

    begun, ended = zip(*ranks.run(program), strict=True)
    bound_s = 4 * model.between.latency_s + 4 * length * (nodes - 1) / nodes / model.between.rate
    assert max(ended) - max(begun) < 1.05 * bound_s
