"""Checks: replicas that drift, and steps that hang."""
