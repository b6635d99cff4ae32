"""One compressor, one topology and one kernel that the library does not know: each is one file behind its seam."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends import ppermute
from jax_skipreduce._backends.kernel import Kernel
from jax_skipreduce._forecast.method import Method
from jax_skipreduce._topologies.schedule import Schedule, Transfer
from jax_skipreduce._topologies.topology import Topology
from jax_skipreduce._transform.compressor import Compressor, LeafForecast, StepForecast
from jax_skipreduce._transform.settings import Settings


@dataclasses.dataclass(frozen=True)
class Halves(Compressor):
    """Sends the first half of a leaf in even steps and the second in odd ones; keeps the rest for the next step."""

    name: ClassVar[str] = "halves"
    treatment: ClassVar[str] = "halved"

    scale: float = 1.0

    def init(self, leaf, num_workers):
        return {"rest": jnp.zeros(leaf.shape, leaf.dtype), "turn": jnp.zeros((), jnp.int32)}

    def resize(self, states, num_workers):
        def spread(rest):
            total = rest.sum(0, keepdims=True)
            return jnp.concatenate([total, jnp.zeros((num_workers - 1, *total.shape[1:]), rest.dtype)])

        turn = jnp.broadcast_to(states["turn"][:1], (num_workers, *states["turn"].shape[1:]))
        return {"rest": spread(states["rest"]), "turn": turn}

    def reduce(self, bucket, states, plan, group):
        means, kept = [], []
        for array, state in zip(bucket, states, strict=True):
            whole = (array + state["rest"]).reshape(-1)
            half = -(-whole.size // 2)
            start = jnp.where(state["turn"] % 2 == 0, 0, whole.size - half)
            part = lax.dynamic_slice_in_dim(whole, start, half)
            mean = lax.psum(self.scale * part, group.names) / group.size
            # The counter differs between workers by its type alone; the places of a half are everybody's.
            shared = group.gather(start)[0]
            means.append(lax.dynamic_update_slice_in_dim(jnp.zeros_like(mean, shape=whole.shape), mean, shared, 0))
            rest = lax.dynamic_update_slice_in_dim(whole, jnp.zeros_like(part), start, 0)
            kept.append({"rest": rest.reshape(array.shape), "turn": state["turn"] + 1})
        return [mean.reshape(array.shape) for mean, array in zip(means, bucket, strict=True)], kept

    def forecast(self, tree, num_workers, num_parts, count):
        leaves = []
        for leaf in jax.tree.leaves(tree):
            half = -(-leaf.size // 2)
            num_bytes = 2 * (num_workers - 1) * -(-half // num_workers) * leaf.dtype.itemsize
            leaves.append(LeafForecast(str(leaf.dtype), num_bytes, leaf.size - half))
        return StepForecast(tuple(leaves))


@dataclasses.dataclass(frozen=True)
class HalvesMethod(Method):
    name: ClassVar[str] = Halves.name

    axis_name: str
    min_size: int = 1024
    protect: object = None
    mesh: object = None
    param_specs: object = None
    scale: float = 1.0

    @property
    def settings(self):
        return Settings(
            self.axis_name,
            Halves(self.scale),
            self.protect,
            self.min_size,
            mesh=self.mesh,
            param_specs=self.param_specs,
        )


class Direct(Topology):
    """Each worker sends slice j straight to worker j, one offset at a time; k of the N-1 senders are left out."""

    name: ClassVar[str] = "direct"

    def schedule(self, num_workers, num_skipped=0, shift=0, num_gather_skipped=0):
        ranks = range(num_workers)
        offsets = range(1 + num_skipped, num_workers)
        scatter = tuple(
            tuple(Transfer((j + d) % num_workers, j, (j + shift) % num_workers, "reduce") for j in ranks)
            for d in offsets
        )
        gather = tuple(
            tuple(Transfer(j, (j + d) % num_workers, (j + shift) % num_workers, "copy") for j in ranks)
            for d in range(1, num_workers)
        )
        return Schedule(num_workers, num_workers, scatter + gather)


class Star(Topology):
    """Worker 0 gathers everything and hands it out: all slices have one owner. k leaves out the last k workers."""

    name: ClassVar[str] = "star"

    def schedule(self, num_workers, num_skipped=0, shift=0, num_gather_skipped=0):
        slices, others = range(num_workers), range(1, num_workers)
        scatter = tuple(tuple(Transfer(r, 0, j, "reduce") for j in slices) for r in range(1, num_workers - num_skipped))
        gather = tuple(tuple(Transfer(0, r, j, "copy") for j in slices) for r in others)
        return Schedule(num_workers, num_workers, scatter + gather)


class CountingKernel(Kernel):
    """For the CPU; runs the ring of ppermutes, and counts its calls."""

    platform: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "cpu"
    is_automatic: ClassVar[bool] = True

    def __init__(self):
        self.num_runs = 0

    def reason_against(self, dtype, group, reduction):
        return "it takes float32 alone" if dtype != jnp.float32 else None

    def run(self, arrays, group, reduction, place):
        self.num_runs += 1
        # Typed as the same on all workers already, which is what `typed_like` expects of a custom call.
        return ppermute.reduce_by_ppermute(arrays, group, reduction.with_operands(place.num_skipped, place.shift))
