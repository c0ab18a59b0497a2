"""Runs that begin with the weights of others, with frozen layers."""

import re

import pytest
import torch
from job import completed, losses, metrics, train
from safetensors.torch import load_file

from mntrain.checkpoint.reader import list_checkpoints

SAVED = ["--checkpoint.every", "100"]


def weights(folder):
    return load_file(list_checkpoints(folder / "run")[0] / "model.safetensors")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose weights others begin with, and the corpus."""
    folder = tmp_path_factory.mktemp("first")
    completed(train(1, folder, *SAVED, "--run.seed", "5"))
    return folder


def tune(ranks, folder, first, *options):
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_bytes((first / "corpus.txt").read_bytes())
    return train(ranks, folder, *SAVED, "--init.from", str(first / "run"), *options)


@pytest.mark.exhaustive
def test_a_run_takes_weights_and_trains_the_layers_that_are_not_frozen(tmp_path, first):
    frozen = ["--init.freeze", "embedding*", "blocks.0.*", "--zero.stage", "2"]
    result = completed(tune(2, tmp_path / "tuned", first, *frozen))
    assert f"weights: 14 of 14 tensors from {first}/run" in result.stdout
    assert re.search(r"lm: 4\d,\d{3} parameters, of which 2\d,\d{3} are frozen", result.stdout)
    before, after = weights(first), weights(tmp_path / "tuned")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {n for n in before if not n.startswith(("embedding", "blocks.0."))}
    assert changed == expected
    completed(tune(1, tmp_path / "alone", first, *frozen))
    assert losses(tmp_path / "tuned") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    # The first loss is that of trained weights: it is lower than that of new ones.
    assert metrics(tmp_path / "tuned")[0]["loss"] < metrics(first)[0]["loss"] - 0.1
