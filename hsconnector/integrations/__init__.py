"""Plug-ins for other people's programs; each is imported by name, and only then needs its program."""
