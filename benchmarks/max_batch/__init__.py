"""Accuracy of `stepscope fit`, compared with a scan, published tables and other tools."""
