"""Imports go downward through the layers, and importing starts nothing."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module may import those of lower layers, and a package's modules each other: the rows of the
# architecture guide, from layer 0 upward. A name of its own has its place in the package mntrain.
GUIDE = (ROOT / "docs" / "architecture.md").read_text()
ROWS = re.findall(r"^ ?(\d+)  (\w.*)$", GUIDE, re.MULTILINE)[::-1]
LAYERS = [
    {name if name == "zero" else f"mntrain.{name}" for name in names.split(", ")}
    for _, names in ROWS
]
LAYERS[0] |= {"mntrain._version"}
LAYERS[-1] |= {"mntrain"}


MOST = 8  # arguments of a constructor beside `self`


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for name in ("mntrain", "zero") for path in (ROOT / name).rglob("*.py")
}


@functools.cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text())


@functools.cache
def nodes_of(module):
    """All nodes of a module's tree that are no expressions."""
    return [node for node in ast.walk(tree_of(module)) if not isinstance(node, ast.expr)]


@functools.cache
def imports(module):
    """The modules that a module imports anywhere."""
    found = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return found


def ours(module):
    return {name for name in imports(module) if name in MODULES}


def layer(module):
    """The layer of a module, or of the package that it is in."""
    while not (found := [i for i, names in enumerate(LAYERS) if module in names]):
        package, _, _ = module.rpartition(".")
        # A module right under one of the two packages needs a place of its own.
        assert package, f"{module} is in no layer: add it to LAYERS"
        module = package
    return found[0]


def package(module):
    """The name in the table: the module itself, or the inner package that it is in."""
    return "zero" if module.split(".")[0] == "zero" else ".".join(module.split(".")[:2])


def test_all_modules_were_found():
    inner = {"mntrain.comm.mpi", "mntrain.comm.algorithms.lanes", "zero.layout"}
    assert {"mntrain", *inner} <= set(MODULES)
    assert {"mntrain.ranks", "zero.optimizer"} <= ours("mntrain.world")
    assert "mntrain.train.entry" in ours("mntrain.__main__")  # inside a function


def test_the_layers_are_numbered_and_name_no_module_that_is_gone():
    assert [int(number) for number, _ in ROWS] == list(range(13))
    assert set().union(*LAYERS) <= set(MODULES)


def test_imports_go_downward():
    for module in MODULES:
        for imported in ours(module) - {module}:
            if package(imported) != package(module):
                assert layer(imported) < layer(module), f"{module} may not import {imported}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: ours(module) - {module} for module in MODULES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(order) == set(MODULES)


def test_zero_imports_torch_and_itself_only():
    for module in MODULES:
        if module.split(".")[0] == "zero":
            tops = {name.split(".")[0] for name in imports(module)}
            assert tops <= {"zero", "torch", *sys.stdlib_module_names}, module


def imports_mpi(nodes):
    """True if one of the nodes imports mpi4py, and not for type checkers alone."""
    nodes = list(nodes)
    guards = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    typing = {below for guard in guards for below in ast.walk(guard)}
    found = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) and n not in typing]
    return any(re.match(r"(from|import) mpi4py\b", ast.unparse(node)) for node in found)


def test_only_one_module_imports_mpi4py_and_only_in_functions():
    found = [module for module in MODULES if imports_mpi(nodes_of(module))]
    assert found == ["mntrain.comm.mpi"]
    assert not imports_mpi(tree_of("mntrain.comm.mpi").body)


def test_nothing_is_kept_at_module_level():
    for module in MODULES:
        assert not [node for node in nodes_of(module) if isinstance(node, ast.Global)], module
        for node in tree_of(module).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                empty = ast.unparse(node.value) in ("[]", "{}", "None", "set()", "dict()", "list()")
                assert not empty, f"{module}: what is to fill {ast.unparse(node)!r}?"


def run(program):
    """Run a program in a fresh interpreter, with warnings as errors, and return what it prints."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.thorough
def test_importing_everything_looks_for_no_mpi_or_cupy_and_starts_no_thread_and_takes_no_hook():
    # The backend of torch.distributed starts MPI, for scripts that read the variables of torchrun.
    starting = {"mntrain.__main__", "mntrain.torch_backend.lightning", "mntrain.torch_backend"}
    names = sorted(set(MODULES) - starting)
    names = [name for name in names if not name.startswith("mntrain.torch_backend.")]
    program = f"""
import importlib, signal, sys, threading
class Finder:
    find_spec = staticmethod(lambda name, *_: sought.append(name))
sought = []
sys.meta_path.insert(0, Finder)
signals = [signal.getsignal(number) for number in signal.valid_signals()]
for name in {names}:
    importlib.import_module(name)
import mntrain
mntrain.init, mntrain.World, mntrain.AgreedError
print({{"mpi4py", "cupy"}} & {{*sought}} == set(), threading.active_count())
print(sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)
print(signals == [signal.getsignal(number) for number in signal.valid_signals()])
"""
    assert run(program) == ["True", "1", "True", "True", "True"]


def test_constructors_have_at_most_8_arguments():
    found = {}
    for kind in chain.from_iterable(map(nodes_of, MODULES)):
        for made in kind.body if isinstance(kind, ast.ClassDef) else ():
            if getattr(made, "name", "") == "__init__":
                given = made.args
                names = [*given.posonlyargs, *given.args[1:], *given.kwonlyargs]
                found[kind.name] = len(names)
    assert len(found) > 100
    assert [name for name, number in found.items() if number > MOST] == []
