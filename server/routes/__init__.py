"""One module per resource; no logic."""
