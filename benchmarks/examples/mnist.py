"""Handwritten digits by DistributedDataParallel: what a script of torch changes is one word.

::

    torchrun --nproc-per-node 2 benchmarks/examples/mnist.py

One rank a GPU, or a process of the CPU where there are none. The digits are scikit-learn's 1797
images of 8 x 8 pixels; without scikit-learn they are drawn here. Nothing is downloaded.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

EPOCHS, BATCH = 12, 32


def digits():
    """All images, in the range 0 to 1, with their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return drawn()
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def drawn():
    """Ten shapes, each many times with noise."""
    generator = torch.Generator().manual_seed(7)
    shapes = torch.rand(10, 64, generator=generator)
    labels = torch.arange(1800) % 10
    noise = torch.randn(1800, 64, generator=generator)
    return TensorDataset((shapes[labels] + noise / 2).clamp(0, 1), labels)


def main():
    """Train on this rank's part of the images; rank 0 prints loss and accuracy."""
    dist.init_process_group("ringcoll")  # instead of "nccl" or "gloo"
    rank, device = dist.get_rank(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    parts = random_split(digits(), [0.8, 0.2], torch.Generator().manual_seed(0))
    sampler = DistributedSampler(parts[0], drop_last=True)
    loader = DataLoader(parts[0], BATCH, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model)  # averages gradients through ringcoll
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0 and epoch % 3 in (0, 2):
            print(f"epoch {epoch:2}: loss {total:.4f}")

    right = torch.zeros((), device=device)
    for images, labels in DataLoader(parts[1], 100):
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    equal = all(torch.equal(weights, other) for other in everyone)
    if rank == 0:
        print(f"accuracy {right / len(parts[1]):.1%} on {len(parts[1])} unseen images")
        print(f"replicas are {'equal to the bit' if equal else 'DIFFERENT'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
