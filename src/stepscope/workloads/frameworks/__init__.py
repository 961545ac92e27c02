"""One adapter for each framework, imported only in the process that trains."""
