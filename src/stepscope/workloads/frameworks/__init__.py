"""Framework adapters. A framework is imported only in the process that trains."""
