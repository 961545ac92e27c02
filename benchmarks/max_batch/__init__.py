"""Whether `stepscope fit` is right, beside the truth, the papers' tables, and other finders."""
