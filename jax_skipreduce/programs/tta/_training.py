"""Trains a workload with any method, and times each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import jax_skipreduce as sr
from jax_skipreduce.programs.common import methods
from jax_skipreduce.programs.tta import _methods
from jax_skipreduce.programs.tta._cluster import AXIS, Cluster
from jax_skipreduce.programs.tta._records import Evaluation, Run
from jax_skipreduce.programs.tta._settings import Settings
from jax_skipreduce.programs.tta._stand_ins import nothing_on_the_wire
from jax_skipreduce.programs.tta._workloads import Workload, deal_batches

Variant = Literal["step", "local", "compute"]

# In the text of a compiled program.
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)

_SHARED, _OWN = PartitionSpec(), PartitionSpec(AXIS)


class State(NamedTuple):
    """State of a training.

    Attributes:
      params, opt_state: as in optax.
      step: steps made.
      loss_sum: of each worker, over its steps; shape (1,) on each.
    """

    params: Any
    opt_state: Any
    step: Any
    loss_sum: Any


def _specs(opt_state: Any) -> State:
    """How a state is sharded: what a method keeps per worker has a row for each."""
    return State(_SHARED, sr.state_specs(opt_state, AXIS), _SHARED, _OWN)


class Trainer:
    """Holds what runs share: workers, network, data, and one compiled step for each method.

    Args:
      settings: of all runs.
      workload: what is trained.
      cluster: the workers.
    """

    def __init__(self, settings: Settings, workload: Workload, cluster: Cluster) -> None:
        self.settings, self.workload, self.cluster = settings, workload, cluster
        self._context = _methods.Context(AXIS, cluster.num_workers, settings.num_steps, workload.protect)
        self._programs: dict[tuple[str, Variant], Any] = {}
        self._init = jax.jit(workload.init)
        self._test = self._deal_test()
        self._evaluate = jax.jit(
            jax.shard_map(
                self._evaluate_local, mesh=cluster.mesh, in_specs=(_SHARED, _OWN, _OWN, _OWN), out_specs=_SHARED
            )
        )

    def program(self, name: str, variant: Variant, state: State, batches: Any) -> Callable[[State, Any], State]:
        """A compiled step, which overwrites the state it gets. Compiled once; it takes the states of all seeds.

        Args:
          name: of a method.
          variant: ``step`` as it is; ``local`` with nothing on the wire; ``compute`` without the reduction.
          state: such as it will get.
          batches: such as it will get.
        """
        # Without a reduction all methods are the same.
        key = ("", variant) if variant == "compute" else (name, variant)
        if key not in self._programs:
            self._programs[key] = self._compile(name, variant, state, batches)
        return self._programs[key]

    def _compile(self, name: str, variant: Variant, state: State, batches: Any) -> Any:
        tx = self._transformation(name) if variant != "compute" else self._optimizer_alone(name)

        def step(state: State, batches: Any) -> State:
            batch = jax.tree.map(lambda array: array[state.step % self.settings.num_steps], batches)
            loss, grads = sr.local_value_and_grad(self._loss, AXIS)(state.params, batch)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return State(params, opt_state, state.step + 1, state.loss_sum + loss)

        specs = _specs(state.opt_state)
        mapped = jax.shard_map(
            step,
            mesh=self.cluster.mesh,
            in_specs=(specs, _OWN),
            out_specs=specs,
            # Workers that exchange nothing end with different parameters, which would be refused.
            check_vma=variant == "step",
        )
        lowering = jax.jit(mapped, donate_argnums=0)
        if variant == "step":
            return lowering.lower(state, batches).compile()
        with nothing_on_the_wire():
            compiled = lowering.lower(state, batches).compile()
        left = [word for word in _COLLECTIVES if word in (compiled.as_text() or "")]
        if left:
            raise RuntimeError(
                f"the method {name!r} still has {', '.join(left)} where nothing may be on the wire: call collectives "
                "as attributes of jax.lax (lax.psum, not `from jax.lax import psum`), and only those in "
                "jax_skipreduce.programs.tta._stand_ins"
            )
        return compiled

    def _transformation(self, name: str) -> optax.GradientTransformation:
        return optax.chain(_methods.find(name).make(self._context), self._optimizer())

    def _optimizer_alone(self, name: str) -> optax.GradientTransformation:
        """With the state of `name`, so that it takes the same one."""
        init = self._transformation(name).init
        optimizer = self._optimizer()

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, own = optimizer.update(updates, state[1], params)
            return updates, (state[0], own)

        return optax.GradientTransformation(init, update)

    def _optimizer(self) -> optax.GradientTransformation:
        steps = self.settings.num_steps
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.1 * self.settings.learning_rate,
            peak_value=self.settings.learning_rate,
            warmup_steps=max(1, steps // 20),
            decay_steps=max(2, steps),
            end_value=0.1 * self.settings.learning_rate,
        )
        return optax.adam(schedule)

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        return self.workload.score(params, *batch)[0].mean()

    def start(self, name: str, seed: int) -> State:
        """The state before the first step: with the same seed the same for all methods."""
        params = jax.tree.map(np.asarray, self._init(seed))
        mesh = self.cluster.mesh
        opt_state = _methods.start_count(methods.init(self._transformation(name), params, mesh), seed)
        params, step = self.cluster.share((params, np.int32(0)))
        opt_state = methods.place(opt_state, sr.state_specs(opt_state, AXIS), mesh)
        return State(params, opt_state, step, self.cluster.deal(lambda _: np.zeros(1, np.float32)))

    def batches(self, seed: int) -> tuple[Any, str]:
        """All batches of a run, each worker's on its device, and their checksum."""
        own = {
            rank: deal_batches(self.workload.examples, self.settings, seed, rank) for rank in self.cluster.local_ranks
        }
        num_arrays = len(self.workload.examples.train)
        arrays = tuple(self.cluster.deal(lambda rank, i=i: own[rank][i]) for i in range(num_arrays))
        checksum = self.cluster.checksum_of_own(lambda rank: np.concatenate([a.reshape(-1) for a in own[rank]]))
        return arrays, checksum

    def warm_up(self, name: str) -> None:
        """Compiles a method's step and the evaluation, and runs them once."""
        seed = self.settings.seeds[0]
        state, (batches, _) = self.start(name, seed), self.batches(seed)
        state = self.program(name, "step", state, batches)(state, batches)
        self.evaluate(state)

    def run(self, name: str, seed: int, position: int) -> Run:
        """Trains from scratch. With the same seed everything but the method is the same."""
        settings = self.settings
        state, (batches, batches_checksum) = self.start(name, seed), self.batches(seed)
        program = self.program(name, "step", state, batches)
        initial_checksum = self.cluster.checksum(state.params)
        seconds, evaluations, loss_before = [], [], (0.0, 0)
        self.cluster.barrier()
        for step in range(1, settings.num_steps + 1):
            start = time.perf_counter()
            state = jax.block_until_ready(program(state, batches))
            seconds.append(time.perf_counter() - start)
            if step % settings.evaluation_interval == 0 or step == settings.num_steps:
                accuracy, loss, loss_sum = self.evaluate(state)
                train_loss = (loss_sum - loss_before[0]) / (step - loss_before[1])
                loss_before = (loss_sum, step)
                evaluations.append(Evaluation(step, sum(seconds), accuracy, loss, train_loss))
        # The clock of worker 0 is everybody's: accuracies are the same, and so is what follows from both.
        clock = self.cluster.from_first(seconds)
        at = np.cumsum(clock, dtype=np.float64)
        timed = tuple(e.at(float(at[e.step - 1])) for e in evaluations)
        return Run(
            method=name,
            seed=seed,
            position=position,
            step_seconds=tuple(float(value) for value in clock),
            evaluations=timed,
            initial_checksum=initial_checksum,
            batches_checksum=batches_checksum,
            final_checksum=self.cluster.checksum(state.params),
        )

    def evaluate(self, state: State) -> tuple[float, float, float]:
        """Accuracy and loss over the test examples, and the training loss so far, summed over steps."""
        values = self._evaluate(state.params, state.loss_sum, *self._test)
        accuracy, loss, loss_sum = np.asarray(values).tolist()
        return accuracy, loss, loss_sum

    def _evaluate_local(self, params: Any, loss_sum: jax.Array, examples: Any, weights: jax.Array) -> jax.Array:
        losses, accuracies = self.workload.score(params, *examples)
        sums = jnp.stack([jnp.sum(accuracies * weights), jnp.sum(losses * weights)])
        num_examples = len(self.workload.examples.test[0])
        means = lax.psum(sums, AXIS) / num_examples
        return jnp.concatenate([means, lax.pmean(loss_sum, AXIS)])

    def _deal_test(self) -> tuple[Any, Any]:
        """The test examples, dealt to the workers, and 0 for what only fills up the last ones' share."""
        examples, num_workers = self.workload.examples.test, self.cluster.num_workers
        num_examples = len(examples[0])
        share = -(-num_examples // num_workers)
        index = np.arange(share * num_workers)
        weights = (index < num_examples).astype(np.float32)
        rows = {rank: slice(rank * share, (rank + 1) * share) for rank in range(num_workers)}
        arrays = tuple(
            self.cluster.deal(lambda rank, a=array: a[np.minimum(index[rows[rank]], num_examples - 1)])
            for array in examples
        )
        return arrays, self.cluster.deal(lambda rank: weights[rows[rank]])
