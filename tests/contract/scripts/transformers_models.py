"""Scripts with Hugging Face models, made from a configuration without a download."""

import torch
from torch.optim import AdamW

from contract.script import make, script, step

SMALL = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
    config = GPT2Config(**SMALL, **size, loss_type="ForCausalLM")
    return GPT2LMHeadModel(config).double()


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(12)
    size = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    size |= {"intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 3}
    config = BertConfig(**SMALL, **size, problem_type="single_label_classification")
    return BertForSequenceClassification(config).double()


def language_batches():
    """Dictionaries, as a tokenizer and a collator make them."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        tokens = torch.randint(32, (12, 10), generator=generator)
        yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def train(kit, model, data, **given):
    model, optimizer = make(kit, model.train(), AdamW, lr=0.01)
    torch.manual_seed(kit.rank)  # for dropout
    for batch in kit.shard(data):
        model(**batch, **given).loss.backward()
        step(optimizer)
    return {"model": model}


@script(thorough=True)  # the import takes seconds
def hugging_face_gpt2(kit):
    return train(kit, gpt2(), list(language_batches()), use_cache=False)


@script(thorough=True)
def hugging_face_bert(kit):
    """The labels are a column of the batch."""
    data = [{**batch, "labels": batch["input_ids"].sum(dim=1) % 3} for batch in language_batches()]
    return train(kit, bert(), data)
