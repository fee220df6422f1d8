"""Rollouts for RL post-training that can be suspended with all their KV and resumed on another worker, exactly."""
