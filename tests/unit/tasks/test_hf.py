import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import stories, write_records
from hf_models import write_bert, write_gpt2
from text_tasks import hf_task as task
from text_tasks import write_reviews
from torch.utils.data import default_collate

from mntrain.corpus.tokenizer import FileTokenizer
from mntrain.options.config import Config, DataConfig
from mntrain.options.huggingface import HuggingFaceConfig
from mntrain.tasks import load
from mntrain.tasks.hf import pad_batch

# Of several workers, one imports the library, which takes seconds.
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("large libraries")]

EXAMPLES = Path(__file__).parents[3] / "examples"
classifier = partial(task, head="classification")


@pytest.fixture
def text(tmp_path):
    return write_records(tmp_path / "a", stories(200))


def first_batch(made, split="train", size=4):
    data = made.dataset(split)
    return (made.collate or default_collate)([data[i] for i in range(size)])


# ---- causal ----


def test_weights_of_the_folder_are_taken_unless_its_config_is_named(tmp_path, text):
    folder = write_gpt2(tmp_path / "gpt2", weights=True)
    made = task(folder, text)
    first, again = made.model(), made.model()
    assert first.training  # so that dropout is on from the first step
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    alone = task(folder / "config.json", text)
    torch.manual_seed(0)
    assert not torch.equal(alone.model().lm_head.weight, first.lm_head.weight)
    assert "random weights" in alone.describe_data()


def test_weights_without_the_head_are_named_and_those_of_another_model_refused(tmp_path):
    folder = write_bert(tmp_path / "bert", weights=True)
    made = classifier(folder, write_reviews(tmp_path / "r", [0, 1] * 5))
    made.model()
    assert "random: bert.pooler.dense.bias" in made.describe_data()
    assert "classifier.bias" in made.describe_data()
    write_gpt2(tmp_path / "gpt2", weights=True)
    (tmp_path / "gpt2" / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot make a model of it .*no tensor of it has a name"):
        classifier(folder, write_reviews(tmp_path / "r", [0, 1] * 5)).model()


def test_a_model_is_compared_by_its_config_and_not_by_its_place(tmp_path, text):
    folder, moved = write_gpt2(tmp_path / "gpt2"), tmp_path / "moved"
    before = task(folder, text).compared_values()
    folder.rename(moved)
    assert task(moved, text).compared_values() == before
    write_gpt2(moved, n_head=1)  # of the same shapes
    after = task(moved, text).compared_values()
    assert {name for name in before if before[name] != after[name]} == {"the model's config.json"}


def test_the_flops_of_a_token_are_six_per_parameter_that_computes(tmp_path, text):
    made = task(write_gpt2(tmp_path / "gpt2"), text)
    model = made.model()
    everything = sum(p.numel() for p in model.parameters())
    assert made.flops_per_item(model) == 6 * (everything - model.transformer.wpe.weight.numel())
    model.transformer.h[0].requires_grad_(False)
    assert made.flops_per_item(model) is None


def test_a_sample_takes_the_likeliest_tokens_and_changes_no_random_state(tmp_path, text):
    made = task(write_gpt2(tmp_path / "gpt2", weights=True), text)
    model, before = made.model(), torch.get_rng_state()
    made.sample(model, "12 and", tokens=40)  # beyond the model's length
    tokenizer = FileTokenizer(tmp_path / "gpt2" / "tokenizer.json")
    ids = torch.tensor([[0, *tokenizer.encode(["12 and"])[0]]])
    model.eval()
    made_ids = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 1:]
    expected = tokenizer.decode([one for one in made_ids.tolist() if one < tokenizer.size])
    assert made.sample(model, "12 and", tokens=8, temperature=0) == expected
    assert torch.equal(torch.get_rng_state(), before)


# ---- masked, as an example ----


