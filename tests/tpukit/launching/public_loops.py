"""Loops in the shape of five public ones: pytorch/examples' mnist, dcgan and time_sequence_prediction,
karpathy/nanoGPT's train.py and milesial/Pytorch-UNet's. Each is small, draws its own data, and differs from a
loop for one device by the lines of `tpukit.core()`.

Two cores compute one half of each batch each. One core computes the whole batch or, where that gives another
result, both halves one after another: batch norm normalises each half by itself, and dropout draws the masks
of each from numbers of its own."""

import contextlib
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

import tpukit


def halves(core):
    """Return the halves of a batch that a core computes: its own, or without another core both."""
    return range(core.rank, 2, core.size)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(models):
    return torch.cat([p.detach().cpu().double().flatten() for model in models for p in model.parameters()])


class Outcome:
    """What a test asks of a loop. Made before the first step; the loop adds its `losses`."""

    def __init__(self, core, *models):
        self.core, self.models, self.losses = core, models, []
        self.before, self.step = weights_of(models), core.world.step

    def end(self):
        """Return the weights of each rank, how far the weights went at most, the mean of the cores' losses in
        each step, and the number of steps."""
        after = weights_of(self.models)
        losses = self.core.world.all_gather([float(loss) for loss in self.losses])
        return dict(
            ranks=self.core.world.all_gather(after.tolist()),
            moved=float((after - self.before).abs().max()),
            losses=[sum(step) / len(step) for step in zip(*losses)],
            steps=self.core.world.step - self.step,
        )


# pytorch/examples, mnist: dropout, Adadelta, a schedule, one step after another


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Draws:
    """The random numbers of each half: two generators that take turns where one core computes both."""

    def __init__(self, core, seed=0):
        self.core, self.states = core, {}
        for half in halves(core):
            torch.manual_seed(2 * seed + half)
            if core.device.type == "xla":
                import torch_xla

                torch_xla.manual_seed(2 * seed + half)
            self.states[half] = core.state_dict()

    @contextlib.contextmanager
    def of(self, half):
        if self.core.size > 1:  # the generator is this half's alone, and goes on by itself
            yield
            return
        self.core.load_state_dict(self.states[half])
        yield
        self.states[half] = self.core.state_dict()


def mnist():
    core = tpukit.core()
    torch.manual_seed(1)
    model = Digits().to(core.device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    images, labels = drawn(3, 16, 1, 12, 12), torch.arange(48).view(3, 16) % 4
    images += labels[..., None, None, None]
    outcome, draws = Outcome(core, model), Draws(core)
    for _ in range(4):
        for data, target in zip(images, labels):
            optimizer.zero_grad()
            total = 0
            for half in halves(core):
                with draws.of(half):
                    output = model(data[half::2].to(core.device))
                    loss = F.nll_loss(output, target[half::2].to(core.device)) / len(halves(core))
                    loss.backward()
                    total += loss.detach()
            core.optimizer_step(optimizer)
            outcome.losses.append(total)
        scheduler.step()
    return outcome.end()


# pytorch/examples, dcgan: two optimizers, two losses, batch norm in both networks


def spread(module):
    if "Conv" in type(module).__name__:
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif "BatchNorm" in type(module).__name__:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip


def dcgan():
    core = tpukit.core()
    torch.manual_seed(2)
    net_g, net_d = (net.apply(spread).to(core.device) for net in (generator(), discriminator()))
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    pictures, noises = drawn(4, 16, 1, 16, 16).tanh(), drawn(4, 16, 6, 1, 1, seed=1)
    mine, outcome = halves(core), Outcome(core, net_g, net_d)
    for picture, noise in zip(pictures, noises):
        net_d.zero_grad()
        fakes, total = {}, 0
        for half in mine:
            real = picture[half::2].to(core.device)
            label = torch.full((len(real),), 1.0, device=core.device)
            loss_real = criterion(net_d(real), label) / len(mine)
            loss_real.backward()
            fakes[half] = net_g(noise[half::2].to(core.device))
            loss_fake = criterion(net_d(fakes[half].detach()), label.fill_(0.0)) / len(mine)
            loss_fake.backward()
            total += loss_real.detach() + loss_fake.detach()
        core.average_gradients(optimizer_d)
        optimizer_d.step()
        net_g.zero_grad()
        for fake in fakes.values():
            loss_g = criterion(net_d(fake), torch.full((len(fake),), 1.0, device=core.device)) / len(mine)
            loss_g.backward()
        core.average_gradients(optimizer_g)
        optimizer_g.step()
        core.end_step()
        outcome.losses.append(total)
    return outcome.end()


# nanoGPT: tied weights, parts of a batch that add up, a clip, a scaler, another learning rate in each step


class GPT(nn.Module):
    def __init__(self, words=16, length=8, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.ln_1, self.ln_2, self.ln_f = (nn.LayerNorm(width, bias=False) for _ in range(3))
        # Without biases, as there: the gradient of a key's is rounding, of which Adam would make whole steps.
        linear = functools.partial(nn.Linear, bias=False)
        self.attention, self.projection = linear(width, 3 * width), linear(width, width)
        self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, index, targets):
        x = self.wte(index) + self.wpe.weight[: index.shape[1]]
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.attention(self.ln_1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.ln_2(x))
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def nanogpt():
    core = tpukit.core()
    torch.manual_seed(3)
    model = GPT().to(core.device)
    model.wte.weight = model.lm_head.weight  # after the move, which on XLA makes new parameters
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(core.device.type)
    text = (torch.arange(400) ** 2 + 3 * torch.arange(400)) % 16
    parts = 4 // core.size  # of a step, on each core
    outcome = Outcome(core, model)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 8)) / 2
        total = 0
        for part in range(core.rank, 4, core.size):
            starts = [(29 * step + 7 * part + 3 * row) % 390 for row in range(4)]
            x = torch.stack([text[start : start + 8] for start in starts]).to(core.device)
            y = torch.stack([text[start + 1 : start + 9] for start in starts]).to(core.device)
            loss = model(x, y) / parts
            scaler.scale(loss).backward()
            total += loss.detach()
        core.average_gradients(optimizer)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        core.end_step()
        outcome.losses.append(total)
    return outcome.end()


