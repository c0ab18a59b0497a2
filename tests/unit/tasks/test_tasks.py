import math
import sys
import sysconfig
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import text_tasks
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from corpora import stories, write_bpe, write_records
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mntrain.corpus.tokenizer import load_tokenizer
from mntrain.corpus.training_tokens import Corpus
from mntrain.options.config import Config, RunConfig
from mntrain.tasks import Loss, Mean, Sum, Task, check_loss, load
from mntrain.tasks.token_windows import Windows
from mntrain.tasks.transformer import RMSNorm, Transformer

language_model = partial(text_tasks.language_model, valid_fraction=0.25)


def batch_of(task, split="valid"):
    return torch.stack(list(task.dataset(split)))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(97, 123)) * 4)
    return path


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A current directory to put modules in, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    libraries = tuple(sysconfig.get_paths().values())  # whose modules cannot be imported twice
    for name in set(sys.modules) - before:
        if not str(getattr(sys.modules[name], "__file__", "")).startswith(libraries):
            del sys.modules[name]


# ---- tasks by name ----

COMPLETE = """
from torch import nn
from mntrain.tasks import Loss, Task

class Half(Task):
    def model(self):
        return nn.Linear(1, 1)

class Mine(Half):
    def dataset(self, split):
        return [1.0, 2.0]

    def loss(self, model, batch):
        return Loss(model(batch).mean(), len(batch))

class Foreign:
    def model(self):
        return nn.Linear(1, 1)

number = 3
"""


def test_a_task_is_loaded_from_the_current_directory(modules):
    (modules / "own").mkdir()
    (modules / "own" / "part.py").write_text(COMPLETE)
    config = Config()
    task = load("own.part:Mine", config)
    assert isinstance(task, Task)
    assert task.config is config
    assert task.sample(task.model(), "a prompt") is None
    assert str(modules) in sys.path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lmm", 'is not of the form "package.module:Class", and none of lm, hf'),
        ("own:", "is not of the form"),
        (":Mine", "is not of the form"),
        (".own:Mine", "is not of the form"),
        ("absent_module:Mine", "does not import: ModuleNotFoundError: No module named 'absent_m"),
        ("broken:Mine", "module 'broken' does not import: ZeroDivisionError: division by zero"),
        ("own:Other", "module 'own' has no class 'Other'"),
        ("own:number", "module 'own' has no class 'number'"),
        ("own:Half", "Half lacks dataset, loss$"),
        ("own:Foreign", "Foreign does not derive from mntrain.tasks.Task"),
    ],
)
def test_a_name_that_is_not_of_a_task_is_refused(modules, name, message):
    (modules / "own.py").write_text(COMPLETE)
    (modules / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=message):
        load(name, Config())


# ---- the language model's data ----


@pytest.mark.parametrize(("valid_fraction", "expected"), [(0.01, 1), (0.25, 2), (0.99, 9), (0, 0)])
def test_windows_share_one_token_and_the_last_are_for_validation(text, valid_fraction, expected):
    task = language_model(text, 10, valid_fraction=valid_fraction)
    train, valid = task.dataset("train"), task.dataset("valid")
    windows = [*train, *valid]
    assert (len(train) + len(valid), len(windows), len(valid)) == (10, 10, expected)  # of 104
    whole = list(text.read_bytes())
    for i, window in enumerate(windows):
        assert window.dtype == torch.int64
        assert window.tolist() == whole[i * 10 : i * 10 + 11]
    with pytest.raises(IndexError):
        valid[len(valid)]


def test_the_vocabulary_is_that_of_data_and_tokenizer_or_as_given(text, tmp_path, documents):
    np.save(tmp_path / "a.npy", np.arange(40))
    given = f"bpe:{write_bpe(tmp_path)}"
    for path, vocab, tokenizer, expected in (
        (text, 0, "bytes", 256),
        (text, 300, "bytes", 300),
        (tmp_path / "a.npy", 0, "bytes", 40),
        (tmp_path / "a.npy", 64, "bytes", 64),
        (documents, 320, given, 320),
    ):
        model = language_model(path, vocab=vocab, tokenizer=tokenizer).model()
        assert model.embedding.num_embeddings == expected
    for path, vocab, tokenizer, least in ((text, 255, "bytes", 256), (documents, 299, given, 300)):
        with pytest.raises(ValueError, match=rf"--model.vocab {vocab}: .* or at least {least}"):
            language_model(path, vocab=vocab, tokenizer=tokenizer)
    np.save(tmp_path / "a.npy", np.array([5, 301, 7] * 9))
    with pytest.raises(ValueError, match="token id 301, outside the vocabulary of 300"):
        language_model(tmp_path / "a.npy", tokenizer=given)


