"""Choosing tokens: parameters, the sampler on the device, and the same on the CPU for reading."""
