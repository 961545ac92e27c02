"""What many trials teach together. Pure: observations in, records out."""
