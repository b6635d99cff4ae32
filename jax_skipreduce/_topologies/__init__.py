"""Topologies: who sends which slice to whom, step by step. Plain data, without JAX."""
