"""A data set through a running engine: rows -> prompts -> captures in the sidecar."""
