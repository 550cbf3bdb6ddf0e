"""Ways to train in less memory: recomputation, offloading, and compiled blocks."""
