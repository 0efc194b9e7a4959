"""One module per revision of the index; each knows its tables by itself and never changes."""
