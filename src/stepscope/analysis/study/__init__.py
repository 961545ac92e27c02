"""Analysis of a study's trials. Pure functions: observations in, records out."""
