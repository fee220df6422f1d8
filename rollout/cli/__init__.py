"""The command line: `rollout COMMAND`, one module a command."""
