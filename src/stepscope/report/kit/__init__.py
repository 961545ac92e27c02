"""What reports are made of: `document` and `table` say it; `terminal`, `html`, `json` draw it."""
