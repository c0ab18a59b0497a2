import pytest
import torch
from torch import nn

from mntrain.optim import Muon, muon_groups, orthogonalized


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (64, 7)])
def test_singular_values_become_about_one(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonalized(matrix)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.97


def trained(optimizer_of, shape, steps=6):
    """A parameter after steps with given gradients."""
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = optimizer_of([parameter])
    for _ in range(steps):
        parameter.grad = torch.randn(shape)
        optimizer.step()
    return parameter.detach()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(4, 6), (9, 3)])
def test_matrices_are_updated_as_by_torchs_muon(shape):
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
    mine = trained(lambda p: Muon(p, **options), shape)
    torchs = trained(
        lambda p: torch.optim.Muon(p, **options, adjust_lr_fn="match_rms_adamw"), shape
    )
    torch.testing.assert_close(mine, torchs, rtol=0.02, atol=0.01)  # torch's runs in bf16


@pytest.mark.parametrize("shape", [(4, 6), (5,)])
def test_other_groups_are_updated_by_adamw(shape):
    options = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9)}
    mine = trained(lambda p: Muon([{"params": p, "muon": False}], **options), shape)
    torch.testing.assert_close(mine, trained(lambda p: torch.optim.AdamW(p, **options), shape))
    with pytest.raises(ValueError, match=r"takes matrices, not a parameter of shape \(5,\)"):
        Muon([nn.Parameter(torch.ones(5))])


def test_the_matrices_of_layers_are_for_muon_and_the_embedding_is_not():
    model = nn.Module()
    model.embedding = nn.Embedding(7, 4)
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
    model.head = nn.Linear(4, 7)
    matrices, others, vectors = muon_groups(model, model.layers)
    assert [id(p) for p in matrices["params"]] == [id(model.layers[0].weight)]
    assert [id(p) for p in others["params"]] == [id(model.embedding.weight), id(model.head.weight)]
    assert len(vectors["params"]) == 4
    assert vectors["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in (matrices, others, vectors)) == 7
