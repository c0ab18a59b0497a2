"""Scripts that run several forward and backward passes, models or optimizers in a step."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam
from torch.utils.checkpoint import checkpoint

from contract.script import TwoHeads, batches, loss_of, make, net, script, step, train


@script()
def accumulate_under_no_sync(kit):
    model, optimizer = make(kit)
    data = batches(6)
    for first, second in zip(kit.shard(data[::2]), kit.shard(data[1::2]), strict=True):
        with kit.no_sync(model, optimizer):
            (loss_of(model, *first) / 2).backward()
        (loss_of(model, *second) / 2).backward()
        step(optimizer)
    return {"model": model}


@script()
def accumulate_with_sync(kit):
    """Each of several backward passes before one step is averaged over ranks."""
    model, optimizer = make(kit)
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        (loss_of(model, x, y) / 3).backward()
        if turn % 3 == 2:
            step(optimizer)
    return {"model": model}


@script(reference="alone")  # DDP does not reduce a second backward of one forward
def retain_graph(kit):
    model, optimizer = make(kit, lr=0.1)
    for x, y in kit.shard(batches()):
        out = model(x)
        functional.cross_entropy(out, y).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward()
        step(optimizer)
    return {"model": model}


@script()
def backward_of_a_part(kit):
    """The heads take turns."""
    model = kit.ddp(TwoHeads(), find_unused_parameters=True)
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    for turn, (x, y) in enumerate(kit.shard(batches(6))):
        heads = ["left"] if turn % 2 else ["right"]
        functional.cross_entropy(model(x, heads), y).backward()
        step(optimizer)
    return {"model": model}


@script()
def each_rank_uses_another_part(kit):
    """Some ranks have no gradient where others have one."""
    model = kit.ddp(TwoHeads(), find_unused_parameters=True)
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    for turn, (x, y) in enumerate(kit.shard(batches())):
        heads = ["left"] if (turn + kit.rank) % 2 else ["right"]
        functional.cross_entropy(model(x, heads), y).backward()
        step(optimizer)
    return {"model": model}


class Generator(nn.Sequential):
    def __init__(self):
        torch.manual_seed(5)
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        self.double()


class Discriminator(nn.Sequential):
    def __init__(self):
        torch.manual_seed(6)
        super().__init__(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.double()


@script()
def dcgan(kit):
    """The loop of PyTorch's DCGAN example."""
    net_g, net_d = kit.ddp(Generator()), kit.ddp(Discriminator())
    optimizer_d = kit.optimizer(net_d, Adam, lr=0.01, betas=(0.5, 0.999))
    optimizer_g = kit.optimizer(net_g, Adam, lr=0.01, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(kit.rank)
    errors = []
    for x, _ in kit.shard(batches()):
        # Update D: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        output = net_d(x)
        error_real = criterion(output, torch.ones_like(output))
        error_real.backward()
        fake = net_g(torch.randn(len(x), 4, dtype=torch.float64))
        output = net_d(fake.detach())
        error_fake = criterion(output, torch.zeros_like(output))
        error_fake.backward()
        optimizer_d.step()
        # Update G: maximize log(D(G(z)))
        net_g.zero_grad()
        output = net_d(fake)
        error_g = criterion(output, torch.ones_like(output))
        error_g.backward()
        optimizer_g.step()
        errors += [error_real.item(), error_fake.item(), error_g.item()]
    return {"net_g": net_g, "net_d": net_d, "local errors": errors}


@script()
def wgan_gp(kit):
    net_g, net_d = kit.ddp(Generator()), kit.ddp(Discriminator())
    optimizer_d = kit.optimizer(net_d, Adam, lr=0.01, betas=(0.0, 0.9))
    optimizer_g = kit.optimizer(net_g, Adam, lr=0.01, betas=(0.0, 0.9))
    torch.manual_seed(kit.rank)
    for turn, (x, _) in enumerate(kit.shard(batches(6))):
        optimizer_d.zero_grad()
        fake = net_g(torch.randn(len(x), 4, dtype=torch.float64)).detach()
        mix = torch.rand(len(x), 1, dtype=torch.float64)
        between = (mix * x + (1 - mix) * fake).requires_grad_()
        scores = net_d(between)
        [slopes] = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        penalty = (slopes.norm(2, dim=1) - 1).square().mean()
        (net_d(fake).mean() - net_d(x).mean() + 10 * penalty).backward()
        optimizer_d.step()
        if turn % 2:
            optimizer_g.zero_grad()
            (-net_d(net_g(torch.randn(len(x), 4, dtype=torch.float64))).mean()).backward()
            optimizer_g.step()
    return {"net_g": net_g, "net_d": net_d}


@script()
def actor_critic(kit):
    """Two models and two optimizers share one backward."""
    actor, critic = kit.ddp(net()), kit.ddp(Discriminator())
    optimizer_a = kit.optimizer(actor, Adam, lr=0.01)
    optimizer_c = kit.optimizer(critic, Adam, lr=0.02)
    for states, actions in kit.shard(batches()):
        returns = states.sum(dim=1)
        values = critic(states).squeeze(1)
        advantage = (returns - values).detach()
        log_probs = functional.log_softmax(actor(states), dim=1)
        chosen = log_probs.gather(1, actions[:, None]).squeeze(1)
        loss_a = -(advantage * chosen).mean()
        loss_c = functional.mse_loss(values, returns)
        optimizer_a.zero_grad()
        optimizer_c.zero_grad()
        (loss_a + loss_c).backward()
        optimizer_a.step()
        optimizer_c.step()
    return {"actor": actor, "critic": critic}


# DDP adds the gradients of one model to those of the other.
@script(reference="alone", refused=dict.fromkeys(range(3), "wait for each other"))
def optimizers_in_another_order_on_each_rank(kit):
    """The order in which backward reaches two models differs between ranks."""
    first, second = kit.ddp(net(seed=1)), kit.ddp(net(seed=2))
    optimizers = [kit.optimizer(model, SGD, lr=0.1) for model in (first, second)]
    for x, y in kit.shard(batches()):
        models = (first, second) if kit.rank % 2 else (second, first)
        loss = sum(loss_of(model, x, y) for model in models)
        loss.backward()
        for optimizer in optimizers:
            step(optimizer)
    return {"first": first, "second": second}


@script()
def siamese(kit):
    """Two forwards of one model enter one loss."""
    model, optimizer = make(kit, lr=0.1)
    for x, y in kit.shard(batches()):
        distance = (model(x) - model(x.flip(0))).square().mean()
        (distance + loss_of(model, x, y)).backward()
        step(optimizer)
    return {"model": model}


class Blocks(nn.Module):
    """Segments under activation checkpointing, one of which is used twice."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.use_reentrant = use_reentrant
        self.double()

    def forward(self, x):
        x = self.inner(x)
        for index in (0, 1, 0):
            block = self.blocks[index]
            x = checkpoint(lambda x, b=block: b(x).tanh(), x, use_reentrant=self.use_reentrant)
        return self.head(x)


@script()
def checkpointed(kit):
    return train(kit, Blocks(use_reentrant=False), Adam, lr=0.01)


@script(reference="alone")  # DDP raises: "marked ready twice"
def checkpointed_reentrant_layer_shared(kit):
    return train(kit, Blocks(use_reentrant=True), Adam, lr=0.01)


@script(reference="alone")
def checkpointed_reentrant_as_a_whole(kit):
    """No parameter lies outside of the checkpoints, so only their backward passes reach any."""
    model, optimizer = make(kit)

    def loss(x, y):
        x.requires_grad_()
        outputs = [checkpoint(model, sign * x, use_reentrant=True) for sign in (1, -1)]
        return functional.cross_entropy(outputs[0] - outputs[1], y) / 2

    data = batches(6)
    for first, second in zip(kit.shard(data[::2]), kit.shard(data[1::2]), strict=True):
        with kit.no_sync(model, optimizer):
            loss(*first).backward()
        loss(*second).backward()
        step(optimizer)
    return {"model": model}


def train_with_closure(kit, *choice, **options):
    model, optimizer = make(kit, None, *choice, **options)
    for x, y in kit.shard(batches()):

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return {"model": model}


@script()
def closure(kit):
    return train_with_closure(kit)


@script(refused=dict.fromkeys(range(3), "closure"), refused_alone=True)
def lbfgs(kit):
    """LBFGS calls its closure as often as it likes."""
    return train_with_closure(kit, LBFGS, max_iter=3)
