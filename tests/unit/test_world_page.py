"""The section of all calls of a world in docs/own-loop.md."""

import ast
import inspect
import re
from pathlib import Path

from mntrain.ranks import Ranks
from mntrain.world import World
from zero import Options

PAGE = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
CALLS = PAGE.partition("## Calls of a world")[2]


def public_names():
    """The methods and properties of the class, and what its instances are given."""
    assigned = {
        node.attr
        for kind in (World, Ranks)
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }
    return {name for name in {*assigned, *dir(World)} if not name.startswith("_")}


def test_each_public_name_of_a_world_stands_in_the_section():
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", CALLS))))
    assert not public_names() - shown
    assert {"gather", "broadcast", "master", "close"} <= public_names()


def test_the_page_shows_no_call_that_does_not_exist():
    assert set(re.findall(r"world\.(\w+)", PAGE)) <= public_names()


OF_WORLD = ("gather_dtype", "bucket_bytes")  # options that the world's settings decide


def test_the_signature_of_optimizer_lists_the_options_and_takes_arguments_of_the_class():
    shown, declared = (inspect.signature(one).parameters for one in (World.optimizer, Options))
    expected = {name: option for name, option in declared.items() if name not in OF_WORLD}
    for name, option in expected.items():
        assert shown[name].default == option.default
        assert shown[name].annotation == option.annotation
    own = ["self", "model", "optimizer_class", "groups", "comm_hook", "sync"]
    assert [*shown] == [*own, *expected, "kwargs"]
    assert len(expected) == 8
