"""`skipreduce tta`: time to a target accuracy of data-parallel training over slow links, method by method.

Needs the extra `demo`; nothing here is imported by `import jax_skipreduce`.
"""