# Pytorch-UNet: a GradScaler, a clip, channels innermost, RMSprop with foreach, a schedule by a score


def two_convolutions(inside, outside):
    layers = []
    for channels in (inside, outside):
        conv = nn.Conv2d(channels, outside, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down = two_convolutions(3, 4), nn.Sequential(nn.MaxPool2d(2), two_convolutions(4, 8))
        self.up, self.conv, self.outc = (
            nn.ConvTranspose2d(8, 4, 2, 2),
            two_convolutions(8, 4),
            nn.Conv2d(4, 1, 1),
        )

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down(x1))
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_loss(values, target):
    return 1 - (2 * (values * target).sum() + 1e-6) / (values.sum() + target.sum() + 1e-6)


def unet():
    core = tpukit.core()
    torch.manual_seed(4)
    model = UNet().to(memory_format=torch.channels_last).to(core.device)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9, foreach=True
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    scaler = torch.amp.GradScaler(core.device.type)
    images = drawn(3, 8, 3, 8, 8)
    masks = (images.mean(2, keepdim=True) > 0).float()
    mine, outcome = halves(core), Outcome(core, model)
    for _ in range(2):
        for image, mask in zip(images, masks):
            optimizer.zero_grad(set_to_none=True)
            total = 0
            for half in mine:
                picture = image[half::2].to(core.device, memory_format=torch.channels_last)
                truth = mask[half::2].to(core.device)
                predicted = model(picture)
                loss = F.binary_cross_entropy_with_logits(predicted, truth)
                loss = (loss + dice_loss(predicted.sigmoid(), truth)) / len(mine)
                scaler.scale(loss).backward()
                total += loss.detach()
            core.average_gradients(optimizer)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            core.end_step()
            outcome.losses.append(total)
        scores = core.world.all_gather(-float(total))
        scheduler.step(sum(scores) / core.size)
    return outcome.end()


# pytorch/examples, time_sequence_prediction: LBFGS with a closure, in double precision


class Sequence(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.linear = nn.Linear(width, 1)

    def forward(self, x):
        first = second = None
        outputs = []
        for value in x.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def lbfgs():
    core = tpukit.core()
    torch.manual_seed(5)
    model = Sequence().double().to(core.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    waves = ((torch.arange(4.0) + 2.0 * torch.arange(8.0)[:, None]) / 3.0).double().sin()
    mine = waves[core.rank :: core.size].to(core.device)
    outcome = Outcome(core, model)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        core.average_gradients(optimizer)
        core.end_step()  # or XLA would compile a longer graph for each number that is read
        losses = core.world.all_gather(loss.item())
        return sum(losses) / core.size  # by which LBFGS stops, on all cores alike

    for _ in range(2):
        outcome.losses.append(optimizer.step(closure))
    return outcome.end()


LOOPS = dict(mnist=mnist, dcgan=dcgan, nanogpt=nanogpt, unet=unet, lbfgs=lbfgs)


def all_loops():
    return {name: loop() for name, loop in LOOPS.items()}