def test_ids_that_no_vocabulary_has_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 2**63, 7] * 9, np.uint64))
    with pytest.raises(ValueError, match=f"token id {2**63}, and the vocabulary would have as"):
        language_model(tmp_path / "a.npy")


@pytest.mark.parametrize("bad", [50, -1])
def test_a_token_outside_the_vocabulary_is_named(tmp_path, bad):
    np.save(tmp_path / "a.npy", np.array([1] * 9 + [bad] + [1] * 9))
    with pytest.raises(ValueError, match=f"token id {bad}, outside the vocabulary of 50,"):
        language_model(tmp_path / "a.npy", vocab=50)
    windows = Windows(Corpus([tmp_path / "a.npy"]), 4, 50)  # as if the scan had left it out
    assert windows[0].tolist() == [1] * 5
    with pytest.raises(ValueError, match=f"token id {bad}, outside the vocabulary of 50,"):
        windows[2]


SHORT = "the data has {} tokens, .* need a window each, 9 tokens .*give more data"
NO_VECTOR = r"a.npy holds {}\): save .* 1-D array of integers"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "^--data.path: .*absent: must be a file or a folder"),
        ("empty", b"", SHORT.format(0)),
        ("short", b"12345678", SHORT.format(8)),
        ("a.npy", np.zeros(50), NO_VECTOR.format(r"float64 of shape \(50,")),
        ("a.npy", b"not an array", "a.npy is not a .npy file of token ids"),
        ("a.npy", np.zeros(0, int), SHORT.format(0)),
        ("a.bin", b"123", "a.bin is not a .bin file of token ids .Size of (the )?available"),
        ("", {"glob": "*.bin"}, "has no text: a.bin has a NUL byte at offset 1; give UTF-8 text"),
        ("", {"glob": "*.jsonl"}, "has no text: a.jsonl holds records; .* save_to_disk"),
        ("", {"glob": "*.md"}, r"^--data.path: glob '\*.md' matches no file in .*: give"),
        ("four", b"1234", "has 4 tokens, but training needs a window, 5 tokens"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path, name, content, message):
    options = {"valid_fraction": 0} if name == "four" else {}
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif isinstance(content, dict):
        options = content
        for file in ("a.bin", "a.jsonl", "readme.txt"):
            (tmp_path / file).write_bytes(b"1\0002" if file == "a.bin" else b"1234")
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        language_model(tmp_path / name, **options)


# ---- the transformer ----


def test_the_norm_equals_torchs():
    norm = RMSNorm(8)
    nn.init.uniform_(norm.weight)
    x = torch.randn(3, 5, 8, requires_grad=True)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected)
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def transformer(seed=0):
    torch.manual_seed(seed)
    return Transformer(layers=2, width=16, heads=2, context=12, vocab=20)


def test_attention_equals_the_explicit_formula():
    torch.manual_seed(0)
    model = Transformer(layers=1, width=16, heads=4, context=12, vocab=20)
    attention = model.blocks[0].attention
    x = torch.randn(2, 12, 16)
    heads = [y.view(2, 12, 4) for y in attention.qkv(x).split(4, dim=-1)]
    q, k, v = (torch.stack(heads[i : i + 4], dim=1) for i in (0, 4, 8))

    def rotated(y):
        # As complex numbers: the pair (i, i + 2) times e^(j * position * 10000^(-i/2)).
        angles = torch.outer(torch.arange(12.0), 10_000.0 ** -(torch.arange(2) / 2))
        turned = torch.complex(y[..., :2], y[..., 2:]) * torch.polar(torch.ones(12, 2), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    scores = rotated(q) @ rotated(k).transpose(-1, -2) / 4**0.5
    scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 12, 16)
    torch.testing.assert_close(attention(x), attention.out(y))


