"""NVIDIA GPUs: selection and sensors."""
