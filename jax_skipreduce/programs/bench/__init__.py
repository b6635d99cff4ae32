"""`skipreduce bench`: nccl-tests for this library. Checks, then times, all-reduces with and without skipping.

Needs the extra `demo`; nothing here is imported by `import jax_skipreduce`.
"""
