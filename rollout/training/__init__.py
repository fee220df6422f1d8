"""What training loops share: trajectories as tensors, off-policy corrections, a run's metrics.

Knows results and tensors only: neither the service nor a trainer.
"""
