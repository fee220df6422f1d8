"""The decode engine: sequences, scheduler, batches, sampling, and `Engine.step()`."""
