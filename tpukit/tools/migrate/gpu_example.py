"""Digits on a GPU, written as such scripts usually are: what `tpukit migrate` is taught and tested on.
Nothing else uses it.

python gpu_example.py mnist.npz digits.pt
"""

import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.fc = nn.Linear(8 * 13 * 13, 10)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def main(data, out, epochs=4):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with np.load(data) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    digits = TensorDataset(torch.tensor(images)[:, None].float() / 255, torch.tensor(labels).long())
    loader = DataLoader(digits, batch_size=32, shuffle=True)
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler()
    for epoch in range(epochs):
        total, started = 0.0, time.time()
        for x, y in loader:
            x, y = x.to("cuda"), y.to(device)
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        torch.cuda.synchronize()
        rate = len(loader) / (time.time() - started)
        print(
            f"epoch {epoch + 1}: loss {total / len(loader):.3f} on {loss.device}, {rate:.1f} steps per second"
        )
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
