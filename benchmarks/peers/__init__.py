"""Other systems that benchmarks compare with, each a server in an interpreter of its own.

They run with the interpreter that `--peer-python` names, where this project need not be installed: nothing here
imports `rollout`. `benchmarks.peer` starts them and talks to them as `benchmarks.peers.protocol` says.
"""
