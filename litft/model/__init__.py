"""The network: architecture, layers, loss, quantized Linears, and the placement of weights on
processes."""
