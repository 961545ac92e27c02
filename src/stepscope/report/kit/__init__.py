"""Building blocks of reports: `document` and `table` hold the content, the renderers draw it."""
