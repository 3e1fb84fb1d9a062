"""Checkpoint layouts, what servers do with a head's options, and running servers."""
