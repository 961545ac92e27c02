"""NVIDIA GPUs: which ones, and the sensors that read them."""
