"""Forecast: what a run will do, in numbers, before and while it runs."""
