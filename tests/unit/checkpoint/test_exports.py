"""Exports of models as folders of Hugging Face."""

import json

import pytest
import torch
from corpora import bpe, stories
from manifests import manifest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mntrain.checkpoint.exports import export_folder
from mntrain.corpus.tokenizer import FileTokenizer
from mntrain.options.config import Config, DataConfig, ModelConfig
from mntrain.options.types import as_mapping
from mntrain.tasks.lm import LanguageModel
from mntrain.tasks.transformer import Transformer

# Of several workers, one imports the libraries, which takes seconds.
pytestmark = pytest.mark.xdist_group("large libraries")

VOCABULARY = 37
HF = manifest(task="hf")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def saved(request, tmp_path):
    """A checkpoint of a model with tied weights, and the model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=11)
    model = GPT2LMHeadModel(config).to(request.param)
    path, run_files = tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "run" / "hf"
    for folder in (path, run_files):
        folder.mkdir(parents=True)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, path / "model.safetensors")
    # The configuration of the model that training began with names another dtype.
    content = config.to_dict() | {"architectures": ["GPT2LMHeadModel"], "dtype": "float16"}
    (run_files / "config.json").write_text(json.dumps(content))
    (run_files / "tokenizer.json").write_text("{}")
    return path, model


@pytest.mark.thorough
def test_an_exported_folder_has_the_tensors_and_the_dtype_of_the_checkpoint(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    path, model = saved
    size = export_folder(path, HF, tmp_path / "out", force=False)
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == model.dtype
    state = model.state_dict()
    assert opened.state_dict().keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in opened.state_dict().items())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.thorough
def test_an_existing_folder_is_kept_unless_forced(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="out exists: give another name, or --force"):
        export_folder(saved[0], HF, tmp_path / "out", force=False)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "vocab.txt").write_text("")  # of an earlier export
    export_folder(saved[0], HF, tmp_path / "out", force=True)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"mine", "model.safetensors"} <= names
    assert "vocab.txt" not in names
    with pytest.raises(ValueError, match="mine exists"):
        export_folder(saved[0], HF, tmp_path / "out" / "mine", force=True)


def test_a_model_of_other_shapes_and_a_run_of_another_task_are_refused(saved, tmp_path):
    file = tmp_path / "run" / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 12}))
    with pytest.raises(ValueError, match=r"is of another model: transformer.wte"):
        export_folder(saved[0], HF, tmp_path / "out", force=False)
    file.unlink()
    refused = r"is of no run of --task hf, .* or of --task lm: export it to a .safetensors"
    for content in (manifest(task="own:Task"), manifest()):
        with pytest.raises(ValueError, match=refused):
            export_folder(saved[0], content, tmp_path / "out", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# The built-in model


def shape(heads=4):
    return ModelConfig(layers=2, width=48, heads=heads, context=24)


def save(folder, given, dtype=torch.float32):
    """A checkpoint of the built-in model, with weights that all matter, and the model."""
    torch.manual_seed(3)
    sizes = given.layers, given.width, given.heads, given.context, VOCABULARY
    model = Transformer(*sizes).to(dtype)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    # So small that the epsilon of the first norms matters.
    model.embedding.weight.data *= 0.01
    path = folder / "run" / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    save_file(model.state_dict(), path / "model.safetensors")
    return path, model


def described(given):
    return manifest(task="lm", model=as_mapping(given))


def opened(folder):
    """The exported model, of which no tensor may be missing or unexpected."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize(
    ("heads", "dtype"), [(4, torch.float32), (3, torch.float32), (4, torch.bfloat16)]
)
@torch.no_grad()
def test_the_exported_llama_has_the_same_weights_and_logits(tmp_path, heads, dtype):
    from transformers import LlamaForCausalLM

    given = shape(heads)
    path, ours = save(tmp_path, given, dtype)
    size = export_folder(path, described(given), tmp_path / "out", force=False)
    files = list((tmp_path / "out").iterdir())
    assert size == sum(file.stat().st_size for file in files)
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    llama = opened(tmp_path / "out")
    assert type(llama) is LlamaForCausalLM
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    assert torch.equal(llama.model.embed_tokens.weight, ours.embedding.weight)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {llama.dtype, *(tensor.dtype for tensor in tensors.values())} == {dtype}
    assert llama.config.max_position_embeddings == 24
    assert (llama.config.bos_token_id, llama.config.eos_token_id) == (None, None)
    if dtype == torch.float32:
        tokens = torch.randint(VOCABULARY, (3, 24))
        logits = llama(tokens).logits
        atol = 1e-4 * logits.std().item()
        torch.testing.assert_close(logits, ours(tokens), rtol=1e-4, atol=atol)


@pytest.mark.thorough
def test_the_tokenizer_of_the_run_is_exported_and_names_the_end_of_text(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = bpe(tmp_path)
    (tmp_path / "a.txt").write_text("".join(stories(200)))
    data = DataConfig(path=tmp_path / "a.txt", tokenizer=f"bpe:{tokenizer.path}")
    path, _ = save(tmp_path, shape())
    for name, content in LanguageModel(Config(data=data)).run_files().items():
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes(content)
    export_folder(path, described(shape()), tmp_path / "out", force=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = stories(70)[69]
    assert theirs.encode(text) == tokenizer.encode([text])[0].tolist()
    assert theirs.eos_token_id == opened(tmp_path / "out").config.eos_token_id
    assert theirs.eos_token_id == tokenizer.end_of_text


def test_the_exported_tokenizer_adds_no_token_that_training_has_not_seen(tmp_path):
    from transformers import AutoTokenizer

    made = Tokenizer.from_file(str(bpe(tmp_path).path))
    made.add_special_tokens(["<s>"])
    start = made.token_to_id("<s>")
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    made.enable_truncation(3)
    folder = tmp_path / "llama"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    given = FileTokenizer(folder / "tokenizer.json")
    path, _ = save(tmp_path, shape())
    (tmp_path / "run" / "hf").mkdir()
    for name, content in given.exported_files().items():
        (tmp_path / "run" / "hf" / name).write_bytes(content)
    export_folder(path, described(shape()), tmp_path / "out", force=False)
    theirs, text = AutoTokenizer.from_pretrained(tmp_path / "out"), stories(70)[69]
    assert theirs(text)["input_ids"] == given.encode([text])[0].tolist()
    assert theirs.bos_token_id == start


def test_a_model_of_other_layers_is_refused(tmp_path):
    path, _ = save(tmp_path, shape())
    options = as_mapping(shape()) | {"layers": 3}
    with pytest.raises(ValueError, match=r"differs in blocks\.2\.attention"):
        export_folder(path, manifest(task="lm", model=options), tmp_path / "out", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
