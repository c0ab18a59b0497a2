"""Tests marked `cluster` run on emulated nodes, and are skipped, with the reason, without them."""

import pytest
from nodes import Cluster, available


@pytest.fixture(autouse=True)
def _nodes_or_skip(request):
    if request.node.get_closest_marker("cluster") and (reason := available()) is not None:
        pytest.skip(reason)


@pytest.fixture
def make_cluster():
    """The nodes of a test: `with make_cluster(ranks=(2, 2), link=None) as cluster: ...`."""
    return Cluster
