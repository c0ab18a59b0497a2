"""Small corpora and tokenizers for tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mntrain.corpus.tokenizer import FileTokenizer
from mntrain.corpus.training_tokens import TrainingTokens


def write_records(folder: Path, texts: Iterable[str], field: str = "text", **columns: list) -> Path:
    """A folder as the datasets library saves it, with a text in one field."""
    import datasets

    texts = list(texts)
    records = {"id": list(range(len(texts))), field: texts, **columns}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(records).save_to_disk(folder)
    return folder


def ids(found: TrainingTokens) -> list[int]:
    """All tokens of some data."""
    return found.tokens.read(0, len(found.tokens)).tolist()


def stories(count: int) -> list[str]:
    """Short documents that have something to learn."""
    return [f"{i} and {i + 1} make {2 * i + 1}.\nThat is all\n" for i in range(count)]


def write_bpe(folder: Path, texts: Sequence[str] | None = None, vocabulary: int = 300) -> Path:
    """The tok.json of a byte-level byte-pair encoding of stories, or of other texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    made.pre_tokenizer, made.decoder = byte_level(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts or stories(50), trainer)
    made.save(str(folder / "tok.json"))
    return folder / "tok.json"


def bpe(folder: Path, **options: object) -> FileTokenizer:
    """A byte-pair encoding."""
    return FileTokenizer(write_bpe(folder, **options))  # type: ignore[arg-type]
