"""Scripts that use p.grad between backward and step."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from contract.script import TwoHeads, backwards, batches, loss_of, make, net, script, step, train

# Nowhere is there a whole gradient from stage 1 on, and the error names what to call instead.
WITHOUT_GRADIENTS = {1: r"optimizer\.clip_grad_norm_", 2: r"optimizer\.clip_grad_norm_"}


@script(refused=WITHOUT_GRADIENTS)
def clip_with_torch(kit):
    model, optimizer = make(kit)
    norms = [
        nn.utils.clip_grad_norm_(model.parameters(), 0.1) for _ in backwards(kit, model, optimizer)
    ]
    return {"model": model, "norms": torch.stack(norms)}


@script()
def clip_with_the_optimizer(kit):
    model, optimizer = make(kit)
    norms = [kit.clip_grad_norm_(model, optimizer, 0.1) for _ in backwards(kit, model, optimizer)]
    return {"model": model, "norms": torch.stack(norms)}


@script()
def scale_gradients(kit):
    model, optimizer = make(kit)
    for _ in backwards(kit, model, optimizer):
        kit.scale_gradients_(model, optimizer, 0.3)
    return {"model": model}


@script(refused=WITHOUT_GRADIENTS)
def grad_scaler(kit):
    """The gradient of the second step overflows on rank 0 alone."""
    model = kit.ddp(net().float())
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        loss = loss_of(model, x.float(), y)
        if turn == 1 and kit.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"model": model, "scales": scales}


@script(refused=WITHOUT_GRADIENTS)
def log_gradients(kit):
    model, optimizer = make(kit, None, AdamW, lr=0.01)
    log = []
    for _ in backwards(kit, model, optimizer):
        log += [parameter.grad.norm() for parameter in model.parameters()]
        log.append(max(parameter.grad.abs().max() for parameter in model.parameters()))
    return {"model": model, "log": torch.stack(log)}


@script()
def log_one_full_gradient(kit):
    model, optimizer = make(kit, None, AdamW, lr=0.01)
    first = next(model.parameters())
    log = [kit.full_gradient(optimizer, first).clone() for _ in backwards(kit, model, optimizer)]
    return {"model": model, "log": torch.stack(log)}


def with_masks(kit, model, optimizer):
    """Yield every parameter with a mask of its gradient, in each step."""
    masks = [torch.rand_like(parameter) < 0.5 for parameter in model.parameters()]
    for _ in backwards(kit, model, optimizer):
        yield from zip(model.parameters(), masks, strict=True)


@script(refused=WITHOUT_GRADIENTS)
def mask_in_place(kit):
    model, optimizer = make(kit)
    for parameter, mask in with_masks(kit, model, optimizer):
        parameter.grad *= mask
    return {"model": model}


@script(refused=WITHOUT_GRADIENTS)
def mask_by_assignment(kit):
    model, optimizer = make(kit)
    for parameter, mask in with_masks(kit, model, optimizer):
        parameter.grad = parameter.grad * mask
    return {"model": model}


@script(refused=WITHOUT_GRADIENTS)
def mask_by_data(kit):
    """The gradient stays the same tensor, and gets other memory."""
    model, optimizer = make(kit)
    for parameter, mask in with_masks(kit, model, optimizer):
        parameter.grad.data = parameter.grad.data * mask
    return {"model": model}


@script()
def take_gradients_away(kit):
    """Momentum is left alone where a gradient is None, unlike where it is zero."""
    model, optimizer = make(kit)
    first = next(model.parameters())
    for turn, _ in enumerate(backwards(kit, model, optimizer)):
        if turn == 2:
            first.grad = None
    return {"model": model}


@script(refused=dict.fromkeys([1, 2], "assigned after backward"))
def write_gradients(kit):
    """Gradients are replaced after backward, without being read."""
    model, optimizer = make(kit)
    for _ in backwards(kit, model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
    return {"model": model}


@script()
def gradients_by_hand(kit):
    """Gradients come from autograd.grad, not from backward, and are the same on all ranks."""
    model, optimizer = make(kit)
    for _ in range(3):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(penalty, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step(optimizer)
    return {"model": model}


@script()
def tensor_hooks(kit):
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return train(kit, model)


@script()
def drop_a_step(kit):
    """Discard the gradient of one batch without a step."""
    model, optimizer = make(kit)
    for turn, (x, y) in enumerate(kit.shard(batches())):
        loss_of(model, x, y).backward()
        if turn != 1:
            optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script()
def log_the_mean_loss(kit):
    """Communicates between backward and step."""
    model, optimizer = make(kit)
    losses = []
    for x, y in kit.shard(batches()):
        loss = loss_of(model, x, y)
        loss.backward()
        losses.append(kit.mean(loss.item(), len(x)))
        step(optimizer)
    return {"model": model, "losses": losses}


@script()
def gradients_of_zeros(kit):
    """Momentum and weight decay go on where backward did not pass, since gradients are zeros."""
    model = kit.ddp(TwoHeads(), find_unused_parameters=True)
    optimizer = kit.optimizer(model, SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        heads = ["left"] if turn % 2 else ["right"]
        functional.cross_entropy(model(x, heads), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {"model": model}


@script()
def never_zero_gradients(kit):
    """Gradients add up over steps that no zero_grad separates."""
    model, optimizer = make(kit, lr=0.1)
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        optimizer.step()
    return {"model": model}
