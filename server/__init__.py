"""The sidecar: takes captures from engines, stores them as safetensors shards, judges them, serves them over HTTP."""
