"""Benchmarks of the service, run by `rollout bench NAME` from a checkout; no part of the installed package."""
