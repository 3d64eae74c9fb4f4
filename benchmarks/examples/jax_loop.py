"""Data-parallel training with JAX: the gradients of a jitted step are averaged by ringcoll.

::

    mpiexec -n 2 python benchmarks/examples/jax_loop.py

JAX's arrays are immutable. So one is only ever the ``sendbuf`` of a call, which reads it where it
lies (on the host by the buffer protocol, on a GPU by ``__cuda_array_interface__`` or DLPack), and
the ``recvbuf`` is memory of ``comm.empty``: numpy's on CPU ranks, CuPy's on GPU ranks. JAX then
*copies* that into an array of its own: what ``from_dlpack`` gives may alias memory that the next
call writes, behind the back of a compiler that takes arrays for constant.

JAX runs on streams of its own, which nobody else sees: before a call wait for the gradients with
``block_until_ready``, and after it for the sum with ``comm.synchronize``.
"""

from __future__ import annotations

import os

import ringcoll

STEPS, BATCH, RATE = 60, 64, 0.2


def train(comm):
    """The loss before and after, and the parameters of this rank."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave ringcoll some memory
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    kind, _, number = comm.device.partition(":")  # the device of this rank, for JAX too
    jax.config.update("jax_default_device", jax.devices(kind)[int(number or 0)])

    def loss(parameters, x, labels):
        hidden = jax.nn.relu(x @ parameters["w1"] + parameters["b1"])
        scores = jax.nn.log_softmax(hidden @ parameters["w2"] + parameters["b2"])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit
    def gradient_of(parameters, x, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, x, labels)
        return value, ravel_pytree(gradients)[0]  # one flat array: one call of ringcoll

    @jax.jit
    def update(parameters, total):
        flat, unravel = ravel_pytree(parameters)
        return unravel(flat - RATE * total)

    # The same key on every rank: all begin alike.
    first, second, teacher_key = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "w1": jax.random.normal(first, (16, 32)) / 4,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32, 4)) / 4,
        "b2": jnp.zeros(4),
    }
    teacher = jax.random.normal(teacher_key, (16, 4))
    total = comm.empty(ravel_pytree(parameters)[0].size, "float32")
    key = jax.random.key(1 + comm.rank)  # each rank its own part of the data
    losses = []
    for _ in range(STEPS):
        key, now = jax.random.split(key)
        x = jax.random.normal(now, (BATCH, 16))
        value, gradient = gradient_of(parameters, x, (x @ teacher).argmax(1))
        comm.all_reduce(gradient.block_until_ready(), total, op="avg")
        comm.synchronize()
        # Read before the next call writes: that one waits for gradients at these parameters.
        parameters = update(parameters, jnp.array(jnp.from_dlpack(total), copy=True))
        losses.append(float(value))
    return losses[0], losses[-1], ravel_pytree(parameters)[0]


def main():
    """Train, and show that all ranks hold the same parameters at the end."""
    with ringcoll.init() as comm:
        first, last, parameters = train(comm)
        everyone = comm.empty((comm.nranks, parameters.size), "float32")
        comm.all_gather(parameters.block_until_ready(), everyone)
        comm.synchronize()
        equal = bool((everyone == everyone[0]).all())
        if comm.rank == 0:
            print(f"ranks: {comm.nranks}, on {comm.device}; loss {first:.3f} -> {last:.3f}")
            print(f"replicas are {'equal to the bit' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
