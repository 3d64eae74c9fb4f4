"""Data-parallel training by hand, CuPy on GPUs and numpy on CPUs: mpiexec -n 2 python cupy_loop.py.

The gradients of all parameters are views of one symmetric array: one zero-copy call averages them.
"""

import math

import numpy as np

import ringcoll

STEPS, BATCH, RATE = 60, 64, 0.2
SHAPES = ((16, 32), (32,), (32, 4), (4,))  # two layers: weights and biases


def views(flat):
    """A view of the flat array for each parameter."""
    ends = np.cumsum([math.prod(shape) for shape in SHAPES])
    return [flat[end - math.prod(s) : end].reshape(s) for end, s in zip(ends, SHAPES, strict=True)]


def backward(xp, parameters, gradients, x, labels):
    """Write the gradients of a softmax regression behind one hidden layer; return the loss."""
    w1, b1, w2, b2 = parameters
    hidden = xp.maximum(x @ w1 + b1, 0)
    shares = xp.exp(hidden @ w2 + b2)
    shares /= shares.sum(1, keepdims=True)
    rows = xp.arange(len(x))
    loss = -xp.log(shares[rows, labels]).mean()
    shares[rows, labels] -= 1
    error = shares / len(x)
    through = error @ w2.T * (hidden > 0)
    gradients[0][...], gradients[1][...] = x.T @ through, through.sum(0)
    gradients[2][...], gradients[3][...] = hidden.T @ error, error.sum(0)
    return loss


def train(comm):
    """Train on this rank's batches; return the first loss, the last one and the parameters."""
    xp, count = comm.xp, sum(map(math.prod, SHAPES))  # cupy on GPU ranks, numpy on CPU ranks
    weights = xp.asarray(np.random.default_rng(0).standard_normal(count) / 4, "float32")
    comm.broadcast(weights)  # every rank starts from the weights of rank 0
    gradient = comm.empty(count, "float32")
    teacher = np.random.default_rng(1).standard_normal((16, 4))
    data, losses = np.random.default_rng(2 + comm.rank), []
    for _ in range(STEPS):
        x = data.standard_normal((BATCH, 16), "float32")
        batch = xp.asarray(x), xp.asarray((x @ teacher).argmax(1))
        losses.append(backward(xp, views(weights), views(gradient), *batch))
        comm.all_reduce(gradient, op="avg")  # on CuPy's current stream, in place
        weights -= RATE * gradient
    comm.synchronize()
    return float(losses[0]), float(losses[-1]), weights


if __name__ == "__main__":
    with ringcoll.init() as comm:
        first, last, weights = train(comm)
        where = f"rank {comm.rank} of {comm.nranks} on {comm.device}"
        print(f"{where}: loss {first:.3f} -> {last:.3f}, weights {float(weights.sum()):.9f}")
