"""Programs that between them do all that the plugins are told of; test_spy.py runs each on both NCCLs."""

from __future__ import annotations

from collections.abc import Callable

from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.program import Comm, DataType, Program, RankProgram

AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
BC, RD = Collective.BROADCAST, Collective.REDUCE
KIB, MIB = 1 << 10, 1 << 20


def of_world(
    per_rank: Callable[[Program, RankProgram, Comm], None],
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    steps: int = 2,
    blocking: bool = True,
) -> Program:
    """With one communicator of all ranks, from the first operation to the last."""
    program = Program(nodes=nodes, ranks_per_node=ranks_per_node, steps=steps)
    world = program.comm("world", blocking=blocking)
    for rank in program.ranks:
        rank.setup.init(world)
        per_rank(program, rank, world)
        rank.step.sync()
        rank.end.destroy(world)
    return program


def data_parallel() -> Program:
    """Weights are broadcast, then each step reduces gradients in buckets while it computes."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        for nbytes in (4, 4096, MIB, 25 * MIB):
            rank.setup.collective(world, BC, nbytes)
        step = rank.step
        for bucket in range(4):
            step.compute(150.0)
            step.record(bucket)
            step.wait(bucket, stream=1)
            step.collective(world, AR, 25 * MIB if bucket else MIB, stream=1)
        step.collective(world, AR, 4, stream=1)
        step.record(8, stream=1)
        step.wait(8)

    return of_world(per_rank)


def tensor_and_data() -> Program:
    """Groups inside nodes and between them."""
    program = Program(nodes=2, ranks_per_node=2, steps=2)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        rank.setup.collective(world, AR, 4096)
    tensor = program.split(world, {"tp0": (0, 1), "tp1": (2, 3)})
    data = program.split(world, {"dp0": (0, 2), "dp1": (1, 3)})
    for rank in program.ranks:
        tp, dp = (next(c for c in comms if rank.rank in c.ranks) for comms in (tensor, data))
        for layer in range(3):
            rank.step.compute(50.0)
            rank.step.collective(tp, AR, MIB)
            rank.step.record(layer)
            rank.step.wait(layer, stream=1)
            rank.step.collective(dp, AR, 8 * MIB, stream=1)
        rank.step.sync()
        for comm in (tp, dp, world):
            rank.end.destroy(comm)
    return program


def fully_sharded() -> Program:
    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        step = rank.step
        for layer in range(3):
            step.collective(world, AG, 13 * MIB, type_=DataType.BFLOAT16, stream=1)
            step.record(layer, stream=1)
            step.wait(layer)
            step.compute(200.0)
        for layer in range(3):
            step.collective(world, AG, 13 * MIB, type_=DataType.BFLOAT16, stream=1)
            step.compute(400.0)
            step.record(8 + layer)
            step.wait(8 + layer, stream=2)
            step.collective(world, RS, 26 * MIB, stream=2)
        step.collective(world, AR, 4)

    return of_world(per_rank)


def pipeline() -> Program:
    """Sends and receives of all sizes; all to all, small and large; several to one peer; beside a collective."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        step, n, me = rank.step, world.size, rank.rank
        for exponent in (0, 10, 16, 17, 20, 23, 28):
            if me > 0:
                step.recv(world, me - 1, 1 << exponent)
            if me < n - 1:
                step.send(world, me + 1, 1 << exponent)
        for nbytes in (16 * KIB, 3 * MIB):
            with step.group():
                for peer in range(n):
                    step.send(world, peer, nbytes)
                    step.recv(world, peer, nbytes)
                if nbytes > MIB:
                    step.collective(world, AR, MIB)
        with step.group():
            for exponent in (12, 14, 16):
                step.send(world, (me + 1) % n, 1 << exponent)
                step.recv(world, (me - 1) % n, 1 << exponent)
        step.collective(world, AR, 64 * KIB)

    return of_world(per_rank)


def grouped() -> Program:
    """Functions, sizes and types in one group; groups of one kind that are decided together; more than one plan."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        step = rank.step
        for type_ in (DataType.FLOAT16, DataType.FLOAT32):
            with step.group():
                for nbytes in (4 * KIB, MIB, 8 * KIB, 1_200_000, 16 * KIB, 64 * MIB, 4 * KIB, 24 * KIB):
                    step.collective(world, AR, nbytes, type_=type_)
                step.collective(world, AG, MIB)
                step.collective(world, RS, 4 * MIB, type_=type_)
                step.collective(world, RD, 256 * KIB, root=1)
                step.collective(world, AG, 16 * KIB)
        with step.group():
            for k in range(16):
                step.collective(world, AR, 4 * KIB * (1 + k))
        step.sync()
        with step.group():
            for _k in range(20):
                step.collective(world, AR, MIB)
                step.collective(world, AG, MIB)

    return of_world(per_rank)


def broadcasts() -> Program:
    """Alone and in groups, of one root and of several, before and after other collectives."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        rank.setup.collective(world, BC, 25 * MIB)
        step = rank.step
        with step.group():
            for nbytes in (4 * KIB, MIB):
                step.collective(world, BC, nbytes, root=2)
        step.collective(world, AR, MIB)
        # Nothing that is watched comes after these: see docs/real_nccl.md.
        with rank.end.group():
            for root, nbytes in enumerate((4 * KIB, MIB)):
                rank.end.collective(world, BC, nbytes, root=root)
        rank.end.sync()

    return of_world(per_rank)


