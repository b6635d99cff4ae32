"""`skipreduce demo`: trains the same small network with full reduction and with skipping, and compares.

Needs the extra `demo`; nothing here is imported by `import jax_skipreduce`.
"""
