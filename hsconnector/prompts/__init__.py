"""Rows of a data set -> token ids and loss mask."""
