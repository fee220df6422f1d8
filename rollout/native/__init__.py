"""Kernels of our own for the CPU, in C++: the whole decoder over packed weights and paged KV, and the sampler.

Built with the machine's compiler on first use; whoever calls decides what happens where that is not possible.
"""
