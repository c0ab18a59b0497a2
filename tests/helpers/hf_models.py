"""Folders of small Hugging Face models, with tokenizers of their own."""

import json
from pathlib import Path

import torch
from corpora import stories, write_bpe
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

VOCABULARY = 300
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_gpt2(folder: Path, *, weights: bool = False, **options: object) -> Path:
    """A GPT-2 of two layers that takes 32 tokens, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel  # it takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    write_bpe(folder, vocabulary=VOCABULARY).rename(folder / "tokenizer.json")
    given = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 304}
    ends = {"bos_token_id": 0, "eos_token_id": 0}  # <|endoftext|>
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _write(folder, GPT2Config(**given | ends | dropouts | options), GPT2LMHeadModel, weights)


def write_bert(folder: Path, *, weights: bool = False, **options: object) -> Path:
    """A BERT of two layers that takes 24 tokens, without dropout."""
    from transformers import BertConfig, BertForMaskedLM  # it takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=BERT_SPECIAL, show_progress=False
    )
    made.train_from_iterator(stories(50) + list(map(chr, range(33, 127))), trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    settings = {f"{kind}_token": token for kind, token in names.items()}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    given = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 24,
        "vocab_size": VOCABULARY,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return _write(folder, BertConfig(**given | options), BertForMaskedLM, weights)


def _write(folder, config, kind, weights):
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(3)
        kind(config).save_pretrained(folder)
    return folder
