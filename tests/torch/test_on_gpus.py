"""The backend on GPUs."""

import pytest

from tests.torch.world import World, names_of

# No such thing in a world of one.
ALONE = ("another_device", "a_message", "a_rank_that", "memory_that", "receives", "tensors_that")
FREE_MEMORY = pytest.param("gpu.memory_that_is_given_back", marks=pytest.mark.alone)
SHARING = ("gpu.a_message_between_calls", "gpu.tensors_that_come_back", FREE_MEMORY)
EVERY = [name for name in names_of("gpu") if name not in FREE_MEMORY.values]


@pytest.fixture(scope="module")
def worlds_on_gpus():
    worlds: dict = {}
    yield worlds
    for world in worlds.values():
        world.close()


def run(worlds, name, nranks):
    if nranks not in worlds:
        worlds[nranks] = World(nranks, cuda=True)
    try:
        worlds[nranks].run(name)
    except BaseException:
        worlds.pop(nranks).close(kill=True)
        raise


def alone() -> list[str]:
    return [name for name in names_of("gpu") if not name.partition(".")[2].startswith(ALONE)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", alone())
def test_on_one_gpu(worlds_on_gpus, name):
    run(worlds_on_gpus, name, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARING)
def test_two_ranks_of_one_gpu(worlds_on_gpus, name):
    run(worlds_on_gpus, name, 2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", [*EVERY, FREE_MEMORY])
def test_on_gpus(worlds_on_gpus, name):
    from ringcoll.cuda.device import devices

    run(worlds_on_gpus, name, min(4, len(devices())))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", names_of("gpu_pairs"))
def test_messages_of_some_ranks(worlds_on_gpus, name):
    """In a group of three: two GPUs are enough, but where the third has something to do."""
    from ringcoll.cuda.device import devices
    from tests.torch.on_ranks.gpu_pairs import A_GPU_EACH

    if name.partition(".")[2] in A_GPU_EACH and len(devices()) < 3:
        pytest.skip("needs 3 GPUs")
    run(worlds_on_gpus, name, 3)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["ringcoll", "cpu:gloo,cuda:ringcoll"])
def test_with_a_device_that_is_named_at_the_start(backend):
    """Trap 6: torch asks such a group whether it can split; and trap 8 on GPUs."""
    world = World(2, backend, cuda=True, named=True)
    try:
        for name in ("gpu.ddp", "gpu.barriers_and_objects", "gpu.every_other_collective"):
            world.run(name)
    except BaseException:
        world.close(kill=True)
        raise
    world.close()
