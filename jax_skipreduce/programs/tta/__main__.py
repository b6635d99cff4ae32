"""One worker of a measurement, started in a lab: ``python -m jax_skipreduce.programs.tta SETTINGS``."""

from __future__ import annotations

import sys


def main() -> None:
    """Joins the other workers and makes all runs."""
    # Only in the lab, whose variables say who the others are.
    from jax_skipreduce import netlab

    netlab.initialize()

    import jax

    from jax_skipreduce.programs.tta._campaign import run_all
    from jax_skipreduce.programs.tta._cluster import Cluster
    from jax_skipreduce.programs.tta._settings import Settings

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    run_all(Settings.from_json(sys.argv[1]), Cluster(jax.devices()), say)


if __name__ == "__main__":
    main()
