"""Scripts that freeze, group, schedule, average, copy or write parameters."""

import copy

import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from contract.script import batches, loss_of, make, net, script, step, train


@script()
def freeze_later(kit):
    """A layer is frozen after two steps; without a gradient, it stays as it is."""
    model = kit.ddp(net(), find_unused_parameters=True)
    optimizer = kit.optimizer(model, AdamW, lr=0.01)
    for turn, (x, y) in enumerate(kit.shard(batches())):
        if turn == 2:
            kit.module(model)[0].requires_grad_(False)
        loss_of(model, x, y).backward()
        step(optimizer)
    return {"model": model}


@script(reference="alone")  # DDP does not reduce what was frozen when it was made
def unfreeze_later(kit):
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = make(kit, model, AdamW, lr=0.01)
    for turn, (x, y) in enumerate(kit.shard(batches())):
        if turn == 2:
            layer = kit.module(model)[0].requires_grad_(True)
            kit.add_param_group(optimizer, [(f"0.{n}", p) for n, p in layer.named_parameters()])
        loss_of(model, x, y).backward()
        step(optimizer)
    return {"model": model}


@script()
def parameter_groups(kit):
    """Weights decay, biases do not, and the head has a learning rate of its own."""
    model = net()
    weights = [p for p in model[:4].parameters() if p.ndim == 2]
    biases = [p for p in model[:4].parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
        {"params": list(model[4].parameters()), "lr": 0.05},
    ]
    return train(kit, model, AdamW, groups=groups, lr=0.01)


@script()
def one_cycle(kit):
    """The schedule changes the learning rate and, as Adam has no momentum, beta 1."""
    model, optimizer = make(kit, None, AdamW, lr=0.01)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
    rates = []
    for x, y in kit.shard(batches(6)):
        loss_of(model, x, y).backward()
        step(optimizer)
        rates += [scheduler.get_last_lr()[0], optimizer.param_groups[0]["betas"][0]]
        if len(rates) < 12:
            scheduler.step()
    return {"model": model, "rates": rates}


@script()
def exponential_average(kit):
    model, optimizer = make(kit)
    average = AveragedModel(kit.module(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        step(optimizer)
        average.update_parameters(kit.module(model))
    return {"model": model, "average": average}


@script()
def exponential_average_by_hand(kit):
    """Reads a list of parameters that was made before training, instead of the model's."""
    model, optimizer = make(kit)
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        step(optimizer)
        with torch.no_grad():
            for mean, parameter in zip(average, parameters, strict=True):
                mean.lerp_(parameter, 0.1)
    return {"model": model, **{f"average {i}": mean for i, mean in enumerate(average)}}


@script()
def stochastic_weight_averaging(kit):
    model, optimizer = make(kit)
    average = AveragedModel(kit.module(model))
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    late = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        loss_of(model, x, y).backward()
        step(optimizer)
        if turn > 2:
            average.update_parameters(kit.module(model))
            late.step()
        else:
            scheduler.step()
    return {"model": model, "average": average}


@script()
def deepcopy(kit):
    """A copy keeps the weights of its step, and can be trained on its own."""
    model, optimizer = make(kit)
    for turn, (x, y) in enumerate(kit.shard(batches())):
        loss_of(model, x, y).backward()
        optimizer.step()
        if turn == 1:
            kept = copy.deepcopy(kit.module(model))
        optimizer.zero_grad()
    apart = copy.deepcopy(kept)
    own = SGD(apart.parameters(), lr=0.5)
    for x, y in batches():
        loss_of(apart, x, y).backward()
        step(own)
    return {"model": model, "kept": kept, "apart": apart}


@script()
def return_to_the_best_weights(kit):
    model, optimizer = make(kit)
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        loss_of(model, x, y).backward()
        step(optimizer)
        if turn == 1:
            best = copy.deepcopy(model.state_dict())
        if turn == 3:
            model.load_state_dict(best)
    return {"model": model}


@script()
def project_weights(kit):
    """Weights are written between steps, as by weight clipping."""
    model, optimizer = make(kit)
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        step(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return {"model": model}
