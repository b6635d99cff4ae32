"""`skipreduce lab`: runs a command as N workers in network namespaces, over links that are limited.

Linux and root only. Nothing but the standard library is imported here; JAX comes in with `initialize`.
"""

from jax_skipreduce.programs.netlab._launch import LabError
from jax_skipreduce.programs.netlab._probe import unavailable
from jax_skipreduce.programs.netlab._run import dry_run, run
from jax_skipreduce.programs.netlab._worker import initialize, is_worker, read_environment

__all__ = ["LabError", "dry_run", "initialize", "is_worker", "read_environment", "run", "unavailable"]
