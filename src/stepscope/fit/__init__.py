"""The max batch size and the recommended one: request, probes, search, answer."""
