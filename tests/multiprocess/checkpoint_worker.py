"""One process of test_checkpoint.py: ``checkpoint_worker.py PORT RANK FOLDER through|resume OUT``."""

import os
import sys
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import orbax.checkpoint as ocp


def main() -> None:
    port, rank, folder, task, out = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    from tests import test_checkpoint as test

    class Run(test.Run):
        def train(self, first: int, last: int) -> None:
            sharding = test.NamedSharding(self.mesh, test.P("data"))
            for number in range(first, last):
                batch = np.random.default_rng([number, int(rank)]).normal(size=(4, 7)).astype(np.float32)
                self.state = self.step(self.state, jax.make_array_from_process_local_data(sharding, batch))
                jax.block_until_ready(self.state)

    run = Run(2, test.SETTINGS["random"])
    with ocp.CheckpointManager(Path(folder)) as manager:
        if task == "through":
            run.train(0, test.SAVED_AT)
            manager.save(test.SAVED_AT, args=ocp.args.StandardSave(run.state))
            manager.wait_until_finished()
        else:
            run.state = manager.restore(test.SAVED_AT, args=ocp.args.StandardRestore(run.template()))
    run.train(test.SAVED_AT, test.LAST)
    leaves = jax.tree.leaves_with_path(run.state)
    np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
