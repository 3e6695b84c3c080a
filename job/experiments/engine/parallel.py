"""The processes of a run: their ranks, their common decisions, and how a module is spread over them.

There are two ways to spread: `shard` (FSDP2: each rank holds a part of every weight, gradient and moment) for models
that are too large or trained whole, `replicate` for small trainable sets (an adapter). Both ways sum gradients over
ranks and never average them, because the loss of each rank is already divided by the tokens of the whole global batch.

With several nodes, each node holds the whole module, split over its own GPUs alone (HSDP), so that one node's disk has
a whole checkpoint and only one sum of gradients per step crosses the network. Node 0 saves checkpoints; when it reads
one, it sends the tensors to the ranks of the other nodes. Decisions are sent over a separate gloo group on the CPU, and
saves use another one, because they run at the same time as training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gpufleet.job.experiments.engine.device import require_cuda

# bytes of a decision, which is one broadcast of a fixed size, and of the length at its beginning
MESSAGE_BYTES, LENGTH_BYTES = 512, 4
# how long ranks wait for each other; a rank may read or write gigabytes while the others wait for its tensors
PATIENCE = timedelta(minutes=60)
# how long ranks wait for a decision of rank 0, which may work alone for hours after training
LONG_PATIENCE = timedelta(days=2)
JSON = TypeVar("JSON")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes of this run. If there is only one process, nothing is communicated."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    nodes: int = 1
    control: dist.ProcessGroup | None = None  # the gloo group for decisions
    # the gloo group of node 0's ranks for checkpoints, which the saving thread uses
    saves: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # the mesh of the training devices
    host_mesh: DeviceMesh | None = None  # the same ranks on the CPU, for copies there

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which logs and writes files."""
        return self.rank == 0

    @property
    def first_here(self) -> bool:
        """Whether this rank writes the messages for its node's supervisor."""
        return self.local_rank == 0

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.nodes

    @property
    def spans_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return self.nodes > 1

    @property
    def is_saving(self) -> bool:
        """Whether checkpoints are on this node's disk."""
        return self.node == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor`, summed over ranks in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value: JSON) -> JSON:
        """Rank 0's `value` (JSON), on every rank, by one broadcast of MESSAGE_BYTES, or two for longer values."""
        if self.size == 1:
            return value
        words = json.dumps(value).encode() if self.first else b""
        letter = len(words).to_bytes(LENGTH_BYTES, "big") + words
        head = self._broadcast(letter[:MESSAGE_BYTES], MESSAGE_BYTES)
        length = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "big")
        whole = head if length <= MESSAGE_BYTES else self._broadcast(letter, length)
        return cast(JSON, json.loads(whole[LENGTH_BYTES:length]))

    def _broadcast(self, content: bytes, size: int) -> bytes:
        """Rank 0's `content`, padded to `size` bytes."""
        message = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self.control)
        return bytes(message.tolist())

    def every(self, value: JSON) -> list[JSON]:
        """The list of all ranks' `value` (JSON), in the order of ranks. Every rank gets it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Leaves the group together with all other ranks. If a rank left while others still communicate, they would
        take it for a failure.
        """
        if self.size > 1:
            self.barrier()
            dist.destroy_process_group()


def expected() -> World:
    """The world as torchrun's environment describes it, without communication; of size 1 if torchrun did not start this
    process.
    """

    def number(name: str, otherwise: int) -> int:
        return int(os.environ.get(name, otherwise))

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        node=number("GROUP_RANK", 0),
        nodes=number("GROUP_WORLD_SIZE", 1),
    )


def join(kind: str) -> World:
    """Waits until all processes of the run have joined, and returns them. `kind`: their devices, cuda or cpu. Raises
    NodeRefusedError.
    """
    named = expected()
    if named.size == 1:
        return World()
    if kind == "cuda":
        require_cuda()
        torch.cuda.set_device(named.local_rank)
        if not named.spans_nodes:
            # AWS's image has an NCCL plugin for EFA. On a single node there is no EFA, and the plugin would fail, or
            # tune NCCL for EFA.
            os.environ.setdefault("NCCL_NET_PLUGIN", "none")
            # This is the only network interface of the container, and the nccl.conf of the image excludes it.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
    return meet(kind, local_rank=named.local_rank, nodes=named.nodes)


def meet(kind: str, *, local_rank: int, nodes: int = 1) -> World:
    """The world of the existing default process group: all nodes have the same number of ranks, and those of node 0
    come first.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    here = size // nodes
    shape, names = ((size,), None) if nodes == 1 else ((nodes, here), ("node", "gpu"))
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        node=rank // here,
        nodes=nodes,
        control=dist.new_group(backend="gloo", timeout=LONG_PATIENCE),
        saves=dist.new_group(list(range(here)), backend="gloo", timeout=LONG_PATIENCE),
        mesh=init_device_mesh(kind, shape, mesh_dim_names=names),
        host_mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
    )


def shard(
    module: nn.Module,
    world: World,
    blocks: Iterable[nn.Module],
    *,
    compute: torch.dtype,
    reshard: bool,
    whole: Iterable[Tensor] = (),
) -> nn.Module:
    """The module with its weights spread over a node's ranks, gathered block by block in `compute` (FSDP2; gradients
    are summed in fp32). `reshard`: whether a block's weights are dropped after its forward pass (ZeRO-3) instead of
    being kept until its backward pass (ZeRO-2). Tensors in `whole` stay whole on every rank. If there is only one rank,
    the module is not changed.
    """
    if world.size == 1:
        return module
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotations stay in fp32; the model casts by itself
    )
    unsharded = {parameter for parameter in whole if isinstance(parameter, nn.Parameter)}
    for part in (*blocks, module):
        fully_shard(
            part,
            mesh=world.mesh,
            mp_policy=policy,
            reshard_after_forward=reshard and part is not module,
            ignored_params=unsharded,
        )
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(enable=True)
            part.set_gradient_divide_factor(1.0)
    return module


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Writes a whole tensor into a parameter; each rank of a sharded parameter takes its own part."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def reduce_between(module: nn.Module, world: World, *, wanted: bool) -> None:
    """Sets whether the next backward pass also sums sharded gradients between nodes, which is needed only once per
    step.
    """
    if world.spans_nodes and isinstance(module, FSDPModule):
        module.set_requires_all_reduce(wanted)


@torch.no_grad()
def hand_on(tensors: Iterable[Tensor], world: World) -> None:
    """Copies the tensors of node 0's ranks to the ranks of other nodes, in place. Must be called by every rank."""
    if not world.spans_nodes:
        return
    assert world.mesh is not None
    group = world.mesh.get_group("node")
    for tensor in tensors:
        dist.broadcast(local(tensor), group=group, group_src=0)


def replicate(module: nn.Module, world: World) -> nn.Module:
    """The module with rank 0's trained weights on every rank; frozen weights come from each rank's own file. Gradients
    are summed once per optimizer step (`reduce`).
    """
    if world.size > 1:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    dist.broadcast(parameter, 0)
    return module


def reduce(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Sums the gradients of replicated parameters over ranks, one message per dtype; FSDP2 has summed its own."""
    if world.size == 1:
        return
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same in gradients.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in same])
        dist.all_reduce(flat)
        for gradient, part in zip(same, torch.split(flat, [g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, on its device. Must be called by every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors in host memory on rank 0, gathered one by one; empty on other ranks. Must be called by
    every rank.
    """
    whole = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if world.first:
            whole[name] = full.detach().cpu()
    return whole


def cut_over(tensor: DTensor) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks over which a tensor is split: their group, their number, and the place of this rank."""
    mesh = tensor.device_mesh
    last = mesh.ndim - 1
    return mesh.get_group(last), mesh.size(last), mesh.get_local_rank(last)


def local(tensor: Tensor) -> Tensor:
    """This rank's own part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensor: Tensor, part: Tensor, world: World) -> Tensor:
    """A sharded tensor made from `part`, which is host memory for this rank's part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    assert world.host_mesh is not None
    return DTensor.from_local(
        part, world.host_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global norm over all gradients and the ranks of a node, fp32 or wider, a scalar on the device."""
    norms = _own_norms([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if sharded:
        square = torch.linalg.vector_norm(torch.stack(_own_norms([g.to_local() for g in sharded]))).square()
        dist.all_reduce(square, group=cut_over(sharded[0])[0])
        norms.append(square.sqrt())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _own_norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norms, computed by one launch for many gradients. All gradients of a run have the same dtype."""
    if not gradients:
        return []
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return list(torch._foreach_norm(gradients, 2, dtype=wide))
