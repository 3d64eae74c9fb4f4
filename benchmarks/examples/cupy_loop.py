"""Data-parallel training by hand: CuPy on GPUs, numpy where there are none, the same lines.

::

    mpiexec -n 2 python benchmarks/examples/cupy_loop.py

The gradients of all parameters are views of one array that ``comm.empty`` has made. So they are
summed by one call, which takes them from where they lie: nothing is copied, nothing is staged.
CuPy multiplies matrices by cuBLAS, which ``pip install 'cupy-cuda13x[ctk]'`` brings, and torch too.
"""

from __future__ import annotations

import math

import numpy as np

import ringcoll

STEPS, BATCH, RATE = 60, 64, 0.2
SHAPES = ((16, 32), (32,), (32, 4), (4,))  # two layers: weights and biases


def parts_of(flat):
    """Views of a flat array, one for each parameter."""
    views, start = [], 0
    for shape in SHAPES:
        end = start + math.prod(shape)
        views.append(flat[start:end].reshape(shape))
        start = end
    return views


def backward(xp, parameters, gradients, x, labels):
    """Softmax regression behind one hidden layer: writes the gradients, returns the loss."""
    w1, b1, w2, b2 = parameters
    hidden = xp.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    shares = xp.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = xp.arange(len(x))
    loss = -xp.log(shares[rows, labels]).mean()
    shares[rows, labels] -= 1
    error = shares / len(x)
    through = error @ w2.T * (hidden > 0)
    for gradient, value in zip(
        gradients, (x.T @ through, through.sum(0), hidden.T @ error, error.sum(0)), strict=True
    ):
        gradient[...] = value
    return loss


def train(comm):
    """The loss before and after, and the parameters of this rank."""
    xp = comm.xp  # cupy on GPU ranks, numpy on CPU ranks
    count = sum(math.prod(shape) for shape in SHAPES)
    weights = xp.asarray(np.random.default_rng(0).standard_normal(count) / 4, "float32")
    comm.broadcast(weights)  # all begin as rank 0 does
    gradient = comm.empty(count, "float32")  # memory that all ranks reach
    parameters, gradients = parts_of(weights), parts_of(gradient)
    teacher = np.random.default_rng(1).standard_normal((16, 4))
    data = np.random.default_rng(2 + comm.rank)  # each rank its own part of the data
    losses = []
    for _ in range(STEPS):
        x = data.standard_normal((BATCH, 16), "float32")
        batch = xp.asarray(x), xp.asarray((x @ teacher).argmax(1))
        losses.append(backward(xp, parameters, gradients, *batch))
        comm.all_reduce(gradient, op="avg")  # on CuPy's current stream, in place
        weights -= RATE * gradient
    comm.synchronize()
    return float(losses[0]), float(losses[-1]), weights


def main():
    """Train, and show that all ranks hold the same parameters at the end."""
    with ringcoll.init() as comm:
        first, last, weights = train(comm)
        everyone = comm.empty((comm.nranks, weights.size), "float32")
        comm.all_gather(weights, everyone)
        comm.synchronize()
        equal = bool((everyone == everyone[0]).all())
        if comm.rank == 0:
            print(f"ranks: {comm.nranks}, on {comm.device}; loss {first:.3f} -> {last:.3f}")
            print(f"replicas are {'equal to the bit' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
