"""Data-parallel training with JAX: mpiexec -n 2 python jax_loop.py.

JAX's arrays are immutable, so one is only ever a ``sendbuf``; the ``recvbuf`` is symmetric memory,
which JAX copies into an array of its own. JAX runs on streams of its own: ``block_until_ready``
comes before a call, ``comm.synchronize`` after it.
"""

import os

import ringcoll

STEPS, BATCH, RATE = 60, 64, 0.2


def train(comm):
    """Train on this rank's batches; return the first loss, the last one, the weights' sum."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ringcoll needs memory too
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    kind, _, number = comm.device.partition(":")  # JAX computes on this rank's device
    jax.config.update("jax_default_device", jax.devices(kind)[int(number or 0)])

    def loss(parameters, x, labels):
        hidden = jax.nn.relu(x @ parameters["w1"])
        scores = jax.nn.log_softmax(hidden @ parameters["w2"])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit
    def gradient_of(parameters, x, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, x, labels)
        return value, ravel_pytree(gradients)[0]  # one flat array, so one call of ringcoll

    @jax.jit
    def update(parameters, average):
        flat, unravel = ravel_pytree(parameters)
        return unravel(flat - RATE * average)

    key1, key2, key3 = jax.random.split(jax.random.key(0), 3)  # the same keys on every rank
    w1, w2 = jax.random.normal(key1, (16, 32)) / 4, jax.random.normal(key2, (32, 4)) / 4
    parameters, teacher = {"w1": w1, "w2": w2}, jax.random.normal(key3, (16, 4))
    average = comm.empty(ravel_pytree(parameters)[0].size, "float32")
    key, losses = jax.random.key(1 + comm.rank), []  # each rank draws its own batches
    for _ in range(STEPS):
        key, now = jax.random.split(key)
        x = jax.random.normal(now, (BATCH, 16))
        value, gradient = gradient_of(parameters, x, (x @ teacher).argmax(1))
        comm.all_reduce(gradient.block_until_ready(), average, op="avg")
        comm.synchronize()
        parameters = update(parameters, jnp.array(jnp.from_dlpack(average), copy=True))
        losses.append(float(value))
    return losses[0], losses[-1], float(ravel_pytree(parameters)[0].sum())


if __name__ == "__main__":
    with ringcoll.init() as comm:
        first, last, total = train(comm)
        where = f"rank {comm.rank} of {comm.nranks} on {comm.device}"
        print(f"{where}: loss {first:.3f} -> {last:.3f}, weights {total:.9f}")
