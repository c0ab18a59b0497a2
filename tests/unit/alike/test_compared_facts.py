"""Options, sources and data of a job, as ranks compare them."""

import importlib
import sys
from types import ModuleType

import pytest

from mntrain.alike.compared_options import describe_options
from mntrain.alike.compared_task import (
    changed_data,
    describe_files,
    describe_sources,
    module_files,
)
from mntrain.bench.bench_options import BenchOptions
from mntrain.options.command_line import named_options, parse
from mntrain.options.config import MAY_DIFFER, Config
from mntrain.tasks.lm import LanguageModel


def test_every_option_is_compared_by_its_flag_and_value_but_for_those_that_may_differ():
    names = named_options(Config()).keys()
    flags = {"--" + name.replace("_", "-") for name in names - MAY_DIFFER}
    assert MAY_DIFFER.keys() <= names
    assert describe_options(Config()).keys() == flags
    assert {"--optim.lr", "--train.batch-size", "--run.seed", "--comm.bucket-mb"} <= flags
    assert describe_options(BenchOptions()).keys() > {"--sizes"}
    for words in (["--data.path", "x"], ["--run.dir", "y"], ["--data.workers=3"]):
        assert describe_options(parse(words)) == describe_options(Config())
    one, other = (describe_options(parse(["--optim.lr", text])) for text in ("1e-2", "0.01"))
    assert one["--optim.lr"] == other["--optim.lr"] == "0.01"
    assert (
        describe_options(parse(["--optim.max-grad-norm=none"]))["--optim.max-grad-norm"] == "none"
    )


def write(folder, contents):
    paths = {name: folder / name for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    return paths


def test_files_differ_by_name_and_by_size_and_of_many_some_sizes_are_compared(tmp_path):
    names = "the list of the data's files"
    usual, same, longer, named = (
        describe_files(write(tmp_path, contents))
        for contents in (
            {"a": b"one", "b": b"two"},
            {"a": b"one", "b": b"twO"},
            {"a": b"one", "b": b"two "},
            {"a": b"one", "c": b"two"},
        )
    )
    assert usual == same
    assert {name for name in usual if usual[name] != longer[name]} == {"the size of b"}
    assert longer["the size of b"] == "4 bytes"
    assert usual[names] != named[names]
    paths = write(tmp_path, {f"{number:04}": b"x" * (number % 7) for number in range(250)})
    told = describe_files(paths)
    assert 50 < len(told) <= 101
    del paths["0124"]
    assert describe_files(paths)[names] != told[names]
    assert describe_files({}) == {}


FILES = {
    "own/__init__.py": "",
    "own/task.py": "import os\nfrom . import nets\nfrom .deep.er import f",
    "own/nets.py": "import helper",
    "own/unused.py": "",
    "own/deep/__init__.py": "",
    "own/deep/er.py": "f = 1",
    "helper.py": "",
}


@pytest.mark.parametrize("folder", ["folder", "site-packages"])
def test_the_source_is_what_is_imported_from_its_folder_or_package(folder, tmp_path, monkeypatch):
    root = tmp_path / folder
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(root)
    before = set(sys.modules)
    archived = ModuleType("archived")
    archived.__file__ = str(root / "own" / "deps.zip" / "archived.py")
    try:
        sys.modules["archived"] = archived
        found = module_files(importlib.import_module("own.task"))
        package = module_files(sys.modules["own"])
    finally:
        for name in sys.modules.keys() - before:
            del sys.modules[name]
    used = FILES.keys() - {"own/unused.py"} - ({"helper.py"} if folder != "folder" else set())
    assert found == package == {name: root / name for name in used}


def test_a_module_without_a_file_of_its_own_has_no_source():
    made = ModuleType("typed_in")
    assert module_files(made) == {}
    for file in (None, "/lib/tasks.zip/typed_in.py"):
        made.__file__ = file
        assert module_files(made) == {}


def test_the_source_of_a_class_is_that_of_its_bases_too(tmp_path, monkeypatch):
    (tmp_path / "base_task.py").write_text("from mntrain.tasks import Task\nclass Base(Task): pass")
    (tmp_path / "top_task.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    base, top = (importlib.import_module(f"{name}_task") for name in ("base", "top"))
    kind = type("Top", (base.Base,), {"__module__": "top_task"})
    assert describe_sources(kind).keys() == {"the source base_task.py", "the source top_task.py"}
    for module in (base, top):
        del sys.modules[module.__name__]
    assert describe_sources(LanguageModel) == {}  # it is compared with its package


def test_changed_data_are_named_as_far_as_both_know_them():
    def facts(size, **fields):
        return {"files": {"the size of a": size}, "samples": {"the training data": fields}}

    said = "the data is not that of the checkpoint: {}samples of the training data changed"
    now = facts(5, x="1", y="2")
    assert changed_data(now, now) == ""
    assert changed_data(facts(6, x="1", y="3"), now) == said.format("the size of a, ")
    for before in ({}, {"files": {}, "values": {}}, {"samples": {"the validation data": {"x": 0}}}):
        assert changed_data(before, now) == ""  # of an earlier version, or other data
    assert changed_data(facts(5, x="1"), now) == ""  # y was random
    assert changed_data(facts(5), now) == changed_data(now, facts(5)) == ""  # a stream
    assert changed_data(facts(5, z="1"), now) == said.format("")
