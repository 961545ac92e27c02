"""Max and recommended batch size: request, probes, search, result."""
