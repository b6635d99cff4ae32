"""Training with several methods on four CPU devices: what they share, what is timed, and how it goes on."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jax_skipreduce._transform.registry import METHODS, register
from jax_skipreduce.programs.tta import _breakdown, _campaign, _methods, _records, _workloads
from jax_skipreduce.programs.tta._cluster import AXIS, Cluster
from jax_skipreduce.programs.tta._training import Trainer
from jax_skipreduce.programs.tta._vgg import VGG
from tests.seams.toys import HalvesMethod
from tests.tta.settings import make_settings

pytestmark = pytest.mark.promotes


@pytest.fixture
def cluster():
    return Cluster(jax.devices()[:4])


@pytest.fixture
def registry(monkeypatch):
    """A copy, so that tests can add methods."""
    monkeypatch.setattr(_methods, "METHODS", dict(_methods.METHODS))


def load_tiny(settings):
    """A network that is compiled within a second or two."""
    return _workloads.of_images(VGG(blocks=((4,),), dense_size=32), _workloads.load_examples(settings))


def make_trainer(settings, cluster):
    return Trainer(settings, load_tiny(settings), cluster)


def curves(run):
    return [(e.step, e.accuracy, e.loss, e.train_loss) for e in run.evaluations]


def test_methods_share_all_but_the_reduction(tmp_path, cluster):
    settings = make_settings(tmp_path, num_steps=60, evaluation_interval=20, learning_rate=3e-3, num_test=360)
    trainer = make_trainer(settings, cluster)
    psum, ring, half = (trainer.run(name, 0, 0) for name in ("psum", "skip-0", "skip-50"))
    assert psum.initial_checksum == ring.initial_checksum == half.initial_checksum
    assert psum.batches_checksum == ring.batches_checksum == half.batches_checksum
    assert psum.final_checksum != half.final_checksum
    for one, other in zip(curves(psum), curves(ring), strict=True):
        assert one == pytest.approx(other, rel=0.05, abs=0.05)
    assert len(psum.step_seconds) == 60
    assert [e.step for e in psum.evaluations] == [20, 40, 60]
    for evaluation in psum.evaluations:
        assert evaluation.seconds == pytest.approx(sum(psum.step_seconds[: evaluation.step]), rel=1e-5)
        assert evaluation.accuracy * 360 == pytest.approx(round(evaluation.accuracy * 360), abs=1e-3)
    assert psum.evaluations[-1].accuracy > 0.8
    assert half.evaluations[-1].accuracy > 0.6
    assert psum.evaluations[-1].train_loss < psum.evaluations[0].train_loss


def test_runs_repeat_and_seeds_differ_without_compiling_again(tmp_path, cluster, caplog):
    trainer = make_trainer(make_settings(tmp_path, seeds=(0, 1)), cluster)
    trainer.warm_up("skip-50")
    first = trainer.run("skip-50", 0, 0)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        again, other = trainer.run("skip-50", 0, 1), trainer.run("skip-50", 1, 0)
    assert not [record for record in caplog.records if "step" in record.message and "ompil" in record.message]
    assert curves(first) == curves(again)
    assert first.final_checksum == again.final_checksum
    assert first.initial_checksum != other.initial_checksum
    assert first.batches_checksum != other.batches_checksum


def test_the_last_step_is_evaluated(tmp_path, cluster):
    trainer = make_trainer(make_settings(tmp_path, num_steps=5, evaluation_interval=3), cluster)
    assert [e.step for e in trainer.run("psum", 0, 0).evaluations] == [3, 5]


def test_accuracy_is_that_of_all_test_examples(tmp_path, cluster):
    # 30 images cannot be dealt to 4 workers, so the last one gets images that do not count.
    trainer = make_trainer(make_settings(tmp_path), cluster)
    state = trainer.start("psum", 0)
    accuracy, loss, _ = trainer.evaluate(state)
    examples = trainer.workload.examples.test
    params = jax.tree.map(np.asarray, state.params)
    losses, accuracies = trainer.workload.score(params, *examples)
    assert accuracy == pytest.approx(float(accuracies.mean()), abs=1e-6)
    assert loss == pytest.approx(float(losses.mean()), rel=1e-5)


def test_the_language_model_learns(tmp_path, cluster):
    path = tmp_path / "text"
    path.write_text("It is a truth universally acknowledged, that a single man. " * 200)
    settings = make_settings(
        tmp_path, workload="lm", text=str(path), num_steps=60, evaluation_interval=30, learning_rate=5e-3, batch_size=2
    )
    run = Trainer(settings, _workloads.load(settings), cluster).run("selective-50", 0, 0)
    assert run.evaluations[-1].accuracy > 0.35
    assert run.evaluations[-1].loss < run.evaluations[0].loss


def test_replicas_that_differ_are_noticed(tmp_path, cluster, registry, monkeypatch):
    @_methods.method("wrong", "adds the rank on worker 1's own parameters")
    def wrong(context):
        return optax.stateless(lambda updates, _: lax.pmean(updates, context.axis_name))

    trainer = make_trainer(make_settings(tmp_path), cluster)
    real = trainer.program

    def drifting(name, variant, state, batches):
        program = real(name, variant, state, batches)

        def step(state, batches):
            state = program(state, batches)
            return state._replace(params=jax.tree.map(drift, state.params))

        return step

    def drift(leaf):
        shards = [np.asarray(s.data) + (s.device.id == 1) for s in leaf.addressable_shards]
        devices = [s.device for s in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [jax.device_put(a, d) for a, d in zip(shards, devices, strict=True)]
        )

    monkeypatch.setattr(trainer, "program", drifting)
    with pytest.raises(RuntimeError, match="the replicas of the parameters differ between workers: checksums"):
        trainer.run("wrong", 0, 0)


@pytest.mark.parametrize("name", ["psum-bf16", "skip-50-bf16", "selective-50", "warmup-50"])
def test_nothing_is_on_the_wire(tmp_path, cluster, name):
    trainer = make_trainer(make_settings(tmp_path), cluster)
    state, (batches, _) = trainer.start(name, 0), trainer.batches(0)
    local = trainer.program(name, "local", state, batches)
    whole = trainer.program(name, "step", state, batches)
    words = ("all-reduce", "collective-permute", "all-gather")
    assert not [word for word in words if word in local.as_text()]
    assert [word for word in words if word in whole.as_text()]
    # One fence for each collective at least: local work is not fused across.
    assert local.as_text().count(" while(") > whole.as_text().count(" while(")
    after = local(state, batches)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(after.params))
    assert int(after.step) == 1


def test_what_goes_over_the_wire_all_the_same_is_noticed(tmp_path, cluster, registry):
    hidden = lax.pmean

    @_methods.method("hidden", "calls a collective that cannot be replaced")
    def make(context):
        return optax.stateless(lambda updates, _: hidden(updates, AXIS))

    trainer = make_trainer(make_settings(tmp_path), cluster)
    state, (batches, _) = trainer.start("hidden", 0), trainer.batches(0)
    with pytest.raises(RuntimeError, match="the method 'hidden' still has all-reduce"):
        trainer.program("hidden", "local", state, batches)


@pytest.fixture
def halves():
    """A compressor with state per worker, which the library knows by its name alone."""
    register(HalvesMethod)
    yield HalvesMethod.name
    del METHODS[HalvesMethod.name]


def test_a_compressor_with_state_is_trained_by_name(tmp_path, cluster, halves):
    settings = make_settings(tmp_path, methods=("psum", halves))
    trainer = make_trainer(settings, cluster)
    psum, run, again = (trainer.run(name, 0, 0) for name in ("psum", halves, halves))
    assert run.initial_checksum == psum.initial_checksum
    assert run.final_checksum == again.final_checksum != psum.final_checksum
    state, (batches, _) = trainer.start(halves, 0), trainer.batches(0)
    after = trainer.program(halves, "step", state, batches)(state, batches)
    kept = [entry for entry in after.opt_state[0].per_worker if entry is not None]
    assert kept
    for entry in kept:
        rows = np.asarray(entry["rest"])
        assert rows.shape[0] == 4
        assert not (rows[0] == rows[1]).all()  # each worker keeps its own
    timings = _breakdown.measure(trainer, settings.methods, 1)
    assert set(timings.local) == {"psum", halves}


def test_methods_of_the_library_are_found_by_name(halves):
    assert _methods.find("skipreduce").name == "skipreduce"
    with pytest.raises(ValueError, match=r"there are psum, .*skipreduce, halves"):
        _methods.find("quarters")


def test_break_down(tmp_path, cluster):
    settings = make_settings(tmp_path)
    timings = _breakdown.measure(make_trainer(settings, cluster), settings.methods, 3)
    assert set(timings.step) == set(timings.local) == {"psum", "skip-50"}
    for seconds in (timings.compute, *timings.step.values(), *timings.local.values()):
        assert len(seconds) == 3
        assert min(seconds) > 0
    assert set(_breakdown.break_down(timings)) == {"psum", "skip-50"}


def test_cluster(cluster):
    assert cluster.local_ranks == (0, 1, 2, 3)
    assert cluster.is_first
    np.testing.assert_array_equal(
        cluster.gather(lambda rank: [rank, rank * 0.5]), [[rank, rank * 0.5] for rank in range(4)]
    )
    np.testing.assert_array_equal(cluster.from_first([3.0, 1.0]), [3.0, 1.0])
    tree = {"a": np.arange(3, dtype=np.float32), "b": np.float32(1)}
    sums = {
        cluster.checksum(cluster.share(t)) for t in (tree, tree | {"b": np.float32(2)}, tree | {"a": tree["a"][::-1]})
    }
    assert len(sums) == 3
    assert cluster.checksum(cluster.share(tree)) == cluster.checksum(cluster.share(tree))


def test_all_runs_are_made_and_a_stopped_measurement_goes_on(tmp_path, cluster, monkeypatch):
    settings = make_settings(tmp_path, methods=("psum", "skip-50"), seeds=(0, 1))
    monkeypatch.setattr(_workloads, "load", load_tiny)
    lines = []
    real, made = Trainer.run, []

    def run(self, name, seed, position):
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append((seed, name))
        return real(self, name, seed, position)

    monkeypatch.setattr(Trainer, "run", run)
    with pytest.raises(KeyboardInterrupt):
        _campaign.run_all(settings, cluster, lines.append)
    before = _records.read(settings.path)
    assert (
        [(r.seed, r.method) for r in before.runs]
        == made
        == [(0, n) for n in _campaign.order_of(settings.methods, 0)][:1]
    )
    assert before.timings is not None

    monkeypatch.setattr(Trainer, "run", real)
    _campaign.run_all(dataclasses.replace(settings, resume=True), cluster, lines.append)
    after = _records.read(settings.path)
    plan = [(seed, name) for seed in (0, 1) for name in _campaign.order_of(settings.methods, seed)]
    assert [(r.seed, r.method) for r in after.runs] == plan
    assert after.runs[:1] == before.runs
    assert after.timings == before.timings
    assert "3 of 4 runs to make" in "\n".join(lines)
    assert len({r.initial_checksum for r in after.runs if r.seed == 0}) == 1

    lines.clear()
    _campaign.run_all(dataclasses.replace(settings, resume=True), cluster, lines.append)
    assert "0 of 4 runs to make" in "\n".join(lines)
    assert _records.read(settings.path).runs == after.runs


def test_the_order_of_methods_changes_with_the_seed():
    orders = {tuple(_campaign.order_of(_methods.DEFAULT_METHODS, seed)) for seed in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == sorted(_methods.DEFAULT_METHODS) for order in orders)
    assert _campaign.order_of(["a", "b"], 3) == _campaign.order_of(["a", "b"], 3)


def test_no_rank_is_needed_for_a_scalar():
    # The sum of a number is how programs ask for the number of workers: no stand-in may change that.
    from jax_skipreduce.programs.tta._stand_ins import nothing_on_the_wire

    def count(x):
        return x * lax.psum(1, AXIS)

    with nothing_on_the_wire():
        counted = jax.vmap(count, axis_name=AXIS)(jnp.ones(3))
    np.testing.assert_array_equal(counted, [3.0, 3.0, 3.0])
