"""The network alone: architecture, layers, loss, quantized Linears, and which part of a tensor a process holds."""
