"""Handwritten digits by DistributedDataParallel: torchrun --nproc-per-node 2 ddp_digits.py.

One rank a GPU, or a process of the CPU where there are none. The digits are those of scikit-learn
(pip install scikit-learn); without it noisy shapes take their place. Nothing is downloaded.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcoll.torch  # noqa: F401 -- needed only in a checkout that is not installed


def digits():
    """1,797 images of 64 pixels in the range 0 to 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        if dist.get_rank() == 0:
            print("No scikit-learn: noisy shapes, which are no digits, take their place")
        shapes, labels = torch.rand(10, 64), torch.arange(1797) % 10
        return shapes[labels] + torch.randn(1797, 64) / 4, labels
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def main():
    """Train on this rank's part of the images; rank 0 prints loss and accuracy."""
    dist.init_process_group("ringcoll")  # instead of "nccl" or "gloo"
    rank, nranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    images, labels = (part.to(device) for part in digits())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440].to(device), order[1440:].to(device)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model)  # averages gradients through ringcoll
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(12):
        for batch in train[rank::nranks].split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch:2}: loss {loss:.4f}")
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    total = sum(weight.double().sum() for weight in model.parameters())
    print(f"rank {rank}: accuracy {right:.1%} on unseen images, sum of the weights {total:.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
