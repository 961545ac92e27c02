"""What can be read: a file per source, one contract."""