def test_weights_start_as_gpt2s_and_the_embedding_is_tied():
    torch.manual_seed(0)
    model = Transformer(layers=8, width=128, heads=4, context=8, vocab=256)
    spread = {name: weight.std().item() for name, weight in model.named_parameters()}
    for name, expected in (
        ("embedding", 0.02),
        ("blocks.3.attention.qkv", 0.02),
        ("blocks.3.attention.out", 0.005),
        ("blocks.3.mlp.down", 0.005),
    ):
        assert spread[f"{name}.weight"] == pytest.approx(expected, rel=0.05)
    assert not any(name.endswith("bias") for name in spread)
    assert [n for n in spread if "embedding" in n or "head" in n] == ["embedding.weight"]
    state = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_attention_runs_in_16_bits(monkeypatch, how, dtype):
    # Or else torch's flash kernels would not be taken.
    attend, seen = F.scaled_dot_product_attention, []

    def looking(q, k, v, **options):
        seen.append({q.dtype, k.dtype, v.dtype})
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", looking)
    model, tokens = transformer(), torch.randint(20, (2, 12))
    if how == "weights":
        model.to(dtype)(tokens)
    else:
        with torch.autocast("cpu", dtype):
            model(tokens)
    assert seen == [{dtype}] * 2


def test_flops_are_those_of_the_matrices_that_torch_counts_and_of_causal_attention(text):
    task = language_model(text, 8)
    model = task.model()
    batch = batch_of(task)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = task.loss(model, batch)
        loss.mean.backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(flops for kind, flops in counted.items() if "bmm" not in str(kind))
    # Two layers of width 16: scores and values, forward and twice backward, half of 8 positions.
    attention = 2 * 2 * 3 * 2 * 16 * 8 / 2
    assert task.flops_per_item(model) == matrices / loss.count + attention
    assert task.flops_per_item(nn.Linear(2, 2)) is None


class Bare(Task):
    def model(self):
        return nn.Linear(1, 1)

    dataset = loss = model


