"""CPU kernels in C++: linears for few rows and the layer stack around them.

Built when the package is installed or on first use; without a compiler the PyTorch decoder runs.
"""