def test_the_example_predicts_masks_that_the_seed_decides_with_the_loss_of_the_library(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    write_records(tmp_path / "texts", stories(40))
    config = Config(
        task="masked_lm:MaskedLM",
        data=DataConfig(path=tmp_path / "texts"),
        hf=HuggingFaceConfig(model=write_bert(tmp_path / "bert", weights=True), max_length=24),
    )
    made = load(config.task, config)
    assert [len(made.dataset(split)) for split in ("train", "valid")] == [38, 2]
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(first_batch(made))
    assert torch.equal(drawn[0]["labels"], drawn[1]["labels"])
    assert not torch.equal(drawn[0]["labels"], drawn[2]["labels"])
    batch, model = drawn[0], made.model().eval()
    loss = made.loss(model, batch)
    assert loss.count == int((batch["labels"] >= 0).sum()) > 0
    torch.testing.assert_close(loss.mean, model(**batch).loss)
    none = made.loss(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert (none.mean.item(), none.count) == (0, 0)


# ---- classification ----


def test_positions_behind_the_padding_token_count(tmp_path):
    from transformers import RobertaConfig

    folder = write_bert(tmp_path / "roberta")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 26}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    RobertaConfig(**sizes, **layers).save_pretrained(folder)
    path = write_reviews(tmp_path / "r", [0, 1] * 5, times=10)
    made = classifier(folder, path)
    batch = first_batch(made)
    assert batch[0].shape == (4, 24)
    assert made.loss(made.model(), batch).mean.isfinite()
    with pytest.raises(ValueError, match=r"--hf.max-length 25: .* takes at most 24 tokens"):
        classifier(folder, path, max_length=25)


@pytest.mark.parametrize("write", [write_bert, write_gpt2])  # GPT-2 has no padding token
def test_labels_are_sorted_and_a_padded_record_has_the_loss_that_it_has_alone(tmp_path, write):
    path = write_reviews(tmp_path / "r", [10, 9, 10, 2] * 5)  # some texts are empty
    made = classifier(write(tmp_path / "model", weights=write is write_bert), path)
    model = made.model().eval()
    assert model.config.id2label == {0: "2", 1: "9", 2: "10"}
    samples = [made.dataset("train")[i] for i in range(8)]
    batch = pickle.loads(pickle.dumps(made.collate))(samples)
    assert len({int(row.sum()) for row in batch[1]}) > 1  # of different lengths
    loss = made.loss(model, batch)
    alone = [made.loss(model, made.collate([one])) for one in samples]
    torch.testing.assert_close(loss.mean, torch.stack([one.mean for one in alone]).mean())
    accuracies = torch.stack([one.metrics["accuracy"] for one in alone])
    torch.testing.assert_close(loss.metrics["accuracy"], accuracies.mean())
    assert loss.count == 8


def test_label_names_of_the_model_keep_their_order(tmp_path):
    folder = write_bert(tmp_path / "bert", id2label={0: "pos", 1: "neg"})
    made = classifier(folder, write_reviews(tmp_path / "r", ["neg", "pos"] * 9))
    assert made.model().config.label2id == {"pos": 0, "neg": 1}
    labels = [label for split in ("train", "valid") for _, label in made.dataset(split)]
    assert sorted(labels) == [0] * 9 + [1] * 9


def test_texts_are_cut_to_the_length_of_the_model_and_padded_with_its_token(tmp_path):
    path = write_reviews(tmp_path / "r", [0, 1] * 5)
    made = classifier(write_bert(tmp_path / "bert"), path, max_length=5)
    ids, attention, labels = made.collate([made.dataset("train")[i] for i in range(9)])
    assert ids.shape == (9, 5)
    assert (ids[attention == 1] != 0).all()
    assert (ids[attention == 0] == 0).all()
    assert ids[:, 0].tolist() == [2] * 9
    assert len(labels) == 9
    ids, attention, _ = pad_batch([(torch.tensor([7]), 0), (torch.tensor([7, 8, 9]), 1)], 99)
    assert ids.tolist() == [[7, 99, 99], [7, 8, 9]]
    assert attention.tolist() == [[1, 0, 0], [1, 1, 1]]


# ---- refusals ----


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of models in the current directory."""
    from transformers import ViTConfig

    monkeypatch.chdir(tmp_path)
    for name in ("text", "odd"):
        Path(name).mkdir()
    for name, options in {"gpt2": {}, "small": {"vocab_size": 290}, "pickled": {}}.items():
        write_gpt2(Path(name), **options)
    Path("pickled/x.gguf").touch()
    write_bert(Path("bert"))
    ViTConfig(max_position_embeddings=9, vocab_size=9).save_pretrained(Path("vit"))
    (write_gpt2(Path("bare")) / "tokenizer.json").unlink()
    Path("odd/config.json").write_text('{"model_type": "no such"}')


@pytest.mark.parametrize(
    ("base", "head"),
    [("HuggingFaceTask", "classification"), ("HuggingFaceClassifier", "causal-lm")],
)
def test_a_task_of_another_head_is_refused_with_what_to_derive_it_from(tmp_path, base, head):
    name = f"mntrain.tasks.hf:{base}"
    config = Config(task=name, hf=HuggingFaceConfig(model=write_gpt2(tmp_path / "a"), head=head))
    with pytest.raises(ValueError, match=rf"^--hf.head {head}: the task {name} is of .*; derive"):
        load(name, config)


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2-xl", {}, "gpt2-xl: there is no config.json, and nothing is downloaded"),
        ("text", {}, "text: there is no config.json"),
        ("gpt2", {"max_length": 33}, "--hf.max-length 33: the model of .* takes at most 32"),
        ("vit", {}, "has no model for --hf.head causal-lm"),
        ("small", {}, "the tokenizer has 300 tokens, and the model of .* only 290"),
        ("bare", {}, "has no tokenizer.json: give --data.tokenizer"),
        ("pickled", {}, r"weights of another kind \(x.gguf\)"),
        ("bert", {"head": "classification"}, "has no field 'label': .* label-field"),
        ("odd", {}, "is not a configuration of the transformers library"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(text, name, options, message):
    with pytest.raises(ValueError, match=message):
        task(Path(name), text, **options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1.0, 1.5], "'label' are of type float: texts must be str, and labels all str or all int"),
        ([False, True], "'label' are of type bool"),
        ([1, None], "'label' are of type NoneType, int"),
        ([1, 1], "has 1 labels: give more records"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, labels, message):
    path = write_reviews(tmp_path / "r", labels)
    with pytest.raises(ValueError, match=message):
        classifier(write_bert(tmp_path / "bert"), path)


def test_token_ids_outside_the_vocabulary_of_the_model_are_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(310) % 305)
    with pytest.raises(ValueError, match=r"id 304, outside the vocabulary of 304, .*: the model"):
        task(write_gpt2(tmp_path / "gpt2"), tmp_path / "ids.npy")


def test_the_library_that_is_not_installed_is_named(tmp_path, monkeypatch, text):
    monkeypatch.setattr("mntrain.options.huggingface.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install transformers"):
        task(write_gpt2(tmp_path / "gpt2"), text)