def sizes_of_node() -> Program:
    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        for collective in (AR, AG, RS, BC, RD):
            for exponent in range(6, 29, 2):
                rank.step.collective(world, collective, 1 << exponent)

    return of_world(per_rank, nodes=1, ranks_per_node=4, steps=1)


def sizes_of_nodes() -> Program:
    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        for collective in (AR, AG, RS):
            for exponent in range(6, 31):
                rank.step.collective(world, collective, 1 << exponent)
            rank.step.sync()

    return of_world(per_rank, steps=1)


def comings_and_goings(*, again: bool = True) -> Program:
    """Split, shrink, finalize, destroy, abort; then a new communicator when all were gone."""
    program = Program(nodes=2, ranks_per_node=2, steps=1)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
    halves = program.split(world, {"left": (0, 1), "right": (2, 3)})
    (some,) = program.split(world, {"some": (0, 2)})
    shrunk = program.comm("shrunk", (0, 1, 2))
    new = program.comm("again") if again else None
    for rank in program.ranks:
        half, end = halves[rank.rank // 2], rank.end
        if rank.rank in shrunk.ranks:
            rank.setup.shrink(world, shrunk)
        for comm in (world, half, some, shrunk):
            if rank.rank in comm.ranks:
                rank.step.collective(comm, AR, MIB)
        rank.step.sync()
        end.finalize(world)
        end.destroy(world)
        end.collective(half, AR, 4 * KIB)
        end.sync()
        if rank.rank in shrunk.ranks:
            # The proxy threads of what is aborted next have reported all by then.
            for _ in range(4):
                end.collective(shrunk, AR, 4 * MIB)
            end.sync()
            end.finalize(shrunk)
            end.destroy(shrunk)
        if rank.rank < 2:
            end.abort(half)
        else:
            end.destroy(half)
        if rank.rank in some.ranks:
            end.destroy(some)
        if new:
            end.init(new)
            end.collective(new, AR, MIB)
            end.sync()
            end.destroy(new)
    return program


def goings() -> Program:
    """The same without a new communicator: NCCL 2.28 may fail where a thread creates one while another in its process
    destroys the last.
    """
    return comings_and_goings(again=False)


def captured() -> Program:
    """A graph of computation, a collective, a group and a transfer; replayed alone and after other work."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        setup = rank.setup
        setup.collective(world, AR, MIB)
        setup.capture()
        setup.compute(5.0)
        setup.collective(world, AR, MIB)
        with setup.group():
            setup.collective(world, AR, 4 * KIB)
            setup.collective(world, AG, 64 * KIB)
        transfer = setup.send if rank.rank == 0 else setup.recv
        transfer(world, 1 - rank.rank, 4 * KIB)
        setup.end_capture(0)
        setup.sync()
        rank.step.replay(0)
        rank.end.collective(world, AR, 16 * KIB)
        rank.end.replay(0)
        rank.end.sync()
        rank.end.drop(0)

    return of_world(per_rank, nodes=1, steps=3)


def registered() -> Program:
    """Collectives on a buffer before it is registered, while it is, and afterwards."""

    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        rank.setup.collective(world, AR, MIB)
        rank.setup.register(world)
        for collective in (AR, AG, RS, BC):
            rank.step.collective(world, collective, 16 * MIB)
            rank.step.collective(world, collective, 16 * KIB)
        rank.end.deregister(world)
        rank.end.collective(world, AG, 16 * MIB)
        rank.end.sync()

    return of_world(per_rank, nodes=1, ranks_per_node=4)


def non_blocking() -> Program:
    program = Program(nodes=2, ranks_per_node=1, steps=2)
    world = program.comm("world", blocking=False)
    for rank in program.ranks:
        rank.setup.init(world)
    (turned,) = program.split(world, {"turned": (1, 0)})
    for rank in program.ranks:
        rank.step.collective(world, AR, MIB)
        with rank.step.group(world):
            rank.step.collective(world, AR, 4 * KIB)
            rank.step.collective(world, AG, 16 * KIB)
        rank.step.collective(turned, AR, MIB)
        rank.step.sync()
        rank.end.finalize(world)
        rank.end.destroy(world)
        rank.end.destroy(turned)
    return program


def simulated() -> Program:
    def per_rank(_: Program, rank: RankProgram, world: Comm) -> None:
        with rank.step.group(simulate=True):
            rank.step.collective(world, AR, MIB)
            rank.step.collective(world, AG, MIB)
        with rank.step.group(simulate=True):
            rank.step.collective(world, AR, KIB)
        rank.step.collective(world, AR, MIB)

    return of_world(per_rank, ranks_per_node=1)


def groups_in_groups() -> Program:
    """Communicators that are made and destroyed in groups, and groups of several of them on several streams."""
    program = Program(nodes=2, ranks_per_node=2, steps=2)
    world = program.comm("world")
    left, right = program.comm("left", (0, 1)), program.comm("right", (2, 3))
    even, odd = program.comm("even", (0, 2)), program.comm("odd", (1, 3))
    for rank in program.ranks:
        near, far = left if rank.rank < 2 else right, odd if rank.rank % 2 else even
        with rank.setup.group():
            rank.setup.init(near)
            rank.setup.init(far)
        rank.setup.init(world)
        step = rank.step
        with step.group():
            step.collective(world, AR, MIB)
            with step.group():
                step.collective(near, AG, MIB)
            step.collective(far, RS, MIB, stream=1)
            step.collective(world, AR, 64 * KIB, stream=2)
        step.collective(world, AR, KIB, stream=3)
        with step.group():
            pass
        step.sync()
        with rank.end.group():
            for comm in (world, near, far):
                rank.end.destroy(comm)
    return program
