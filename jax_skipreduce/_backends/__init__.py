"""Backends: how a reduction runs. By `lax.ppermute` anywhere, or by a native kernel where there is one."""
