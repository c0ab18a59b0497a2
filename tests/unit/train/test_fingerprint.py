"""The fingerprint of data: what counts as another one."""

import json

import torch
from torch.utils.data import TensorDataset

from mntrain.train.data_digest import describe_files, describe_samples
from mntrain.train.fingerprint import differences, fingerprint


def taken(tmp_path, text="text", offset=0.0, count=3):
    (tmp_path / "a").write_text(text)
    samples = TensorDataset(torch.arange(5.0 * count).view(count, 5) + offset)
    found = fingerprint(
        describe_files({"a": tmp_path / "a"}), describe_samples("training", samples)
    )
    return json.loads(json.dumps(found))


def none_random():
    return set()


def test_the_same_data_has_no_differences(tmp_path):
    assert differences(taken(tmp_path), taken(tmp_path, offset=1e-6), none_random) == []


def test_another_content_of_the_same_size_is_named(tmp_path):
    found = differences(taken(tmp_path), taken(tmp_path, text="tex_"), none_random)
    assert found == ["the content of a"]


def test_other_samples_are_named_unless_they_are_random(tmp_path):
    before, now = taken(tmp_path), taken(tmp_path, offset=1.0)
    names = [f"sample {n} of the training data" for n in range(3)]
    assert differences(before, now, none_random) == names
    assert differences(before, now, lambda: set(names[:2])) == names[2:]


def test_a_checkpoint_without_a_fingerprint_differs_in_nothing(tmp_path):
    assert differences({}, taken(tmp_path), none_random) == []


def test_few_of_many_files_are_kept(tmp_path):
    files = {f"{n:04}": tmp_path / f"{n}" for n in range(250)}
    for path in files.values():
        path.write_text("text")
    kept = fingerprint(describe_files(files), {})["files"]
    assert 50 < len(kept) <= 100
    assert "the list of the data's files" in kept
