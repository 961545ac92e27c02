"""Draws what the analysis computed: in a terminal, and as one offline HTML file."""
