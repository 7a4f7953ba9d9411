"""CPU kernels in C++: linears for few rows and the layer stack around them.

Built on first use into the cache where a compiler is found; without one the PyTorch decoder runs.
"""