class ListedLayers(nn.Module):
    """Two lists of layers, a layer with a list of its own, and something else."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.down = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        expert = nn.Module()
        expert.parts = nn.ModuleList([nn.Linear(1, 1)])
        self.up = nn.ModuleList([expert, nn.ModuleList([nn.Linear(1, 1)]), self.down[0]])


def test_compiled_regions_are_the_outermost_layers_or_the_whole_model(text):
    task, model = Bare(Config()), ListedLayers()
    expected = [*model.down, model.up[0], *model.up[1]]
    assert set(task.regions(model)) == set(expected)
    assert len(task.regions(model)) == len(expected)
    whole = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert task.regions(whole) == [whole]
    assert task.flops_per_item(whole) is None
    built_in = language_model(text)
    own = built_in.model()
    within = {module for region in built_in.regions(own) for module in region.modules()}
    assert set(own.modules()) - within == {own, own.embedding, own.blocks}
    assert built_in.regions(model) == task.regions(model)


# ---- the language model's loss and sample ----


def test_the_loss_is_the_cross_entropy_of_the_next_token_counted_in_tokens(text):
    task = language_model(text, 10)
    torch.manual_seed(0)
    model, batch = task.model(), batch_of(task)
    loss, logits = task.loss(model, batch), model(batch[:, :-1])
    assert loss.mean.dim() == 0
    assert torch.equal(loss.mean, F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    assert loss.count == len(batch) * 10
    assert loss.mean.item() == pytest.approx(np.log(256), rel=0.02)


def test_a_sample_changes_no_state_and_depends_on_its_seed_and_temperature(text):
    task = language_model(text)
    model, state = task.model(), torch.get_rng_state()
    sample = partial(task.sample, model, tokens=30)
    for training in (True, False):
        default = model.train(training) and sample()
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training is training
        assert all(parameter.grad is None for parameter in model.parameters())
        assert default == sample("", temperature=0.8)
    greedy, seeds = [], [replace(task.config, run=RunConfig(seed=seed)) for seed in range(3)]
    for task.config in seeds:
        assert (sample() == default) == (task.config.run.seed == 0)
        greedy.append(sample("a", temperature=0))
    assert len(set(greedy)) == 1


class Successor(nn.Module):
    """A model whose likeliest next token is the last one plus 1, by far."""

    def __init__(self, vocab):
        super().__init__()
        self.weight, self.vocab, self.seen = nn.Parameter(torch.zeros(1)), vocab, []

    def forward(self, tokens):
        self.seen.append(tokens[0].tolist())
        return 100.0 * F.one_hot(tokens + 1, self.vocab + 1)


def test_a_sample_continues_its_prompt(text):
    task = language_model(text, 3)
    model = Successor(300)
    assert task.sample(model, "xab", tokens=4) == "xabcdef"
    assert model.seen == [[120, 97, 98], [97, 98, 99], [98, 99, 100], [99, 100, 101]]
    assert task.sample(Successor(300), tokens=2) == "\x0b\x0c"  # behind a line break


@pytest.fixture
def documents(tmp_path):
    return write_records(tmp_path / "a", stories(50))


def test_documents_are_decoded_and_end_at_the_end_of_text(tmp_path, documents):
    given = f"bpe:{write_bpe(tmp_path)}"
    task, tokenizer = language_model(documents, tokenizer=given), load_tokenizer(given)
    assert task.model().embedding.num_embeddings == tokenizer.size == 300
    train = task.dataset("train")
    text = tokenizer.decode([*train[0].tolist(), *train[1].tolist()[1:]])
    assert stories(1)[0].startswith(text)
    model = Successor(300)
    sample = task.sample(model, "12", tokens=2)
    first = tokenizer.encode(["12"])[0].tolist()
    assert model.seen[0] == [0, *first]  # behind an end of text
    assert sample == "12" + tokenizer.decode([first[-1] + 1, first[-1] + 2])

    class Ending(Successor):
        def forward(self, tokens):
            return super().forward(torch.zeros_like(tokens) - 1 if len(self.seen) > 2 else tokens)

    assert len(tokenizer.encode([task.sample(Ending(300), "12")])[0]) == len(first) + 3


def test_the_data_is_described_with_its_split_and_epochs(tmp_path):
    (tmp_path / "a.txt").write_text("".join(stories(50)))
    task = language_model(tmp_path / "a.txt", 10)
    nbytes = sum(map(len, stories(50)))
    windows = (nbytes - 1) // 10
    train, valid = (len(task.dataset(split)) for split in ("train", "valid"))
    assert train + valid == windows
    assert task.describe_data().splitlines() == [
        f"data: 1 file, {nbytes:,} tokens, which are bytes",
        f"{train} training and {valid} validation windows of 10 tokens; 200 steps of 32 windows "
        f"are {200 / math.ceil(train / 32):.3g} epochs",
    ]
    dropping = language_model(tmp_path / "a.txt", 10, drop_last=True).describe_data()
    assert dropping.endswith(f" are {200 / (train // 32):.3g} epochs")


def test_the_tokenizer_is_among_what_is_compared(tmp_path, documents):
    given = f"bpe:{write_bpe(tmp_path)}"
    task = language_model(documents, tokenizer=given)
    assert task.compared_values() == {"the tokenizer": load_tokenizer(given).identity}
    assert set(task.compared_files()) == {"data-00000-of-00001.arrow", "the tokens"}
    (tmp_path / "b").write_text("as bytes" * 9)
    assert language_model(tmp_path / "b").compared_values() == {"the tokenizer": "bytes"}
    np.save(tmp_path / "a.npy", np.arange(40))
    assert language_model(tmp_path / "a.npy").compared_values() == {}


# ---- what a task returns ----


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.tensor(1.0), "returned a Tensor: return mntrain.tasks.Loss"),
        (None, "returned a NoneType"),
        (Loss(1.0, 3), "mean is 1.0, and must be a tensor of no dimension"),
        (Loss(torch.ones(2), 3), r"mean is of shape \(2,\)"),
        (Loss(torch.tensor(1.0), 3.0), "count is 3.0, and must be the number of items"),
        (Loss(torch.tensor(1.0), -1), "count is -1"),
        (Loss(torch.tensor(1.0), 3, {"accuracy": 0.5}), "accuracy is 0.5"),
        (Loss(torch.tensor(1.0), 3, {"loss": torch.tensor(2.0)}), "a metric is named loss"),
        (Loss(torch.tensor(1.0), 3, {"a": Mean(torch.ones(2), 3)}), r"a is of shape \(2,\)"),
        (Loss(torch.tensor(1.0), 3, {"a": Mean(1.0, -3)}), "the count of a is -3"),
    ],
)
def test_a_wrong_loss_is_refused_with_what_to_return(loss, words):
    with pytest.raises(TypeError, match=f"loss.. of --task mine:Task.*{words}"):
        check_loss(loss, "mine:Task")


def test_a_right_loss_is_taken():
    metrics = {"accuracy": torch.tensor(0.5), "errors": Sum(2), "words": Mean(1.0, 0)}
    check_loss(Loss(torch.tensor(1.0), 0, metrics), "mine:Task")
    check_loss(Loss(torch.tensor(1.0), np.int64(3)), "mine:Task")
