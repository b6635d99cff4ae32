"""Importance: which gradients hold the largest elements, and which leaves to protect because of that."""
