"""Transform: what every compressor shares as an optax transformation: settings, one step, pjit programs, state."""
